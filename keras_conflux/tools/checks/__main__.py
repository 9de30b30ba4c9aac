"""Runs one check, for `keras-conflux check`, and prints a line of JSON."""

import dataclasses
import importlib
import json
import sys

from keras_conflux.tools.checks import Wrong


def main(name: str, devices: str) -> int:
    """Runs a check, and returns 0 if it has passed, 1 if something is wrong."""
    module = importlib.import_module(f"keras_conflux.tools.checks.{name}")
    try:
        found = dataclasses.asdict(module.check(int(devices)))
    except Wrong as wrong:
        found = {"wrong": str(wrong), "todo": wrong.todo}
    print(json.dumps(found), flush=True)
    return int("wrong" in found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

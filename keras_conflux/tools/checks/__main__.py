"""Runs one check, for `keras-conflux check`, and prints a line of JSON."""

import argparse
import dataclasses
import importlib
import json
import sys

from keras_conflux.tools.checks.table import CHECKS
from keras_conflux.tools.checks.table import Wrong


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m keras_conflux.tools.checks")
    parser.add_argument("name", choices=[check.name for check in CHECKS])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="of the machine")
    parser.add_argument(
        "--running",
        nargs=3,
        action="append",
        default=[],
        metavar=("UUID", "PID", "NAME"),
        help="a process that computed on a GPU before the checks began",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Runs a check.

    Returns:
        The exit status: 0 if it has passed, 1 if something is wrong.
    """
    options = parse(arguments)
    module = importlib.import_module(
        f"keras_conflux.tools.checks.{options.name}"
    )
    try:
        found = dataclasses.asdict(module.check(options))
    except Wrong as wrong:
        found = {"wrong": str(wrong), "todo": wrong.todo}
    print(json.dumps(found), flush=True)
    return int("wrong" in found)


if __name__ == "__main__":
    sys.exit(main())

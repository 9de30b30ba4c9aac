"""The command `keras-conflux`, with one file per subcommand.

Nothing here makes a tensor: the GPUs belong to the processes that are started.
"""

import argparse
import pathlib
import re
import sys

from keras_conflux.tools.cli import check
from keras_conflux.tools.cli import env
from keras_conflux.tools.cli import run


def main(arguments: list[str] | None = None) -> int:
    """Runs the subcommand that arguments name, by default of this process."""
    parser = argparse.ArgumentParser("keras-conflux", allow_abbrev=False)
    parser.add_argument(
        "--version", action="version", version=f"keras-conflux {_version()}"
    )
    subcommands = parser.add_subparsers(metavar="SUBCOMMAND")
    for each in (env, check, run):
        each.add_to(subcommands)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # a subcommand shows its own options
        fail = getattr(options, "error", parser.error)
        fail(f"unrecognized arguments: {' '.join(unknown)}")
    if "main" not in options:
        parser.print_help(sys.stderr)
        return 2
    return options.main(options)


def _version() -> str:
    """Returns the package's version, without running the package."""
    text = pathlib.Path(__file__).parents[2].joinpath("__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert found is not None
    return found[1]

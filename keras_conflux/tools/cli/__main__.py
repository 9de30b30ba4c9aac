"""The command `conflux`, also `python -m keras_conflux`."""

import argparse
import sys

from keras_conflux.tools.cli import check
from keras_conflux.tools.cli import env
from keras_conflux.tools.cli import resume
from keras_conflux.tools.cli import run


def main(arguments: list[str] | None = None) -> int:
    """Runs the subcommand that the command line names.

    Args:
        arguments: The command line; by default that of this process.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser("conflux", allow_abbrev=False)
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for each in (env, check, run, resume):
        each.add_to(subcommands)
    options = parser.parse_args(arguments)
    return options.main(options)


if __name__ == "__main__":
    sys.exit(main())

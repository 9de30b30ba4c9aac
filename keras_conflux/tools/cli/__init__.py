"""The command `keras-conflux`, with one file per subcommand.

Nothing here makes a tensor: the GPUs belong to the processes that are started.
"""

import argparse
from typing import Any


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option that prints for programs instead of people."""
    parser.add_argument(
        "--json", action="store_true", help="print a JSON document instead"
    )


def at_least(minimum: int) -> Any:
    """Returns a parser of numbers that are not below a minimum."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {minimum}")
        return number

    parse.__name__ = "int"  # for the message of argparse
    return parse

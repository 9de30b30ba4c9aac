"""What several subcommands read from the command line."""

import argparse
from typing import Any


def at_least(minimum: int) -> Any:
    """Returns what reads a number that is not below a minimum."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {minimum}")
        return number

    parse.__name__ = "int"  # for the message of argparse
    return parse

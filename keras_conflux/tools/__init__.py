"""The command line of the package, and options that its subcommands share."""

import argparse


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds the option that prints for programs instead of people."""
    parser.add_argument(
        "--json", action="store_true", help="print a JSON document instead"
    )


def add_count(
    parser: argparse.ArgumentParser,
    option: str,
    minimum: int,
    default: int | None,
    text: str,
) -> None:
    """Adds an option with a number that is not below a minimum."""

    def parse(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number} is below {minimum}")
        return number

    parse.__name__ = "int"  # for the message of argparse
    parser.add_argument(
        option, type=parse, default=default, metavar="N", help=text
    )

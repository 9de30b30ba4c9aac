"""`keras-conflux resume` lists the checkpoints of a training."""

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from keras_conflux._extensions.resume.checkpoint_files import checkpoints
from keras_conflux.tools.cli.options import add_json


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: The result of `ArgumentParser.add_subparsers`.
    """
    parser = subcommands.add_parser(
        "resume",
        help="list the checkpoints from which a training would go on",
        description=(
            "Lists the checkpoints in a directory of kc.Resume or kc.save, the "
            "newest first. All of their bytes are compared with their digests. "
            "The exit status is 1 if none is whole, and 2 if the directory "
            "cannot be read."
        ),
        allow_abbrev=False,
    )
    parser.add_argument("directory", metavar="DIR")
    add_json(parser)
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Prints the checkpoints.

    Args:
        options: The command line.

    Returns:
        The exit status.
    """
    try:
        listed = checkpoints(options.directory)
    except (ImportError, OSError, ValueError) as error:
        print(f"keras-conflux resume: {error}", file=sys.stderr)
        return 2
    found = [
        {
            "path": str(each.path),
            "step": each.step,
            "epoch": each.epoch,
            "bytes": each.size,
            "written": datetime.datetime.fromtimestamp(each.time)
            .astimezone()
            .isoformat(" ", "seconds"),
            "damage": each.damage,
        }
        for each in listed
    ]
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _show(found, options.directory)
    return 0 if any(each["damage"] is None for each in found) else 1


def _show(found: list[dict[str, Any]], directory: str) -> None:
    console = Console(highlight=False, markup=False)
    if not found:
        console.print(f"There is no checkpoint in {directory}.")
        return
    columns = "checkpoint", "step", "epoch", "MB", "written", "state"
    table = Table(*columns, box=MARKDOWN)
    for each in found:
        table.add_row(
            Path(each["path"]).name,
            f"{each['step']:,}",
            str(each["epoch"]),
            f"{each['bytes'] / 1e6:,.1f}",
            each["written"][: len("2000-01-01 00:00:00")],
            each["damage"] or "whole",
        )
    console.print(table)

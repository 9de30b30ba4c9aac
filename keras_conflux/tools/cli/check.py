"""`keras-conflux check` tells whether training on this machine works."""

import argparse
import dataclasses
import json
import os
from typing import Any

from rich.console import Console

from keras_conflux._devices.driver import visible_gpus
from keras_conflux.tools.checks.table import CHECKS
from keras_conflux.tools.cli import check_report
from keras_conflux.tools.cli import check_runner
from keras_conflux.tools.cli.options import add_json
from keras_conflux.tools.cli.options import at_least

_CPU_DEVICES = 2
"""How many logical CPU devices are tried where there is no GPU."""

_EPILOG = """exit status:
  0  all is good
  1  something is wrong
  3  all works, but slower than it should
"""


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: The result of `ArgumentParser.add_subparsers`.
    """
    parser = subcommands.add_parser(
        "check",
        help="tell in a minute whether training on this machine works",
        description=(
            "Tries in a minute all that a training on this machine needs. Each "
            "check is a process of its own with a time limit."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--devices",
        type=at_least(1),
        metavar="N",
        help=f"default: all GPUs, or {_CPU_DEVICES} logical CPU devices",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[check.name for check in CHECKS],
        metavar="CHECK",
        help=f"some of: {', '.join(check.name for check in CHECKS)}",
    )
    add_json(parser)
    parser.set_defaults(main=main)


def main(options: argparse.Namespace) -> int:
    """Runs the checks and reports them.

    Args:
        options: The command line.

    Returns:
        The exit status.
    """
    gpus = len(visible_gpus(os.environ))
    devices = options.devices or gpus or _CPU_DEVICES
    console = Console(quiet=options.json, highlight=False)
    results = []
    for check in CHECKS:
        # CPU devices share one CPU.
        has_sense = check.name != "faster" or (gpus > 0 and devices > 1)
        if has_sense and check.name in (options.only or [check.name]):
            with check_report.saying(console, check.name):
                results.append(check_runner.run_check(check, devices))
            console.print(check_report.line(results[-1]), soft_wrap=True)
    said = check_report.sentence(results, devices, gpus)
    console.print(f"\n{said}", soft_wrap=True)
    if options.json:
        found = [dataclasses.asdict(result) for result in results]
        print(json.dumps({"sentence": said, "checks": found}, indent=1))
    return check_report.exit_status(results)

"""`keras-conflux run` starts a script in several processes of this host."""

import argparse
import json
import os
import queue
import secrets
import signal
import socket
import sys
from collections.abc import Iterator
from collections.abc import Sequence
from contextlib import ExitStack
from contextlib import contextmanager
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from keras_conflux._cluster import roll_call
from keras_conflux._common.errors import ClusterError
from keras_conflux._devices.driver import visible_gpus
from keras_conflux._extensions.launchers.known import LAUNCHERS
from keras_conflux._extensions.launchers.known import without_launchers
from keras_conflux.tools import add_count
from keras_conflux.tools.cli.gang import TOLD
from keras_conflux.tools.cli.gang import Event
from keras_conflux.tools.cli.gang import Gang
from keras_conflux.tools.cli.output import RUNNING
from keras_conflux.tools.cli.output import Screen

_ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals of which a second one does not wait."""
_EXAMPLES = """examples:
  keras-conflux run --processes 4 train.py --epochs 10
  keras-conflux run --processes 4 --restarts 3 -m project.train --epochs 10
"""


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line."""
    parser = subcommands.add_parser(
        "run",
        help="start a script in several processes of this host",
        description=(
            "Starts a script in several processes of this host, which train "
            "together once the script calls `kc.initialize()`. If one fails, "
            "all are ended. The processes listen for each other without asking "
            "who connects: every other user of this host can read and write "
            "your files through them, and run programs as you, unless "
            "`unshare` of Linux gives them a network of their own."
        ),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser)
    # The rest belongs to the script, even if it looks like an option.
    rest: Any = {"nargs": argparse.REMAINDER}
    module = "run a module, as `python -m` does; its arguments follow"
    parser.add_argument("-m", dest="module", help=module, **rest)
    script = "the script; its arguments follow"
    parser.add_argument("script", help=script, **rest)
    parser.set_defaults(main=main, error=parser.error)


def _add_options(parser: argparse.ArgumentParser) -> None:
    processes = "how many; as all options, it comes before the script"
    add_count(parser, "--processes", 1, 0, processes)
    gpus = "default: all GPUs, dealt out evenly; 0: run on CPUs"
    add_count(parser, "--gpus-per-process", 0, None, gpus)
    restarts = "how often to start all again after a failure (default: 0)"
    add_count(parser, "--restarts", 0, 0, restarts)
    parser.add_argument(
        "--grace",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="how long the others may go on after a failure (default: 15)",
    )


def main(options: argparse.Namespace) -> int:
    """Starts all processes, and again if one fails.

    Returns 0, or the exit status of the first process that failed, in the last
    attempt. It is 128 and the signal's number if a signal ended it.
    """
    command = _command(options)
    if not options.processes:
        options.error("expected --processes N, before the script")
    if not hasattr(os, "waitid"):
        options.error(
            "expected Linux, or macOS with Python 3.13 or newer: elsewhere, "
            "Python cannot wait for processes and keep their numbers"
        )
    inherited = _without_launchers(options)
    try:
        gpus, count = visible_gpus(os.environ), options.processes
        shares = deal(gpus, count, options.gpus_per_process)
    except ValueError as error:
        options.error(str(error))
    with _signals_as_events() as events:
        screen = Screen(events.put)
        for attempt in range(options.restarts + 1):
            environments = _environments(inherited, shares, attempt)
            screen.keep_up_to(RUNNING)
            gang = Gang(command, environments, options.grace, events, screen)
            gang.run()
            is_last = gang.status == 0 or gang.is_interrupted
            if gang.failed is not None:
                left = 0 if is_last else options.restarts
                screen.say(_told(gang, attempt, left))
            if is_last:
                break
        _wait_for_reader(screen, events, gang.heard)
    return gang.status


def _wait_for_reader(
    screen: Screen, events: "queue.SimpleQueue[Event]", heard: int
) -> None:
    """Waits until all is read, or the user has sent two signals in all."""
    screen.close()
    while not screen.join(0.05 if heard < 2 else 1.0) and heard < 2:
        while not events.empty():
            heard += events.get() in _ENDING


def _command(options: argparse.Namespace) -> list[str]:
    if options.module:
        return [sys.executable, "-m", *options.module]
    if not options.script:
        options.error("expected a script, or -m and a module, after options")
    if not Path(options.script[0]).exists():
        options.error(f"there is no file {options.script[0]!r}")
    return [sys.executable, *options.script]


def _without_launchers(options: argparse.Namespace) -> dict[str, str]:
    """Returns the environment variables without other launchers' variables.

    Processes would ask them as well. One that has started this command more
    than once is refused, as processes would be started in each of its tasks.
    """
    for launcher in LAUNCHERS:
        try:
            outer = launcher.announced(os.environ)
        except ClusterError:  # some of its variables are left
            continue
        if outer is None or outer.count == 1:
            continue
        names = launcher.variables_in(os.environ)
        if launcher.starts_commands:
            options.error(
                f"{outer.source} has started this command {outer.count} "
                f"times ({outer.count_from}): start the script itself in "
                "place of it, or start it once. If that is not so, type "
                f"unset {' '.join(names)}"
            )
        _say(
            f"{outer.count_from} tells of {outer.count} processes, which "
            "those started here do not belong to: they do not get "
            f"{', '.join(names)}"
        )
    return without_launchers(os.environ)


def deal(
    gpus: Sequence[str], processes: int, per_process: int | None
) -> list[str | None]:
    """Deals GPUs out to processes, as many as possible if no number is given.

    Returns the CUDA_VISIBLE_DEVICES of each, or `None` to leave it as it is,
    where there are no GPUs, and raises a `ValueError` if there are too few.
    """
    if per_process is None:
        if not gpus:
            return [None] * processes
        per_process = len(gpus) // processes
        if per_process == 0:
            raise ValueError(
                f"there are {len(gpus)} GPUs for {processes} processes, which "
                "cannot share one: type --processes "
                f"{len(gpus)}, or --gpus-per-process 0 to run on CPUs"
            )
    if per_process == 0:
        return ["-1"] * processes
    if per_process * processes > len(gpus):
        raise ValueError(
            f"{processes} processes with {per_process} GPUs each need "
            f"{per_process * processes} GPUs, but there are {len(gpus)}"
        )
    starts = range(0, per_process * processes, per_process)
    return [",".join(gpus[start : start + per_process]) for start in starts]


def _environments(
    inherited: dict[str, str], shares: list[str | None], attempt: int
) -> list[dict[str, str]]:
    """Returns the environment variables of each process.

    They share the inherited ones, and each sees its share of the GPUs, if any.
    """
    # Ports are new in each attempt: the system may still hold the old ones.
    addresses = [f"localhost:{port}" for port in _free_ports(len(shares))]
    token = secrets.token_hex()
    told: dict[str, Any] = {"cluster": {"worker": addresses}}
    environments = []
    for index, gpus in enumerate(shares):
        told["task"] = {"type": "worker", "index": index}
        environment = {
            **inherited,
            "TF_CONFIG": json.dumps(told),
            "CONFLUX_ATTEMPT": str(attempt),
            roll_call.TOKEN: token,
            "PYTHONUNBUFFERED": "1",
        }
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        environments.append(environment)
    return environments


def _free_ports(count: int) -> list[int]:
    # All are bound at a time, so that they differ.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def _signals_as_events() -> Iterator["queue.SimpleQueue[Event]"]:
    """Puts signals that are for the processes in a queue, while it lasts."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def put(number: int, frame: FrameType | None) -> None:
        events.put(signal.Signals(number))

    before = {
        number: signal.signal(number, put)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *TOLD)
        # `nohup` has said so, or a shell in the background.
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield events
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _told(gang: Gang, attempt: int, restarts: int) -> str:
    """Returns the message after a failure."""
    failed = gang.failed
    assert failed is not None
    text = f"process {failed.index} ended with exit status {failed.status}"
    if failed.status > 128:
        number = failed.status - 128
        text += f" ({signal.strsignal(number) or f'signal {number}'})"
    if gang.error:
        text += f": {gang.error}"
    if attempt < restarts:
        return f"{text}; restart {attempt + 1} of {restarts}"
    return f"{text}; no restarts are left" if restarts else text


def _say(text: str) -> None:
    with suppress(OSError):  # nobody reads it
        print(f"keras-conflux run: {text}", file=sys.stderr, flush=True)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no time from 0")
    return seconds

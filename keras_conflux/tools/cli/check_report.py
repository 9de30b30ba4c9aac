"""The report of `keras-conflux check` on its results."""

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from keras_conflux.tools.cli.check_runner import Result

_STATUS = {"good": 0, "slow": 3, "wrong": 1}
_MARKS = {
    "good": ("ok", "green"),
    "slow": ("slow", "yellow"),
    "wrong": ("wrong", "bold red"),
}
_VERBS = {"wrong": "failed", "slow": "slower than usual"}


def exit_status(results: list[Result]) -> int:
    """Returns the exit status of `keras-conflux check`."""
    found = {result.status for result in results}
    worst = next((each for each in _VERBS if each in found), "good")
    return _STATUS[worst]


def sentence(results: list[Result], devices: int, gpus: int) -> str:
    """Returns a summary of the results in a sentence.

    Args:
        results: The results of all checks.
        devices: The number of devices that they were for.
        gpus: The number of GPUs; 0 if the devices are of the CPU.
    """
    what = f"{devices} {'GPU' if gpus else 'logical CPU device'}"
    what += "s" if devices > 1 else ""
    for status, verb in _VERBS.items():
        names = [each.name for each in results if each.status == status]
        if names:
            counted = f"{len(names)} of {len(results)} checks"
            return f"{what}: {counted} {verb}: {', '.join(names)}."
    ratio = next(
        (each.values["ratio"] for each in results if "ratio" in each.values),
        None,
    )
    if ratio is not None:
        return f"{what}, all good: {ratio:.2f} times as fast as one."
    if gpus:
        return f"{what}, all good."
    return (
        f"{what}, all good. There is no GPU, so this says nothing about speed."
    )


@contextlib.contextmanager
def saying(console: Console, name: str) -> Iterator[None]:
    """Shows the running check on a terminal."""
    if console.is_terminal and not console.quiet:
        with console.status(name):
            yield
    else:
        yield


def line(result: Result) -> Text:
    """Returns the line of the terminal for a result.

    Args:
        result: The result of a check.
    """
    mark, style = _MARKS[result.status]
    shown = Text.assemble(
        (f"{mark:<6}", style),
        (f"{result.name:<13}", "bold"),
        f"{result.text}",
        (f"  {result.seconds:.0f} s", "dim"),
    )
    if result.todo:
        shown.append(f"\n      type: {result.todo}", style)
    return shown

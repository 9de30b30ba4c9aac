"""Prints which programs emitted steps train as one device, beside replicas.

    PYTHONPATH=.:tests python tests/emitted_programs.py [PATTERN ...]

runs the programs of the tests of equality whose names have one of the patterns
in them. With `--fit`, replicas run them as well.
"""

import argparse
import collections
import functools
import itertools
import random
import sys
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import conftest  # noqa: F401, as it makes the devices
import drawn_trainings
import emitted_step
import keras
import test_equal
import test_layer_state
import test_losses_and_metrics
import test_programs
from cases import CASES
from drawn_programs import Redraw
from drawn_programs import drawn_program

import keras_conflux as kc

PARTS = 3
TESTS = (
    *vars(test_losses_and_metrics).values(),
    test_programs.test_a_program_trains_what_one_device_does,
    test_layer_state.test_what_a_layer_keeps,
    test_layer_state.test_rows_of_which_a_replica_has_too_few,
    test_layer_state.test_a_step_of_ones_own,
    test_layer_state.test_synchronized_normalization_in_a_step_of_ones_own,
)
NO_TRAINING = ("test_every_", "test_one_replica_")


def programs() -> dict[str, Callable[[], None]]:
    """Returns what raises if a program is not as on one device, by names."""
    found = {
        f"case {name}": functools.partial(
            test_equal.assert_equals_one_device, name, PARTS
        )
        for name in CASES
    }
    for test in TESTS:
        name = getattr(test, "__name__", "")
        if name.startswith("test_") and not name.startswith(NO_TRAINING):
            found |= {
                f"{name.removeprefix('test_')} {said}".strip(): call
                for said, call in _calls(test)
            }
    for number in range(90):
        found[f"drawn {number}"] = functools.partial(drawn, number)
    return found


def _calls(test: Callable) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields a test with each of its parameters, and how they are called."""
    choices = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names, values = mark.args
            split = names.split(",") if isinstance(names, str) else names
            choices.append([(split, value) for value in values])
    for number, chosen in enumerate(itertools.product(*choices)):
        given: dict[str, Any] = {}
        for names, value in chosen:
            values = getattr(value, "values", value)
            given |= zip(
                names, values if len(names) > 1 else [value], strict=True
            )
        if given.get("count", PARTS) == PARTS:
            said = " ".join(map(_said, given.values()))
            yield f"{number} {said}", functools.partial(test, **given)


def _said(value: Any) -> str:
    if isinstance(value, str | int):
        return str(value)
    return getattr(value, "__name__", "").replace("<lambda>", "")


def drawn(number: int) -> None:
    """Trains a program that is drawn by a number, in float64."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        for attempt in itertools.count():
            try:
                rng = random.Random(f"{number} {attempt}")
                program = drawn_program(rng, PARTS)
                verdict = drawn_trainings.judge(program)
            except Redraw:
                continue
            break
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    assert verdict[0] == "equal", f"{verdict}\n{program}"


def verdict_of(call: Callable[[], None]) -> str:
    """Runs a program, and returns what is to be said of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", kc.ConfluxWarning)
        try:
            call()
        except kc.ConfluxWarning:
            return "warns"
        except AssertionError as error:
            text = " ".join(str(error).split())
            return f"differs: {text[:150]}"
        except Exception as error:
            text = " ".join(str(error).split())
            noted = "; ".join(getattr(error, "__notes__", [])[:1])
            return f"raises {type(error).__name__}: {text[:150]} {noted}"
    return "equal"


def main() -> None:
    """Prints a line for each program, and how many there are of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pattern", nargs="*", default=[""])
    parser.add_argument("--fit", action="store_true")
    chosen = parser.parse_args()
    verdicts: collections.Counter = collections.Counter()
    counts: collections.Counter = collections.Counter()
    types: collections.Counter = collections.Counter()
    for name, call in programs().items():
        if not any(pattern in name for pattern in chosen.pattern):
            continue
        with emitted_step.in_place_of_replicas() as emitted:
            verdict = verdict_of(call)
        beside = f" | replicas: {verdict_of(call)}" if chosen.fit else ""
        own = sum((each.counts for each in emitted), collections.Counter())
        whole = sum(
            (each.computed_whole for each in emitted), collections.Counter()
        )
        verdicts[verdict.split(":")[0]] += 1
        counts, types = counts + own, types + whole
        print(f"{name} | {verdict}{beside} | {_told(own)} | {_told(whole)}")
        sys.stdout.flush()
        keras.backend.clear_session()
    print(_told(verdicts), _told(counts), _told(types), sep="\n")


def _told(counter: collections.Counter) -> str:
    return ", ".join(f"{name} {n}" for name, n in counter.most_common())


if __name__ == "__main__":
    main()

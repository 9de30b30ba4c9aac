"""N replicas compute what one device computes, case by case."""

import functools

import keras
import pytest
from cases import CASES
from cases import OPTIMIZERS
from cases_trained import train
from conftest import COUNTS
from conftest import MANY
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from models import assert_same_outcome
from models import moved_by_roundings
from models import size

# By hand, each case on 1 to 4 devices. In CI every second one is on 2 or on 3,
# and one of ten is compiled by XLA as well.


def runs():
    """Yields each case with how many devices, and whether XLA compiles it."""
    for index, name in enumerate(CASES):
        for count in COUNTS:
            in_ci = ON_GPU or index % 2 == 0
            if RUN_LONG_TESTS or (
                in_ci and count == min(2 + index % 4 // 2, MANY)
            ):
                yield name, count, False
            # XLA has collectives for GPUs only.
            may_compile = RUN_LONG_TESTS or ON_GPU or index % 10 == 0
            if may_compile and count == (min(2, MANY) if ON_GPU else 1):
                yield name, count, True


@functools.cache
def on_one_device(name, **options):
    return train(name, **options)


@functools.cache
def roundings(name):
    """How far a rounding moves each tensor, where that can be taken for one.

    A tensor that moves by over a thousandth of its size would hide a fault. The
    case has to name it, or it is compared without regard to roundings.
    """
    expected = on_one_device(name)
    moved = moved_by_roundings(
        expected, lambda prepare: train(name, prepare=prepare)
    )
    return {
        key: gap
        for key, gap in moved.items()
        if gap <= 1e-3 * size(expected[key])
        or any(part in key for part in CASES[name].only_roundings)
    }


def assert_equals_one_device(name, count, compiled=False):
    """Trains a case replicated, and compares all that it leaves."""
    got = train(name, count, compiled)
    expected = on_one_device(name)
    if compiled:
        expected = {
            key: value
            for key, value in expected.items()
            if " of batch " not in key
        }
    assert_same_outcome(
        expected, got, CASES[name].rtol, lambda: roundings(name)
    )


def test_every_optimizer_of_keras_has_a_case():
    classes = {
        value
        for value in vars(keras.optimizers).values()
        if isinstance(value, type)
        and issubclass(value, keras.optimizers.Optimizer)
    }
    tested = {type(make()) for make in OPTIMIZERS.values()}
    assert classes - tested == {keras.optimizers.Optimizer}  # the base class


# By the norm or the squares of rows that repeat, one by one.
SEES_SINGLE_ROWS = (
    "embedding with sparse gradients and clipping",
    *(f"rows that repeat, {name}" for name in ("RMSprop", "Adam", "Adagrad")),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "count", "compiled"), list(runs()))
def test_equals_one_device(name, count, compiled):
    if ON_GPU and name in SEES_SINGLE_ROWS:
        pytest.skip("rows that repeat are added up before the optimizer")
    assert_equals_one_device(name, count, compiled)

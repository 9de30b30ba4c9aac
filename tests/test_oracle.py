"""What the comparison with one device notices, and that tests compare."""

import ast
import pathlib
from collections.abc import Iterator

import numpy as np
import pytest
from models import MARGIN
from models import assert_same_outcome

ONE = {
    "0 kernel": np.array([1e-6, -2e-6, 0.0], "float32"),
    "1 iteration": np.int64(3),
    "loss of epoch 0": np.array(np.inf),
    "f1 of batch 0": np.array([0.5, np.nan]),
}
WRONG = {
    "a factor": {"0 kernel": ONE["0 kernel"] * np.float32(1.01)},
    "zeros": {"0 kernel": np.zeros(3, "float32")},
    "not zero": {"0 kernel": np.array([1e-6, -2e-6, 1e-10], "float32")},
    "a count": {"1 iteration": np.int64(4)},
    "finite": {"loss of epoch 0": np.array(1e30)},
    "the other infinity": {"loss of epoch 0": np.array(-np.inf)},
    "NaN": {"0 kernel": np.array([1e-6, -2e-6, np.nan], "float32")},
    "no NaN": {"f1 of batch 0": np.array([0.5, 0.0])},
    "one number of all": {"f1 of batch 0": np.array(0.5)},
}


def test_equal_but_for_roundings():
    moved = ONE["0 kernel"] * np.float32(1 + 1e-6)
    assert_same_outcome(ONE, ONE | {"0 kernel": moved})
    renamed = {f"0 other/{name}": ONE[name] for name in ("0 kernel",)}
    assert_same_outcome({"0 kernel": ONE["0 kernel"]}, renamed)


@pytest.mark.parametrize("changed", WRONG.values(), ids=WRONG)
def test_what_is_not_equal(changed):
    with pytest.raises(AssertionError):
        assert_same_outcome(ONE, ONE | changed)


@pytest.mark.parametrize("missing", ONE)
def test_all_that_one_device_has_is_compared(missing):
    some = {name: value for name, value in ONE.items() if name != missing}
    for pair in ((ONE, some), (some, ONE)):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_outcome(*pair)


def test_a_rounding_explains_what_it_moves():
    zero, near = {"0 bias": np.zeros(2)}, {"0 bias": np.array([0.0, 1e-8])}
    assert_same_outcome(zero, near, roundings=lambda: {"0 bias": 1e-8})
    for moved in ({"0 bias": 0.9e-8 / MARGIN}, {}):
        with pytest.raises(AssertionError, match="0 bias, moved by"):
            assert_same_outcome(zero, near, roundings=lambda moved=moved: moved)


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a function, less those of functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from own_nodes(node)


def test_no_test_returns_before_its_assertions():
    files = pathlib.Path(__file__).parent.rglob("test_*.py")
    returning = [
        f"{file.name}::{function.name}"
        for file in files
        for function in ast.parse(file.read_text()).body
        if isinstance(function, ast.FunctionDef)
        and function.name.startswith("test_")
        and any(isinstance(node, ast.Return) for node in own_nodes(function))
    ]
    assert returning == []

"""Each case of the table over two processes with two devices each."""

import pytest
from cases import CASES
from conftest import ON_GPU
from models import assert_same_outcome
from serving import Serving
from serving import assert_bitwise_equal
from test_equal import on_one_device
from test_equal import roundings

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ON_GPU, reason="needs four devices"),
]


@pytest.fixture(scope="module")
def processes():
    with Serving(2, devices=2) as serving:
        yield serving


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device_over_processes(name, processes):
    found = processes.outcomes(("case", name), devices=2)
    assert found is not None, "a warning"
    assert_bitwise_equal(*found)
    expected = on_one_device(name)
    assert_same_outcome(
        expected, found[0], CASES[name].rtol, lambda: roundings(name)
    )

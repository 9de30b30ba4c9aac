"""Programs of tf.distribute give here what a stock MirroredStrategy gives.

Each check runs on both strategies, over the same three CPU devices, in one
process. `docs/design/beside-mirrored-strategy.md` lists where they differ.
"""

import functools
import pathlib

import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import ON_GPU
from strategy_checks.results import are_equal
from strategy_checks.results import plain
from strategy_checks.results import result
from strategy_checks.table import CHECKS

import keras_conflux as kc

PAGE = pathlib.Path(__file__).parent.parent.joinpath(
    "docs/design/beside-mirrored-strategy.md"
)
REASONS = {row.differs for row in CHECKS.values() if row.differs}

pytestmark = pytest.mark.skipif(ON_GPU, reason="three CPU devices")


@functools.cache
def stock():
    # After an error, the collectives of its default would all be aborted.
    return tf.distribute.MirroredStrategy(
        list(DEVICES[:3]),
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


@functools.cache
def ours():
    return kc.ReplicatedStrategy(DEVICES[:3])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CHECKS)
def test_a_program_gives_what_it_gives_on_a_mirrored_strategy(name, request):
    row = CHECKS[name]
    if row.fails:
        request.applymarker(pytest.mark.xfail(reason=row.fails, strict=True))
    expected = result(row, stock())
    found = result(row, ours())
    assert are_equal(expected, found) == (row.differs is None), (
        expected,
        found,
    )
    if row.differs:
        assert are_equal(plain(ours(), row.here), found), found


@pytest.mark.parametrize("reason", sorted(REASONS))
def test_the_documents_name_a_difference(reason):
    assert f"| {reason} |" in PAGE.read_text()

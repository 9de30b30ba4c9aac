"""What is compared when copies shall be equal."""

import pytest
import tensorflow as tf
from conftest import MANY

import keras_conflux as kc

NAN = float("nan")
several = pytest.mark.skipif(MANY < 2, reason="needs two devices")


@several
def test_trees_of_replicas_are_compared():
    same = kc.Replicas([{"w": tf.ones(2), "none": None}] * MANY, MANY)
    assert kc.in_sync(same)
    kc.assert_in_sync(same)
    other = [{"w": tf.ones(2)}] * (MANY - 1) + [{"w": tf.constant([1.0, 1.5])}]
    message = rf"\['w'\] differs between replica 0 and replica {MANY - 1}, "
    with pytest.raises(kc.ReplicaMismatchError, match=message + "by up to 0.5"):
        kc.assert_in_sync(kc.Replicas(other, MANY))
    for trees in ([1.0, NAN], [{"a": 1.0}, {"b": 1.0}], [1.0, None]):
        assert not kc.in_sync(kc.Replicas(trees, 2))
    assert kc.in_sync(kc.Replicas([NAN, NAN], 2))

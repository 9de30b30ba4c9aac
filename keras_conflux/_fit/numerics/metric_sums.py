"""The sums of metrics, over several processes.

While steps run, each replica counts its own samples. Between executions each
process has the whole sum, in the copy of its first replica, so that a metric
reads, is saved and is reset as in one process.
"""

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._replication import state
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_index
from keras_conflux._replication.strategy import replica_rank


def take_apart(model: keras.Model) -> None:
    """Leaves the sums with the first replica of all processes.

    Traced in a replica, before its steps.
    """
    copies = _copies(model)
    if not copies or replica_rank() == 0:
        return

    # In a graph of its own: to the step, what it reads is a sum over samples.
    @tf.function(autograph=False)
    def begin() -> None:
        for copy in copies:
            copy.assign(tf.zeros_like(copy))

    begin()


def put_together(model: keras.Model) -> None:
    """Gives all processes the sums of all. Traced after a replica's steps."""
    copies = _copies(model)
    if not copies:
        return
    values = [copy.read_value() for copy in copies]
    sums = replica_collectives().all_reduce("sum", values)
    is_first = replica_index() == 0
    for copy, total in zip(copies, sums, strict=True):
        copy.assign(total if is_first else tf.zeros_like(total))


def _copies(model: keras.Model) -> list[tf.Variable]:
    """Returns this replica's copies, if there are other processes."""
    if process_count() == 1:
        return []
    return [state.copies(v)[replica_index()] for v in state.sums_of(model)]

"""Gradients that replicas have accumulated, over several processes.

Each replica adds up the gradients of its own samples until the optimizer
updates. The value is the sum of the copies in all processes.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._replication import state
from keras_conflux._replication.across_processes import run_everywhere
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import replica_index
from keras_conflux._replication.replica_context import replica_rank
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import is_replicated


def add_up_on_first_replica(owners: Iterable[Any]) -> None:
    """Moves all accumulated gradients to the first replica of all processes.

    The sum stays the same, and the first process saves all of it. All
    processes call this.
    """
    _add_up(owners, in_each_process=False)


def add_up_in_each_process(owners: Iterable[Any]) -> None:
    """Gives the first replica of each process the sum over all processes.

    Each process can go on with it alone. All processes call this.
    """
    _add_up(owners, in_each_process=True)


def _add_up(owners: Iterable[Any], in_each_process: bool) -> None:
    if process_count() == 1:
        return
    found = [
        variable
        for owner in owners
        for variable in keras_models.accumulators(owner)
        if is_replicated(keras_variables.backing(variable))
    ]
    if not found:
        return
    strategy = state.strategy_of(found) or current_strategy()
    copies = list(zip(*map(state.copies, found), strict=True))

    def one_replica() -> None:
        mine = copies[replica_index()]
        values = [copy.read_value() for copy in mine]
        sums = replica_collectives().all_reduce("sum", values)
        place = replica_index() if in_each_process else replica_rank()
        for copy, total in zip(mine, sums, strict=True):
            copy.assign(total if place == 0 else tf.zeros_like(total))

    one_replica.__qualname__ = f"adding up {len(found)} accumulated gradients"
    run_everywhere(one_replica, strategy)()

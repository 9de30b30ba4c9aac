"""Sums over replicas of several processes, such as the sums of metrics.

Copies of all processes add up to the value. So that each process can read it
alone, it holds the value besides, which each program that writes copies renews
at its end. The first replica of all has all of it then, as after a restart.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.replicated_variables import OnRead
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._replication.replica_context import replica_collectives


def adds_up(program: Any) -> Any:
    """Marks a program of a replica that calls `add_up` itself."""
    program.conflux_adds_up = True
    return program


def added_up(program: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a program of a replica add up the sums that it writes."""
    if hasattr(program, "conflux_adds_up"):
        return program

    @functools.wraps(program)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = program(*args, **kwargs)
        if not tf.executing_eagerly():
            add_up(written_here())
        return result

    return run


def written_here() -> list[OnRead]:
    """Returns the sums of which a replica writes its copy in this graph."""
    index = replica_index()
    graph = tf.compat.v1.get_default_graph()
    return [
        variable
        for handle, users in resources.uses_of_resources(graph)
        if isinstance(variable := resources.container_of(handle), OnRead)
        and variable.conflux_whole is not None
        and variable.values[index].handle is handle
        and not all(map(effects.only_reads, users))
    ]


def add_up(variables: Sequence[Any]) -> None:
    """Gives all processes the sums of the copies of all, in a replica."""
    index = replica_index()
    copies = [variable.values[index] for variable in variables]
    values = [copy.read_value() for copy in copies]
    totals = replica_collectives().all_reduce("sum", values) if values else []
    for variable, copy, total in zip(variables, copies, totals, strict=True):
        if index == 0 and variable.conflux_whole is not None:
            variable.conflux_whole.assign(total)
        rank = variable.distribute_strategy.communicator.rank(index)
        with tensorflow_tracing.of_rank():
            left = tf.zeros_like(total) if rank else tf.identity(total)
        copy.assign(left)

"""In how many turns replicas run their parts of a batch.

It is the number that the user has given. `choose_by` puts somebody in place who
chooses one where the user has left it open.
"""

from collections.abc import Callable

import keras

from keras_conflux._common.trees import Tree
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._fit.input.batches import Batch
from keras_conflux._fit.input.batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._replication.strategy import ReplicatedStrategy


class NumberOfTurns:
    """The same number for all batches.

    Args:
        count: The number.
    """

    may_be_several: bool

    def __init__(self, count: int) -> None:
        self._count = count
        self.may_be_several = count > 1

    def begins(self, group: StepGroup) -> None:
        """Is told of the batches that come next.

        Args:
            group: They lie on the devices.
        """

    def run(
        self, batch: Batch, compiled: bool, run: Callable[[int], Tree]
    ) -> Tree:
        """Runs a program that has a number of turns.

        Args:
            batch: What it runs.
            compiled: Whether XLA compiles it.
            run: Runs the program of so many turns, and returns what it returns.
        """
        del batch, compiled
        return run(self._count)


Chooser = Callable[
    [keras.Model, ReplicaStep, ReplicatedStrategy], NumberOfTurns
]


def _refuse(
    model: keras.Model, step: ReplicaStep, strategy: object
) -> NumberOfTurns:
    del step, strategy
    raise NotImplementedError(
        f'{model.name}: `microbatches="auto"` is an extension, and '
        "`CONFLUX_EXTENSIONS=0` has left all of them out. Unset that variable "
        "of the environment, or give a number."
    )


_choosers: list[Chooser] = [_refuse]


def choose_by(chooser: Chooser) -> None:
    """Has a function choose from now on, where the user does not.

    Args:
        chooser: Takes a model, a step of it and what replicates it, and returns
            what chooses for that step.
    """
    _choosers.append(chooser)


def turns_of(
    model: keras.Model, plan: ExecutionPlan, step: ReplicaStep
) -> NumberOfTurns:
    """Returns what says in how many turns a step runs."""
    if plan.eager or not step.runs_in_turns:
        return NumberOfTurns(1)
    if plan.turns == "auto":
        return _choosers[-1](model, step, plan.strategy)
    return NumberOfTurns(plan.turns)

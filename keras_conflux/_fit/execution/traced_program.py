"""Programs of all replicas: how they are made, kept, and run.

By default a program that XLA compiles is traced and called. `makers` gets
another maker of such programs, once.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Hashable
from typing import Any
from typing import Protocol

import tensorflow as tf

from keras_conflux._common.errors import StrategyError
from keras_conflux._communication.communicator import Communicator
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.execution.replica_step import ReplicaStep
from keras_conflux._replication import lost_values
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.traced_functions import Staleness
from keras_conflux._replication.watchdog import StepWatchdog


class Program(Protocol):
    """A program of all replicas."""

    def is_stale(self) -> bool:
        """Whether it reads variables that have been replaced since."""
        ...

    def __call__(self, *arguments: Any) -> Any:
        """Returns the result of the program, or raises its error."""
        ...


def _reads_what_was(name: str) -> StrategyError:
    return StrategyError(
        f"{name}: the step calls a concrete function, of "
        "`get_concrete_function`, that reads variables as they were before "
        "they were replicated. Call the `tf.function`, or a plain Python "
        "function: a step is traced as a whole."
    )


class TracedProgram:
    """Traces a program in the caller's thread. It runs when it may."""

    def __init__(
        self,
        communicator: Communicator,
        watchdog: StepWatchdog,
        function: Callable,
        signature: Any,
        compiled: bool = False,
    ) -> None:
        self._communicator = communicator
        self._watchdog = watchdog
        self._staleness = Staleness()
        leaves_out = tensorflow_tracing.Grappler.NOTHING
        if compiled:
            leaves_out = tensorflow_tracing.Grappler.ALL
        elif communicator.size > 1:  # copies stay equal bit by bit
            leaves_out = tensorflow_tracing.Grappler.ORDERS
        try:
            with communicator.tracing() as trace:
                self._run = tensorflow_tracing.concrete_function(
                    function, signature, leaves_out
                )
        except AssertionError as error:
            if not error_texts.is_of_deleted_variables(error):
                raise
            raise _reads_what_was(watchdog.name) from error
        self._has_collectives = trace.collectives > 0
        self._is_compiled = compiled
        if self.is_stale():
            raise _reads_what_was(watchdog.name)

    def is_stale(self) -> bool:
        """See `Program`."""
        return self._staleness.applies_to(self._run)

    def __call__(self, *arguments: Any) -> Any:
        """See `Program`. Raises if the program that runs waits for this one."""
        if not self._has_collectives:
            return self._call(*arguments)
        name = self._watchdog.name
        with self._communicator.exclusive(self._run, name):
            return self._call(*arguments)

    def _call(self, *arguments: Any) -> Any:
        try:
            return self._watchdog.call(self._run, *arguments)
        except tf.errors.OpError as error:
            if self._is_compiled:
                lost_values.after(error, self._run)
            raise


@dataclasses.dataclass(frozen=True)
class Purpose:
    """The purpose of a program."""

    identity: str
    """A text that is the same whenever the same program is traced."""
    kind: str
    """The kind of the devices that it runs on."""
    name: str
    """The name for people."""


Maker = Callable[[Callable[[], TracedProgram], Purpose], Program]
makers: list[Maker] = [lambda trace, _: trace()]
"""The last one makes the programs of XLA."""


class StepPrograms:
    """Keeps the programs of a step until variables they read are replaced."""

    def __init__(
        self, step: ReplicaStep, strategy: ReplicatedStrategy, steps: int = 1
    ) -> None:
        self._step = step
        self._strategy = strategy
        self._communicator = strategy.communicator
        self._watchdog = StepWatchdog(strategy.devices, step.name, steps)
        self._programs: dict[Hashable, Program] = {}
        self.count = 0
        """How many have been traced."""

    def _program(
        self, key: Hashable, trace: Callable[[], Program], common: bool = True
    ) -> Program:
        """Returns the program of a key; traces it if there is none in use."""
        with self._step.tracing:
            program = self._programs.get(key)
            if program is None or program.is_stale():
                program = self._programs[key] = trace()
                self.count += 1
                if self._communicator.spans_processes and common:
                    self._step.agree()
            return program

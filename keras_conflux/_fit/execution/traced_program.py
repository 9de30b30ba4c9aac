"""A traced program of all replicas, which runs when its collectives may."""

from collections.abc import Callable
from typing import Any

from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.errors import StrategyError
from keras_conflux._communication.communicator import Communicator
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.execution.watchdog import StepAbandoned
from keras_conflux._fit.execution.watchdog import StepWatchdog
from keras_conflux._replication.traced_functions import Staleness


def _reads_what_was(name: str) -> StrategyError:
    return StrategyError(
        f"{name}: the step calls a concrete function, of "
        "`get_concrete_function`, that reads variables as they were before "
        "they were replicated. Call the `tf.function`, or a plain Python "
        "function: a step is traced as a whole."
    )


class TracedProgram:
    """Traces a program in the thread of the caller, as on one device.

    Args:
        communicator: Carries its collectives.
        watchdog: Runs it.
        function: What it does.
        signature: What `function` takes.
        compiled: Whether XLA compiles what it does.
    """

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
        try:
            with communicator.tracing() as trace:
                self._run = tensorflow_tracing.concrete_function(
                    function, signature, optimized=not compiled
                )
        except AssertionError as error:
            if not error_texts.is_of_deleted_variables(error):
                raise
            raise _reads_what_was(watchdog.name) from error
        self._has_collectives = trace.collectives > 0
        if self.is_stale():
            raise _reads_what_was(watchdog.name)

    def is_stale(self) -> bool:
        """Whether it reads variables that have been replaced since."""
        return self._staleness.of(self._run)

    def __call__(self, *arguments: Any) -> Any:
        """Returns what the program returns, or raises what it raises.

        Raises:
            StrategyError: If the program that runs waits for this one.
        """
        if not self._has_collectives:
            return self._watchdog.call(self._run, *arguments)
        name = self._watchdog.name
        with self._communicator.exclusive(self._run, name):
            try:
                return self._watchdog.call(self._run, *arguments)
            except (StepTimeoutError, StepAbandoned):
                raise  # it still runs; all else would wait for it
            except BaseException:
                # Replicas have stopped at different places.
                self._communicator.recover()
                raise

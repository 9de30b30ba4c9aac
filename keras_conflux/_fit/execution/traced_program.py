"""A traced program of all replicas, which runs when its collectives may."""

from collections.abc import Callable
from typing import Any

from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.errors import StrategyError
from keras_conflux._communication.communicator import Communicator
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.execution.watchdog import StepAbandoned
from keras_conflux._fit.execution.watchdog import StepWatchdog
from keras_conflux._replication.traced_functions import Staleness


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
        with communicator.tracing() as trace:
            self._run = tensorflow_tracing.concrete_function(
                function, signature, optimized=not compiled
            )
        self._has_collectives = trace.collectives > 0
        if self.is_stale():
            raise StrategyError(
                f"{watchdog.name}: a `tf.function` that the step calls was "
                "traced before and reads variables as they were before they "
                "were replicated again. Make the function anew, or call plain "
                "Python functions: a step is traced as a whole."
            )

    def is_stale(self) -> bool:
        """Whether it reads variables that have been replaced since."""
        return self._staleness.applies_to(self._run)

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

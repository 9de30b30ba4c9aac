"""The effects on a replica's step of a call that is run a second time.

The rows that a replica draws, and where replicas meet, follow from the kinds of
tensors. In the second run the kinds are the same as in the first.
"""

import contextlib
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._batch_analysis import Role
from keras_conflux._fit.numerics.draws import Draws
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.layers import Layers
from keras_conflux._replication import steps

_OF_THE_BATCH = (Role.COUNT, Role.SHAPE, Role.TOTAL, Role.MEAN)


class CallInStep:
    """A call that begins here, in a step of `fit` or outside of one."""

    def __init__(self) -> None:
        step = steps.current_fit_step()
        self._step = step
        self._draws = 0 if step is None else Draws.of(step).count

    @contextlib.contextmanager
    def second_run(self) -> Iterator[None]:
        """Marks the second run of the call.

        Its draws do not count once more, and its layers are inside of one.
        """
        if self._step is None:
            yield
            return
        with (
            Draws.of(self._step).again(self._draws),
            Layers.of(self._step).calling(),
        ):
            yield

    @contextlib.contextmanager
    def differentiating(self) -> Iterator[None]:
        """Marks a call of the package's own tape, not of the program's."""
        if self._step is None:
            yield
            return
        with Gradients.of(self._step).computing():
            yield

    def is_of_samples(self, results: list[tf.Tensor]) -> bool:
        """Whether no result of a call is a number of the batch as a whole.

        How such a number is made of samples, the graph has to show.
        """
        if self._step is None:
            return True
        kinds = [self._step.kinds.of(result) for result in results]
        return not any(
            kind.role in _OF_THE_BATCH or not result.shape.rank
            for kind, result in zip(kinds, results, strict=True)
        )

    def mark_alike(self, source: tf.Tensor, target: tf.Tensor) -> None:
        """Gives a tensor the kind of another one."""
        if self._step is not None:
            self._step.kinds.mark(target, self._step.kinds.of(source))

    def trust(self, operation: tf.Operation) -> None:
        """Marks an operation whose gradient is the one of its inputs."""
        if self._step is not None:
            Layers.of(self._step).own_gradients.trust(operation)

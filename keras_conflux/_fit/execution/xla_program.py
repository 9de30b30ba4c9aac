"""A step as one XLA program a replica, which runs many steps a call.

The whole step is inside, the reduction of the gradients included. Around a
call the devices wait for the host, for some ten milliseconds with hundreds of
variables (docs/performance.md), so the batches of many steps go into a call
and a loop of the program walks them.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_internals
from keras_conflux._fit.execution.replica_step import Work
from keras_conflux._fit.execution.watchdog import Watch
from keras_conflux._fit.input.batches import Stack
from keras_conflux._fit.input.batches import shares
from keras_conflux._fit.input.host_to_device import concatenated
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import replica_index


class XlaProgram:
    """Runs steps for batches of one shape that divide evenly.

    Args:
        work: What the replicas do.
        strategy: What replicates the model: one device, or GPUs. XLA has no
            collectives for several CPU devices in TensorFlow 2.21.
        steps: How many steps a call the user has asked for.
    """

    def __init__(
        self, work: Work, strategy: ReplicatedStrategy, steps: int
    ) -> None:
        self._work = work
        self._strategy = strategy
        self._watch = Watch(strategy.devices, work.name, steps)
        self._traced: dict[Any, Callable] = {}

    def __call__(self, stack: Stack, limit: int) -> Tree:
        """Runs a step a batch and returns the last one's result.

        Args:
            stack: At most `limit` batches.
            limit: How many steps a call may have. A program is compiled for
                each limit that is asked for.
        """
        key = stack.signature, limit
        if key not in self._traced:
            self._traced[key] = self._trace(stack.specs, limit)
        parts = [
            [_padded(leaf, stack.count, limit, device) for leaf in part]
            for part, device in zip(
                stack.parts, self._strategy.devices, strict=True
            )
        ]
        return self._watch.call(
            self._traced[key], tf.constant(stack.count), parts
        )

    def _trace(self, parts: list[Tree], limit: int) -> Callable:
        def all_replicas(steps: tf.Tensor, stacked: list[list[Any]]) -> Tree:
            count = len(stacked)
            outputs: dict[int, Tree] = {}

            def one_replica() -> None:
                index = replica_index()
                program = self._program(parts[index], limit)
                outputs[index] = self._watch.note_end(
                    index, program(steps, stacked[index])
                )

            self._strategy.run(_as_it_is(one_replica))
            ordered = [outputs[index] for index in range(count)]
            return self._work.merge(
                ordered, shares([1] * count), [None] * count
            )

        specs = [
            [_stacked_spec(spec, limit) for spec in trees.present(part)]
            for part in parts
        ]
        signature = [tf.TensorSpec([], tf.int32), specs]
        return tensorflow_internals.graph_function(all_replicas, signature)

    def _program(self, part: Tree, limit: int) -> Callable:
        """Returns what a replica runs, on as many as `limit` batches.

        Its share is written into it, so that XLA removes what is done for
        batches that do not divide evenly.
        """
        share = 1 / len(self._strategy.devices)

        def one_step(*leaves: Any) -> Tree:
            with self._strategy.communicator.inside_xla():
                return self._work.on_replica(
                    trees.refill(part, leaves), tf.constant(share), None
                )

        def after_steps() -> None:
            with self._strategy.communicator.inside_xla():
                self._work.after_steps(tf.constant(share))

        return _compiled(one_step, after_steps, part, limit)


_as_it_is = tf.autograph.experimental.do_not_convert


def _compiled(
    one_step: Callable, after_steps: Callable, part: Tree, limit: int
) -> Callable:
    """Returns the XLA program that calls `one_step` for each batch."""

    def many_steps(steps: tf.Tensor, stacked: list[Any]) -> Tree:
        # Traced on its own, so that the loop knows what a step returns.
        step = tf.function(_as_it_is(one_step)).get_concrete_function(
            *trees.present(part)
        )

        def run(position: Any) -> list[tf.Tensor]:
            return trees.present(step(*[leaf[position] for leaf in stacked]))

        if limit == 1:
            latest = run(0)
        else:
            latest = tf.while_loop(
                lambda position, _: position < steps,
                lambda position, _: (position + 1, run(position)),
                (tf.constant(0), _nothing_like(step.structured_outputs)),
            )[1]
        after_steps()
        return trees.refill(step.structured_outputs, latest)

    return tf.function(_as_it_is(many_steps), jit_compile=True)


def _nothing_like(outputs: Tree) -> list[tf.Tensor]:
    """Returns what a loop over steps begins with."""
    for path, output in trees.with_paths(outputs):
        if output is not None and not output.shape.is_fully_defined():
            raise tf.errors.UnimplementedError(
                None,
                None,
                f"A compiled step returns one number a log; that at {path} is "
                f"{trees.describe(output)}.",
            )
    return [tf.zeros(x.shape, x.dtype) for x in trees.present(outputs)]


def _padded(
    stacked: tf.Tensor, count: int, limit: int, device: str
) -> tf.Tensor:
    """Makes one shape of any number of batches, so of all one program."""
    missing = limit - count
    if missing == 0:
        return stacked
    with tf.device(device):
        shape = [missing, *stacked.shape[1:]]
        return concatenated(stacked, tf.zeros(shape, stacked.dtype))


def _stacked_spec(spec: tf.TensorSpec, limit: int) -> tf.TensorSpec:
    return tf.TensorSpec([limit, *spec.shape], spec.dtype)

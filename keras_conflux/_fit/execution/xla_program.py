"""A step as one XLA program per replica, which runs many steps per execution.

Between two executions the devices wait for the host, for some ten milliseconds
(docs/performance.md). So a loop of the program walks over many batches.
"""

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from keras_conflux._cluster.processes import process_index
from keras_conflux._common import trees
from keras_conflux._common.notices import told_if_slow
from keras_conflux._common.trees import Tree
from keras_conflux._compat import error_texts
from keras_conflux._compat.replicas_in_turn import SharedTrace
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.execution.traced_program import Program
from keras_conflux._fit.execution.traced_program import Purpose
from keras_conflux._fit.execution.traced_program import StepPrograms
from keras_conflux._fit.execution.traced_program import TracedProgram
from keras_conflux._fit.execution.traced_program import makers
from keras_conflux._fit.input.device_batches import StackedBatch
from keras_conflux._fit.input.device_batches import batch_fractions
from keras_conflux._fit.input.host_to_device import concatenated
from keras_conflux._fit.numerics.exit import TraceAgain
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._replication import sums
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.steps import CompiledStep
from keras_conflux._replication.steps import Place


class XlaProgram(StepPrograms):
    """Runs steps for batches of one shape, on one device or on GPUs."""

    _are_apart = False
    """Whether each replica has a program of its own."""

    def __call__(self, stack: StackedBatch, limit: int) -> Tree:
        """Runs a step per batch and returns the last one's result."""
        key = stack.signature, limit, stack.shape, self._step.turns
        trace = functools.partial(self._made, key, stack, limit)
        shards = [
            [_padded(leaf, limit, device) for leaf in shard]
            for shard, device in zip(
                stack.shards, self._strategy.devices, strict=True
            )
        ]
        is_known = key in self._programs or process_index() > 0
        with contextlib.nullcontext() if is_known else self._waiting(stack):
            return self._program(key, trace)(tf.constant(stack.steps), shards)

    def _waiting(self, stack: StackedBatch) -> AbstractContextManager[None]:
        shapes = ", ".join(trees.describe(leaf[0]) for leaf in stack.shards[0])
        return told_if_slow(
            f"{self._step.name}: XLA compiles a step for {shapes} on each "
            "device, which may take minutes. Later starts are shorter where "
            "programs are kept, as `keras-conflux env` says."
        )

    def _made(self, key: tuple, stack: StackedBatch, limit: int) -> Program:
        communicator = self._communicator
        trace = functools.partial(self._trace, stack.specs, limit, stack.shape)
        purpose = Purpose(
            f"{self._step.identity} {key} on {communicator.size} devices",
            self._strategy.devices[0].kind,
            self._watchdog.name,
        )
        return makers[-1](trace, purpose)

    def _trace(
        self, shard_specs: list[Tree], limit: int, shape: tuple
    ) -> TracedProgram:
        # Made here: inside of a replica no scope can be entered.
        ranks = self._strategy.ranks if self._communicator.size > 1 else None
        compiled = CompiledStep([each for each, _ in shape], ranks)

        def all_replicas(steps: tf.Tensor, stacked: list[list[Any]]) -> Tree:
            count = len(stacked)
            outputs: dict[int, Tree] = {}
            shared: list[SharedTrace] = []

            def one_replica() -> None:
                index = replica_index()
                arguments = steps, stacked[index]
                if shared:
                    self._communicator.repeat_calls(index)
                    output = shared[0](*arguments, replica=index)
                else:
                    spec = shard_specs[index]
                    program = self._many_steps(spec, limit, compiled)
                    trace = SharedTrace(program, arguments)
                    output = trace(*arguments)
                    if index == 0 and self._serves_all(trace, shard_specs):
                        shared.append(trace)
                outputs[index] = self._watchdog.mark_end(index, output)

            with self._communicator.in_order(self._are_apart):
                run = sums.adds_up(_without_autograph(one_replica))
                self._strategy.run(run)
                if not shared and self._communicator.may_reorder:
                    self._are_apart = True
                    raise TraceAgain(TraceFindings())
            self._step.raise_if_retrace_needed()
            ordered = [outputs[index] for index in range(count)]
            fractions = batch_fractions([1] * self._communicator.size)[:count]
            return self._step.merge(ordered, fractions, [None] * count)

        specs = [
            [
                tf.TensorSpec([limit, *spec.shape], spec.dtype)
                for spec in trees.present(each)
            ]
            for each in shard_specs
        ]
        signature = [tf.TensorSpec([], tf.int32), specs]
        given = self._communicator, self._watchdog, all_replicas, signature
        return TracedProgram(*given, compiled=True)

    def _serves_all(self, trace: SharedTrace, shard_specs: list[Tree]) -> bool:
        """Whether the trace of replica 0 equals the traces of the others.

        In several processes, each first replica keeps the sums of metrics.
        """
        return (
            all(spec == shard_specs[0] for spec in shard_specs)
            and not self._communicator.spans_processes
            and trace.serves_others()
        )

    def _many_steps(
        self, shard_spec: Tree, limit: int, compiled: CompiledStep
    ) -> Callable:
        """Returns the program of a replica, on as many as `limit` batches.

        The constant batch fraction has XLA leave out what uneven batches need.
        """
        count = self._communicator.size

        def place() -> Place:  # shards are even
            return Place(1, tf.cast(rank_as_tensor(), tf.uint64), count)

        def one_step(*leaves: Any) -> Tree:
            fraction = batch_fractions([1] * count)[0]
            shard = trees.refill(shard_spec, leaves)
            return self._step.on_replica(shard, fraction, place, None, compiled)

        def many_steps(steps: tf.Tensor, stacked: list[Any]) -> Tree:
            # Traced on its own, so that the loop knows the results of a step.
            traced = tf.function(_without_autograph(one_step))
            step = traced.get_concrete_function(*trees.present(shard_spec))

            def run(position: Any) -> list[tf.Tensor]:
                leaves = [leaf[position] for leaf in stacked]
                return trees.present(step(*leaves))

            if limit == 1:
                latest = run(0)
            else:
                latest = tf.while_loop(
                    lambda position, _: position < steps,
                    lambda position, _: (position + 1, run(position)),
                    (tf.constant(0), _zeros_like(step.structured_outputs)),
                )[1]
            self._step.after_steps()
            return trees.refill(step.structured_outputs, latest)

        return tf.function(_without_autograph(many_steps), jit_compile=True)


_without_autograph = tf.autograph.experimental.do_not_convert


def _zeros_like(logs: Tree) -> list[tf.Tensor]:
    """Returns the initial values of a loop over steps."""
    for path, output in trees.with_paths(logs):
        if output is not None and not output.shape.is_fully_defined():
            raise error_texts.cannot_compile(
                f"A compiled step returns one number a log; that at {path} is "
                f"{trees.describe(output)}."
            )
    return [tf.zeros(x.shape, x.dtype) for x in trees.present(logs)]


def _padded(stacked: tf.Tensor, limit: int, device: str) -> tf.Tensor:
    """Pads any number of batches to one shape, so that one program fits all."""
    missing = limit - len(stacked)
    if missing == 0:
        return stacked
    with tf.device(device):
        shape = [missing, *stacked.shape[1:]]
        return concatenated(stacked, tf.zeros(shape, stacked.dtype))

"""Runs a function on every device at once."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any
from typing import overload

import keras
import tensorflow as tf

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._common import arguments
from keras_conflux._common import errors
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._compat.tensorflow_tracing import Grappler
from keras_conflux._custom_loops import branches
from keras_conflux._custom_loops.given import Decorator
from keras_conflux._custom_loops.given import Given
from keras_conflux._custom_loops.given import Kind
from keras_conflux._custom_loops.given import P
from keras_conflux._custom_loops.given import PerDeviceFunction
from keras_conflux._custom_loops.given import R
from keras_conflux._custom_loops.given import are_tensors
from keras_conflux._custom_loops.given import warn_if_unsplit
from keras_conflux._custom_loops.given import warn_of_numbers
from keras_conflux._custom_loops.given import warn_of_returned_sums
from keras_conflux._custom_loops.verbs import Means
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import DevicesLike
from keras_conflux._devices.device import devices as find_devices
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.gradients import are_alike
from keras_conflux._fit.numerics.warnings import warn_of_plain_variables
from keras_conflux._graphs import bodies
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import is_collective
from keras_conflux._replication import common_state
from keras_conflux._replication import lost_values
from keras_conflux._replication import promotion
from keras_conflux._replication import steps
from keras_conflux._replication.across_processes import run_everywhere_by
from keras_conflux._replication.common_program import CommonProgram
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import outside_of_strategies
from keras_conflux._replication.replica_context import replica_rank
from keras_conflux._replication.replica_context import whole_batch_strategy
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.strategy import current_strategy
from keras_conflux._replication.strategy import strategy_over
from keras_conflux._replication.watchdog import StepWatchdog


@dataclasses.dataclass(frozen=True)
class Replica:
    """Which replica the running program is, as `replica` tells.

    Example:
        ```python
        @kc.withdevices
        def scaled(x):
            this = kc.replica()
            return x * (this.index + 1) / this.count
        ```
    """

    index: int
    """The position of this replica, from 0."""
    count: int
    """How many replicas run."""
    device: Device
    """The device of this replica."""


@tf.autograph.experimental.do_not_convert
def replica() -> Replica:
    """Returns which replica is running: its index, their count, its device.

    Returns:
        A `Replica`.

    Raises:
        StrategyError: Outside of `withdevices`, `strategy.run` and `fit`.

    Example:
        ```python
        @kc.withdevices
        def whoami():
            return kc.replica().index

        print([index.numpy() for index in whoami()])
        ```
    """
    of_whole_batch = whole_batch_strategy()
    if of_whole_batch is not None:
        return Replica(0, 1, of_whole_batch.devices[0])
    if not in_replica():
        raise errors.StrategyError(
            "`replica()` is known only while replicas run. Call it inside a "
            "`withdevices` function, `strategy.run`, or a `train_step`."
        )
    steps.refuse_in_turns(
        "`replica()` is a number of Python", "Write the step without it"
    )
    strategy = tf.distribute.get_strategy()
    device = strategy.devices[replica_index()]
    return Replica(replica_rank(), strategy.communicator.size, device)


@overload
def withdevices(
    fn: Callable[P, R],
    *,
    devices: DevicesLike = None,
    jit_compile: bool = False,
) -> PerDeviceFunction[P, Replicas[R]]: ...
@overload
def withdevices(
    fn: None = None, *, devices: DevicesLike = None, jit_compile: bool = False
) -> Decorator: ...
def withdevices(
    fn: Callable[..., Any] | None = None,
    *,
    devices: DevicesLike = None,
    jit_compile: bool = False,
) -> Any:
    """Makes `fn` run on every device at once, compiled to one graph.

    It is like `strategy.run` of `tf.distribute`, and like `pmap` in JAX: the
    same function runs once per device, each time with its part of the data.
    `fn` becomes a graph as under `tf.function`: `if` and `for` take tensors.

    Arguments that are `Replicas` or `tf.distribute` values give each device
    its own part; all others go to every device as they are, with a warning
    about arrays that look like a batch which was not split. Give models and
    optimizers that `fn` uses to `replicate`, or make them in its scope.

    Nothing is reduced for you: gradients that `fn` computes are this
    replica's until it calls `allreduce`.

    Args:
        fn: The function to run. `None` makes a decorator with options.
        devices: See `keras_conflux.devices`. Default: the devices of the
            `Replicas` among the arguments, else of the open scope, else of
            `keras.distribution`, else all.
        jit_compile: Whether XLA compiles the program of each device,
            collectives included. TensorFlow's XLA has none for CPU devices, so
            on several of these `fn` runs as a plain graph.

    Returns:
        A function of the same parameters that returns a `Replicas` of the
        results of `fn` on each device, in device order. If `fn` is `None`, a
        decorator that makes such a function.

    Raises:
        DeviceError: When the function is called, if the devices do not exist,
            repeat or are mixed.
        ReplicaMismatchError: When it is called, if replicas make different
            collective calls, or processes split different batches.
        StrategyError: When it is called, if that is inside a replica, or if
            its arguments are on different devices.
        Exception: Any error of `fn`, with a note that names the replica.

    Example:
        ```python
        model = kc.replicate(build_model())
        optimizer = kc.replicate(keras.optimizers.SGD(0.1))

        @kc.withdevices
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x))
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients = kc.allreduce("mean", gradients, weight=len(x))
            optimizer.apply(gradients, model.trainable_variables)
            return loss

        losses = step(*kc.split((x, y)))
        ```
    """
    if fn is None:
        return functools.partial(
            withdevices, devices=devices, jit_compile=jit_compile
        )
    arguments.assert_is(fn, Callable, "a function that is run on every device")
    compiled_for = functools.cache(functools.partial(_Compiled, fn))

    @functools.cache
    def chosen() -> set[tuple[Device, ...]]:
        return set() if devices is None else {find_devices(devices)}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Replicas[Any]:
        strategy = _strategy(chosen, (args, kwargs))
        spares = jit_compile and strategy.communicator.spares_threads(_name(fn))
        compiled = compiled_for(strategy, jit_compile and not spares)
        arguments = args, kwargs
        if tf.distribute.get_strategy() is strategy:
            return compiled(arguments)
        return outside_of_strategies(functools.partial(compiled, arguments))

    return run


def on_every_device(
    fn: Callable[..., Any], strategy: ReplicatedStrategy
) -> Callable[..., Replicas[Any]]:
    """Returns a function that runs on every device with the same arguments."""
    compiled = _Compiled(fn, strategy, False, is_users=False)
    return lambda *args: compiled((args, {}))


class _Noted:
    """The results of the replicas of one trace, and the means they take."""

    def __init__(self) -> None:
        self.outputs: dict[int, Any] = {}
        self.means: list[Means] = []
        self.constants: list[Any] = []
        """Of each replica that returns what all may have alike, else `None`."""

    @functools.cached_property
    def returns_alike(self) -> bool:
        """Whether all replicas return the same."""
        first, *others = self.constants
        return first is not None and all(each == first for each in others)

    @functools.cached_property
    def count_alike(self) -> bool:
        """Whether a mean has no weight, or the same number in each replica."""
        numbers = {tuple(each.numbers) for each in self.means}
        alike = len(self.means) > 1 and len(numbers) == 1 and numbers != {()}
        if alike and not all(each.are_rows for each in self.means):
            return True
        return any(each.are_of_parts for each in self.means)


class _Compiled:
    """`fn` as one graph for all devices of one strategy."""

    def __init__(
        self,
        fn: Callable[..., Any],
        strategy: ReplicatedStrategy,
        jit_compile: bool,
        is_users: bool = True,
    ) -> None:
        self._name = _name(fn)
        self._strategy = strategy
        self._devices = strategy.devices
        self._failed: list[tuple[int | None, Exception]] = []
        self._calls = 0
        self._has_built = self._has_warned = False
        self._traced: dict[Any, Any] = {}
        """By signature, programs for tensors. TensorFlow finds them slowly."""
        self._by_numbers: set[int] = set()
        self._is_users = self._warns_of_unsplit = is_users
        self._noted = _Noted()  # of the last call
        self._watchdog = StepWatchdog(strategy.devices, self._name)
        alone = strategy.communicator.size == 1
        self._leaves_out = Grappler.NOTHING if alone else Grappler.ORDERS
        warned: set[str] = set()
        begin = tf.autograph.experimental.do_not_convert(self._begin)
        fail = tf.autograph.experimental.do_not_convert(self._fail)
        finish = tf.autograph.experimental.do_not_convert(self._finish)
        compiled = None
        if jit_compile and strategy.communicator.supports_xla:
            compiled = steps.CompiledStep()
            fn = _through_xla(fn)
        self._is_compiled = compiled is not None

        # TensorFlow turns these two and `fn` into graph code (AutoGraph), so
        # that Python's `if` and `for` over tensors work in `fn`.
        def all_replicas(
            arguments: list[Any], kinds: tuple[Kind, ...]
        ) -> list[Any]:
            self._noted = noted = _Noted()

            def one_replica() -> None:
                index = replica_index()
                args, kwargs = arguments[index]
                step = steps.Step(self._name, warned, compiled)
                program = begin(step, arguments[index], kinds)
                with steps.entered(step):
                    try:
                        output = fn(*args, **kwargs)
                    except Exception as error:
                        fail(index, error)
                        raise
                finish(step, program, kinds, noted, index, output)

            try:
                strategy.run(one_replica)
            except Exception as error:
                fail(None, error)
                raise
            return [noted.outputs[index] for index in range(len(arguments))]

        self._function = tensorflow_tracing.without_retracing_warning(
            tf.function(all_replicas, reduce_retracing=True)
        )

    def __call__(self, arguments: Tree) -> Replicas[Any]:
        given = Given(arguments)
        parts = given.parts(len(self._devices))
        signature = given.signature(parts)
        promotion.promote_new_state(None, self._strategy)  # Keras' seeds
        self._failed.clear()
        communicator = self._strategy.communicator
        if self._warns_of_unsplit and signature not in self._traced:
            warned = warn_if_unsplit(self._name, communicator.size, arguments)
            self._warns_of_unsplit = not warned
        try:
            with (
                errors_reported_to_all(self._name),
                communicator.exclusive(self._function, self._name),
            ):
                self._calls += 1
                results = self._run(signature, parts, given)
                promotion.give_back_seed()
        except BaseException as error:
            raise self._explain(error, given.empty) from None
        alike = self._noted.count_alike
        passes = any(each.pass_collectives for each in self._noted.means)
        if (alike or passes) and not self._has_warned:
            self._has_warned = given.warn_of_mean(self._name, not alike)
        results.is_uneven = given.is_uneven
        return results

    def _run(self, key: Any, parts: list[Tree], given: Given) -> Replicas[Any]:
        """Traces the program if it has to be, and runs it when all agree."""
        what = f"call {self._calls} of {self._name}"
        if any(sums := [each.checksum for each in given.split]):
            what += f" with the checksums {sums}"
        arguments = parts, given.kinds
        if not tensorflow_tracing.may_run_in_another_thread():
            assert_same_place(what)
            with tensorflow_tracing.leaving_out(self._leaves_out):
                return Replicas(self._function(*arguments), self._devices)
        program = self._traced.get(key)
        if program is None:
            program = self._trace(given.opened(parts), given.kinds)
            if are_tensors(parts):
                self._traced[key] = program
            else:
                self._by_numbers.add(id(program))
                warn_of_numbers(self._name, len(self._by_numbers), parts[0])
        self._noted = program.graph.conflux_noted
        traced = program.graph.conflux_program
        if self._is_users:
            alike = traced.agree(what, common_state.sums_of_assigned())
            common_state.compare_assigned(what, alike, traced.variables)
        else:  # which may be there to make variables equal
            traced.agree(what)

        def run() -> Any:
            with tensorflow_tracing.leaving_out(self._leaves_out):
                return program(*arguments)

        try:
            results = Replicas(self._watchdog.call(run), self._devices)
        except tf.errors.OpError as error:
            if self._is_compiled:
                lost_values.after(error, program)
            raise
        if self._noted.returns_alike:
            results.kind = "reduced"
        return results

    def _trace(self, *arguments: Any) -> Any:
        # Programs of XLA may differ by the rank, or the length of a part.
        with self._strategy.communicator.in_order(True):
            program = self._function.get_concrete_function(*arguments)
            if self._has_built:  # an optimizer, see `TraceFindings.built`
                self._has_built = False
                self._function = tensorflow_tracing.untraced(self._function)
                program = self._function.get_concrete_function(*arguments)
        return program

    def _begin(
        self, step: steps.Step, inputs: Tree, kinds: tuple[Kind, ...]
    ) -> CommonProgram:
        """Notes the arguments of a replica that were reduced before."""
        given = list(zip(keras.tree.flatten(inputs), kinds, strict=True))
        rank = self._strategy.communicator.rank(replica_index())
        reductions = steps.UserReductions.of(step)
        alike = "shared", "reduced", rank
        reductions.add([x for x, kind in given if kind in alike[1:]])
        reductions.own = [x for x, kind in given if kind not in alike]
        parts = [x for x in reductions.own if tf.is_tensor(x) and x.shape.rank]
        if parts and not any(x.shape[0] for x in parts):
            most = tf.reduce_max([tf.shape(x)[0] for x in parts])
            reductions.has_rows = most > 0
        return CommonProgram(inputs)

    def _finish(
        self,
        step: steps.Step,
        program: CommonProgram,
        kinds: tuple[Kind, ...],
        noted: _Noted,
        index: int,
        output: Any,
    ) -> None:
        """Checks the trace of a replica, and keeps its outputs."""
        means = Means.of(step)
        noted.means.append(means)
        if not tf.executing_eagerly():
            program.close()
            self._has_built |= Gradients.of(step).have_built
            given = zip(keras.tree.flatten(program.inputs), kinds, strict=True)
            equal = {id(x) for x, k in given if k in ("shared", "reduced")}
            branches.refuse_unequal(self._name, program.operations, equal)
            made_of = self._note_made(step, noted, output)
            if index == 0:
                step.graph = program.graph
                if self._is_users:
                    warn_of_plain_variables(step)
                    warn_of_returned_sums(step, made_of)
                program.graph.conflux_program = program
                program.graph.conflux_noted = noted
                reductions = steps.UserReductions.of(step)
                counted = reductions.counted & reductions.of_parts
                means.are_of_parts |= bool(counted)
            output = self._watchdog.mark_end(index, output)
        noted.outputs[index] = output

    def _note_made(self, step: steps.Step, noted: _Noted, output: Tree) -> Any:
        """Notes if all replicas return the same. Tells of what that is made."""
        leaves = trees.present(output)
        found = steps.symbolic(leaves)
        made_of = [*walks.walked(found, walks.made_past(is_collective, {}))]
        traced = [x.op for x in made_of if not bodies.is_eager(x)]
        constants = [x for x in traced if x.type == "Const"]
        values = [x.get_attr("value").SerializeToString() for x in constants]
        alike = len(found) == len(leaves)
        alike = alike and are_alike(made_of, steps.UserReductions.of(step))
        # Known lengths of parts are constants. Other processes tell none.
        told = not values or not self._strategy.communicator.spans_processes
        noted.constants.append(values if alike and told else None)
        return made_of

    def _fail(self, index: int | None, error: Exception) -> None:
        if not self._failed and not tensorflow_internals.is_cancellation(error):
            self._failed.append((index, error))

    def _explain(self, error: BaseException, empty: list[int]) -> BaseException:
        """Returns the error to raise: of the original type, saying where."""
        index, original = self._failed[0] if self._failed else (None, error)
        if isinstance(error, tf.errors.OpError) and not self._failed:
            index = error_texts.replica_of(error)
        if type(error) is not type(original):
            # AutoGraph adds the line of the user's source to the message, but
            # replaces exceptions of types that it does not know.
            error = original
        errors.add_notes(error)
        if error_texts.is_of_length(error):
            error.add_note(
                "Once a step has had parts of two sizes, `x.shape[0]` is None "
                "and `len(x)` an int32 tensor. Write `len(x)`, in arithmetic "
                "`tf.cast(len(x), x.dtype)`."
            )
        on_gpu = self._strategy.communicator.on_gpu
        if empty and isinstance(error, tf.errors.OpError) and not on_gpu:
            error.add_note(
                f"Replica {empty[0]} ({self._devices[empty[0]]}) has no "
                "samples, and on CPU devices oneDNN's operations may fail "
                "without any. Set `TF_ENABLE_ONEDNN_OPTS=0` in the shell, or "
                "give each device a sample, as by "
                "`dataset.batch(..., drop_remainder=True)`."
            )
        if index is not None:
            error.add_note(
                f"Raised in replica {index} ({self._devices[index]}) "
                f"of {self._name}, run by withdevices."
            )
        return error


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _through_xla(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        output = fn(*args, **kwargs)
        steps.finish()
        return output

    def run(*args: Any, **kwargs: Any) -> Any:
        # A function for each replica: each is traced over its own variables.
        return tf.function(step, jit_compile=True)(*args, **kwargs)

    return run


def _strategy(
    chosen: Callable[[], set[tuple[Device, ...]]], arguments: Tree
) -> ReplicatedStrategy:
    if in_replica():
        raise errors.StrategyError(
            "A `withdevices` function was called inside another. The inner "
            "one already runs on every device: call the plain function."
        )
    found = chosen() | {
        leaf.devices
        for leaf in trees.flatten(arguments)
        if isinstance(leaf, Replicas)
    }
    if len(found) > 1:
        raise errors.StrategyError(
            "The arguments of one call must be on the same devices. Received "
            f"Replicas on {' and on '.join(', '.join(d) for d in found)}."
        )
    return strategy_over(found.pop()) if found else current_strategy()


run_everywhere_by(on_every_device)

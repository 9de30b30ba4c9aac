"""Accessors of the private names that `private_keras_names` lists."""

import contextlib
import functools
import inspect
import random
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common import masking
from keras.src.backend.tensorflow import (
    distribution_lib as backend_distribution,
)
from keras.src.random import seed_generator
from keras.src.trainers import data_adapters
from keras.src.trainers import trainer as trainer_module
from keras.src.utils import rng_utils

from keras_conflux._compat import error_texts
from keras_conflux._compat.private_keras_names import Patched


def provide_distribution(*functions: Callable[..., Any]) -> None:
    """Gives Keras what its TensorFlow backend lacks for `keras.distribution`.

    Args:
        *functions: Found by their names, which are those that other backends
            have.
    """
    # keras.src.distribution calls them on this module. In 3.14.0 and 3.15.1
    # it has `list_devices`, which works, and attempts at DTensor.
    for function in functions:
        setattr(backend_distribution, function.__name__, function)


def take_whole_datasets(distribution: Any) -> None:
    """Keeps a distribution of several processes from sharding data sets."""
    distribution._is_multi_process = False


def is_of_keras(part: Any) -> bool:
    """Whether Keras has written a function, or the class of a layer."""
    owner = part if inspect.isroutine(part) else type(part)
    return (owner.__module__ or "").split(".")[0] == "keras"


def random_seed() -> int | None:
    """Returns the seed that the program has given Keras, if it has."""
    return rng_utils.get_random_seed()


def backing(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable that holds a Keras variable's value.

    `None` if it has not been made yet. `variable.value` would cast it where
    autocasting is on.
    """
    return variable._value


def mask_of(tensor: Any) -> Any:
    """Returns the mask that Keras has noted for a tensor, or `None`."""
    return masking.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Notes a mask for a tensor."""
    masking.set_keras_mask(tensor, mask)


def reduction_axes(layer: Any) -> list[int]:
    """Returns the axes over which a normalization takes means."""
    return layer._reduction_axes


def set_backing(variable: keras.Variable, new: tf.Variable) -> None:
    """Puts another TensorFlow variable under a Keras variable."""
    variable._value = new


def make_backing(
    variable: keras.Variable, value: Any, summed: bool = False
) -> tf.Variable:
    """Makes a TensorFlow variable as Keras would in the current scope.

    Args:
        variable: The Keras variable that it is for.
        value: Its initial value.
        summed: Whether its value is the sum of what replicas hold, whatever
            Keras says.
    """
    # As in core.Variable._initialize, except that a copy that a replica writes
    # is never reduced on the way: it would be reduced at each writing, and
    # Keras writes a sum by writing the old sum and what is added.
    synchronization = "on_read" if summed else variable.synchronization
    aggregation = "sum" if summed else variable.aggregation
    if synchronization != "on_read":
        aggregation = "none"
    # Freezing a Keras variable leaves TensorFlow's watched by gradient tapes;
    # what is made while it is frozen must be as well.
    old = backing(variable)
    return tf.Variable(
        lambda: value,
        dtype=value.dtype,
        trainable=variable.trainable if old is None else old.trainable,
        name=variable.name,
        aggregation=variable._map_aggregation(aggregation),
        synchronization=variable._map_synchronization(synchronization),
    )


def accumulators(optimizer: Any) -> list[keras.Variable]:
    """Returns the variables that add up gradients between updates."""
    # Keras has no public name for them (base_optimizer.py, `build`).
    found = getattr(optimizer, "_accumulated_gradients", None) or []
    return [variable for variable in found if variable is not None]


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model was built under, if any."""
    return model._distribute_strategy


def set_strategy(model: keras.Model, strategy: Any) -> None:
    """Makes `model` train, evaluate and predict under another strategy."""
    model._distribute_strategy = strategy


def functions_of(model: keras.Model) -> list[Any]:
    """Returns what a model trains, evaluates and predicts with, or `None`s."""
    return [model.train_function, model.test_function, model.predict_function]


def tf_functions_in(function: Any) -> Iterator[Any]:
    """Yields what a function of Keras' own trainer is traced as."""
    # trainer.py makes them in closures.
    waiting, seen = [function], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, tf.types.experimental.PolymorphicFunction):
            yield item
        elif inspect.isfunction(item) and item not in seen:
            seen.add(item)
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty one
                    waiting.append(cell.cell_contents)


def optimizer_strategy(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy that an optimizer makes its variables under."""
    return optimizer._distribution_strategy


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer create and update its variables under a strategy."""
    # TFOptimizer takes the strategy at construction and never asks again.
    optimizer._distribution_strategy = strategy


def global_seed_generator() -> keras.random.SeedGenerator:
    """Returns the generator behind `keras.random` without a seed."""
    # Made here, outside of any function, for a function makes no variables.
    # Its seed comes from Python's `random`. A model that never asks for it
    # would not have drawn: what a PyDataset shuffles by stays the same.
    before = random.getstate()
    generator = seed_generator.global_seed_generator()
    random.setstate(before)
    return generator


def present_global_seed() -> keras.Variable | None:
    """Returns the seed behind `keras.random`, if this thread has used it."""
    name = seed_generator.GLOBAL_SEED_GENERATOR
    generator = global_state.get_global_attribute(name)
    return None if generator is None else generator.state


def with_this_threads_state(fn: Callable) -> Callable:
    """Makes `fn` see this thread's Keras settings in the thread it runs in."""
    # Keras keeps them by thread (backend/common/global_state.py), and each
    # replica has a thread. Both names are set for the whole program, not for
    # a scope.
    names = ("dtype_policy", "global_seed_generator")
    settings = {name: global_state.get_global_attribute(name) for name in names}

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        for name, value in settings.items():
            global_state.set_global_attribute(name, value)
        return fn(*args, **kwargs)

    return run


def symbolic_build(
    model: keras.Model,
    spec: Any,
    at_once: bool = False,
    layers_alone: bool = False,
) -> None:
    """Builds a model, its metrics and its optimizer for batches like `spec`.

    Args:
        model: What is built.
        spec: Of a batch.
        at_once: Whether metrics and losses are built also where a step of the
            user's own may give them something else than the data.
        layers_alone: Whether nothing but layers is built, as for `predict`.
    """
    # Public `model.build` builds neither metrics nor the optimizer.
    try:
        with (
            _without_compiled(model)
            if layers_alone
            else _without_what_steps_tell(model, at_once)
        ):
            model._symbolic_build(data_batch=spec)
    except Exception as error:
        # Keras cannot trace some models by shapes alone. And a step of the
        # user's own may do without `call`, or take what `call` does not. Both
        # are built by their first step on one device, so they shall be here.
        untraceable = error_texts.is_untraceable_by_shapes(error)
        left_to_step = untraceable or layers_alone or has_own_step(model)
        if not left_to_step:
            raise


@contextlib.contextmanager
def _without_what_steps_tell(
    model: keras.Model, at_once: bool
) -> Iterator[None]:
    """Leaves to the first step what it may build otherwise than from data.

    A step of the user's own may give metrics and losses something else than
    the data, and by its shape Keras chooses what "accuracy" means. It may
    build layers, and an optimizer refuses variables that are made after it
    was built.
    """
    if not has_own_step(model):
        yield
        return
    names = ("optimizer",) if at_once else _COMPILED
    with _without_compiled(model, names) as left:
        yield
    if any(part is model.optimizer for part in left) and all(
        layer.built for layer in all_layers(model)[1:]
    ):
        model.optimizer.build(model.trainable_variables)


_COMPILED = ("optimizer", "_compile_metrics", "_compile_loss")


@contextlib.contextmanager
def _without_compiled(
    model: keras.Model, names: Sequence[str] = _COMPILED
) -> Iterator[list[Any]]:
    """Leaves out what `compile` has given a model; yields what is unbuilt."""
    parts = [getattr(model, name, None) for name in names]
    left = [part for part in parts if part is not None and not part.built]
    for part in left:
        part.built = True
    try:
        yield left
    finally:
        for part in left:
            part.built = False


def layers_are_built(model: keras.Model) -> bool:
    """Whether all layers of a model have their variables."""
    return all(layer.built for layer in all_layers(model))


def metrics_are_built(model: keras.Model) -> bool:
    """Whether the metrics that `compile` was given have their variables."""
    metrics = getattr(model, "_compile_metrics", None)
    return metrics is None or metrics.built


def all_layers(model: keras.Model) -> list[Any]:
    """Returns a model, and the layers in it and in each other."""
    return list(model._flatten_layers())


def has_own_step(model: keras.Model) -> bool:
    """Whether a model overrides one of the three steps of Keras."""
    trainer = Patched.FIT.owner
    return any(
        getattr(type(model), step) is not getattr(trainer, step)
        for step in ("train_step", "test_step", "predict_step")
    )


def supports_jit(model: keras.Model) -> bool:
    """Whether Keras holds that XLA can compile a model."""
    return trainer_module.model_supports_jit(model)


def tensorboard_needs_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard callback writes or profiles single batches."""
    # `profile_batch` is kept as the first batch to profile.
    return callback.update_freq != "epoch" or callback._start_batch > 0


def set_monitor(callback: Any) -> None:
    """Makes a callback decide what is better, as at its first epoch's end."""
    callback._set_monitor_op()


def flush_tensorboard(callback: keras.callbacks.TensorBoard) -> None:
    """Sees to it that what a TensorBoard callback has written is in files."""
    for writer in callback._writers.values():
        writer.flush()


def flush_callbacks(callbacks: keras.callbacks.CallbackList) -> None:
    """Waits for what callbacks do in other threads."""
    callbacks._flush_futures()


def dataset_of(iterator: Any) -> Any:
    """Returns the data set that an epoch iterator of Keras draws from."""
    return iterator._distributed_dataset


def py_dataset_of(iterator: Any) -> Any:
    """Returns the `PyDataset` behind an epoch iterator of Keras, or `None`."""
    return getattr(iterator.data_adapter, "py_dataset", None)


def count_iterators(iterator: Any, before_each: Callable[[], None]) -> None:
    """Calls a function before an epoch iterator begins to draw anew."""
    make = iterator._get_iterator

    def counted() -> Any:
        before_each()
        return make()

    iterator._get_iterator = counted


def draws_on(iterator: Any) -> bool:
    """Whether the next epoch goes on with an iterator that has begun."""
    cut = iterator.steps_per_epoch is not None
    return cut and iterator._current_iterator is not None


def set_learned_number(iterator: Any, number: int | None) -> None:
    """Tells an epoch iterator what it learns at the end of its first epoch."""
    if iterator.num_batches is None:
        iterator._num_batches = number


def add_steps_seen(iterator: Any, steps: int) -> None:
    """Tells an epoch iterator that batches of its data are used already."""
    iterator._steps_seen += steps


def batch_spec(iterator: Any) -> Any:
    """Returns the `tf.TypeSpec`s that an epoch iterator of Keras yields."""
    spec = iterator._distributed_dataset.element_spec
    return keras.tree.map_structure(_first_spec, spec)


def draws_from_python(iterator: Any) -> bool:
    """Whether an epoch iterator of Keras draws from Python code of the user's.

    That is a generator, a `PyDataset` or another library's data set.
    """
    plain = data_adapters.ArrayDataAdapter | data_adapters.TFDatasetAdapter
    return not isinstance(iterator.data_adapter, plain)


def set_number_of_batches(iterator: Any, number: int | None) -> None:
    """Tells an epoch iterator of Keras how many batches its data have."""
    # It asks its adapter once more when it is reset.
    iterator.data_adapter = _Counted(iterator.data_adapter, number)
    iterator._num_batches = number


class _Counted:
    """A data adapter of Keras that tells another number of batches."""

    def __init__(self, adapter: Any, number: int | None) -> None:
        self._adapter = adapter
        self.num_batches = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._adapter, name)


_NO_TENSOR = type(tf.type_spec_from_value(None))


def _first_spec(spec: Any) -> Any:
    # Where a batch has None, Keras' adapters put an Optional or leave it. A
    # PerReplicaSpec, of a DistributedDataset, holds one spec a replica.
    if isinstance(spec, tf.OptionalSpec | _NO_TENSOR):
        return None
    return getattr(spec, "_value_specs", (spec,))[0]

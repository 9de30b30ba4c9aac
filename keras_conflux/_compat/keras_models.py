"""The private parts of Keras' models, their parts and their callbacks."""

import contextlib
import inspect
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import masking
from keras.src.trainers import trainer as trainer_module

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import error_texts
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._graphs import walks


def is_of_keras(part: Any) -> bool:
    """Whether Keras has written a function, or the class of a layer."""
    owner = part if inspect.isroutine(part) else type(part)
    return (owner.__module__ or "").split(".")[0] == "keras"


def copy_mask(source: Any, target: Any) -> None:
    """Gives a tensor the mask that Keras has attached to another one."""
    mask = masking.get_keras_mask(source)
    if mask is not None:
        masking.set_keras_mask(target, mask)


def reduction_axes(layer: Any) -> list[int]:
    """Returns the axes over which a normalization takes means."""
    return layer._reduction_axes


def accumulators(optimizer: Any) -> list[keras.Variable]:
    """Returns the variables that add up gradients between updates."""
    return [variable for variable, _ in keras_optimizers.accumulated(optimizer)]


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model was built under, if any."""
    return model._distribute_strategy


def set_strategy(model: keras.Model, strategy: Any) -> None:
    """Makes `model` train, evaluate and predict under another strategy."""
    model._distribute_strategy = strategy


def tf_functions_in(function: Any) -> list[Any]:
    """Returns the `tf.function`s of a function of Keras' own trainer."""

    def held(item: Any) -> Iterator[Any]:
        # trainer.py makes them in closures.
        cells = item.__closure__ if inspect.isfunction(item) else None
        for cell in cells or ():
            with contextlib.suppress(ValueError):  # an empty one
                yield cell.cell_contents

    kind = tf.types.experimental.PolymorphicFunction
    return [x for x in walks.walked([function], held) if isinstance(x, kind)]


def optimizer_strategy(optimizer: Any) -> tf.distribute.Strategy:
    """Returns the strategy that an optimizer makes its variables under."""
    return optimizer._distribution_strategy


def set_optimizer_strategy(optimizer: Any, strategy: Any) -> None:
    """Makes an optimizer create and update its variables under a strategy."""
    # TFOptimizer takes the strategy at construction and never asks again.
    optimizer._distribution_strategy = strategy


def symbolic_build(
    model: keras.Model,
    spec: Any,
    at_once: bool = False,
    layers_alone: bool = False,
) -> None:
    """Builds a model, its metrics and its optimizer for batches like `spec`.

    With `at_once`, metrics and losses are built also where a step of the user's
    own may give them something else than the data. With `layers_alone`, nothing
    but layers is built, as for `predict`.
    """
    keras_variables.forget_initialized()
    # Public `model.build` builds neither metrics nor the optimizer.
    try:
        with (
            _without_compiled(model)
            if layers_alone
            else _without_unclear_parts(model, at_once)
        ):
            model._symbolic_build(data_batch=spec)
    except StrategyError:
        raise
    except Exception as error:
        # Keras cannot trace some models by shapes alone. And a step of the
        # user's own may do without `call`, or take other data. Both
        # are built by their first step on one device, so they shall be here.
        untraceable = error_texts.is_untraceable_by_shapes(error)
        # So may code that gets NumPy arrays under `run_eagerly=True`.
        left_to_step = untraceable or layers_alone or has_own_step(model)
        if not left_to_step and not runs_eagerly(model):
            raise


@contextlib.contextmanager
def _without_unclear_parts(model: keras.Model, at_once: bool) -> Iterator[None]:
    """Leaves parts to the first step that may not be built from the data.

    A step of the user's own may give metrics and losses something else than the
    data, and may build layers. A built optimizer refuses later variables.
    """
    from_data = at_once or not (has_own_step(model) or runs_eagerly(model))
    names = ("optimizer",) if from_data else _COMPILED
    try:
        with _without_compiled(model, names) as left:
            yield
    finally:
        # A step of the user's own may train some of the weights, and builds
        # the optimizer for them, or may have another one than `compile`'s.
        if (
            any(part is model.optimizer for part in left)
            and not has_own_step(model, "train_step")
            and not _holds_other_optimizers(model)
            and all(layer.built for layer in all_layers(model)[1:])
        ):
            model.optimizer.build(model.trainable_variables)


def _holds_other_optimizers(model: keras.Model) -> bool:
    held: list[Any] = []
    for value in vars(model).values():
        if isinstance(value, dict):
            value = list(value.values())
        held.extend(value if isinstance(value, list | tuple) else [value])
    return any(
        isinstance(each, keras.optimizers.Optimizer)
        and each is not model.optimizer
        for each in held
    )


_COMPILED = ("optimizer", "_compile_metrics", "_compile_loss")


@contextlib.contextmanager
def _without_compiled(
    model: keras.Model, names: Sequence[str] = _COMPILED
) -> Iterator[list[Any]]:
    """Leaves out a model's parts by `compile`; yields the unbuilt ones."""
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


def dtypes_of_reading(model: keras.Model) -> dict[int, str]:
    """Returns in which dtype layers read their variables, by ids of these."""
    found: dict[int, str] = {}
    for layer in all_layers(model):  # a layer comes before those in it
        for variable in layer.variables:
            casts = variable._autocast and layer.autocast
            is_float = keras.backend.is_float_dtype(variable._dtype)
            dtype = layer.compute_dtype if casts and is_float else None
            found[id(variable)] = dtype or variable._dtype
    return found


def has_own_step(model: keras.Model, *steps: str) -> bool:
    """Whether a model overrides one of some, or of the three, of Keras."""
    trainer = Patched.FIT.owner
    return any(
        getattr(type(model), step) is not getattr(trainer, step)
        for step in steps or ("train_step", "test_step", "predict_step")
    )


def runs_eagerly(model: keras.Model) -> bool:
    """Whether the steps of a model run without a graph, as for debugging."""
    return bool(model.run_eagerly or tf.config.functions_run_eagerly())


def is_compiled(model: keras.Model) -> bool:
    """Whether XLA is to compile the steps of a model."""
    return bool(model.jit_compile and not runs_eagerly(model))


def initial_epoch(model: keras.Model) -> int | None:
    """Returns the epoch that a callback has asked `fit` to begin with."""
    return model._initial_epoch


def set_initial_epoch(model: keras.Model, epoch: int | None) -> None:
    """Asks `fit` to begin with an epoch, unless it is `None`."""
    model._initial_epoch = epoch


def supports_jit(model: keras.Model) -> bool:
    """Whether Keras holds that XLA can compile a model."""
    return trainer_module.model_supports_jit(model)


def tensorboard_needs_batches(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a TensorBoard callback writes or profiles single batches."""
    # `profile_batch` is kept as the first batch to profile.
    return callback.update_freq != "epoch" or callback._start_batch > 0

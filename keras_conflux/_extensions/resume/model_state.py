"""The variables of a model: copies of them, and back into them."""

import contextlib
import operator
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.compat import compiled_parts
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.compat import weight_files
from keras_conflux._extensions.resume.held_variables import variables_of
from keras_conflux._replication import parts
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication.strategy import is_replicated


def copied_from(
    model: keras.Model,
) -> tuple[list[weight_files.Entry], dict[str, Any]]:
    """Copies all variables to the host. See `gather` for several processes.

    First come the contents of Keras' file of weights, with the optimizer's
    state, and then all else: metrics, seeds, each replica's part of a sum, and
    a description, by which a checkpoint fits the model and its optimizer.
    """
    shared = random_generators.present_global_seed()
    beside = beside_weights(model)
    return weight_files.copied(weight_files.entries_of(model)), {
        "model": _described(model, beside),
        "variables": _copied(beside),
        "global seed": None if shared is None else _copied([shared]),
        "sums": {k: _copied(copies) for k, copies in _sums(model).items()},
    }


def _copied(variables: Iterable[Any]) -> list[np.ndarray]:
    return [np.array(each.numpy()) for each in variables]


@contextlib.contextmanager
def gathered(model: keras.Model) -> Iterator[None]:
    """Gives the first process all of a model's state. All enter it."""
    state.add_up_accumulated(state.stateful_objects(model))
    with parts.led(model):
        yield


def restore(model: keras.Model, saved: Saved) -> None:
    """Gives a built model its saved values; processes do so together."""
    assert_same(saved, model)
    with parts.led(model):
        if process_index() == 0:
            _load_weights(model, saved)
    beside = beside_weights(model)
    ordered = _in_order_of(saved, beside)
    _assign(ordered, saved.state["variables"])
    if saved.state["global seed"]:
        # A program that has not used it yet makes it here.
        generator = keras_variables.global_seed_generator()
        _assign([generator.state], saved.state["global seed"])
    if process_count() > 1:
        synchronization.synchronize(model)
    are_moved = any(map(operator.is_not, ordered, beside))
    for number, copies in _sums(model).items():
        values = saved.state["sums"].get(number, ())
        # The first replica has the whole sum now. With as many replicas as
        # there were, each gets its part again, for the last bit's sake.
        if len(values) == len(copies) and not are_moved:
            _assign(copies, values)


def _load_weights(model: keras.Model, saved: Saved) -> None:
    try:
        file = saved.path / checkpoint_files.WEIGHTS
        with checkpoint_files.open_file(file):
            weight_files.assert_plain(file)
            model.load_weights(file)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{saved.path} was saved of another model: {error} Resume with "
            "the model that it was saved of, or in another directory."
        ) from error


def _in_order_of(saved: Saved, variables: list[Any]) -> list[Any]:
    """Returns variables as a checkpoint has them, if all have names there.

    A dictionary may have been filled in another order.
    """
    there = [name for name, *_ in saved.state["model"]["other variables"]]
    by_name = {state.name_of(each): each for each in variables}
    if len(by_name) < len(variables) or by_name.keys() != {*there}:
        return variables
    return [by_name[name] for name in there]


def _assign(variables: Iterable[Any], values: Iterable[np.ndarray]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def build_optimizer(model: keras.Model, saved: Saved) -> None:
    """Builds an optimizer for the weights that it was saved for."""
    optimizer = getattr(model, "optimizer", None)
    weights = model.trainable_variables
    there = saved.state["model"]
    if optimizer is not None and not optimizer.built and there[_OPTIMIZER]:
        places = there["trained"] or []
        if max(places, default=0) < len(weights):  # else `assert_same` raises
            trained = [weights[i] for i in places]
            optimizer.build(trained or weights)


def beside_weights(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables that Keras' file of weights does not have."""
    optimizer = getattr(model, "optimizer", None)
    written = weight_files.entries_of(model)
    known = {id(v) for *_, values in written for v in values.values()}
    known |= {id(v) for v in getattr(optimizer, "variables", ())}
    known.add(id(random_generators.present_global_seed()))
    return [v for v in variables_of(model) if id(v) not in known]


def names_of_made(model: keras.Model, before: set[int] | None) -> list[str]:
    """Returns new variables that no build of a model makes, if some are old."""
    if before is None:
        return []
    metrics = compiled_parts.metrics_of(model)
    old = before | {id(x) for each in metrics for x in each.variables}
    return [state.name_of(v) for v in beside_weights(model) if id(v) not in old]


_OPTIMIZER = "optimizer's variables"


def _described(model: keras.Model, beside: list[Any]) -> dict[str, Any]:
    optimizer: Any = getattr(model, "optimizer", None)
    is_built = getattr(optimizer, "built", False)
    return {
        "optimizer": type(optimizer).__name__,
        "trained": _trained(model) if is_built else None,
        "weights": _specs(model.weights),
        _OPTIMIZER: _specs(optimizer.variables if is_built else []),
        "other variables": _specs(beside),
    }


def _specs(variables: list[keras.Variable]) -> list[list[Any]]:
    return [
        [state.name_of(v), list(v.shape), tf.as_dtype(v.dtype).name]
        for v in variables
    ]


def _trained(model: keras.Model) -> list[int] | None:
    """Returns which weights the optimizer was built for; `None` if others."""
    places = {id(v): i for i, v in enumerate(model.trainable_variables)}
    trained = [id(v) for v in keras_optimizers.trained_by(model.optimizer)]
    is_known = places.keys() >= {*trained}
    return [places[each] for each in trained] if is_known else None


def assert_same(saved: Saved, model: keras.Model) -> None:
    """Raises if a checkpoint was saved of another model or optimizer."""
    ordered = _in_order_of(saved, beside_weights(model))
    there, here = saved.state["model"], _described(model, ordered)
    begin = (
        f"{saved.path} was saved of another model, or of one that was compiled "
        "in another way"
    )
    if there["optimizer"] != here["optimizer"]:
        raise ValueError(
            f"{begin}: with the optimizer {there['optimizer']}, which is "
            f"{here['optimizer']} here. Train with the former, or use another "
            "directory."
        )
    for kind in ("weights", _OPTIMIZER, "other variables"):
        saved_of, found = there[kind], here[kind]
        is_new = kind == _OPTIMIZER and not saved_of  # no step had used it
        if is_new and found and int(model.optimizer.iterations):
            raise ValueError(
                f"{saved.path} was saved before the optimizer had done a step, "
                "and the one that the model has now has trained. Compile the "
                "model anew before it is loaded."
            )
        if is_new or [x[1:] for x in saved_of] == [x[1:] for x in found]:
            continue
        is_less = kind != _OPTIMIZER and len(found) < len(saved_of)
        raise ValueError(
            f"{begin}. Of the {kind} and in this order, only the checkpoint "
            f"has [{_beyond(saved_of, found)}], and only the model has "
            f"[{_beyond(found, saved_of)}]." + _ways_to_build(model, is_less)
        )
    _assert_values(saved, here["other variables"])


def _ways_to_build(model: keras.Model, is_less: bool) -> str:
    found = [
        f" The optimizer {name} is not built: {HOW_TO_BUILD}."
        for name in unbuilt_optimizers(model)
    ]
    if is_less:
        found.append(
            " A metric or a layer that only a step of the model's own uses is "
            "built by its first batch: give it one before training, as in "
            "model.f1.update_state(y, model(x)), and reset it."
        )
    optimizer = getattr(model, "optimizer", None)
    is_built = optimizer is None or optimizer.built
    if not keras_models.layers_are_built(model) or not is_built:
        found.append(
            " Build the model and its optimizer before: call the model on a "
            "batch, then model.optimizer.build(model.trainable_variables)."
        )
    return "".join(found)


def _beyond(some: list[list[Any]], others: list[list[Any]]) -> str:
    """Lists variables with none of the same path, or else shape, in others."""
    left = [each[1:] for each in others if each not in some]
    found = []
    for path, shape, dtype in (each for each in some if each not in others):
        if [shape, dtype] in left:
            left.remove([shape, dtype])
        else:
            found.append(f"{path} {shape} {dtype}")
    return ", ".join(found)


def _assert_values(saved: Saved, described: list[list[Any]]) -> None:
    found = [np.shape(value) for value in saved.state["variables"]]
    expected = [tuple(shape) for _, shape, _ in described]
    if found != expected:
        raise ValueError(
            f"{saved.path} has values of the shapes {found} for variables of "
            f"the shapes {expected}. This package does not write such a "
            "checkpoint: remove it, or resume in another directory."
        )


HOW_TO_BUILD = (
    "before training, call its `build` with the variables that it trains, as "
    "in optimizer.build(part.trainable_variables)"
)


def unbuilt_optimizers(model: keras.Model) -> list[str]:
    """Returns the names of those that nothing but the model's step builds."""
    own = getattr(model, "optimizer", None)  # which Keras builds
    found = optimizers_of(model).values()
    return sorted(x.name for x in found if not x.built and x is not own)


def optimizers_of(model: keras.Model) -> dict[str, Any]:
    """Returns the optimizers of a model by the attributes that hold them."""
    found, seen = {}, set()
    # Private ones are mostly Keras' lists of what is in others as well.
    names = sorted(vars(model), key=lambda x: (x != "optimizer", x[0] == "_"))
    for name in names:
        held = []
        for each in state.stateful_objects(vars(model)[name], keras.Optimizer):
            if id(each) not in seen:
                held.insert(0, each)
                seen |= {id(part) for part in state.stateful_objects(each)}
        for number, each in enumerate(held):
            found[f"{name}.{number}" if held[1:] else name] = each
    return found


def _sums(model: keras.Model) -> dict[int, tuple[Any, ...]]:
    """Returns the copies of variables that are sums of them, by places."""
    if process_count() > 1:
        return {}
    return {
        number: state.copies(variable)
        for number, variable in enumerate(variables_of(model))
        if is_replicated(state.backing(variable))
        and not state.is_mirrored(variable)
        and len(state.copies(variable)) > 1
    }

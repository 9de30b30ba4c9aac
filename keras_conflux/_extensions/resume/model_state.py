"""The variables of a model: copies of them, and back into them."""

import dataclasses
from typing import Any

import keras
import numpy as np

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_variables
from keras_conflux._extensions.resume import plain_files
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.compat import weight_files
from keras_conflux._extensions.resume.stored_arrays import Arrays
from keras_conflux._replication import state
from keras_conflux._replication import synchronization
from keras_conflux._replication.strategy import is_replicated

_GLOBAL_SEED = "global seed"
"""The seed behind `keras.random` without a seed, where the program uses it."""


@dataclasses.dataclass(frozen=True)
class ModelState:
    """Copies, on the host, of all variables of a model."""

    weights: list[weight_files.Entry]
    """The contents of Keras' file of weights, with the optimizer's state."""
    arrays: Arrays
    """All else: metrics, seeds, and each replica's part of a sum."""
    variables: list[list[Any]]
    """The path, shape and dtype of all else, in the order of the arrays."""

    @classmethod
    def copied_from(cls, model: keras.Model) -> "ModelState":
        """Copies the variables. See `gather` for several processes."""
        written = weight_files.entries_of(model)
        others = _beside_weights(model, written)
        arrays = {
            f"variable{number}": np.array(variable.numpy())
            for number, variable in enumerate(others)
        }
        shared = random_generators.present_global_seed()
        if shared is not None:
            arrays[_GLOBAL_SEED] = np.array(shared.numpy())
        return cls(
            weight_files.copied(written),
            arrays | _parts(model),
            _described(others),
        )


def gather(model: keras.Model) -> None:
    """Gives the first process all of a model's state. All call it."""
    state.add_up_accumulated(state.stateful_objects(model))


def restore(model: keras.Model, saved: Saved, has_files: bool) -> None:
    """Gives the variables of a built model the values that were saved.

    All processes call this together. Those that have no files get the weights
    from the first one.
    """
    _assert_same(saved, model)
    if has_files and saved.weights is not None:
        try:
            file = saved.weights
            with plain_files.open_file(file.parent, file.name):
                weight_files.assert_fits(file, weight_files.entries_of(model))
                model.load_weights(file)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{saved.path} was saved of another model: {error} Resume with "
                "the model that it was saved of, or in another directory."
            ) from error
    others = _beside_weights(model, weight_files.entries_of(model))
    for number, variable in enumerate(others):
        variable.assign(saved.arrays[f"variable{number}"])
    if _GLOBAL_SEED in saved.arrays:
        # A program that has not used it yet makes it here.
        generator = keras_variables.global_seed_generator()
        generator.state.assign(saved.arrays[_GLOBAL_SEED])
    if process_count() > 1:
        synchronization.synchronize(model)
    for number, sums in _sums(model).items():
        names = [f"sum{number}.{index}" for index in range(len(sums))]
        # The first replica has the whole sum now. With as many replicas as
        # there were, each gets its part again, for the last bit's sake.
        followed = f"sum{number}.{len(sums)}" in saved.arrays
        if not followed and all(name in saved.arrays for name in names):
            for name, copy in zip(names, sums, strict=True):
                copy.assign(saved.arrays[name])


def _beside_weights(
    model: keras.Model, written: list[weight_files.Entry]
) -> list[keras.Variable]:
    """Returns the variables that Keras' file of weights does not have."""
    optimizer = getattr(model, "optimizer", None)
    known = {id(value) for entry in written for value in entry.values.values()}
    known |= {id(v) for v in getattr(optimizer, "variables", ())}
    shared = random_generators.present_global_seed()
    return [
        variable
        for variable in state.variables_of(model)
        if id(variable) not in known and variable is not shared
    ]


def _described(variables: list[keras.Variable]) -> list[list[Any]]:
    return [[v.path, list(v.shape), str(v.dtype)] for v in variables]


def _assert_same(saved: Saved, model: keras.Model) -> None:
    here = _described(_beside_weights(model, weight_files.entries_of(model)))
    there = saved.state["variables"]
    if [each[1:] for each in there] == [each[1:] for each in here]:
        _assert_values(saved, here)
        return
    unbuilt = "".join(
        f" The optimizer {name} is not built: {HOW_TO_BUILD}."
        for name in unbuilt_optimizers(model)
    )
    raise ValueError(
        f"{saved.path} was saved of another model, or of one that was compiled "
        "in another way. Besides the weights and in this order, only the "
        f"checkpoint has the variables [{_beyond(there, here)}], and only the "
        f"model has [{_beyond(here, there)}].{unbuilt} Metrics and losses of "
        "`compile` get variables in a first step: before `keras_conflux.load`, "
        "call model.test_on_batch(x, y)."
    )


def _beyond(some: list[list[Any]], others: list[list[Any]]) -> str:
    """Lists variables that have no counterpart among others."""
    left = [each[1:] for each in others]
    found = []
    for path, shape, dtype in some:
        if [shape, dtype] in left:
            left.remove([shape, dtype])
        else:
            found.append(f"{path} {shape} {dtype}")
    return ", ".join(found)


def _assert_values(saved: Saved, described: list[list[Any]]) -> None:
    for number, (path, shape, _) in enumerate(described):
        found = getattr(saved.arrays.get(f"variable{number}"), "shape", None)
        if found != tuple(shape):
            raise ValueError(
                f"{saved.path} has a value of the shape {found} for {path}, "
                f"whose shape is {tuple(shape)}. This package does not write "
                "such a checkpoint: remove it, or resume in another directory."
            )


HOW_TO_BUILD = (
    "before training, call its `build` with the variables that it trains, as "
    "in optimizer.build(part.trainable_variables)"
)


def unbuilt_optimizers(model: keras.Model) -> list[str]:
    """Returns the names of those that nothing but the model's step builds."""
    own = getattr(model, "optimizer", None)  # which Keras builds
    of_keras = {id(each) for each in state.stateful_objects(own)}
    return sorted(
        each.name
        for each in state.stateful_objects(model)
        if isinstance(each, keras.optimizers.Optimizer)
        and not each.built
        and id(each) not in of_keras
    )


def _sums(model: keras.Model) -> dict[int, tuple[Any, ...]]:
    """Returns the copies of the variables whose values are sums of them.

    They are known by their places among all variables, of which others may be
    sums on devices that hold other parts.
    """
    if process_count() > 1:
        return {}
    return {
        number: state.copies(variable)
        for number, variable in enumerate(state.variables_of(model))
        if is_replicated(keras_variables.backing(variable))
        and not state.is_mirrored(variable)
        and not state.is_in_parts(variable)
    }


def _parts(model: keras.Model) -> Arrays:
    return {
        f"sum{number}.{index}": np.array(copy.numpy())
        for number, copies in _sums(model).items()
        for index, copy in enumerate(copies)
        if len(copies) > 1
    }

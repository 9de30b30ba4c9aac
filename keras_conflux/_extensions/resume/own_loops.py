"""Checkpoints of loops of the user's own."""

import collections
import contextlib
import gc
import os
import pathlib
import weakref
from typing import Any
from typing import NamedTuple

import keras

from keras_conflux._cluster.agreement import barrier
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import arguments
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import patching
from keras_conflux._compat import versions
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import fingerprint
from keras_conflux._extensions.resume import held_variables
from keras_conflux._extensions.resume import model_state
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import writer
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.compat import compiled_parts
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._replication import promotion
from keras_conflux._replication import state as state_of_models

_savers: Any = collections.defaultdict(weakref.WeakSet)
"""By directory, the models that were saved there, or loaded after that."""
_settings: Any = weakref.WeakKeyDictionary()
"""By model, its optimizers and loss, and their settings when first seen."""


def save(
    model: keras.Model,
    directory: str | os.PathLike[str],
    *,
    step: int,
    state: Any = None,
    keep: int = 2,
) -> None:
    """Writes a checkpoint of a loop of your own, which `load` reads.

    It has all variables of the model, of its optimizer and its metrics, its
    seeds, and where the random generators of Python, NumPy and TensorFlow
    stand. It is in place as a whole or not at all, whenever the process is
    killed. Not to be called inside of a step. Of several processes, the first
    one writes, and all call this.

    Args:
        model: A compiled model, or one that has its optimizer as an attribute.
            Metrics, and models that are trained together, are attributes, too.
        directory: The directory of the checkpoints, of this training alone.
        step: The number of steps done. The checkpoint with most is the newest.
        state: Other values that the loop needs to go on: numbers, strings,
            arrays, and lists, tuples and dicts of them.
        keep: The number of checkpoints that stay, at least 1.

    Raises:
        OSError: If it cannot be written.
        TypeError: If something else is in `state`, or an argument is of
            another type.
        ValueError: If `keep` is below 1 or `step` below 0, or if there is a
            checkpoint of a later step, or of another model of this process.
        RuntimeError: If another training writes to the directory.

    Example:
        ```python
        model = kc.replicate(build_model())
        model.compile("sgd", "mse")
        kc.save(model, "runs/loop", step=100, state={"best": 0.25})
        ```
    """
    arguments.assert_is(model, keras.Model, "a Keras model")
    versions.assert_in_place("resume", "kc.save")
    arguments.assert_count("keep", keep, "how many checkpoints stay")
    arguments.assert_count("step", step, "how many steps are done", least=0)
    if not model_state.optimizers_of(model):
        warn(
            f"{model.name}: no optimizer is saved, as the model has none. "
            "Write `model.compile(optimizer)` or `model.optimizer = optimizer` "
            "before, so that a loop goes on with it."
        )
    root = checkpoint_files.directory_of(directory)
    savers = _savers[root.resolve()]
    if savers and model not in savers:
        gc.collect()  # which forgets models that nobody holds any more
    for other in () if model in savers else savers:
        raise ValueError(
            f"This process has saved another model, {other.name}, to {root}, "
            f"and the checkpoint of {model.name} would replace it. Save each "
            "to a directory of its own, or save one model that has both as "
            "attributes."
        )
    settings = _settings_of(model)
    what = "saving a checkpoint"
    with errors_reported_to_all(what):
        generators = checkpoint_files.gathered(what, random_generators.states())
        with model_state.gathered(model):
            if process_index() == 0:
                writer.keep_from_others(root)
                _assert_newest(root, step)
                plain_values.assert_plain("state", state)
                writer.remove_unfinished(root)
                weights, values = model_state.copied_from(model)
                values |= {
                    "loop": state,
                    "generators": generators,
                    "built for": compiled_parts.built_for(model),
                    "compiled": settings | fingerprint.of_loop(model),
                }
                said = writer.write(root, (step, 0), weights, values, keep)
                if said:
                    warn(said)
        barrier()
    if model not in savers and (lost := held_variables.said_of_lost(model)):
        warn(lost)
    savers.add(model)


def _assert_newest(root: pathlib.Path, step: int) -> None:
    """Raises `ValueError` if `load` would read another step's checkpoint."""
    for path in checkpoint_files.folders(root):
        if checkpoint_files.position_of(path)[0] <= step:
            return
        with contextlib.suppress(checkpoint_files.Damage):
            checkpoint_files.read(path)
            raise ValueError(
                f"{path} is of a later step, and `load` would read it. Go on "
                "from it, remove it, or save to another directory. Received: "
                f"step={step}"
            )


class Loaded(NamedTuple):
    """The step and the state of the checkpoint that `load` has read."""

    step: int
    """The number of steps done."""
    state: Any
    """The `state` that was saved, `None` if none was."""


def load(
    model: keras.Model, directory: str | os.PathLike[str]
) -> Loaded | None:
    """Restores a model from the newest whole checkpoint of `save`.

    Of several processes, the first one reads, and all call this.

    Args:
        model: Like the one that was saved: built, with its optimizer built, and
            on any devices.
        directory: The directory of the checkpoints.

    Returns:
        The saved `step` and `state`, by these names; `None` if there is none.

    Raises:
        ValueError: If the checkpoint is of another model or optimizer, or of
            `keras_conflux.Resume`, or if the optimizer is not built.

    Example:
        ```python
        model = kc.replicate(build_model())
        model.compile("sgd", "mse")
        model.optimizer.build(model.trainable_variables)
        loaded = kc.load(model, "runs/loop")
        state = loaded.state if loaded else {"best": 1.0}
        ```
    """
    arguments.assert_is(model, keras.Model, "a Keras model")
    versions.assert_in_place("resume", "kc.load")
    patching.begin()
    settings = _settings_of(model)
    saved = checkpoint_files.read_newest(directory)
    if saved is None:
        return None
    if "loop" not in saved.state:
        weights = saved.path / checkpoint_files.WEIGHTS
        raise ValueError(
            f"{saved.path} was saved by `Resume`, which also restores it: pass "
            "`fit` the callback. To read its weights alone: "
            f"model.load_weights({str(weights)!r})"
        )
    with errors_reported_to_all("loading a checkpoint"):
        _build_as_saved(model, saved)
        model_state.restore(model, saved)
    of_loop = fingerprint.of_loop(model)
    fingerprint.name_changed_settings(saved, settings | of_loop)
    random_generators.set_states(_own(saved.state["generators"]))
    if savers := _savers[saved.path.parent.resolve()]:
        savers.add(model)
    step = checkpoint_files.position_of(saved.path)[0]
    return Loaded(step, saved.state["loop"])


def _settings_of(model: keras.Model) -> dict[str, Any]:
    """Returns its settings before a loop has changed a learning rate."""
    optimizers = model_state.optimizers_of(model)
    compiled = [*optimizers.values(), getattr(model, "loss", None)]
    if _settings.get(model, [None])[0] != compiled:
        _settings[model] = compiled, fingerprint.of_compile(model)
    return _settings[model][1]


def _build_as_saved(model: keras.Model, saved: Saved) -> None:
    """Builds parts that the first step builds, and saved models have."""
    strategy = state_of_models.strategy_of(state_of_models.variables_of(model))
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        compiled_parts.build(model, saved.state["built for"])
    if strategy is not None:
        promotion.promote_new_state(model, strategy)


def _own(generators: Any) -> dict[str, Any]:
    """Returns where the random generators of this process stood."""
    if len(generators) == process_count():
        return generators[process_index()]
    warn(
        f"The checkpoint was saved by {len(generators)} processes, and here "
        f"are {process_count()}. The random generators of Python, NumPy and "
        "TensorFlow go on as in its first process in all of them. Where "
        "processes are to draw different numbers, seed them after `load`."
    )
    return generators[0]

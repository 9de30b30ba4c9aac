"""Fingerprints by which a checkpoint and a training belong together."""

import contextlib
import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._cluster.processes import process_index
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import keras_models
from keras_conflux._extensions.resume import model_state
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.compat import compiled_parts

_ENTRIES = 4096
"""How many entries of a tensor are read at most."""
_SUMS = 8
_SIGNS = np.random.default_rng(0).choice([-1.0, 1.0], [2 * _ENTRIES, _SUMS])
_OF_DEVIATION, _OF_MEAN = 5e-2, 1e-4
"""The changes by roundings, by entry: pixels by one, for example."""
SMALL = 1e-3
"""A gap, as of floats that are computed in another order."""


def of_data(iterator: Any) -> dict[str, Any]:
    """Returns a description of an epoch iterator's data, and of versions."""
    return {
        "data": [
            "Python" if keras_iterators.has_python_source(iterator) else "",
            str(keras_iterators.batch_spec(iterator)),
            iterator.num_batches,
            iterator.data_adapter.batch_size,
        ],
        "steps_per_execution": iterator.steps_per_execution,
        "versions": f"Keras {keras.__version__}, TensorFlow {tf.__version__}",
    }


def assert_as_many_parts(saved: Saved, count: int) -> None:
    """Raises unless as many processes had a part of the data of their own."""
    there = len(saved.state["parts"])
    if there != count:
        raise ValueError(
            f"The checkpoint {saved.path} was saved with data in {there} "
            f"part(s), one of each process; here it is in {count}. Without "
            '`data="local"`, it is in 1. Only as many processes can go on in '
            "their parts. Start the training as it was started, or pass "
            "`Resume` another directory."
        )


def own_part(saved: Saved) -> dict[str, Any]:
    """Returns a checkpoint's description of this process' data."""
    parts = saved.state["parts"]
    return parts[process_index() if len(parts) > 1 else 0]


def assert_same_data(saved: Saved, here: dict[str, Any]) -> None:
    """Raises if a checkpoint was saved with other data than `of_data`'s."""
    there = own_part(saved)["data"]
    names = "kind of data", "shapes of batches", "batches in an epoch", "size"
    pairs = zip(names, there["data"], here["data"], strict=False)
    changed = [f"{name}: {a!r}, now {b!r}" for name, a, b in pairs if a != b]
    if changed:
        raise ValueError(
            f"The checkpoint {saved.path} belongs to another training, or to "
            f"another batch size ({'; '.join(changed)}). Train with the "
            "former, or use another directory."
        )
    steps, step = here["steps_per_execution"], saved.state["step"]
    if steps != there["steps_per_execution"] and step % steps:
        raise ValueError(
            f"The checkpoint {saved.path} was saved before step {step}, with "
            f"steps_per_execution={there['steps_per_execution']}. With "
            f"steps_per_execution={steps} no execution begins there. Compile "
            "the model as before."
        )
    if there["versions"] != here["versions"]:
        warn(
            f"The checkpoint {saved.path} was saved with {there['versions']}; "
            f"here are {here['versions']}. Results may differ in the last "
            "digits."
        )


def of_compile(model: keras.Model) -> dict[str, Any]:
    """Returns the settings of all optimizers and losses."""
    settings: dict[str, Any] = {"loss": getattr(model, "loss", None)}
    with contextlib.suppress(Exception):  # of a part of the user's
        config: Any = model.get_compile_config()
        settings["loss_weights"] = config["loss_weights"]
    for name, optimizer in model_state.optimizers_of(model).items():
        with contextlib.suppress(Exception):  # of a schedule of the user's
            settings[name] = optimizer.get_config()
    text = json.dumps(settings, default=_described, skipkeys=True)
    found = {
        ".".join(re.findall(r"\w+", path)): value
        for path, value in trees.with_paths(json.loads(text))
    }
    # Names have the number of the optimizer in this process.
    return {k: v for k, v in found.items() if not k.endswith(".name")}


def of_metrics(model: keras.Model) -> dict[str, str]:
    """Returns the names of metrics that are built, as more settings."""
    metrics = enumerate(compiled_parts.metrics_of(model))
    return {f"metrics.{i}": _name(metric) for i, metric in metrics}


def of_loop(model: keras.Model) -> dict[str, str]:
    """Returns the same, and which layers a loop of one's own trains."""
    layers = enumerate(keras_models.all_layers(model))
    flags = ((i, x, "trained" if x.trainable else "frozen") for i, x in layers)
    found = {f"layers.{i}": f"{_name(x)}, {flag}" for i, x, flag in flags}
    return found | of_metrics(model)


def _name(part: Any) -> str:
    """Returns a name without the number of the part in this process."""
    return re.sub(r"_\d+$", "", part.name)


def _described(value: Any) -> Any:
    name = getattr(value, "__name__", type(value).__name__)
    if isinstance(value, Mapping):  # as Keras holds it
        return dict(value)
    if not isinstance(value, keras.losses.Loss):
        return name
    is_plain = plain_values.is_plain
    return {"": name} | {k: v for k, v in vars(value).items() if is_plain(v)}


def name_changed_settings(saved: Saved, here: dict[str, Any]) -> None:
    """Warns where `of_compile` differs from a checkpoint's."""
    there = saved.state.get("compiled", {})
    # Of some optimizers, such as in older checkpoints, nothing is known.
    known = {path.split(".")[0] for path in there}
    if not any(path.startswith("metrics.") for path in here):
        known.discard("metrics")
    changed = [
        f"{path} was {_text(there.get(path))} and is {_text(here.get(path))}"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path) and path.split(".")[0] in known
    ]
    if changed:
        warn(
            "Optimizers, losses, metrics or layers are not set as when the "
            f"checkpoint {saved.path} was saved: {'; '.join(changed)}. A "
            "learning rate that is a number goes on from the checkpoint; all "
            "else is now as the program says. If that is not meant, set them "
            "as before."
        )


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def sketch(batch: Tree) -> np.ndarray:
    """Returns a row for each tensor of a batch: sums and their tolerance.

    The sums are of some entries, with signs that are always the same. They
    bear roundings, as of another processor.
    """
    leaves = tf.nest.flatten(batch, expand_composites=True)
    rows = [_row(leaf) for leaf in leaves if isinstance(leaf, tf.Tensor)]
    return np.array(rows).reshape(len(rows), _SUMS + 1)


def gap(one: np.ndarray, other: np.ndarray) -> float:
    """Returns how far two sketches differ, as a share of their tolerance."""
    if one.shape != other.shape:
        return np.inf
    gaps = np.abs(one[:, :_SUMS] - other[:, :_SUMS])
    with np.errstate(divide="ignore"):
        shares = np.divide(gaps, one[:, _SUMS:], where=gaps > 0, out=gaps)
    return shares.max(initial=0)


def _row(tensor: Any) -> np.ndarray:
    flat = np.ravel(np.asarray(tensor))
    entries = flat[:: max(1, len(flat) // _ENTRIES)]
    if entries.dtype == object:  # strings
        entries = np.array([zlib.crc32(each) for each in entries])
    entries = np.nan_to_num(entries.astype(np.float64), posinf=0, neginf=0)
    if not len(entries):
        return np.zeros(_SUMS + 1)
    spread = _OF_DEVIATION * entries.std() + _OF_MEAN * np.abs(entries).mean()
    tolerance = np.sqrt(len(entries)) * spread
    return np.append(entries @ _SIGNS[: len(entries)], tolerance)

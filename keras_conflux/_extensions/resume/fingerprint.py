"""Fingerprints by which a checkpoint and a training belong together."""

import json
import re
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_index
from keras_conflux._common import trees
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_iterators
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_optimizers
from keras_conflux._extensions.resume.checkpoint_files import Saved


def of_model(model: keras.Model) -> dict[str, Any]:
    """Returns a description of a model, and of its optimizer if built."""
    optimizer = getattr(model, "optimizer", None)
    variables = getattr(optimizer, "variables", ())
    is_built = getattr(optimizer, "built", False)
    return {
        "weights": _shapes(model.weights),
        "optimizer": [
            type(optimizer).__name__,
            *_shapes(variables if is_built else ()),
        ],
        "trained": _trained(model) if is_built else None,
    }


def _trained(model: keras.Model) -> list[int] | None:
    """Returns which weights the optimizer was built for; `None` if others."""
    places = {id(v): i for i, v in enumerate(model.trainable_variables)}
    trained = [id(v) for v in keras_optimizers.trained_by(model.optimizer)]
    is_known = places.keys() >= {*trained}
    return [places[each] for each in trained] if is_known else None


def build_optimizer(saved: Saved, model: keras.Model) -> None:
    """Builds an optimizer for the weights that it was saved for."""
    optimizer = getattr(model, "optimizer", None)
    weights = model.trainable_variables
    there = saved.state["fingerprint"]
    _, *variables = there["optimizer"]
    if optimizer is not None and not optimizer.built and variables:
        places = there["trained"]
        optimizer.build([weights[i] for i in places] if places else weights)


def of_data(iterator: Any) -> dict[str, Any]:
    """Returns a description of an epoch iterator's data, and of versions."""
    return {
        "data": [
            "Python" if keras_iterators.has_python_source(iterator) else "",
            str(keras_iterators.batch_spec(iterator)),
            iterator.num_batches,
        ],
        "steps_per_execution": iterator.steps_per_execution,
        "versions": [
            f"Keras {keras.__version__}",
            f"TensorFlow {tf.__version__}",
        ],
    }


def assert_as_many_parts(saved: Saved, count: int) -> None:
    """Raises unless as many processes had a part of the data of their own."""
    there = len(saved.state["parts"])
    if there == count:
        return
    texts = [
        "all processes reading the same data"
        if each == 1
        else f'data="local" and {each} processes'
        for each in (there, count)
    ]
    raise ValueError(
        f"The checkpoint {saved.path} was saved with {texts[0]}; here it is "
        f"{texts[1]}. Where each process draws a part of its own, only as many "
        "processes can go on in their parts. Start the training as it was "
        "started, or pass `Resume` another directory."
    )


def own_part(saved: Saved) -> dict[str, Any]:
    """Returns a checkpoint's description of this process' data."""
    parts = saved.state["parts"]
    return parts[process_index() if len(parts) > 1 else 0]


def assert_same_data(saved: Saved, here: dict[str, Any]) -> None:
    """Raises if a checkpoint was saved with other data than `of_data`'s."""
    there = own_part(saved)["data"]
    if there["data"] != here["data"]:
        name = "data like this: kind, shapes of batches, their number"
        raise _of_another(saved, name, there["data"], here["data"])
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
            f"The checkpoint {saved.path} was saved with "
            f"{' and '.join(there['versions'])}; here are "
            f"{' and '.join(here['versions'])}. Results may differ in the "
            "last digits."
        )


def assert_same_model(saved: Saved, model: keras.Model) -> None:
    """Raises if a checkpoint was saved of another model or optimizer."""
    there, here = saved.state["fingerprint"], of_model(model)
    if there["weights"] != here["weights"]:
        _assert_built(saved, keras_models.layers_are_built(model), "the model")
        name = "weights of these shapes"
        raise _of_another(saved, name, there["weights"], here["weights"])
    there, here = there["optimizer"], here["optimizer"]
    # One that no step had used has nothing to restore.
    if there[0] != here[0] or (there[1:] and there != here):
        if there[0] == here[0]:
            _assert_built(saved, model.optimizer.built, "its optimizer")
        raise _of_another(
            saved, "an optimizer with these variables", there, here
        )


def _assert_built(saved: Saved, is_built: bool, what: str) -> None:
    if not is_built:
        raise ValueError(
            f"The checkpoint {saved.path} cannot be restored, because {what} "
            "has no variables yet. Build both before: call the model on a "
            "batch, then model.optimizer.build(model.trainable_variables)"
        )


def _of_another(saved: Saved, name: str, there: Any, here: Any) -> ValueError:
    return ValueError(
        f"The checkpoint {saved.path} belongs to another training. It was "
        f"saved with {name}: {_shortened(there)}; here are "
        f"{_shortened(here)}. Train with the former, or use "
        "another directory."
    )


def _shapes(variables: Any) -> list[str]:
    return [f"{list(v.shape)} {v.dtype}" for v in variables]


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) < 500 else f"{text[:500]}... ({len(value)} in all)"


def of_compile(model: keras.Model) -> dict[str, Any]:
    """Returns the settings of the optimizer and the names of the losses.

    They are the script's before the model is restored. Later, a learning rate
    may have been changed.
    """
    optimizer = getattr(model, "optimizer", None)
    settings = {
        "optimizer": {} if optimizer is None else optimizer.get_config(),
        "loss": getattr(model, "loss", None),
    }
    text = json.dumps(settings, default=_name_of)
    found = {
        ".".join(re.findall(r"\w+", path)): value
        for path, value in trees.with_paths(json.loads(text))
    }
    # Names have the number of the optimizer in this process.
    return {k: v for k, v in found.items() if not k.endswith(".name")}


def name_changed_settings(saved: Saved, here: dict[str, Any]) -> None:
    """Warns where `of_compile` differs from a checkpoint's."""
    there = saved.state["compiled"]
    changed = [
        f"{path} was {_text(there.get(path))} and is {_text(here.get(path))}"
        for path in sorted(there.keys() | here.keys())
        if there.get(path) != here.get(path)
    ]
    if changed:
        warn(
            "The model is not compiled as when the checkpoint "
            f"{saved.path} was saved: {'; '.join(changed)}. A learning rate "
            "that is a number goes on from the checkpoint; all else is now as "
            "the program says. If that is not meant, compile it as before."
        )


def _name_of(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)

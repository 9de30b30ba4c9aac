"""The settings of `compile`, where a checkpoint is taken up again."""

import json
import re
from typing import Any

import keras

from keras_conflux._common import trees
from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume.checkpoint_files import Saved


def of_model(model: keras.Model) -> dict[str, Any]:
    """Returns the settings of the optimizer and the names of the losses.

    Args:
        model: The model as the script has compiled it, before it is restored.
            Later, its learning rate may have been changed.
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


def name_changed(saved: Saved, here: dict[str, Any]) -> None:
    """Warns of settings that differ from a checkpoint's.

    Args:
        saved: The checkpoint.
        here: The result of `of_model`.
    """
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

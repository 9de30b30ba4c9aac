"""What an error says when memory runs out: what takes it, what saves it."""

from typing import Any

import tensorflow as tf

from keras_conflux._common import error_notes
from keras_conflux._extensions.memory import table
from keras_conflux._extensions.memory.model_memory import SHARDS
from keras_conflux._extensions.memory.model_memory import Memory
from keras_conflux._extensions.memory.model_memory import memory
from keras_conflux._replication import model_options


def install() -> None:
    """Has errors explained. Called once, at import."""
    error_notes.add_by(explain)


def explain(error: BaseException, model: Any) -> None:
    """Adds a note to an error if it is one of memory.

    Args:
        error: What a step has raised.
        model: Whose step it is, `None` for a function of the user's own.
    """
    if not isinstance(error, tf.errors.ResourceExhaustedError):
        return
    found = None if model is None else _known(model)
    rows = [*_shards(found), *_WAYS]
    if model is not None and model_options.microbatches_of(model) == "auto":
        rows = [row for row in rows if "microbatches" not in row[0]]
    width = max(len(name) for name, _ in rows)
    error.add_note(
        "\n".join(
            [
                _taken(model, found),
                *(f"  {name:<{width}}  {does}" for name, does in rows),
            ]
        )
    )


_WAYS = (
    (
        "replicate(model, microbatches=2)",
        "runs a batch in parts, one after another, with the same result",
    ),
    (
        "keras.RematScope",
        "computes activations again, which a training keeps otherwise",
    ),
    (
        "a smaller batch",
        "has fewer activations; with `gradient_accumulation_steps` of the "
        "optimizer the updates stay those of the larger one",
    ),
)
"""What saves memory, and how. What it saves is not known."""


def _taken(model: Any, found: Memory | None) -> str:
    if found is None:
        return (
            "A device had no memory for what runs on it. "
            "`keras_conflux.memory(model)` tells what a model's variables "
            "take there. What needs less:"
        )
    return (
        f"{model.name}: a device had no memory for what runs on it. Variables "
        f"take {table.readable(found.variables)} on each of {found.devices}, "
        "the rest is what a step needs, which "
        "`keras_conflux.memory(model, batch)` tells. What needs less:"
    )


def _shards(found: Memory | None) -> list[tuple[str, str]]:
    """Returns a row for each choice of `shard` that saves something."""
    if found is None:
        return []
    rows = []
    for shard in SHARDS:
        saved = found.variables - found.with_shard(shard).variables
        if saved > 0:
            rows.append(
                (
                    f'replicate(model, shard="{shard}")',
                    f"saves {table.readable(saved)} of them on each device",
                )
            )
    return rows


def _known(model: Any) -> Memory | None:
    """Returns what a model needs, as far as its variables are there."""
    try:
        return memory(model)
    except ValueError:  # it is not built
        return None

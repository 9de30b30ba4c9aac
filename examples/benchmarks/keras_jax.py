"""Times Keras on JAX in a process of its own and prints JSON.

    cd examples; KERAS_BACKEND=jax python -m benchmarks.keras_jax MODEL DEVICES

The model is the same Keras model, on several devices under
`keras.distribution.DataParallel`. `--tuning` names other ways. This package
needs TensorFlow, so it is not imported: this file is started as a part of the
package `benchmarks`.
"""

import argparse
import json
import os
import sys
from typing import Any

import jax
import keras

from . import measured
from . import models
from .cases import CASES
from .epoch_clock import EpochClock

WORDS = {
    "wide-mask": "a mask of BERT's that JAX' fused attention takes",
    "on-device": "batches that lie on the devices from the start",
    "scheduler": "XLA's latency-hiding scheduler",
    "shard": "ModelParallel, with a part of each weight on each device",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m benchmarks.keras_jax")
    parser.add_argument("model", choices=list(CASES))
    parser.add_argument("devices", type=int)
    measured.add_options(parser)
    measured.add_tuning(parser, WORDS)
    parser.add_argument(
        "--execution", type=int, default=1, help="steps per execution"
    )
    parser.set_defaults(how="jax", jit="auto")
    return parser.parse_args(arguments)


class InTurn(keras.utils.PyDataset):
    """An epoch of some batches, again and again."""

    def __init__(self, batches: list[Any], steps: int) -> None:
        super().__init__()
        self._batches, self._steps = batches, steps

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> Any:
        return self._batches[index % len(self._batches)]


def measure(options: argparse.Namespace) -> dict:
    """Trains for two epochs that are not timed and some that are.

    JAX traces again in the second one.
    """
    words = options.tuning
    if "scheduler" in words:
        flags = os.environ.get("XLA_FLAGS", "")
        flag = "--xla_gpu_enable_latency_hiding_scheduler=true"
        os.environ["XLA_FLAGS"] = f"{flags} {flag}"
    jax.config.update("jax_num_cpu_devices", options.devices)
    fused = _count_fused()
    _distribute(options)
    case = CASES[options.model]
    keras.config.set_dtype_policy(case.dtype)
    keras.utils.set_random_seed(0)
    more = {"has_wide_mask": True} if "wide-mask" in words else {}
    model = models.build(options.model, **more)
    model.compile(
        model.optimizer, model.loss, steps_per_execution=options.execution
    )
    batches: list[Any] = measured.batches(options)
    if "on-device" in words:
        batches = [_on_devices(batch) for batch in batches]
    clock = EpochClock()
    history = model.fit(
        InTurn(batches, options.steps),
        epochs=options.epochs + 2,
        verbose=0,  # pyright: ignore[reportArgumentType]
        callbacks=[clock, _Forgetting(fused)],
    )
    devices = jax.local_devices()[: options.devices]
    known = [device.memory_stats() for device in devices]
    peaks = [each["peak_bytes_in_use"] for each in known if each]
    versions = {"jax": jax.__version__, "keras": keras.__version__}
    losses = history.history["loss"]
    first = devices[0]
    gpu = first.device_kind if first.platform == "gpu" else None
    found = measured.result(options, clock.clock, losses, peaks, gpu, versions)
    return found | {"fused": fused}


def _distribute(options: argparse.Namespace) -> None:
    """Says on which devices Keras trains.

    A single one needs no distribution, without which Keras moves batches ahead.
    """
    names = keras.distribution.list_devices()
    if len(names) < options.devices:
        raise SystemExit(
            f"Expected {options.devices} devices. JAX has {len(names)}."
        )
    if options.devices == 1:
        return
    names = names[: options.devices]
    if "shard" not in options.tuning:
        chosen = keras.distribution.DataParallel(
            devices=names, auto_shard_dataset=False
        )
    else:
        mesh = keras.distribution.DeviceMesh((len(names),), ["batch"], names)
        layouts = keras.distribution.LayoutMap(mesh)
        layouts["embedding/embeddings"] = ("batch", None)
        layouts["multi_head.*(query|key|value)/kernel"] = ("batch", None, None)
        layouts["multi_head.*output/kernel"] = ("batch", None, None)
        layouts["dense.*/kernel"] = ("batch", None)
        chosen = keras.distribution.ModelParallel(
            layout_map=layouts,
            batch_dim_name="batch",
            auto_shard_dataset=False,
        )
    keras.distribution.set_distribution(chosen)


def _on_devices(batch: Any) -> Any:
    """Moves a batch to where it is trained on."""
    distribution = keras.distribution.distribution()
    if distribution is None:
        return jax.device_put(batch)
    return tuple(
        keras.distribution.distribute_tensor(
            each, distribution.get_data_layout(each.shape)
        )
        for each in batch
    )


class _Forgetting(keras.callbacks.Callback):
    """Drops what was counted before a step, as Keras builds a model."""

    def __init__(self, counts: dict[str, int]) -> None:
        super().__init__()
        self.counts = counts

    def on_train_begin(self, logs: dict | None = None) -> None:
        self.counts.clear()


def _count_fused() -> dict[str, int]:
    """Counts attentions by what has traced them; returns the counts."""
    traced: dict[str, int] = {}
    attention: Any = jax.nn.dot_product_attention

    def counted(*args: Any, implementation: Any = None, **more: Any) -> Any:
        attended = attention(*args, implementation=implementation, **more)
        name = str(implementation)
        traced[name] = traced.get(name, 0) + 1
        return attended

    jax.nn.dot_product_attention = counted
    return traced


if __name__ == "__main__":
    print(json.dumps(measure(parse(sys.argv[1:]))), flush=True)

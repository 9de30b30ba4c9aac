"""Times plain `model.fit` in a process of its own and prints JSON.

    python -m keras_conflux.bench.train MODEL HOW DEVICES [options]

HOW is `keras`, plain Keras on one device; `stock`, Keras under TensorFlow's
own `MirroredStrategy`; or `conflux`, a model that was given to `replicate`.
"""

import argparse
import json
import os
import sys
import time


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser("python -m keras_conflux.bench.train")
    parser.add_argument("model")
    parser.add_argument("how", choices=["keras", "stock", "conflux"])
    parser.add_argument("devices", type=int)
    parser.add_argument("--batch", type=int, help="samples a device")
    parser.add_argument("--jit", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--steps", type=int, default=64, help="in an epoch")
    parser.add_argument("--epochs", type=int, default=4, help="that are timed")
    parser.add_argument("--execution", type=int, default=1)
    parser.add_argument("--profile", help="a folder for a trace of 24 steps")
    return parser.parse_args(arguments)


def measure(options: argparse.Namespace) -> dict:
    """Trains for one epoch that is not timed and some that are."""
    import keras
    import tensorflow as tf

    import keras_conflux as kc
    from keras_conflux.bench.models import CASES

    class Clock(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seconds: list[float] = []

        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            self._began = time.perf_counter()

        def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
            self.seconds.append(time.perf_counter() - self._began)

    case = CASES[options.model]
    devices = kc.devices(options.devices)
    keras.config.set_dtype_policy(case.dtype)
    keras.utils.set_random_seed(0)
    batch = options.batch or case.batch_size
    with_scope = options.how == "stock" and options.devices > 1
    strategy = (
        tf.distribute.MirroredStrategy(list(devices))
        if with_scope
        else tf.distribute.get_strategy()
    )
    with strategy.scope():
        model = case.build()
    model.compile(
        model.optimizer,
        model.loss,
        jit_compile={"auto": "auto", "on": True, "off": False}[options.jit],
        steps_per_execution=options.execution,
    )
    if options.how == "conflux":
        kc.replicate(model, devices)
    data = case.data(batch * options.devices)
    dataset = tf.data.Dataset.from_tensors(data).repeat(options.steps)
    clock = Clock()
    history = model.fit(
        dataset,
        epochs=options.epochs + 1,
        verbose=0,  # pyright: ignore[reportArgumentType]
        callbacks=[clock],
    )
    if options.profile:
        with tf.profiler.experimental.Profile(options.profile):
            model.fit(dataset.take(24), verbose=0)  # pyright: ignore[reportArgumentType]
    first, *timed = clock.seconds
    on_gpu = devices[0].kind == "GPU"
    return {
        "model": options.model,
        "how": options.how,
        "devices": options.devices,
        "batch": batch,
        "jit": options.jit,
        "execution": options.execution,
        "first_epoch_s": round(first, 2),
        "ms_a_step": [round(s / options.steps * 1e3, 3) for s in timed],
        "unit": case.unit,
        "units_a_step": batch * options.devices * case.units,
        "peak_bytes": [
            tf.config.experimental.get_memory_info(device)["peak"]
            for device in devices
        ]
        if on_gpu
        else [],
        "loss": [float(loss) for loss in history.history["loss"]],
    }


def main() -> None:
    """Prints one line of JSON."""
    options = parse(sys.argv[1:])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    if options.devices == 1:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    print(json.dumps(measure(options)), flush=True)


if __name__ == "__main__":
    main()

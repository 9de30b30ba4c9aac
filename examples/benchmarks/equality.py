"""Trains the example's network on four devices and on one, and draws both.

    python -m examples.benchmarks.equality

This writes `docs/data/equality.json` and the picture of it in the README.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

import keras

import keras_conflux as kc
from examples.benchmarks import plot
from examples.benchmarks import report

DOCS = pathlib.Path(__file__).parents[2] / "docs"


def losses(devices: Sequence[str] | None, epochs: int = 12) -> list[float]:
    """Returns the loss of each epoch on some devices, or on one without us."""
    sys.path.append(str(DOCS.parent / "examples"))
    import digits

    (x, y), _ = digits.load_data()
    keras.utils.set_random_seed(0)
    model = digits.build_model()
    if devices is not None:
        kc.replicate(model, devices)
    return model.fit(x, y, 64, epochs, verbose=0).history["loss"]  # pyright: ignore


def main() -> None:
    """Measures and draws."""
    document = {
        "machine": report.machine(),
        "devices": 4,
        "losses": {"4": losses(kc.devices(4)), "1": losses(None)},
    }
    text = json.dumps(document, indent=1)
    (DOCS / "data/equality.json").write_text(f"{text}\n")
    plot.draw_losses(DOCS / "images/equality.svg", document)


if __name__ == "__main__":
    main()

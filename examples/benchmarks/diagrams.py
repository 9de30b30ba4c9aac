"""Draws a batch on four GPUs, memory by `shard`, and what to try first.

`python -m examples.benchmarks.page` draws them with the other pictures. They
are narrow, so that a phone shows them at the size of its text.
"""

from pathlib import Path
from typing import Any

from examples.benchmarks.plot import BAR
from examples.benchmarks.plot import FAINT
from examples.benchmarks.plot import HIGHLIGHT
from examples.benchmarks.plot import INK
from examples.benchmarks.plot import picture

WIDTH = 4.8
GPUS = 4
WAYS = {
    "conflux": "shard=None",
    "conflux-optimizer": '"optimizer"',
    "conflux-weights": '"weights"',
    "conflux-weights-remat": '"weights", RematScope',
}


def draw_all(images: Path, larger_models: dict) -> None:
    """Writes all of them.

    Args:
        images: The folder.
        larger_models: What `docs/data/larger_models.json` holds.
    """
    draw_batch(images / "batch.svg")
    draw_memory(images / "memory_by_shard.svg", larger_models)
    draw_choices(images / "out_of_memory.svg")


def draw_batch(image: Path) -> None:
    """Draws how a batch is cut, and what crosses devices in a step."""
    with picture(image, WIDTH, 3.5) as figure:
        axes = _axes(figure, 3.5)
        each = (WIDTH - 0.2) / GPUS
        _box(axes, 0.1, 3.0, WIDTH - 0.2, "a batch of 64 samples", BAR)
        for gpu in range(GPUS):
            left, middle = 0.1 + gpu * each, 0.1 + (gpu + 0.5) * each
            _arrow(axes, (middle, 3.0), (middle, 2.78))
            box = left + 0.05, each - 0.1
            _box(
                axes, box[0], 2.08, box[1], f"GPU {gpu}:\n16 samples", BAR, 0.7
            )
            _arrow(axes, (middle, 2.08), (middle, 1.78))
            _arrow(axes, (middle, 1.38), (middle, 1.08))
            label = "the same\nupdate"
            _box(axes, box[0], 0.48, box[1], label, BAR, 0.6)
        label = "all-reduce: the gradient of 64 samples"
        _box(axes, 0.1, 1.38, WIDTH - 0.2, label, HIGHLIGHT)
        note = "The weights stay equal. Little else crosses GPUs in a step."
        axes.text(0.12, 0.15, note, size=8, color=FAINT)


def draw_memory(image: Path, larger_models: dict) -> None:
    """Draws the memory that a GPU needs, by `shard`."""
    peaks = {
        way: max(run["peak_bytes"]) / 1e9
        for way in WAYS
        for run in larger_models["training"]
        if (run["model"], run["how"]) == ("gpt-1.3b", way)
    }
    with picture(image, WIDTH, 2.1) as figure:
        axes = _axes(figure, 2.1)
        title = "GB on each of two GPUs, GPT of 1.3 billion parameters"
        axes.text(0.1, 1.85, title, size=9, color=INK, weight="bold")
        for row, (way, peak) in enumerate(peaks.items()):
            y = 1.45 - 0.33 * row
            color = BAR if way == "conflux" else HIGHLIGHT
            axes.text(0.1, y, WAYS[way], size=9, color=INK, va="center")
            length = 2.3 * peak / max(peaks.values())
            axes.barh(y, length, height=0.24, left=1.9, color=color)
            end = 1.95 + length
            axes.text(end, y, f"{peak:.0f}", size=9, color=INK, va="center")
        note = (
            "The largest peak of a step, of 8 sequences of 512 tokens per GPU."
        )
        axes.text(0.1, 0.12, note, size=8, color=FAINT)


def draw_choices(image: Path) -> None:
    """Draws what to try first where memory runs out."""
    steps = [
        ("a smaller batch", "where the result may change"),
        ("keras.RematScope", "costs a forward pass, at most"),
        ('shard="weights"', "with several GPUs"),
        ("microbatches=n", "in place of shard: the batch in n parts"),
    ]
    with picture(image, WIDTH, 3.0) as figure:
        axes = _axes(figure, 3.0)
        for row, (what, when) in enumerate(steps):
            y = 2.5 - 0.68 * row
            _box(axes, 0.1, y, 1.6, what, HIGHLIGHT)
            axes.text(1.85, y + 0.2, when, size=9, color=INK, va="center")
            if row:
                _arrow(axes, (0.9, y + 0.68), (0.9, y + 0.4))
                text = "still out of memory"
                axes.text(1.0, y + 0.54, text, size=8, color=FAINT, va="center")
        note = "kc.memory(model, batch) says what a step needs."
        axes.text(0.1, 0.12, note, size=8, color=FAINT)


def _axes(figure: Any, height: float) -> Any:
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, height))
    axes.axis("off")
    return axes


def _box(
    axes: Any,
    left: float,
    bottom: float,
    width: float,
    text: str,
    color: str,
    height: float = 0.4,
) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, bottom), width, height, color=color))
    middle = left + width / 2, bottom + height / 2
    axes.text(*middle, text, size=9, color=INK, ha="center", va="center")


def _arrow(axes: Any, begin: tuple, end: tuple) -> None:
    axes.annotate(
        "", end, begin, arrowprops={"arrowstyle": "->", "color": FAINT}
    )

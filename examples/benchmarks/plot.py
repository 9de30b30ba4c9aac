"""Draws measured speed, a bar per measurement, and losses of two trainings.

    python -m examples.benchmarks --draw docs/data/performance.json IMAGE

This makes the picture of the documents; the benchmark draws its own results.
"""

import contextlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.benchmarks import report

NAMES = {  # in the order of tables
    "conflux": "keras-conflux",
    "conflux-optimizer": "keras-conflux, optimizer in parts",
    "conflux-weights": "keras-conflux, weights in parts",
    "jax": "Keras on JAX",
    "torch": "PyTorch, compiled",
    "torch-eager": "PyTorch, eager",
    "keras": "Keras + XLA",
    "stock": "MirroredStrategy",
}
TITLES = {  # in the order of the panels
    "resnet": "ResNet-50, 224x224 images",
    "gpt": "GPT, float32 head",
    "gpt-bf16": "GPT, bfloat16 head",
    "gpt-350m": "GPT, 350 M parameters",
    "gpt-1.3b": "GPT, 1.3 B parameters",
    "gpt-5.5b": "GPT, 5.5 B parameters",
    "gpt-8b": "GPT, 7.9 B parameters",
    "vit": "ViT-B/16, 224x224 images",
    "bert": "BERT base, padding counted",
    "vit-dropout": "ViT-B/16 with dropout",
    "mobilenet": "MobileNetV2",
    "efficientnet": "EfficientNetV2-S",
    "convnext": "ConvNeXt-Tiny",
    "xception": "Xception",
}
LIBRARIES = {
    "tensorflow": "TensorFlow",
    "keras": "Keras",
    "jax": "JAX",
    "torch": "PyTorch",
}
COLUMNS = 2
NAME, LENGTH, VALUE = 1.5, 0.75, 0.95  # what stands in a row, in inches
PANEL = NAME + LENGTH + VALUE + 0.2
ROW = 0.24  # height, in inches
GAP = 0.4  # between groups, in rows
PAPER, INK, FAINT = "#ffffff", "#1f2933", "#5f6b76"
BAR, HIGHLIGHT = "#d6dce3", "#8db7f5"
IN_THE_DARK = {
    PAPER: "#1e2129",
    INK: "#e6e9ed",
    FAINT: "#a3adb8",
    BAR: "#414a56",
    HIGHLIGHT: "#2f62a8",
}
"""The colours where a reader's system asks for dark ones."""


def draw_file(source: Path, image: Path) -> None:
    """Draws what a file of measurements holds.

    Args:
        source: A `bench.json` of this benchmark. If some of its runs are marked
            as `shown`, only these are drawn, and otherwise the fastest of each
            package.
        image: The file to write; its suffix says of which kind, such as `.svg`.
    """
    draw_document(image, json.loads(source.read_text()))


def draw_document(image: Path, document: dict, columns: int = COLUMNS) -> None:
    """Draws measurements; see `draw_file` and `draw`."""
    shown = report.shown(document)
    image.parent.mkdir(parents=True, exist_ok=True)
    machine = document["machine"]
    # Runs that are kept may have been made on another machine than the last.
    names = [run["gpu"] for run in shown if run.get("gpu")]
    draw(image, shown, machine | {"gpus": names or machine["gpus"]}, columns)


def draw(
    image: Path, runs: list[dict], machine: dict, columns: int = COLUMNS
) -> None:
    """Draws runs as horizontal bars, grouped by the number of devices.

    Args:
        image: The file to write.
        runs: At least one; see `examples.benchmarks.train` for their fields.
        machine: What `report.machine` returns.
        columns: The number of panels beside each other; one on a phone.
    """
    by_model = panels(runs)
    columns = min(columns, len(by_model))
    lines = [
        by_model[begin : begin + columns]
        for begin in range(0, len(by_model), columns)
    ]
    heights = [ROW * max(map(_rows, line)) + 0.75 for line in lines]
    width, inches = PANEL * columns, sum(heights) + 0.5
    with picture(image, width, inches) as figure:
        top = inches - 0.5
        for line, height in zip(lines, heights, strict=True):
            for column, panel in enumerate(line):
                of_bars = ROW * _rows(panel)
                left, bottom = PANEL * column + 0.1, top - of_bars
                box = left / width, bottom / inches
                box += (PANEL - 0.2) / width, of_bars / inches
                _draw_panel(figure.add_axes(box), panel, _kind(machine))
            top -= height
        note = textwrap.fill(_footnote(machine, shown=runs), int(17 * width))
        figure.text(0.1 / width, 0.1 / inches, note, fontsize=7, color=FAINT)


def draw_losses(image: Path, document: dict) -> None:
    """Draws the losses of several devices, and those of one on top of them.

    Args:
        image: The file to write.
        document: As `examples.benchmarks.equality` records it.
    """
    several, one = document["losses"].values()
    epochs = [*range(1, len(one) + 1)]
    furthest = max(abs(a - b) for a, b in zip(several, one, strict=True))
    with picture(image, 5, 2.4) as figure:
        axes = figure.add_axes((0.1, 0.2, 0.87, 0.66))
        wide: Any = {"color": HIGHLIGHT, "linewidth": 7}
        axes.plot(epochs, several, label="four devices", **wide)
        axes.plot(epochs, one, "o-", color=INK, ms=3, lw=1, label="one device")
        axes.set_yscale("log")
        axes.tick_params(colors=FAINT, which="both", labelsize=8)
        axes.set_xlabel("epoch", color=FAINT, size=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(FAINT)
        title = f"The losses differ by at most {furthest:.0e}"
        axes.set_title(title, loc="left", color=INK, size=10, weight="bold")
        axes.legend(frameon=False, labelcolor=INK, fontsize=9)


@contextlib.contextmanager
def picture(image: Path, width: float, height: float) -> Iterator[Any]:
    """Yields a figure of so many inches, and writes it to a file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, and the same runs give the same file.
    settings: Any = {"svg.fonttype": "none", "svg.hashsalt": "conflux"}
    metadata: Any = {"Date": None} if image.suffix == ".svg" else None
    with mpl.rc_context(settings):
        figure = Figure(figsize=(width, height), facecolor=PAPER)
        yield figure
        figure.savefig(image, dpi=120, metadata=metadata)
    if image.suffix == ".svg":
        _follow_the_reader(image)


def _follow_the_reader(image: Path) -> None:
    """Lets a picture be dark where the reader's system is."""
    rules = " ".join(
        f'[style*="{of}: {light}"] {{ {of}: {dark} !important }}'
        for light, dark in IN_THE_DARK.items()
        for of in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules} }}</style>"
    head, tag, rest = image.read_text().partition("<defs>")
    image.write_text(f"{head}{style}\n {tag}{rest}")


def panels(runs: list[dict]) -> list[list[dict]]:
    """Returns the runs of each model, in the order of `TITLES`."""
    models = [*TITLES, *(run["model"] for run in runs)]
    panels = [
        [run for run in runs if run["model"] == model]
        for model in dict.fromkeys(models)
    ]
    return [panel for panel in panels if panel]


def _rows(panel: list[dict]) -> float:
    """Returns a panel's height in rows: bars, headings and gaps."""
    groups = len({run["devices"] for run in panel})
    return len(panel) + (1 + GAP) * groups - GAP


def _draw_panel(axes: Any, runs: list[dict], device: str) -> None:
    fastest = max(map(report.throughput, runs))
    row = 0
    for count in sorted({run["devices"] for run in runs}):
        heading = f"{count} {device}{'s' * (count > 1)}"
        style: Any = {"color": INK, "size": 9, "weight": "bold"}
        axes.text(-NAME, row, heading, va="center", **style)
        group = [run for run in runs if run["devices"] == count]
        for run in sorted(group, key=report.throughput, reverse=True):
            row += 1
            _draw_bar(axes, row, run, runs, fastest)
        row += 1 + GAP
    axes.set(xlim=(-NAME, LENGTH + VALUE), ylim=(_rows(runs) - 0.5, -0.5))
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    title = TITLES.get(runs[0]["model"], runs[0]["model"])
    axes.set_title(title, loc="left", color=INK, size=10, weight="bold", pad=18)
    unit = (
        f"{runs[0]['unit']} per second, batch {runs[0]['batch']} per {device}"
    )
    style = {"size": 8, "color": FAINT, "textcoords": "offset points"}
    axes.annotate(unit, (0, 1), (0, 5), xycoords="axes fraction", **style)


def _draw_bar(
    axes: Any, row: float, run: dict, runs: list[dict], fastest: float
) -> None:
    ours = run["how"].startswith("conflux")
    speed = report.throughput(run)
    length = speed / fastest * LENGTH
    axes.barh(row, length, height=0.78, color=HIGHLIGHT if ours else BAR)
    weight = "bold" if ours else "normal"
    style: Any = {"va": "center", "color": INK, "size": 9, "weight": weight}
    axes.text(-NAME, row, _name(run), **style)
    share = scaling(run, runs)
    of_linear = "" if share is None else f"({share:.0%}) "
    text = f"{of_linear}{_short(speed)}"
    axes.text(LENGTH + VALUE, row, text, ha="right", **style)


def _name(run: dict) -> str:
    how: str = run["how"]
    name = NAMES.get(how, how)
    if report.is_of_other_form(run):
        name = "PyTorch, torchvision"
    jit = run.get("jit", "auto")
    return name if jit == "auto" else f"{name}, XLA {jit}"


def scaling(run: dict, runs: list[dict]) -> float | None:
    """Returns the speed over that of as many single devices of its kind."""
    for other in runs:
        same = _name(other) == _name(run)
        if same and other["devices"] == 1 < run["devices"]:
            single = report.throughput(other)
            return report.throughput(run) / single / run["devices"]
    return None


def _short(number: float) -> str:
    """Returns three digits of a number, such as 6.77k, 641k or 1.28M."""
    if number >= 999_500:
        size, letter = 1e6, "M"
    elif number >= 999.5:
        size, letter = 1e3, "k"
    else:
        size, letter = 1, ""
    return f"{number / size:#.3g}".rstrip(".") + letter


def _kind(machine: dict) -> str:
    return "GPU" if machine["gpus"] else "device"


def _footnote(machine: dict, shown: list[dict]) -> str:
    names = ", ".join(dict.fromkeys(machine["gpus"])) or machine["cpu"]
    versions = {key: machine[key] for key in ("tensorflow", "keras")}
    for run in shown:
        versions |= run.get("versions", {})
    listed = ", ".join(f"{LIBRARIES[key]} {versions[key]}" for key in versions)
    if not any(scaling(run, shown) for run in shown):
        return f"{names}; {listed}."
    return (
        f"{names}; {listed}. (90%) means 90% of linear scaling: of the speed "
        f"with one {_kind(machine)} times their number."
    )

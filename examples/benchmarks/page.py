"""Makes the tables, sentences and pictures of the documents from measurements.

    python -m examples.benchmarks.page
    python -m examples.benchmarks.page --take measured/bench.json \
        --name two_gpus --date "26 November 2026" --host "one host with ..."

A document has places such as `<!-- measured: two_gpus table 2 -->`. What is
between this and `<!-- end -->` is made from `docs/data/two_gpus.json`, and a
test compares it. `--take` makes such a file of what `--list` has printed or
written.
"""

import argparse
import json
import re
import statistics
import textwrap
from collections.abc import Callable
from collections.abc import Iterator
from pathlib import Path

from examples.benchmarks import diagrams
from examples.benchmarks import plot
from examples.benchmarks import report

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/performance.md")
_PLACE = re.compile(
    r"(<!-- measured: (\w+) (\w+)((?: \w+)*) -->\n\n).*?(\n\n<!-- end -->)",
    re.S,
)
_WIDTH = 92
NO_CLAIM = 0.03
"""Speeds that differ by less, as a part of the slower one, are called alike."""


def main(arguments: list[str] | None = None) -> None:
    """Writes the documents, and before them the data if there are new ones."""
    parser = argparse.ArgumentParser("python -m examples.benchmarks.page")
    parser.add_argument(
        "--take", type=Path, nargs="+", help="files of measured lines of JSON"
    )
    parser.add_argument("--name", help="of the file in docs/data to write")
    parser.add_argument("--date", help="when it was measured")
    parser.add_argument("--host", help="such as: one host with two H100s")
    options = parser.parse_args(arguments)
    if options.take:
        if not (options.name and options.date and options.host):
            parser.error("--take needs --name, --date and --host")
        taken = {"date": options.date, "host": options.host}
        taken |= taken_from(options.take)
        text = json.dumps(taken, indent=1)
        data_file(options.name).write_text(f"{text}\n")
    for name in DOCUMENTS:
        document = ROOT / name
        document.write_text(made(document.read_text()))
    for image in sorted((ROOT / "docs" / "images").glob("*.svg")):
        if data_file(image.stem).exists():
            data = json.loads(data_file(image.stem).read_text())
            plot.draw_document(image, compared(data))
            narrow = image.with_stem(f"{image.stem}_narrow")
            if narrow.exists():
                plot.draw_document(narrow, compared(data), columns=1)
    if data_file("larger_models").exists():
        data = json.loads(data_file("larger_models").read_text())
        diagrams.draw_all(ROOT / "docs" / "images", data)


def data_file(name: str) -> Path:
    """Returns where measurements lie."""
    return ROOT / "docs" / "data" / f"{name}.json"


def compared(data: dict) -> dict:
    """Returns what is drawn: the models that several packages have trained."""
    packages: dict[str, set[str]] = {}
    for run in data["training"]:
        packages.setdefault(run["model"], set()).add(run["how"])
    several = [
        run for run in data["training"] if packages[run["model"]] > {run["how"]}
    ]
    return data | {"training": several}


def made(text: str) -> str:
    """Returns a document whose places are filled from the data."""

    def filled(place: re.Match[str]) -> str:
        begin, name, kind, words, end = place.groups()
        data = json.loads(data_file(name).read_text())
        return begin + "\n".join(_KINDS[kind](data, *words.split())) + end

    return _PLACE.sub(filled, text)


def taken_from(paths: list[Path]) -> dict:
    """Returns what files hold, in which runs that are alike are one.

    Args:
        paths: Files with a line of JSON for each run, or a `bench.json`.
    """
    lines: list[dict] = []
    for path in paths:
        text = path.read_text()
        try:
            document = json.loads(text)
            for kind in report.of_kind([]):
                lines += document.get(kind, [])
        except json.JSONDecodeError:
            lines += [
                json.loads(line)
                for line in text.splitlines()
                if line.startswith("{")
            ]
    kinds = report.of_kind(lines)
    return {
        "machine": _machine(kinds["training"]),
        **kinds,
        "training": _joined(kinds["training"]),
    }


def _joined(runs: list[dict]) -> list[dict]:
    """Joins the processes that have trained the same: all epochs count."""
    joined: dict[tuple, dict] = {}
    for run in runs:
        same = tuple(
            run.get(key) for key in (*report.KIND, "tuning", "execution")
        )
        if same not in joined:
            joined[same] = run | {"starts_s": [run["start_s"]]}
            continue
        first = joined[same] = run | joined[same]
        first["ms_a_step"] += run["ms_a_step"]
        first["starts_s"].append(run["start_s"])
        first["start_s"] = statistics.median(first["starts_s"])
        later = first.get("later_starts_s", []) + run.get("later_starts_s", [])
        if later:
            first["later_starts_s"] = later
            first["second_start_s"] = statistics.median(later)
    return [*joined.values()]


def _machine(runs: list[dict]) -> dict:
    versions = {}
    for run in runs:
        versions |= run["versions"]
    most = max(runs, key=lambda run: run["devices"])
    gpus = [most["gpu"]] * most["devices"] if most["gpu"] else []
    return {"gpus": gpus, "cpu": "", **versions}


def conditions(data: dict) -> Iterator[str]:
    """Says where and when it was measured, and with what."""
    versions: dict[str, str] = {}
    for run in report.shown(data):
        versions |= run["versions"]
    listed = [
        f"{name} {versions[key].partition('+')[0]}"
        for key, name in plot.LIBRARIES.items()
        if key in versions
    ]
    text = (
        f"All packages ran on {data['host']} ({data['date']}), with "
        f"{', '.join(listed[:-1])} and {listed[-1]}."
    )
    yield textwrap.fill(text, _WIDTH)


def table(data: dict, count: str) -> Iterator[str]:
    """Has a row for each package at its best.

    Args:
        data: What was measured.
        count: Of devices.
    """
    runs = report.shown(data)
    several = int(count) > 1
    scaled = " scaling |" if several else ""
    columns = (
        f"| model | package | ms per step | per second |{scaled} "
        "peak GB | first start, s | second start, s |"
    )
    yield columns
    yield "|---" * (columns.count("|") - 1) + "|"
    for panel in plot.panels(runs):
        if not any(run["devices"] == int(count) for run in panel):
            continue
        title = _title(panel)
        for run in sorted(panel, key=_order):
            if run["devices"] != int(count):
                continue
            own = [title, _package(run)]
            title = ""
            own += [_range(run["ms_a_step"]), _per_second(run)]
            share = plot.scaling(run, panel)
            own += ["" if share is None else f"{100 * share:.1f} %"] * several
            peak = max(run["peak_bytes"], default=0) / 1e9
            own += [f"{peak:.1f}" if peak else "", f"{run['start_s']:.0f}"]
            later = run.get("second_start_s")
            own.append("" if later is None else f"{later:.0f}")
            yield f"| {' | '.join(own)} |".replace("|  |", "| |")


def claims(data: dict, count: str) -> Iterator[str]:
    """Says how fast this package is beside the best of each peer.

    The best may be another form of the model.

    Args:
        data: What was measured.
        count: Of devices.
    """
    yield "| model | over Keras on JAX | over PyTorch |"
    yield "|---|---|---|"
    runs = [run for run in report.shown(data) if run["devices"] == int(count)]
    for panel in plot.panels(runs):
        ours = next((run for run in panel if run["how"] == "conflux"), None)
        if ours is None or len(panel) == 1:
            continue
        peers = [
            [run for run in panel if run["how"] == how]
            for how in ("jax", "torch")
        ]
        said = [
            _beside(ours, max(runs, key=report.throughput)) if runs else ""
            for runs in peers
        ]
        row = " | ".join([_title(panel), *said])
        yield f"| {row} |".replace("|  |", "| |")


def gain(data: dict) -> Iterator[str]:
    """Says how much faster two devices are than one."""
    shares = [
        2 * share
        for panel in plot.panels(report.shown(data))
        for run in panel
        if run["how"] == "conflux" and run["devices"] == 2
        for share in [plot.scaling(run, panel)]
        if share
    ]
    yield (
        f"On two GPUs, the models below train {min(shares):.2f} to "
        f"{max(shares):.2f} times as fast as on one."
    )


def headline(data: dict) -> Iterator[str]:
    """Says how fast ResNet-50 is on two devices, as far as it was measured."""
    panel = [
        run
        for run in report.shown(data)
        if run["model"] == "resnet" and not report.is_of_other_form(run)
    ]
    of_two = {run["how"]: run for run in panel if run["devices"] == 2}
    ours, peer = of_two["conflux"], of_two.get("torch")
    share = plot.scaling(ours, panel)
    gpu = (ours["gpu"] or "device").split()[1]
    text = (
        f"**{_rounded(report.throughput(ours)):,} images per second** is the "
        f"speed of ResNet-50 on two {gpu}s"
    )
    if share is not None:
        text += f", {100 * share:.0f} % of twice the speed on one of them"
    if peer is not None:
        text += (
            ". PyTorch's `DistributedDataParallel` with `torch.compile` "
            f"reached {_rounded(report.throughput(peer)):,} on the same host"
        )
    yield textwrap.fill(f"{text} ({data['date']}).", _WIDTH)


def breakdown(data: dict) -> Iterator[str]:
    """Has a row for each run whose steps were broken down."""
    yield "| model | GPUs | in `fit` | alone | exchange | rest |"
    yield "|---|---|---|---|---|---|"
    for panel in plot.panels(data["training"]):
        for run in panel:
            if "breakdown" in run:
                parts = report.parts(run)
                row = [_title(panel), str(run["devices"])]
                row += [f"{ms:.2f}" for ms in [*parts.values()][:4]]
                yield f"| {' | '.join(row)} |"


def augmentation(data: dict) -> Iterator[str]:
    """Has a row for each random layer that was timed."""
    yield "| layer | pipeline, ms | call, ms | step, ms | compiled |"
    yield "|---|---|---|---|---|"
    for line in data["augmentation"]:
        times = (line[f"{name}_ms"] for name in ("pipeline", "call", "step"))
        row = " | ".join(f"{ms:.1f}" for ms in times)
        compiled = "yes" if line["compiled"] else "no"
        yield f"| `{line['layer']}` | {row} | {compiled} |"


_KINDS: dict[str, Callable[..., Iterator[str]]] = {
    "conditions": conditions,
    "table": table,
    "claims": claims,
    "gain": gain,
    "headline": headline,
    "breakdown": breakdown,
    "augmentation": augmentation,
}


def _title(panel: list[dict]) -> str:
    """Returns what the model of a panel is called, without its data."""
    title = plot.TITLES.get(panel[0]["model"], panel[0]["model"])
    return re.sub(", (224x224 images|padding counted)$", "", title)


def _is_ours(run: dict) -> bool:
    return run["how"].startswith("conflux")


def _order(run: dict) -> tuple:
    return not _is_ours(run), list(plot.NAMES).index(run["how"]), run["devices"]


def _package(run: dict) -> str:
    name = plot.NAMES[run["how"]]
    if _is_ours(run):
        return f"**{name}**"
    words = run.get("tuning", "")
    if run.get("execution", 1) > 1:
        words = f"{words} {run['execution']} steps an execution".strip()
    return f"{name} ({words})" if words else name


def _range(times: list[float]) -> str:
    low, high = f"{min(times):.1f}", f"{max(times):.1f}"
    return low if low == high else f"{low} to {high}"


def _per_second(run: dict) -> str:
    speed = f"{_rounded(report.throughput(run)):,}"
    return f"{speed} {run['unit']}" if _is_ours(run) else speed


def _rounded(number: float) -> int:
    """Returns four digits of it."""
    return round(float(f"{number:.4g}"))


def _beside(ours: dict, peer: dict) -> str:
    ratio = report.throughput(ours) / report.throughput(peer)
    if max(ratio, 1 / ratio) < 1 + NO_CLAIM:
        return "alike"
    return f"{ratio:.2f}"


if __name__ == "__main__":
    main()

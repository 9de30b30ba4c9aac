"""`python -m keras_conflux.bench` on CPU devices."""

import importlib
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import ON_GPU

from keras_conflux._program_cache import flags
from keras_conflux.bench import __main__ as bench
from keras_conflux.bench import messages
from keras_conflux.bench import report

DOCS = pathlib.Path(__file__).parent.parent / "docs"


@pytest.mark.skipif(ON_GPU, reason="runs for CI, where the GPUs are not held")
def test_bench(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = "--steps 4 --epochs 2 --kib 4 --ops max --how conflux"
    options += " --breakdown"
    assert bench.main([*options.split(), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    runs = [(run["how"], run["devices"]) for run in found["training"]]
    assert runs == [("conflux", 1), ("conflux", 2)]
    for run in found["training"]:
        assert len(run["ms_a_step"]) == 2
        assert all(ms > 0 for ms in run["ms_a_step"])
    assert {run["op"] for run in found["collectives"]} == {"max"}
    assert found["machine"]["keras"]
    for run in found["training"]:
        assert run["breakdown"]["alone_ms"] > 0
    shown = capsys.readouterr().out
    assert "model.fit" in shown
    assert "allreduce" in shown
    assert "exchange" in shown
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_a_run_that_fails_is_told_by_the_exit_status(tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stdout="no JSON", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert bench.main(["--devices", "1", "--out", str(tmp_path)]) == 1


def test_keras_on_jax_runs_without_this_package(tmp_path, monkeypatch):
    calls = []

    def run(command, **settings):
        calls.append((command, settings))
        return subprocess.CompletedProcess(command, 0, stdout="", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    flags.set_autotuning(os.environ, pathlib.Path(f"/{flags.FOLDER_PREFIX}1"))
    asked = "--models small --devices 1 2 --how conflux jax --batch 8 --kib"
    assert bench.main([*asked.split(), "--out", str(tmp_path)]) == 0
    ours, peers = calls[:2], calls[2:]
    assert all("keras_conflux.bench.train" in command for command, _ in ours)
    for count, (command, settings) in zip("12", peers, strict=True):
        assert command[1:5] == ["-m", "bench.keras_jax", "small", count]
        assert "--batch=8" in command
        assert settings["env"]["KERAS_BACKEND"] == "jax"
        # JAX may be of a version that dies of other flags.
        assert settings["env"]["XLA_FLAGS"] == "--mine"

    # What the peer imports is there without this package.
    monkeypatch.syspath_prepend(peers[0][1]["cwd"])
    monkeypatch.setitem(sys.modules, "keras_conflux", None)
    assert importlib.import_module("bench.measured").CASES


def test_keras_on_jax(tmp_path):
    pytest.importorskip("jax")
    asked = "--models small --devices 2 --how jax --steps 4 --epochs 1 --kib"
    assert bench.main([*asked.split(), "--out", str(tmp_path)]) == 0
    (found,) = json.loads((tmp_path / "bench.json").read_text())["training"]
    assert found["how"] == "jax"
    assert len(found["ms_a_step"]) == 1


def test_efficiency_is_over_single_devices():
    def run(devices, ms):
        return {
            "model": "m",
            "how": "conflux",
            "devices": devices,
            "batch": 8,
            "jit": "auto",
            "ms_a_step": ms,
            "units_a_step": 8 * devices,
        }

    one, four = run(1, [10, 11, 10]), run(4, [12.5, 12.5, 90])
    assert report.throughput(one) == 800
    assert report.efficiency(four, [one, four]) == pytest.approx(0.8)
    assert report.efficiency(four, [four]) is None
    assert report.efficiency(four | {"jit": "off"}, [one, four]) is None


def texts(image: pathlib.Path) -> list[str]:
    return re.findall(r"<text [^>]*>([^<]*)</text>", image.read_text())


def test_the_picture_shows_the_recorded_data(tmp_path):
    pytest.importorskip("matplotlib")
    drawn, again = tmp_path / "speed.svg", tmp_path / "again.svg"
    for image in (drawn, again):
        bench.main(
            ["--draw", str(DOCS / "data" / "performance.json"), str(image)]
        )
    assert drawn.read_bytes() == again.read_bytes()
    assert {"1 GPU", "2 GPUs", "4 GPUs", "keras-conflux"} <= {*texts(drawn)}
    assert texts(drawn) == texts(DOCS / "images" / "speed.svg")
    assert drawn.stat().st_size < 60_000


def test_messages_of_a_process_that_is_alone(monkeypatch):
    monkeypatch.setattr(messages, "_REPETITIONS", 3)
    found = messages.measure()
    assert found["processes"] == 1
    assert found["sum_ms"] > 0

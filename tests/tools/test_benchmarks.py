"""`python -m examples.benchmarks` on CPU devices.

It is no part of what is installed. `test_examples.py` has the run of CI.
"""

import argparse
import importlib
import importlib.util
import json
import math
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ON_GPU

from examples.benchmarks import __main__ as benchmarks
from examples.benchmarks import attention
from examples.benchmarks import diagrams
from examples.benchmarks import measured
from examples.benchmarks import messages
from examples.benchmarks import models
from examples.benchmarks import page
from examples.benchmarks import pipeline
from examples.benchmarks import plot
from examples.benchmarks import report
from examples.benchmarks import runs
from keras_conflux._compat.private_names import version_numbers
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache import exchange_folder
from keras_conflux._extensions.throughput import slow_input

pytestmark = pytest.mark.long
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(ON_GPU, reason="runs for CI, where the GPUs are not held")
def test_what_is_measured(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = "--steps 4 --epochs 2 --kib 4 --ops max --how conflux"
    options += " --breakdown"
    assert benchmarks.main([*options.split(), "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    runs = [(run["how"], run["devices"]) for run in found["training"]]
    assert runs == [("conflux", 1), ("conflux", 2)]
    for run in found["training"]:
        assert len(run["ms_a_step"]) == 2
        assert all(ms > 0 for ms in run["ms_a_step"])
    assert {run["op"] for run in found["collectives"]} == {"max"}
    assert found["machine"]["keras"]
    for run in found["training"]:
        # The others are differences, which a busy machine makes negative.
        assert run["breakdown"]["input_ms"] > 0
        assert run["breakdown"]["alone_ms"] != run["breakdown"]["step_ms"]
    shown = capsys.readouterr().out
    assert "model.fit" in shown
    assert "allreduce" in shown
    assert "exchange" in shown
    assert (tmp_path / "speed.png").stat().st_size > 10_000


class Started(subprocess.Popen):
    """A process that is not started, but prints a line."""

    calls: ClassVar[list] = []
    prints, returncode, pid = '{"start_s": 1, "ms_a_step": [5]}', 0, -1

    def __init__(self, command, **settings):
        self.calls.append((command, settings))

    def communicate(self, **_):
        return self.prints, ""


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(Started, "calls", [])
    monkeypatch.setattr(Started, "prints", Started.prints)
    monkeypatch.setattr(Started, "returncode", 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # nobody has to ask
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setattr(report, "write", lambda *_, **__: None)
    monkeypatch.setattr(plot, "draw_file", lambda *_: None)
    return Started


def test_a_run_that_fails_is_told_and_made_again(tmp_path, started):
    started.returncode = 1
    asked = ["--devices", "1", "--go-on", "--out", str(tmp_path)]
    assert benchmarks.main([*asked, "--how", "keras", "conflux"]) == 1
    started.returncode = 0
    assert benchmarks.main([*asked, "--how", "keras"]) == 0
    assert len(started.calls) == 3  # nothing of the two that failed is kept
    assert benchmarks.main([*asked, "--how", "keras", "conflux"]) == 0
    assert len(started.calls) == 4
    assert "conflux" in started.calls[-1][0]
    asked.remove("--go-on")
    assert benchmarks.main([*asked, "--how", "keras"]) == 0
    assert len(started.calls) == 5


def test_it_says_first_what_it_will_do(tmp_path, started, capsys):
    asked = ["--devices", "1", "2", "--how", "conflux", "torch"]
    asked += ["--out", str(tmp_path / "runs")]
    assert benchmarks.main([*asked, "--dry-run"]) == 0
    assert not started.calls
    assert not (tmp_path / "runs").exists()
    said = capsys.readouterr().err
    assert "4 runs on 2 GPUs; about 5 minutes" in said
    assert "small conflux on 2 devices" in said
    assert "small torch on one device" in said
    assert benchmarks.main(asked) == 0
    assert "3 left, about" in capsys.readouterr().err
    # No collectives, for which nobody has asked.
    assert not any("collectives" in str(call[0]) for call in started.calls)


def test_models_for_gpus_are_named_where_there_are_none(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    benchmarks.main(["--models", "gpt", "small", "--dry-run"])
    said = capsys.readouterr().err
    assert "as there is no GPU" in said
    assert "take hours on CPUs: gpt." in said


def test_what_prints_nothing_has_failed(tmp_path, started):
    started.prints = "no JSON"
    assert benchmarks.main(["--devices", "1", "--out", str(tmp_path)]) == 1


def test_the_second_start_has_what_the_first_has_cached(tmp_path, started):
    asked = "--devices 1 --how keras torch conflux --starts 2"
    assert benchmarks.main([*asked.split(), "--out", str(tmp_path)]) == 0
    assert len(started.calls) == 6
    names = {"KERAS_CONFLUX_CACHE", "CUDA_CACHE_PATH", "TRITON_CACHE_DIR"}
    folders = []
    for first, second in zip(
        started.calls[::2], started.calls[1::2], strict=True
    ):
        assert second[0][:-1] == first[0][:-1]  # but for the time
        one, two = ({n: c[1]["env"][n] for n in names} for c in (first, second))
        assert one == two
        folders.append(one)
    caches = [each["KERAS_CONFLUX_CACHE"] for each in folders]
    assert caches[0] == "0"  # Keras by itself has no such cache
    assert len({each["CUDA_CACHE_PATH"] for each in folders}) == 3
    kept = [*(tmp_path / "runs").glob("*.json")]
    for (line,) in (json.loads(each.read_text()) for each in kept):
        assert line["ms_a_step"] == [5, 5]  # of both processes
        assert line["second_start_s"] == 1


def test_a_list_is_run_in_its_order(tmp_path, capsys, started):
    asked = tmp_path / "list.txt"
    asked.write_text(
        """# a comment
        9 pytorch small torch 2 --tuning buckets  # another
        8x2 train small conflux 1 --steps 4
        7 augmentation RandomFlip
        """
    )
    out = ["--out", str(tmp_path / "out"), "--epochs", "1", "--batches", "3"]
    assert benchmarks.main(["--list", str(asked), *out]) == 0
    words = [" ".join(command) for command, _ in started.calls]
    sizes = "--steps=64 --epochs=1 --batches=3"
    assert f"torch 2 --tuning buckets {sizes}" in words[0]
    own = "conflux 1 --steps 4 --epochs=1 --batches=3"
    assert own in words[1]
    assert words[2].partition("--began")[0] == words[1].partition("--began")[0]
    assert words[3].endswith("augmentation RandomFlip")
    printed = capsys.readouterr().out
    assert printed.count('"start_s": 1') == 3
    assert printed.count('"second_start_s": 1') == 1
    runs = benchmarks.parse(["--list", str(asked), *out])
    assert [run.limit for run in benchmarks._listed(runs)] == [9, 8, 7]


def test_lists_of_the_repository_are_understood():
    modules = {
        "train": importlib.import_module("examples.benchmarks.train").parse
    }
    for name in ("pytorch", "keras_jax"):
        if importlib.util.find_spec({"keras_jax": "jax"}.get(name, "torch")):
            module = importlib.import_module(f"examples.benchmarks.{name}")
            modules[name] = module.parse
    for path in (DOCS.parent / "examples/benchmarks/lists").glob("*.txt"):
        for run in benchmarks._listed(benchmarks.parse(["--list", str(path)])):
            assert run.is_training or run.module == "augmentation"
            if run.module in modules:
                told = modules[run.module]([*run.arguments])
                assert told.devices == run.devices


def test_the_fastest_of_each_package_counts():
    def run(how, ms, tuning=""):
        return {"how": how, "ms_a_step": [ms], "tuning": tuning}

    slow, fast = run("torch", 3), run("torch", 2, "whole")
    other, ours = run("torch", 1, "torchvision"), run("conflux", 5)
    assert report.best([slow, ours, fast, other]) == [fast, ours, other]


def test_runs_share_gpus_and_end_in_time(tmp_path, monkeypatch):
    """Two runs of one GPU meet; one that hangs is ended, and its children."""
    script = tmp_path / "python"
    script.write_text(
        """#!/bin/sh
cd "$(dirname "$0")"
touch "on$CUDA_VISIBLE_DEVICES"
case "$*" in
*resnet*) sleep 60 & echo $! > child; wait;;
*small*) until [ -e on0 ] && [ -e on1 ]; do sleep 0.01; done;;
esac
cores=$(grep Cpus_allowed: /proc/self/status | tr -d '[:blank:]')
echo "{\\"gpus\\": \\"$CUDA_VISIBLE_DEVICES\\", \\"cores\\": \\"$cores\\"}"
"""
    )
    script.chmod(0o755)
    runner = runs.Runner(
        *(tmp_path / "runs", {"torch": [str(script)]}, 5), gpus=["0", "1"]
    )
    asked = [
        runs.Run("pytorch", len(name.split(",")), (name,))
        for name in ("0,1", "small 1", "small 2")
    ]
    found = {run.arguments[0]: out for run, out in runner.measure(asked, False)}
    assert found["0,1"][0]["gpus"] == "0,1"
    assert {found[f"small {i}"][0]["gpus"] for i in (1, 2)} == {"0", "1"}
    assert next(iter(found)) == "0,1"  # in order, though it needs most
    own = {found[f"small {i}"][0]["cores"] for i in (1, 2)}
    assert len(own) == min(2, len(os.sched_getaffinity(0)))

    runner = runs.Runner(tmp_path / "runs", {"torch": [str(script)]}, limit=1)
    hanging = runs.Run("pytorch", 1, ("resnet",))
    assert [*runner.measure([hanging], False)] == [(hanging, [])]
    assert (
        "1 s, its time limit"
        in (tmp_path / "runs/pytorch_resnet.log").read_text()
    )
    child = pathlib.Path("/proc", (tmp_path / "child").read_text().strip())
    deadline = time.monotonic() + 30
    while child.exists() and "Z" not in (child / "stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_peers_run_without_this_package(tmp_path, monkeypatch, started):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    exchange_folder.set_flags(os.environ, pathlib.Path("/1"), "GPU")
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    xla_flags.choose_products(os.environ)
    if version_numbers(tf.__version__)[:2] in xla_flags.KNOWN_TENSORFLOW:
        assert "cublaslt" in os.environ["XLA_FLAGS"]
    asked = "--models small --devices 1 2 --how conflux jax torch --batch 8"
    asked += " --kib --python torch=env\\ there/python --batches 2"
    assert benchmarks.main([*shlex.split(asked), "--out", str(tmp_path)]) == 0
    peers = [call for call in started.calls if call[1]["cwd"]]
    assert len(started.calls) == 6
    assert len(peers) == 4
    words = [" ".join(command[:-1]) for command, _ in peers]
    for count in "12":
        sizes = "--steps=64 --epochs=4 --batches=2 --batch=8"
        jax = f"-m benchmarks.keras_jax small {count} {sizes}"
        torch = f"-m benchmarks.pytorch small torch {count} {sizes}"
        assert f"{sys.executable} {jax}" in words
        assert f"env there/python {torch}" in words
    for command, settings in peers:
        # JAX may be of a version that dies of other flags.
        assert settings["env"]["XLA_FLAGS"] == "--mine"
        if "benchmarks.keras_jax" in command:
            assert settings["env"]["KERAS_BACKEND"] == "jax"

    # What the peers import is there without this package.
    monkeypatch.syspath_prepend(peers[0][1]["cwd"])
    for missing in ("keras_conflux", "tensorflow", "keras"):
        monkeypatch.setitem(sys.modules, missing, None)
    assert importlib.import_module("benchmarks.measured").CASES


def test_a_python_of_what_is_no_peer(tmp_path):
    with pytest.raises(SystemExit, match=r"Received: keras=python3"):
        benchmarks.main(["--python", "keras=python3", "--out", str(tmp_path)])


@pytest.mark.parametrize(
    "told",
    [
        "keras_jax small 2",
        "keras_jax small 2 --tuning on-device shard",
        "pytorch small torch-eager 2",
        "pytorch small torch-eager 2 --tuning buckets",
    ],
)
def test_peers(tmp_path, told):
    pytest.importorskip("torch" if "torch" in told else "jax")
    (tmp_path / "list").write_text(f"300 {told}")
    asked = "--steps 4 --epochs 1 --list"
    asked = [*asked.split(), str(tmp_path / "list"), "--out", str(tmp_path)]
    assert benchmarks.main(asked) == 0
    (found,) = json.loads((tmp_path / "bench.json").read_text())["training"]
    assert found["tuning"] == told.partition("--tuning ")[2]
    assert len(found["ms_a_step"]) == 1
    assert found["start_s"] > 0


@pytest.mark.parametrize("name", ["resnet", "gpt", "vit", "bert", "small"])
def test_peers_have_the_same_numbers_of_weights(name):
    torch = pytest.importorskip("torch")
    pytorch_models = importlib.import_module(
        "examples.benchmarks.pytorch_models"
    )
    with torch.device("meta"):
        peer = pytorch_models.Trained(name)
    ours = models.build(name)
    sizes = [math.prod(each.shape) for each in ours.trainable_weights]
    assert sum(each.numel() for each in peer.parameters()) == sum(sizes)


def test_a_start_is_all_but_the_steps():
    options = argparse.Namespace(
        **{"model": "small", "how": "jax", "devices": 1, "batch": 8},
        **{"jit": "auto", "execution": 1, "steps": 10, "epochs": 2},
        began=1000.0,
    )
    clock = measured.Clock()
    clock.seconds, clock.ends = [20, 5, 2, 2], [1030, 1035, 1037, 1039]
    found = measured.result(options, clock, [], [], None, {})
    assert found["start_s"] == 35 - 2 * 2
    assert found["ms_a_step"] == [200, 200]


def test_the_narrow_head_has_a_wide_loss(monkeypatch):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        small = {"depth": 1, "width": 16, "heads": 2, "length": 8}
        wide, narrow = (
            models.gpt(**small, vocabulary=32, head_dtype=dtype)
            for dtype in ("float32", None)
        )
    finally:
        keras.config.set_dtype_policy("float32")
    narrow.set_weights(wide.get_weights())
    x = np.arange(16).reshape(2, 8)
    assert wide(x).dtype == "float32"
    assert narrow(x).dtype == "bfloat16"
    losses = [model.evaluate(x, x, verbose=0) for model in (wide, narrow)]
    assert losses[0] != losses[1]
    np.testing.assert_allclose(*losses, rtol=2e-3)


def test_berts_padding_is_not_seen():
    bert = models.bert(depth=2, width=16, heads=2, length=8, vocabulary=32)
    (embedding,) = (
        layer for layer in bert.layers if layer.name.startswith("embedding")
    )
    x = np.array([[3, 4, 5, 0, 0, 0, 0, 0]])
    table = embedding.embeddings.numpy()
    noise = np.random.default_rng(0).standard_normal(16)

    def logits(changed):
        rows = (np.arange(32) == changed)[:, None]
        embedding.embeddings.assign(table + noise * rows)
        return bert(x).numpy()

    usual = logits(31)  # a token that the text does not have
    np.testing.assert_array_equal(logits(0), usual)
    assert not np.allclose(logits(5), usual)


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


@pytest.mark.parametrize(
    ("data", "image", "counts"),
    [
        ("performance.json", "speed.svg", {"1 GPU", "2 GPUs", "4 GPUs"}),
        ("two_gpus.json", "two_gpus.svg", {"1 GPU", "2 GPUs"}),
    ],
)
def test_the_pictures_show_the_recorded_data(tmp_path, data, image, counts):
    pytest.importorskip("matplotlib")
    drawn, again = tmp_path / "speed.svg", tmp_path / "again.svg"
    for each in (drawn, again):
        document = json.loads((DOCS / "data" / data).read_text())
        if "host" in document:  # one of the page's
            document = page.compared(document)
        plot.draw_document(each, document)
    assert drawn.read_bytes() == again.read_bytes()
    assert counts | {"keras-conflux"} <= {*texts(drawn)}
    has_scaling = "linear scaling" in " ".join(texts(drawn))
    assert has_scaling == (len(counts) > 1)
    assert texts(drawn) == texts(DOCS / "images" / image)
    assert drawn.stat().st_size < 60_000


def test_the_picture_of_losses_shows_the_recorded_data(tmp_path):
    pytest.importorskip("matplotlib")
    document = json.loads((DOCS / "data/equality.json").read_text())
    plot.draw_losses(tmp_path / "drawn.svg", document)
    drawn = texts(tmp_path / "drawn.svg")
    assert "four devices" in drawn
    assert drawn == texts(DOCS / "images/equality.svg")


def test_the_diagrams_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    data = json.loads((DOCS / "data/larger_models.json").read_text())
    diagrams.draw_all(tmp_path, data)
    drawn = {each.name: texts(each) for each in tmp_path.iterdir()}
    assert {"26", "16", "12"} <= {*drawn["memory_by_shard.svg"]}
    assert drawn["batch.svg"].count("16 samples") == 4
    for name, said in drawn.items():
        assert said == texts(DOCS / "images" / name)


def test_the_documents_say_what_is_recorded():
    """`python -m examples.benchmarks.page` makes them."""
    for name in page.DOCUMENTS:
        document = (DOCS.parent / name).read_text()
        assert "<!-- measured: " in document
        assert page.made(document) == document


def test_new_measurements_make_a_page(tmp_path, monkeypatch):
    run = {
        **{"model": "gpt", "batch": 8, "jit": "auto", "tuning": ""},
        **{"unit": "tokens", "peak_bytes": [2_500_000_000], "start_s": 30},
        **{"gpu": "NVIDIA H100", "versions": {"tensorflow": "2", "jax": "1"}},
    }
    ours = run | {"how": "conflux", "units_a_step": 8000}
    peer = run | {"how": "jax", "units_a_step": 16_000, "devices": 2}
    lines = [
        ours | {"devices": 1, "ms_a_step": [10.0], "later_starts_s": [9]},
        ours | {"devices": 2, "ms_a_step": [10.0], "units_a_step": 16_000},
        ours | {"devices": 2, "ms_a_step": [12.5], "units_a_step": 16_000},
        peer | {"ms_a_step": [13.0]},
        peer | {"ms_a_step": [11.5], "tuning": "on-device"},
        {"layer": "RandomFlip", "pipeline_ms": 1, "call_ms": 2, "step_ms": 3}
        | {"compiled": True},
    ]
    printed = tmp_path / "printed"
    printed.write_text("\n".join(["a table", *map(json.dumps, lines)]))
    monkeypatch.setattr(page, "ROOT", tmp_path)
    (tmp_path / "docs/data").mkdir(parents=True)
    (tmp_path / "docs/images").mkdir()
    kinds = ("conditions", "table 2", "claims 2", "gain", "augmentation")
    text = "\n".join(
        f"<!-- measured: new {kind} -->\n\n\n\n<!-- end -->" for kind in kinds
    )
    for name in page.DOCUMENTS:
        (tmp_path / name).write_text(text)
    taken = ["--take", str(printed), "--name", "new", "--date", "today"]
    page.main([*taken, "--host", "one host"])
    made = (tmp_path / page.DOCUMENTS[0]).read_text()
    assert "on one host (today), with TensorFlow 2 and JAX 1." in made
    # All epochs of both processes, of which the median counts.
    assert "| 10.0 to 12.5 | 1,422,000 tokens | 88.9 % | 2.5 | 30 | |" in made
    assert "Keras on JAX (on-device) | 11.5 |" in made
    assert "13.0" not in made  # the best of each counts
    assert "| GPT, float32 head | alike | |" in made
    assert "1.78 to 1.78 times as fast as on one" in made
    assert "| `RandomFlip` | 1.0 | 2.0 | 3.0 | yes |" in made


def test_the_picture_of_runs_of_another_machine(tmp_path):
    pytest.importorskip("matplotlib")
    run = {"how": "torch", "devices": 1, "batch": 8, "gpu": "NVIDIA H200"}
    run |= {"ms_a_step": [5.0], "unit": "images", "units_a_step": 8}
    models = ("resnet", "gpt", "gpt-bf16", "vit", "bert")
    runs = [
        run | {"model": name, "versions": {"torch": "3"}} for name in models
    ]
    here = {"gpus": [], "cpu": "x", "tensorflow": "2", "keras": "3"}
    source, drawn = tmp_path / "bench.json", tmp_path / "speed.svg"
    source.write_text(json.dumps({"machine": here, "training": runs}))
    plot.draw_file(source, drawn)
    shown = texts(drawn)
    assert {plot.TITLES[name] for name in models} <= {*shown}
    assert shown.count("PyTorch, compiled") == len(models)
    assert "NVIDIA H200; " in " ".join(shown)
    assert "PyTorch 3" in " ".join(shown)


@pytest.mark.parametrize("source", ["synthetic", "memory", "files"])
def test_input_pipelines(monkeypatch, capsys, source):
    monkeypatch.setattr(slow_input, "_has_told", False)
    monkeypatch.setattr(slow_input, "MINIMUM_SECONDS", 0.0)
    monkeypatch.setattr(slow_input, "MINIMUM_SHARE", 0.0)
    asked = "--model small --batch 4 --images 6 --steps 3 --epochs 2"
    pipeline.main([source, *asked.split()])
    found = json.loads(capsys.readouterr().out)
    assert found["source"] == source
    assert len(found["samples_per_second"]) == 2
    assert found["alone_images_s"] > 0
    (said,) = found["said"]
    assert "waited for its data" in said


@pytest.mark.parametrize("source", ["memory", "files"])
def test_images_of_a_pipeline(tmp_path, source):
    data = pipeline.SOURCES[source](6, 8, 16, tmp_path)
    (images, labels), (others, _) = data.take(2).as_numpy_iterator()
    assert images.shape == (8, 16, 16, 3)
    assert images.dtype == "uint8"
    assert 40 < images.std() < 90
    assert set(labels) == set(range(6))  # drawn again when all are drawn
    assert not np.array_equal(images, others)


@pytest.mark.parametrize("way", ["fused", "keras"])
def test_attentions(monkeypatch, capsys, way):
    disabled = []
    monkeypatch.setattr(
        keras.config, "disable_flash_attention", lambda: disabled.append(way)
    )
    asked = "16 --batch 1 --layers 1 --steps 2 --epochs 1 --way"
    policy = keras.config.dtype_policy()
    try:
        attention.main([*asked.split(), way])
    finally:
        keras.config.set_dtype_policy(policy)
    found = json.loads(capsys.readouterr().out)
    assert found["attention"] == way
    assert disabled == ["keras"] * (way == "keras")
    assert len(found["step_ms"]) == 1
    assert len(found["losses"]) == 2


def test_messages_of_a_process_that_is_alone(monkeypatch):
    monkeypatch.setattr(messages, "_REPETITIONS", 3)
    found = messages.measure()
    assert found["processes"] == 1
    assert found["sum_ms"] > 0

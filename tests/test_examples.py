"""The examples, run in forks of a process that has imported Keras."""

import json
import pathlib
import re

import forked
import keras
import numpy as np
import pytest
from conftest import MANY
from conftest import ON_GPU

from examples import lora

ROOT = pathlib.Path(__file__).parent.parent
COUNT = "2" if ON_GPU else "3"
ACCURACY = rf"test accuracy on {COUNT} devices: ([\d.]+)%"


def run(name: str) -> str:
    """Returns what an example prints in one epoch."""
    return printed_by(f"examples/{name}.py", "--devices", COUNT)


def printed_by(*command: str) -> str:
    result = forked.run(*command, "--epochs", "1", cwd=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("digits", 10),
        pytest.param("custom_loop", 10, marks=pytest.mark.long),
        pytest.param("text", 37, marks=pytest.mark.long),
    ],
)
def test_classifier_learns_and_is_served(name, guess):
    printed = run(name)
    (accuracy,) = re.findall(ACCURACY, printed)
    assert float(accuracy) > guess + 20
    assert "served without keras_conflux" in printed
    if name == "digits":
        (single,) = re.findall(r"test accuracy on 1 device: ([\d.]+)%", printed)
        (gap,) = re.findall(r"probabilities differ by at most (\S+)", printed)
        assert ON_GPU or (accuracy == single and float(gap) < 1e-5)


@pytest.mark.long
def test_halves_find_each_other_as_on_one_device():
    printed = run("halves")
    many, one = re.findall(r"test accuracy on \d devices?: ([\d.]+)%", printed)
    (gap,) = re.findall(r"points differ by at most (\S+)", printed)
    assert float(many) > 10  # by guessing, 5
    assert ON_GPU or (many == one and float(gap) < 1e-4)


@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes several CPU devices")
def test_lora_trains_beside_parts_as_on_one_device(tmp_path):
    out = tmp_path / "lora.npz"
    printed = fine_tuned("--gigabytes", "0.00023", "--out", out)
    copy, _, part = weights_told(printed)
    assert copy > 230 > part  # kB
    assert re.search(r"shard='weights', variables take [67]\d%", printed)
    (size,) = re.findall(r"depth (\d+) and width (\d+)", printed)
    depth, width = map(int, size)
    keras.utils.set_random_seed(0)
    one = lora.build_model(width, depth)
    lora.enable_lora(one)
    losses = one.fit(*lora.build_data(), batch_size=32, verbose=0)
    (loss,) = re.findall(r"loss: ([\d.]+)", printed)
    assert float(loss) == pytest.approx(losses.history["loss"][0], abs=1e-3)
    trained = one.trainable_variables
    assert len(trained) == 4 * depth + 2
    values = [each.numpy() for each in trained]
    lora.load(one, out)
    for found, wanted in zip(trained, values, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.skipif(not ON_GPU or MANY < 2, reason="takes several GPUs")
def test_lora_has_no_memory_for_copies(tmp_path):
    given = "--gigabytes", "2", "--out", tmp_path / "lora.npz"
    copy, _, part = weights_told(fine_tuned(*given))
    assert copy > 2 > part  # GB
    with pytest.raises(
        AssertionError, match=r"OOM|[Oo]ut of memory|Dst tensor"
    ):
        fine_tuned(*given, "--shard", "none")


def fine_tuned(*options):
    return printed_by("examples/lora.py", "--devices", "2", *options)


def weights_told(printed):
    """Returns what weights take: copies, parts of the optimizer, and parts."""
    told = re.findall(r"^shard=\S+ +([\d.]+)", printed, re.MULTILINE)
    return map(float, told)


@pytest.mark.long
def test_gan_draws_better_than_untrained():
    distances = re.search(
        rf"distance on {COUNT} devices: ([\d.]+) \(untrained ([\d.]+)",
        run("gan"),
    )
    assert float(distances[1]) < float(distances[2]) / 2


@pytest.mark.long
def test_processes_train_as_one_does():
    script = "examples/several_processes.py"
    launcher = ["-m", "keras_conflux", "run", "--processes", "2"]
    printed = printed_by(script) + printed_by(*launcher, script)
    found = re.findall(
        r"(\w+) data, number of processes: (\d), "
        r"test accuracy: ([\d.]+)%, loss: ([\d.]+)",
        printed,
    )
    assert [each[:2] for each in found] == [
        (data, count) for count in "12" for data in ("global", "local")
    ], printed
    assert float(found[0][2]) > 50  # by guessing, 10
    assert ON_GPU or len({accuracy for *_, accuracy, _ in found}) == 1
    losses = [float(loss) for *_, loss in found]
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-2 if ON_GPU else 1e-5)


@pytest.mark.long
def test_the_benchmarks_measure(tmp_path):
    asked = "--devices 2 --how conflux --steps 2 --kib --json --out"
    printed = printed_by(
        *("-m", "examples.benchmarks", *asked.split(), str(tmp_path))
    )
    (run,) = json.loads(printed)["training"]
    assert (run["how"], run["devices"]) == ("conflux", 2)
    assert run["ms_a_step"][0] > 0

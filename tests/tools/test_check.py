"""`keras-conflux check` and `keras-conflux env`: what is wrong is named."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import time

import keras
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from test_run import COMMAND
from test_run import is_alive
from test_run import wait_until

import keras_conflux as kc
from keras_conflux._communication.communicator import Communicator
from keras_conflux._fit.execution.xla_program import XlaProgram
from keras_conflux.tools.checks import CHECKS
from keras_conflux.tools.checks import Wrong
from keras_conflux.tools.checks import compute
from keras_conflux.tools.checks import equal
from keras_conflux.tools.checks import faster
from keras_conflux.tools.checks import nvidia
from keras_conflux.tools.cli import check
from keras_conflux.tools.cli import env
from keras_conflux.tools.cli import main
from keras_conflux.tools.cli.check import Result

DOCS = pathlib.Path(__file__).parents[2] / "docs"
SOME = min(2, MANY)
several = pytest.mark.skipif(SOME < 2, reason="needs two devices")


@pytest.fixture
def wrong():
    """Returns a function that returns what a check says, and what to type."""

    def run(module, count=SOME):
        with pytest.raises(Wrong) as caught:
            module.check(count)
        return f"{caught.value} -> {caught.value.todo}"

    return run


# --- each check, with a fault of its own ---------------------------------


def test_compute(wrong, monkeypatch):
    passed = compute.check(SOME)
    assert "each computes right" in passed.text
    assert keras.__version__ in passed.text
    assert passed.slow is None
    with monkeypatch.context() as patch:
        patch.setattr(compute, "visible_gpus", lambda _: ["0"] * 9)
        found = wrong(compute)
        assert re.search(r"driver lists 9 GPUs, and TensorFlow sees \d", found)
    with monkeypatch.context() as patch:
        patch.setattr(keras, "__version__", "3.99.0")
        assert "first use compares" in compute.check(SOME).slow
    assert "keras-conflux check --devices 0" in wrong(compute, count=99)
    original = tf.linalg.matmul

    def nearly(a, b):
        last = a.device.endswith(f":{SOME - 1}")
        return original(a, b) + tf.one_hot(3, b.shape[1]) * last

    with monkeypatch.context() as patch:
        patch.setattr(tf.linalg, "matmul", nearly)
        assert re.search(r":1 computes 512 of 262144 ent.*ECC", wrong(compute))
    with monkeypatch.context() as patch:
        patch.setattr(kc.Device, "name", property(lambda device: device))
        assert "not of one kind" in wrong(compute)


@pytest.mark.parametrize(
    ("visible", "is_busy"),
    [("0,2", True), ("GPU-c", True), ("0,1,2", False)],
)
def test_gpus_that_others_use(wrong, monkeypatch, visible, is_busy):
    visible = visible.split(",")
    monkeypatch.setattr(compute, "visible_gpus", lambda _: visible)
    monkeypatch.setattr(compute, "unseen", lambda *_: None)
    listed = [["0", "GPU-a"], ["1", "GPU-b"], ["2", "GPU-c"]]
    monkeypatch.setattr(nvidia, "gpus", lambda *_: listed)
    monkeypatch.setattr(nvidia, "processes", lambda: [["GPU-c", "77", "x"]])
    if is_busy:
        found = wrong(compute, count=2)
        assert re.search(r"process 77 \(x\) .* the GPU 2 .*kill 77", found)
    else:
        compute.check(2)


FAULTS = {
    "copies come apart": (lambda right, given: given, "keras-conflux env"),
    "all get too much": (lambda right, given: right * 1.5, "differs by .*env"),
}


@pytest.mark.sampled(1)
@several
@pytest.mark.parametrize("fault", FAULTS)
def test_equal(wrong, monkeypatch, fault):
    change, expected = FAULTS[fault]
    original = Communicator.all_reduce

    def wrongly(self, tensor, *call):
        right = original(self, tensor, *call)
        return change(right, tensor) if tensor.dtype == tf.float32 else right

    monkeypatch.setattr(Communicator, "all_reduce", wrongly)
    assert re.search(expected, wrong(equal))


@pytest.mark.long
@several
def test_equal_passes():
    assert 0 <= equal.check(SOME).values["difference"] < 1e-4


@pytest.mark.long
def test_a_step_that_xla_does_not_compile(wrong, monkeypatch):
    def fails(*_):
        raise tf.errors.UnimplementedError(None, None, "XLA has no device")

    monkeypatch.setattr(XlaProgram, "__call__", fails)
    assert re.search("XLA has no device.*jit_compile=False", wrong(equal))


@pytest.mark.parametrize(
    ("speed", "wait", "slow"),
    [
        (194, 0, None),
        (120, 0, "topo -m.*NCCL_DEBUG"),
        (120, 0.5, "50% .* wait for input"),
    ],
)
def test_faster(monkeypatch, speed, wait, slow):
    gpus = (kc.Device("GPU:0"), kc.Device("GPU:1"))
    monkeypatch.setattr(kc, "devices", lambda count: gpus[:count])
    monkeypatch.setattr(
        faster,
        "_speed",
        lambda given: {
            "samples_per_second": speed if len(given) > 1 else 100,
            "input_wait": wait,
        },
    )
    passed = faster.check(2)
    assert passed.values == {"ratio": speed / 100}
    if slow:
        assert re.search(slow, passed.slow)
    else:
        assert passed.slow is None


@pytest.mark.long
def test_what_faster_measures(monkeypatch):
    monkeypatch.setattr(faster, "_WIDTH", 8)
    monkeypatch.setattr(faster, "_BATCH", 8)
    policy = keras.config.dtype_policy()
    try:
        speed = faster._speed(kc.devices(1))
    finally:
        keras.config.set_dtype_policy(policy)
    assert speed["samples_per_second"] > 0
    assert 0 <= speed["input_wait"] < 1


# --- the command ---------------------------------------------------------


@pytest.fixture
def conflux(monkeypatch, capsys):
    """Runs `keras-conflux check` with a script in place of each check."""

    def run(script, *options, limit=None):
        scripts = script if isinstance(script, dict) else {}

        def command(name, _):
            found = scripts.get(name, passed("fine"))
            text = script if isinstance(script, str) else found
            return [sys.executable, "-S", "-c", text]

        monkeypatch.setattr(check, "command", command)
        if limit:
            short = [dataclasses.replace(c, limit=limit) for c in CHECKS]
            monkeypatch.setattr(check, "CHECKS", short)
        monkeypatch.setattr(check, "visible_gpus", lambda _: [])
        status = main(["check", *options])
        return status, capsys.readouterr().out

    return run


def said(**document):
    return f"print({json.dumps(document)!r})"


def passed(text, slow=None, **values):
    return said(text=text, values=values, slow=slow)


def test_all_is_good(conflux):
    status, out = conflux(passed("fine"))
    assert status == 0
    names = re.findall(r"(?m)^ok +(\w+) +fine", out)
    assert names == ["compute", "equal"]
    assert "2 logical CPU devices, all good. There is no GPU" in out


def test_some_checks_are_asked_for(conflux):
    _, out = conflux(passed("fine"), "--only", "equal")
    assert re.findall(r"(?m)^ok +(\w+)", out) == ["equal"]


def test_what_is_wrong_is_named(conflux):
    script = {"equal": said(wrong="differs by 1", todo="report it")}
    status, out = conflux(script)
    assert status == 1
    assert re.search(r"(?m)^wrong +equal +differs by 1 .*\n +type: report", out)
    assert "1 of 2 checks failed: equal." in out


def test_a_hang_is_named_and_ended(conflux, tmp_path):
    mark = tmp_path / "alive"
    script = f"""{said(doing="the sum of float32")}
import os, sys, time
sys.stdout.flush()
if os.fork() == 0:
    time.sleep(6)
    open({str(mark)!r}, "w")
time.sleep(60)
"""
    began = time.monotonic()
    status, out = conflux({"equal": script}, limit=3)
    assert status == 1
    assert "hangs: ended after 3 s in the sum of float32" in out
    assert "type: NCCL_P2P_DISABLE=1 keras-conflux check" in out
    assert time.monotonic() - began < 20
    time.sleep(4)
    assert not mark.exists()  # what it has started has ended with it


def test_one_that_dies_is_named(conflux):
    script = f"{said(doing='XLA')[:-1]}, flush=True)\nimport os; os.abort()"
    status, out = conflux({"equal": script})
    assert status == 1
    assert re.search(r"wrong +equal +ended \(Aborted\) in XLA", out)
    status, out = conflux({"equal": "raise ValueError('unheard of')"})
    assert status == 1
    assert "(exit status 1) in its start: ValueError: unheard of" in out
    status, out = conflux({"equal": "print('no JSON')"})
    assert status == 1
    assert "exit status 0" in out


def test_slow_is_no_failure(conflux):
    script = {"compute": passed("newer", slow="install an older one")}
    status, out = conflux(script)
    assert status == 3
    assert "1 of 2 checks slower than usual: compute." in out


def test_json(conflux):
    status, out = conflux(passed("fine", speed=2.0), "--json")
    document = json.loads(out)
    assert status == 0
    assert document["sentence"].startswith("2 logical CPU devices, all good.")
    assert len(document["checks"]) == 2
    assert document["checks"][0] | {"seconds": 0} == {
        "name": "compute",
        "status": "good",
        "text": "fine",
        "todo": "",
        "seconds": 0,
        "values": {"speed": 2.0},
    }


def test_the_sentence_about_gpus():
    good = Result("equal", "good", "", "", 1.0, {})
    fast = dataclasses.replace(good, name="faster", values={"ratio": 1.94})
    said = check.sentence([good, fast], 2, 2)
    assert said == "2 GPUs, all good: 1.94 times as fast as one."
    assert check.sentence([good], 1, 1) == "1 GPU, all good."


def test_a_check_trains_alone_whatever_a_launcher_says():
    set_by_launchers = {"TF_CONFIG", "KERAS_DISTRIBUTION_NUM_PROCESSES", "RANK"}
    environ = dict.fromkeys(set_by_launchers, "4") | {"A": "1"}
    found = check._environment(environ)
    assert found["A"] == "1"
    assert not set_by_launchers & found.keys()


@pytest.mark.skipif(ON_GPU, reason="runs for CI, where the GPUs are not held")
def test_a_check_of_this_machine(capsys):
    assert main(["check", "--only", "compute", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["checks"]
    assert found["text"].startswith("2 logical CPU devices")


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="runs for CI, where the GPUs are not held")
def test_all_checks_of_this_machine(capsys):
    assert main(["check", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["checks"]
    missing = {each.name for each in CHECKS} - {each["name"] for each in found}
    assert missing == {"faster"}


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="runs for CI, where the GPUs are not held")
def test_a_fault_in_the_process_of_a_check(monkeypatch, capsys):
    """Whatever is wrong in a process reaches who has typed the command."""
    fault = """
import sys
import tensorflow as tf
from keras_conflux.tools.checks.__main__ import main
right = tf.linalg.matmul
tf.linalg.matmul = lambda a, b: right(a, b) + 1
sys.exit(main(*sys.argv[1:]))
"""

    def command(name, devices):
        return [sys.executable, "-c", fault, name, str(devices)]

    monkeypatch.setattr(check, "command", command)
    assert main(["check", "--only", "compute"]) == 1
    assert re.search("wrong +compute +CPU:0 computes", capsys.readouterr().out)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_all_checks(tmp_path, monkeypatch):
    sleeps = "import os, sys, time; os.mkdir(f'{sys.argv[1]}/{os.getpid()}'); "
    sleeps += "time.sleep(60)"

    def command(*arguments):
        return [sys.executable, "-c", sleeps, str(tmp_path)]

    def interrupt():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(check, "command", command)
    monkeypatch.setattr(check, "visible_gpus", lambda environ: [])
    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        main(["check"])
    pids = [int(path.name) for path in tmp_path.iterdir()]
    wait_until(lambda: not any(map(is_alive, pids)))
    assert len(list(tmp_path.iterdir())) == 1  # no other one began


# --- keras-conflux env --------------------------------------------------

KEYS_OF_ENV = {
    *("python", "system", "cpu_cores", "packages"),
    *("gpus", "gpu_links", "gpu_processes"),
    *("import_error", "cuda", "cudnn", "devices", "program_cache"),
    *("settings", "cluster_variables", "initialize"),
}
"""Programs read these: a key that goes or is renamed breaks them."""


def test_env(capsys, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": "secret"')
    monkeypatch.setenv("TF_VAR_password", "secret")
    monkeypatch.setenv("CONFLUX_TOKEN", "secret")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["env"]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        rf"(?m)^\| packages +\| .*keras={re.escape(keras.__version__)},", shown
    )
    assert "NCCL_P2P_DISABLE=1" in shown
    assert "| program cache" in shown
    assert re.search(
        r"\| cluster variables +\| CONFLUX_TOKEN; TF_CONFIG +\|", shown
    )
    assert "secret" not in shown
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["keras"] == keras.__version__
    assert isinstance(found["cpu_cores"], int)
    assert found["settings"]["NCCL_P2P_DISABLE"] == "1"
    assert found["cluster_variables"] == ["CONFLUX_TOKEN", "TF_CONFIG"]
    assert found["initialize"] == "raise a ClusterError about TF_CONFIG"
    assert found.keys() == KEYS_OF_ENV


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "do nothing: this process is alone"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "4"},
            r"join 4 processes \(PMI_SIZE\)",
        ),
        ({"PMI_RANK": "0"}, "raise a ClusterError about the variables of MPI"),
    ],
)
def test_what_initialize_would_do(environ, expected):
    assert re.match(expected, env.facts(environ)["initialize"])


def test_env_of_a_machine_with_gpus(monkeypatch, tmp_path):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        """#!/bin/sh
case "$*" in
--query-gpu*) echo '0, NVIDIA H200, 143771 MiB, 4 MiB, 570.1'
              echo '1, NVIDIA H200, 143771 MiB, 9 MiB, 570.1';;
--query-compute-apps*) echo 'GPU-a, 77, python';;
topo*) printf '\\tGPU0\\tGPU1\\nGPU0\\t X \\tNV18\\nGPU1\\tNV18\\t X \\n';;
esac
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = env.facts({})
    assert found["gpus"][1] == {
        "index": "1",
        "name": "NVIDIA H200",
        "memory.total": "143771 MiB",
        "memory.used": "9 MiB",
        "driver_version": "570.1",
    }
    assert env.shown(found["gpus"]).startswith("index=0, name=NVIDIA H200, ")
    assert found["gpu_processes"] == [{"pid": 77, "gpu": "GPU-a"}]
    assert found["gpu_links"] == "NV18"


# --- all commands --------------------------------------------------------


@pytest.fixture
def without_tensorflow():
    """Returns a function that types the command where TensorFlow is missing."""
    script = """
import runpy
import sys
sys.modules["tensorflow"] = sys.modules["keras"] = None
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""

    def run(*words):
        return subprocess.run(
            [sys.executable, "-c", script, COMMAND, *words],
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.mark.parametrize(
    "words",
    [
        (),
        *((name,) for name in ("run", "env", "check")),
    ],
)
def test_help_needs_no_tensorflow(words, without_tensorflow):
    ended = without_tensorflow(*words, "--help")
    assert ended.returncode == 0, ended.stderr
    assert "usage: keras-conflux" in ended.stdout


def test_env_where_tensorflow_is_missing(without_tensorflow):
    ended = without_tensorflow("env")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"import error +\| tensorflow: ", ended.stdout)
    found = json.loads(without_tensorflow("env", "--json").stdout)
    assert found["import_error"].startswith("tensorflow: ")
    assert found.keys() == KEYS_OF_ENV


def test_the_version_is_said(without_tensorflow):
    ended = without_tensorflow("--version")
    assert ended.stdout == f"keras-conflux {kc.__version__}\n", ended.stderr


def test_without_a_subcommand_the_help_is_shown(without_tensorflow):
    ended = without_tensorflow()
    assert ended.returncode == 2
    assert "print versions, devices and settings" in ended.stderr


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        ("tensorflow", r"program cache +\| (?!none)"),
        ("numpy", r"import error +\| keras_conflux: "),
    ],
)
def test_env_runs_what_the_command_leaves_out(backend, expected):
    ended = subprocess.run(
        [sys.executable, COMMAND, "env"],
        env=os.environ | {"KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(expected, ended.stdout)


def test_a_signal_has_a_name():
    said = {"doing": "its start"}
    ended = check._result(CHECKS[0], -signal.SIGSEGV, said, "")
    assert "Segmentation fault" in ended.text


def test_the_page_shows_what_was_recorded():
    record = json.loads((DOCS / "data" / "check.json").read_text())
    page = (DOCS / "questions.md").read_text()
    shown = [
        "$ keras-conflux check",
        *(
            str(check.line(Result(**each))).rstrip()
            for each in record["checks"]
        ),
        f"\n{record['sentence']}",
    ]
    assert "\n".join(shown) in page

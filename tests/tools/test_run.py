"""`keras-conflux run`, with scripts that do not import TensorFlow."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib

import pytest

import keras_conflux
from keras_conflux._devices import driver
from keras_conflux._extensions.launchers import known
from keras_conflux.tools.cli import main
from keras_conflux.tools.cli import output
from keras_conflux.tools.cli.run import deal

PACKAGE = pathlib.Path(keras_conflux.__file__).parent

COMMAND = PACKAGE.parent / "keras_conflux_command.py"
BEGIN = """
import json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
attempt = int(os.environ["CONFLUX_ATTEMPT"])
here = pathlib.Path(__file__).parent
def tell(name, number):
    (here / f".{name}{task}").write_text(str(number))
    (here / f".{name}{task}").rename(here / f"{name}{task}")
def ready():
    tell("ready", os.getpid())
def meet(count):
    ready()
    while len(list(here.glob("ready*"))) < count:
        time.sleep(0.01)
"""


def _hears_interrupts():
    # A program that a shell has started in the background hears none.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def launch(tmp_path):
    """Returns a function that starts the launcher, and ends it afterwards."""
    started = []

    def start(script, *options, environ=None, before=(), **streams):
        (tmp_path / "script.py").write_text(BEGIN + script)
        if "-m" not in options:
            options = (*options, "script.py")
        started.append(
            subprocess.Popen(
                [*before, sys.executable, COMMAND, "run", *options],
                cwd=tmp_path,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}
                | (environ or {}),
                text=True,
                errors="replace",
                preexec_fn=_hears_interrupts,
                **{
                    "stdout": subprocess.PIPE,
                    "stderr": subprocess.PIPE,
                    **streams,
                },
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def run(launch):
    """Returns a function that returns the status and both outputs."""

    def finish(script, *options, **more):
        process = launch(script, *options, **more)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return finish


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_alive(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def pids(folder, pattern="ready*"):
    return [int(path.read_text()) for path in folder.glob(pattern)]


# --- what the processes get ----------------------------------------------


def test_environment(run):
    script = """
print(json.dumps({name: os.environ.get(name) for name in (
    "TF_CONFIG", "CONFLUX_ATTEMPT", "PYTHONUNBUFFERED", "CUDA_VISIBLE_DEVICES",
    "CONFLUX_TOKEN", "MINE")}))
"""
    visible = {"CUDA_VISIBLE_DEVICES": "4,5,6,7,8", "MINE": "1"}
    visible["CONFLUX_TOKEN"] = "of another training"
    status, out, err = run(script, "--processes", "2", environ=visible)
    assert (status, err) == (0, "")
    told = [json.loads(line[4:]) for line in sorted(out.splitlines())]
    configs = [json.loads(each.pop("TF_CONFIG")) for each in told]
    (token,) = {each.pop("CONFLUX_TOKEN") for each in told}
    assert re.fullmatch("[0-9a-f]{64}", token)
    same = {"CONFLUX_ATTEMPT": "0", "PYTHONUNBUFFERED": "1", "MINE": "1"}
    assert told == [
        same | {"CUDA_VISIBLE_DEVICES": "4,5"},
        same | {"CUDA_VISIBLE_DEVICES": "6,7"},
    ]
    addresses = configs[0]["cluster"]["worker"]
    assert len(set(addresses)) == 2
    assert all(re.fullmatch(r"localhost:\d+", each) for each in addresses)
    for index, config in enumerate(configs):
        task = {"type": "worker", "index": index}
        assert config == {"cluster": {"worker": addresses}, "task": task}


OWN_NETWORK = [
    *("unshare", "--map-root-user", "--net", "sh", "-c"),
    *('ip link set lo up && exec "$0" "$@"',),
]


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_network_of_their_own(launch, tmp_path):
    """As `docs/several-hosts.md` says."""
    script = """
import socket
with socket.create_server(("", 0)) as server:
    port = server.getsockname()[1]
    socket.create_connection(("localhost", port)).close()
    print(socket.if_nameindex(), flush=True)
    tell("port", port)
    while not (here / "done").exists():
        time.sleep(0.01)
"""
    process = launch(script, "--processes", "1", before=OWN_NETWORK)
    wait_until(lambda: (tmp_path / "port0").exists() or process.poll())
    if process.poll() == 1 and "unshare" in (said := process.stderr.read()):
        pytest.skip(said)
    (port,) = pids(tmp_path, "port*")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("localhost", port))
    (tmp_path / "done").touch()
    out, err = process.communicate(timeout=60)
    expected = "[0] [(1, 'lo')]\n"
    assert (process.returncode, out, err) == (0, expected, "")


def test_arguments_of_the_script(run):
    script = "print(sys.argv, __name__)"
    options = ["--processes", "1", "script.py", "--grace", "-m", "x"]
    status, out, _ = run(script, *options[:2], "script.py", *options[3:])
    assert status == 0
    assert "'--grace', '-m', 'x'" in out


def test_module(run, tmp_path):
    script = "print(sys.argv[1:], __name__)"
    options = ["--processes", "1", "-m", "script", "--processes", "x"]
    status, out, _ = run(script, *options)
    assert (status, out) == (0, "[0] ['--processes', 'x'] __main__\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "expected --processes N, before the script"),
        (["--processes", "0"], "0 is below 1"),
        (["--processes", "x"], "invalid int value: 'x'"),
        (["--processes", "1", "--grace", "-1"], "no time from 0"),
        (["--processes", "1", "nothing.py"], "no file 'nothing.py'"),
        (["--processes", "1", "-m"], "expected a script, or -m and a module"),
        (["--processes", "3"], "2 GPUs for 3 processes.* --processes 2, or"),
        (
            ["--processes", "2", "--gpus-per-process", "2"],
            "need 4 GPUs, but there are 2",
        ),
        (["-n", "2"], r"--processes N\](?s:.)*unrecognized arguments: -n"),
    ],
)
def test_wrong_options(run, options, message):
    status, out, err = run(
        "print(1)", *options, environ={"CUDA_VISIBLE_DEVICES": "0,1"}
    )
    assert (status, out) == (2, "")
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("rank", "size", "who"),
    [("PMI_RANK", "PMI_SIZE", "MPI"), ("RANK", "WORLD_SIZE", "torchrun")],
)
def test_a_launcher_in_each_task_of_another(run, rank, size, who):
    environ = {rank: "0", size: "4"}
    status, _, err = run("", "--processes", "2", environ=environ)
    assert status == 2
    assert f"{who} has started this command 4 times ({size})" in err
    assert f"unset {rank} {size}" in " ".join(err.split())


def test_leftovers_of_launchers(run):
    """Of all that there are, also of those that do not fit together."""
    left = {
        name + "X" * (name[-1] == "_"): "0"
        for launcher in known.LAUNCHERS
        for name in launcher.variables
    }
    kept = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "2", "RANKING": "1"}
    script = f"print([each for each in {sorted(left)} if each in os.environ])"
    script += f"\nprint([each in os.environ for each in {sorted(kept)}])"
    options = ["--processes", "1"]
    status, out, err = run(script, *options, environ=left | kept)
    assert (status, err) == (0, "")
    assert out == "[0] ['TF_CONFIG']\n[0] [True, True, True]\n"


def test_leftovers_that_tell_of_others_are_named(run):
    left = {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1",
        "KERAS_DISTRIBUTION_PROCESS_ID": "1",
    }
    script = "print([each for each in os.environ if 'DISTRIBUTION' in each])"
    status, out, err = run(script, "--processes", "1", environ=left)
    assert (status, out) == (0, "[0] []\n")
    assert "tells of 2 processes" in err
    assert all(name in err for name in left)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([], 2, None), [None, None]),
        (([], 2, 0), ["-1", "-1"]),
        ((["0", "1"], 2, 0), ["-1", "-1"]),
        ((["0", "1", "2", "3"], 2, None), ["0,1", "2,3"]),
        ((["0", "1", "2"], 2, None), ["0", "1"]),
        ((["0", "1", "2"], 2, 1), ["0", "1"]),
        ((["GPU-a", "MIG-b"], 2, None), ["GPU-a", "MIG-b"]),
    ],
)
def test_deal(arguments, expected):
    assert deal(*arguments) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", []), ("-1", []), ("2, 3", ["2", "3"]), ("0,-1,1", ["0"])],
)
def test_visible_gpus(given, expected):
    assert driver.visible_gpus({"CUDA_VISIBLE_DEVICES": given}) == expected


def test_gpus_of_nvidia_smi(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    lines = "GPU 0: H200 (UUID: x)\\n  MIG 1g: y\\nGPU 1: H200 (UUID: z)\\n"
    program.write_text(f"#!/bin/sh\ntest $1 = -L && printf '{lines}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert driver.visible_gpus({}) == ["0", "1"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert driver.visible_gpus({}) == []


# --- output --------------------------------------------------------------


def test_each_line_has_the_number_of_its_process(run):
    script = """
print("one\\n\\nthree", flush=True)
print("wrong", file=sys.stderr)
sys.stdout.buffer.write(b"\\xff is no UTF-8, and has no end")
"""
    status, out, err = run(script, "--processes", "11")
    assert status == 0
    texts = ("one", "", "three", "\ufffd is no UTF-8, and has no end")
    for index in range(11):
        number = f"[{index:>2}] "
        mine = [line for line in out.split("\n") if line.startswith(number)]
        assert mine == [number + text for text in texts]
        assert f"{number}wrong\n" in err
    assert len(err.splitlines()) == 11


def test_lines_of_several_processes_do_not_mix(run):
    script = """
for _ in range(200):
    for part in ("a" * 50, "b" * 50, "\\n"):
        print(part, end="", flush=True)
"""
    _, out, _ = run(script, "--processes", "3")
    lines = [f"[{index}] {'a' * 50}{'b' * 50}" for index in range(3)]
    assert sorted(out.splitlines()) == sorted(200 * lines)


def test_a_progress_bar_is_one_line_in_a_file(run):
    script = """
for step in range(5):
    print("\\b" * 8 + f"\\rstep {step}", end="", flush=True)
    time.sleep(0.01)
print("\\ndone\\r")
print("erased\\rkept")
"""
    _, out, _ = run(script, "--processes", "1")
    assert out == "[0] step 4\n[0] done\n[0] kept\n"


def test_a_long_progress_bar_is_in_a_file_from_time_to_time():
    written = []

    class Screen(output.Screen):
        def write(self, descriptor, line):
            written.append((descriptor, line))

    stream = output.Output(Screen(written.append), 2, b"[0] ")
    stream.feed(b"\rstep 1")
    stream._next_redrawn = 0.0
    stream.feed(b"\rstep 2")
    stream.feed(b"\rstep 3")
    assert written == [(2, b"[0] step 2")]
    stream.close()
    assert written == [(2, b"[0] step 2"), (2, b"[0] step 3")]


def test_it_ends_when_nobody_reads_its_output(launch):
    script = """
while True:
    print("more")
"""
    process = launch(script, "--processes", "2")
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20) == 128 + signal.SIGTERM


# --- failures ------------------------------------------------------------


def test_one_that_ends_well_leaves_the_others_alone(run):
    script = """
if task:
    time.sleep(0.5)
    print("still here")
"""
    options = ["--processes", "2", "--grace", "0"]
    assert run(script, *options) == (0, "[1] still here\n", "")


def test_others_have_time_to_end_by_themselves(run):
    script = """
meet(2)
if task == 1:
    sys.exit(3)
time.sleep(0.5)
print("saved")
sys.exit(4)
"""
    status, out, err = run(script, "--processes", "2", "--grace", "20")
    assert (status, out) == (3, "[0] saved\n")
    assert err == "keras-conflux run: process 1 ended with exit status 3\n"


def test_a_failure_that_another_causes_is_not_told(run):
    script = """
meet(2)
if task == 1:
    time.sleep(0.5)
    raise OSError("no space is left")
raise type("ProcessError", (Exception,), {})("process 1 has raised OSError")
"""
    status, _, err = run(script, "--processes", "2", "--grace", "20")
    said = err.splitlines()[-1]
    assert status == 1
    assert said.endswith("exit status 1: OSError: no space is left")


def test_others_are_terminated_and_then_killed(run):
    script = """
def terminated(*_):
    print("terminated")
    if task == 0:
        sys.exit(0)
signal.signal(signal.SIGTERM, terminated)
meet(3)
if task == 2:
    os.kill(os.getpid(), signal.SIGSEGV)
while True:
    time.sleep(0.01)
"""
    begin = time.monotonic()
    status, out, err = run(script, "--processes", "3", "--grace", "0.6")
    assert 1.2 < time.monotonic() - begin < 10
    assert status == 128 + signal.SIGSEGV
    assert sorted(out.splitlines()) == ["[0] terminated", "[1] terminated"]
    assert "process 2 ended with exit status 139 (Segmentation" in err


def test_restarts(run):
    script = """
print(attempt, os.environ["TF_CONFIG"])
if attempt < 2 and task == 0:
    sys.exit(5)
if attempt < 2:
    time.sleep(60)
"""
    options = ["--processes", "2", "--restarts", "3", "--grace", "0.1"]
    status, out, err = run(script, *options)
    assert status == 0
    assert err.splitlines() == [
        "keras-conflux run: process 0 ended with exit status 5; restart 1 of 3",
        "keras-conflux run: process 0 ended with exit status 5; restart 2 of 3",
    ]
    first = [line for line in out.splitlines() if line.startswith("[0]")]
    assert [line[:6] for line in first] == ["[0] 0 ", "[0] 1 ", "[0] 2 "]
    ports = [set(re.findall(r"localhost:(\d+)", line)) for line in first]
    assert all(len(each) == 2 for each in ports)
    assert ports[0] != ports[1] != ports[2]


def test_no_restarts_are_left(run):
    options = ["--processes", "1", "--restarts", "1"]
    status, _, err = run("sys.exit(7)", *options)
    assert status == 7
    assert err.endswith("exit status 7; no restarts are left\n")


# --- signals, and what is left behind ------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_handed_on(launch, tmp_path, number):
    script = """
def told(number, _):
    print(f"saves after {number}")
    sys.exit(0)
signal.signal(signal.SIGINT, told)
signal.signal(signal.SIGTERM, told)
ready()
time.sleep(60)
"""
    process = launch(script, "--processes", "2", "--restarts", "3")
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    lines = [f"[{index}] saves after {int(number)}" for index in range(2)]
    assert (process.returncode, err) == (0, "")
    assert sorted(out.splitlines()) == lines


def test_a_signal_to_save_has_all_its_time(launch, tmp_path):
    """As Slurm sends it, long before it ends the program."""
    script = """
def told(number, _):
    time.sleep(1.0 + 0.2 * task)
    print(f"saved after {number}")
    sys.exit(128 + number)
signal.signal(signal.SIGUSR1, told)
ready()
time.sleep(60)
"""
    options = ("--processes", "2", "--restarts", "3", "--grace", "0.9")
    process = launch(script, *options)
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + signal.SIGUSR1, "")
    assert out.count(f"saved after {int(signal.SIGUSR1)}") == 2


def test_an_interrupt_is_not_restarted(launch, tmp_path):
    script = "ready()\ntime.sleep(60)"
    process = launch(script, "--processes", "2", "--restarts", "3")
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert err.count("KeyboardInterrupt") == 2
    assert "restart" not in err


def test_the_second_signal_does_not_wait(launch, tmp_path):
    script = """
def told(*_):
    tell("told", 1)
signal.signal(signal.SIGINT, told)
ready()
while True:
    time.sleep(0.01)
"""
    process = launch(script, "--processes", "2", "--grace", "1000")
    wait_until(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(signal.SIGINT)
    wait_until(lambda: len(pids(tmp_path, "told*")) == 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 128 + signal.SIGKILL


def test_nohup_is_respected(launch, tmp_path):
    script = """
ready()
while not (here / "sent").exists():
    time.sleep(0.01)
"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = launch(script, "--processes", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_until(lambda: pids(tmp_path))
    process.send_signal(signal.SIGHUP)
    time.sleep(0.1)
    (tmp_path / "sent").write_text("")
    assert process.wait(20) == 0


GRANDCHILD = """
import subprocess
sleeper = subprocess.Popen(["sleep", "1000"])
tell("sleeper", sleeper.pid)
meet(2)
"""


@pytest.mark.parametrize("end", ["sys.exit(task)", "time.sleep(60)"])
def test_nothing_is_left_behind(run, tmp_path, end):
    script = f"{GRANDCHILD}\nif task == 1: sys.exit(1)\n{end}"
    status, _, _ = run(script, "--processes", "2", "--grace", "0.1")
    assert status == 1
    left = [*pids(tmp_path), *pids(tmp_path, "sleeper*")]
    assert len(left) == 4
    wait_until(lambda: not any(map(is_alive, left)))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can do it")
def test_nothing_is_left_when_the_launcher_is_killed(launch, tmp_path):
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
time.sleep(1000)
"""
    process = launch(script, "--processes", "2")
    wait_until(lambda: len(pids(tmp_path)) == 2)
    assert all(map(is_alive, pids(tmp_path)))
    process.kill()
    wait_until(lambda: not any(map(is_alive, pids(tmp_path))))


# --- the command itself --------------------------------------------------


def test_systems_that_cannot_do_it(tmp_path, monkeypatch, capsys):
    script = tmp_path / "script.py"
    script.write_text("")
    monkeypatch.delattr(os, "waitid")
    with pytest.raises(SystemExit):
        main(["run", "--processes", "1", str(script)])
    assert "expected Linux, or macOS" in capsys.readouterr().err


def test_the_installed_command():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    scripts = project["project"]["scripts"]
    assert scripts["keras-conflux"] == f"{COMMAND.stem}:main"


@pytest.mark.parametrize("module", ["keras_conflux", COMMAND.stem])
def test_python_m(module, tmp_path):
    (tmp_path / "script.py").write_text("print('there')")
    command = [sys.executable, "-m", module, "run"]
    result = subprocess.run(
        [*command, "--processes", "2", "script.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["[0] there", "[1] there"]


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "907")
    assert driver.unseen(1, 0).startswith("CUDA_VISIBLE_DEVICES names 1 GPUs,")
    assert driver.cure(for_cuda=True).startswith("nvidia-smi -L")

"""`keras-conflux run`, however its output waits or fails, and how it ends."""

import itertools
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from outputs import KINDS
from outputs import ClosedTerminal
from outputs import Full
from outputs import Gone
from outputs import shown

import keras_conflux
from keras_conflux.tools.cli import output
from keras_conflux.tools.cli import reasons

COMMAND = (
    pathlib.Path(keras_conflux.__file__).parents[1] / "keras_conflux_command.py"
)
LONG = 100_000
"""More than a pipe holds, and a line that is written in parts."""

BEGIN = """
import atexit, json, os, pathlib, signal, subprocess, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
here = pathlib.Path(__file__).parent
class ProcessError(Exception): pass
def tell(name, text=""):
    (here / f".{name}{task}").write_text(str(text))
    (here / f".{name}{task}").rename(here / f"{name}{task}")
def wait_for(name, count=1):
    while len(list(here.glob(f"{name}*"))) < count:
        time.sleep(0.01)
"""
SAVE = f"""
def save(number=0, _=None):
    for part in range(10):
        print("saves", part)
        print("part", part, file=sys.stderr)
        time.sleep(0.03)
    print("x" * {LONG})
    print("saved")
    tell("saved", int(number))
    if number:
        sys.exit(128 + number)
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
    signal.signal(each, save)
tell("ready")
while not (here / "go").exists():
    os.write(1, b"trains\\n")
    time.sleep(0.02)
"""
FAIL = """
if task == 1:
    atexit.register(time.sleep, 0.5)  # it ends after its victim
    atexit.register(save)
    raise ValueError("broken")
save()
raise ProcessError("fit has ended in process 0, because process 1 has raised "
                   "ValueError in fit: broken")
"""


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts the launcher, and ends it afterwards."""
    started = []

    def launch(script, *options, count=2, **more):
        (tmp_path / "script.py").write_text(BEGIN + script)
        options = ["--processes", str(count), *options, "script.py"]
        started.append(
            subprocess.Popen(
                [sys.executable, COMMAND, "run", *options],
                cwd=tmp_path,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
                **{"preexec_fn": hear_signals} | more,
            )
        )
        return started[-1]

    yield launch
    for process in started:
        process.kill()
        process.wait()


def hear_signals():
    # What a shell has started in the background hears no interrupt.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def wait_until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def are_there(folder, name, count=2):
    return lambda: len(list(folder.glob(f"{name}*"))) == count


# --- the product ---------------------------------------------------------


ENDS = {
    "well": [],
    "failure": [],
    "Ctrl-C": [signal.SIGINT],
    "SIGTERM": [signal.SIGTERM],
    # The kernel and the shell say it, and `loginctl` after SIGTERM.
    "SIGHUP": [signal.SIGHUP, signal.SIGHUP, signal.SIGHUP],
    "SIGTERM, SIGHUP": [signal.SIGTERM, signal.SIGHUP],
    "SIGUSR1": [signal.SIGUSR1],
    "no reader": [],
}
NUMBERS = dict.fromkeys(("SIGHUP", "no reader"), signal.SIGTERM)
"""What the processes get, if it is not what the launcher gets."""


@pytest.mark.sampled(3)
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full")
@pytest.mark.parametrize(
    ("kind", "end"),
    [
        pytest.param(kind, end, id=f"{kind.__name__}, {end}")
        for kind, end in itertools.product(KINDS.values(), ENDS)
        if end != "no reader" or kind in (Gone, ClosedTerminal)
    ],
)
def test_every_output_with_every_end(start, tmp_path, kind, end):
    """No save is cut short, and what a living reader gets is complete."""
    is_gone = kind in (Gone, ClosedTerminal)
    out = kind(tmp_path)
    script = SAVE + (FAIL if end == "failure" else "save()")
    with (tmp_path / "err").open("wb") as err:
        process = start(script, "--grace", "10", stdout=out.given, stderr=err)
    os.close(out.given)
    wait_until(are_there(tmp_path, "ready"))
    out.begun()
    for number in ENDS[end]:
        process.send_signal(number)
        time.sleep(0.02)
    if end in ("well", "failure"):
        (tmp_path / "go").touch()
    # The reader pauses until all have saved.
    wait_until(are_there(tmp_path, "saved"))
    read = shown(out.read())
    status = process.wait(20)
    told = (tmp_path / "err").read_text()
    numbers = {int(path.read_text()) for path in tmp_path.glob("saved*")}
    if is_gone and end in ("well", "failure"):
        assert numbers <= {0, signal.SIGTERM}  # whichever comes first
    else:
        number = NUMBERS.get(end, (ENDS[end] or [0])[0])
        assert numbers == {number}
        assert status == (1 if end == "failure" else number and 128 + number)
    if end == "failure" and numbers == {0}:
        # Its own error, or its victim's, which names it.
        last = told.splitlines()[-1]
        assert re.match("keras-conflux run: process . ended with .* 1: ", last)
        assert last.endswith(": broken")
    for index, part in itertools.product(range(2), range(10)):
        assert f"[{index}] part {part}\n" in told
        assert not out.is_read or f"[{index}] saves {part}" in read
    if out.is_read:
        assert read.count("x") == 2 * LONG
        assert read.count("saved") == 2
    if kind is Full:
        assert "standard output cannot be written: [Errno 28]" in told


# --- one by one ----------------------------------------------------------


def test_a_terminal_that_is_closed_for_real(start, tmp_path):
    """The kernel tells the launcher, and both of its outputs are gone."""
    own, given = pty.openpty()
    process = start(
        SAVE,
        stdout=given,
        stderr=given,
        preexec_fn=lambda: os.login_tty(os.dup(given)),
    )
    os.close(given)
    wait_until(are_there(tmp_path, "ready"))
    os.close(own)
    wait_until(are_there(tmp_path, "saved"))
    assert process.wait(20) == 128 + signal.SIGTERM


def test_a_reader_that_pauses_for_ever(start, tmp_path):
    """The launcher waits for it, until the second signal."""
    own, given = os.pipe()
    script = f"print('x' * {LONG})\ntell('ready')"
    process = start(script, stdout=given)
    os.close(given)
    wait_until(are_there(tmp_path, "ready"))
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 0
    os.close(own)


def test_a_save_that_prints_much_does_not_wait_for_a_reader(start, tmp_path):
    """While they train, the processes wait for it."""
    script = """
def save(number, _):
    print("saves", "x" * 3_000_000)
    tell("saved")
    sys.exit()
signal.signal(signal.SIGTERM, save)
tell("ready")
while True:
    print("y" * 1000)
    tell("trains", time.monotonic())
"""
    own, given = os.pipe()
    process = start(script, "--grace", "10", stdout=given)
    os.close(given)
    wait_until(are_there(tmp_path, "ready"))
    trains = tmp_path / "trains0"
    wait_until(
        lambda: (
            trains.exists()
            and time.monotonic() - float(trains.read_text()) > 0.5
        )
    )
    process.send_signal(signal.SIGTERM)
    wait_until(are_there(tmp_path, "saved"))
    with open(own, "rb") as read:
        assert read.read().count(b"x") == 6_000_000
    assert process.wait(20) == 0


def test_a_pause_of_one_reader_does_not_hold_up_the_other(start, tmp_path):
    own, given = os.pipe()
    script = f"""
print("x" * {LONG})
print("there", file=sys.stderr)
wait_for("go")
"""
    process = start(script, stdout=given, stderr=subprocess.PIPE, count=1)
    os.close(given)
    assert process.stderr.readline() == b"[0] there\n"
    (tmp_path / "go").touch()
    with open(own, "rb") as read:
        assert read.read() == b"[0] " + b"x" * LONG + b"\n"
    assert process.wait(20) == 0


def test_a_daemon_that_holds_the_output(start, tmp_path):
    """It is not waited for, and the last line without an end is there."""
    script = """
sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
tell("sleeper", sleeper.pid)
print("no end", end="")
"""
    process = start(script, count=1, stdout=subprocess.PIPE)
    out, _ = process.communicate(timeout=60)
    os.kill(int((tmp_path / "sleeper0").read_text()), signal.SIGKILL)
    assert (process.returncode, out) == (0, b"[0] no end\n")


def test_a_long_line_is_broken(start):
    script = f"""
if task == 0:
    print("a" * {LONG}, end="")
    tell("first")
    wait_for("second")
    time.sleep(0.2)
    print("end")
else:
    wait_for("first")
    time.sleep(0.2)
    print("b")
    tell("second")
"""
    out, _ = start(script, stdout=subprocess.PIPE).communicate(timeout=60)
    lines = out.decode().splitlines()
    assert lines.count("[1] b") == 1
    parts = [each.removeprefix("[0] ") for each in lines if each[1] == "0"]
    assert "".join(parts) == "a" * LONG + "end"


class Parts:
    """A screen that keeps what is written."""

    def __init__(self):
        self.written = []

    def write(self, descriptor, line):
        self.written.append(line)


@pytest.mark.parametrize("chunk", [1000, 1 << 16])
def test_a_very_long_line_is_not_copied_again_and_again(chunk):
    """Each byte is looked at a few times, however long its line is."""
    screen = Parts()
    stream = output.Output(screen, 1, b"")
    chunks = (1 << 20) // chunk
    for _ in range(chunks):
        stream.feed(b"x" * chunk)
        assert len(stream._rest) <= 1 << 16
    stream.feed(b"end\n")
    assert all(len(part) <= 1 << 17 for part in screen.written)
    assert b"".join(screen.written) == b"x" * (chunks * chunk) + b"end"


def test_a_signal_that_one_process_ignores(start, tmp_path):
    """After the first process has ended by it, the others have the grace."""
    script = """
if task == 0:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("ready")
time.sleep(60)
"""
    process = start(script, "--grace", "0.3", "--restarts", "2")
    wait_until(are_there(tmp_path, "ready"))
    process.send_signal(signal.SIGUSR1)
    assert process.wait(10) == 128 + signal.SIGUSR1


# --- errors --------------------------------------------------------------


def victim(of):
    return (
        "Traceback (most recent call last):\n  File 'x'\n"
        "keras_conflux._common.errors.ProcessError: fit has ended in process "
        f"9, because process {of} has raised ValueError in fit: no\nmore"
    )


TRACED = (
    "Traceback (most recent call last):\n  File 'x'\n"
    "ValueError: in user code:\n\n    File 'x.py', line 1, in step  *\n"
    "        output: f(x)\n\n    ValueError: slice index 0 of dimension 0\n"
)
CAUSE = "Traceback (most recent call last):\n  File 'x'\nValueError: no\nmore"


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("", ""),
        (CAUSE, "ValueError: no"),
        (victim(1), "ProcessError: fit has ended in .*1 has raised"),
        # The last error of a process is the one that has ended it.
        (f"{victim(1)}\n{CAUSE}", "ValueError: no"),
        (f"x\n{CAUSE}\n2026-11-25 W tensorflow", "ValueError: no"),
        # TensorFlow shows first where it was tracing.
        (TRACED, "ValueError: slice index 0 of"),
    ],
)
def test_the_error_of_a_process(printed, expected):
    error = reasons.LastError()
    for line in printed.encode().splitlines():
        error.hear(line)
    assert re.match(expected, error.text)
    assert bool(expected) == bool(error.text)

"""Several processes compute what one device computes, and end alike.

The processes are started once for each number of processes and devices, and
run all cases one after another.
"""

import contextlib
import functools
import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import forked
import hosts
import numpy as np
import pytest
import tensorflow as tf
from addresses import free_addresses
from conftest import COUNTS
from conftest import ON_GPU
from conftest import RUN_LONG_TESTS
from local_cases import LOCAL_CASES
from local_cases import MORE_LOCAL_CASES
from local_cases import Parts
from models import COMPILED
from models import assert_same_outcome
from models import dense
from process_cases import CASES
from process_cases import CHECKS
from process_cases import MORE_CASES
from process_cases import MORE_CHECKS
from process_cases import X
from process_cases import Y
from started import start
from test_run import COMMAND

from keras_conflux._cluster import agreement
from keras_conflux._cluster import roll_call

HERE = pathlib.Path(__file__).parents[1]
MESSAGES = "../examples/benchmarks/messages.py"
SECONDS = 900


def outputs(started, seconds=SECONDS):
    """Returns what each process has printed, when all have ended."""
    try:
        return [each.communicate(timeout=seconds)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


UNREACHABLE = "ProcessError: .*process 1 cannot be reached"
OTHER_PLACE = "ReplicaMismatchError: .*not at the same place.*"
# By what process 1 does: what process 0 raises, and within how many seconds.
FAULTS = {
    "raises": ("process 1 has raised ValueError.*: the user's own error", 5),
    "eager accumulation": (
        "NotImplementedError: .*run_eagerly=True.*accumulation_steps",
        10,
    ),
    "stops early": (OTHER_PLACE + "process 1: the end of fit", 5),
    "killed while a step hangs": (UNREACHABLE, 10),
    "killed before replicate": (UNREACHABLE, 10),
}
MORE_FAULTS = {
    "killed": (UNREACHABLE, 10),
    "exits": ("process 1 has raised SystemExit", 5),
    "interrupted": ("process 1 has raised KeyboardInterrupt", 5),
    "terminated": (UNREACHABLE, 10),
    "stopped by a signal": (UNREACHABLE + ".*heartbeats", 15),
    "evaluates": ("process 1: the begin of evaluate", 5),
    "waits at a barrier": (OTHER_PLACE + "process 1: a barrier", 5),
    "gets stuck": ("ProcessError: .*has waited for 40 s for another", 60),
    "measures alone": ("process 1: the begin of fit with Throughput of", 60),
    "other data": ("have drawn different batches: .*checksums", 60),
    "fewer batches": (OTHER_PLACE + "checksums", 60),
    "fails in the graph": ("process 1 has raised Invalid.*: not finite", 60),
    "sleeps": ("nothing", 30),
    "first cannot write": ("process 0 has raised OSError in opening", 10),
    "part of another dtype": (
        "Mismatch.*process 0: .*float32.*process 1: .*float64",
        60,
    ),
    "part of another shape": (
        r"Mismatch.*process 0: .*float32\(\?, 8\).*process 1: .*\(\?, 7\)",
        60,
    ),
    "eager part": ('NotImplementedError: .*run_eagerly=True.*data="local"', 10),
    "part of other steps": (
        "Mismatch.*process 0: steps_per_epoch=4.*process 1: steps_per_epoch=3",
        60,
    ),
}


if ON_GPU:  # compiled as one device is here, since XLA draws other numbers
    LAYOUTS = [
        f"{count}x{devices}{' compiled' * COMPILED}"
        for count, devices in ((2, 1), (4, 1), (2, 2))
        if count * devices in COUNTS
    ]
else:
    LAYOUTS = ["2x2", *map(long, ["2x1", "3x1", "2x1 apart"])]


@pytest.fixture(scope="module", params=LAYOUTS)
def processes(request, tmp_path_factory):
    """Runs the cases, and returns how many processes have, and to where.

    Hosts that are apart take 2 ms to hear of each other, and send 100 MB in a
    second.
    """
    layout, *kind = request.param.split()
    count, devices = map(int, layout.split("x"))
    out = tmp_path_factory.mktemp(request.param)
    apart = joined(count, 0.002, 1e8) if "apart" in kind else None
    with apart or contextlib.nullcontext() as network:
        started = start(
            count,
            "process_worker.py",
            out,
            *chosen(request, "case"),
            *chosen(request, "check"),
            devices=devices,
            hosts=network,
            CONFLUX_TEST_COMPILED=str(int("compiled" in kind)),
        )
        return count, out, started, outputs(started)


@contextlib.contextmanager
def joined(count, delay=0.0, rate=math.inf):
    """Yields hosts with a network between them, where this user may."""
    if not hosts.are_allowed():
        pytest.skip("this user may not make network namespaces")
    with hosts.network(count, delay, rate) as network:
        yield network.hosts


def chosen(request, name):
    """Returns what a parameter of this file's tests is in those that run."""
    given = [
        item.callspec.params.get(name)
        for item in request.session.items
        if item.path == request.path
        and hasattr(item, "callspec")
        and not item.get_closest_marker("skip")
    ]
    return [*dict.fromkeys(each for each in given if each is not None)]


def assert_has_run(name, kind, processes):
    count, out, _, printed = processes
    for index in range(count):
        assert (out / f"{name}-{index}.{kind}").exists(), printed[index][-3000:]


@pytest.mark.parametrize("check", [*CHECKS, *map(long, MORE_CHECKS)])
def test_processes(check, processes):
    assert_has_run(check, "passed", processes)


def test_processes_end_well(processes):
    *_, started, printed = processes
    assert [each.returncode for each in started] == [0] * len(started), printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [*CASES, *map(long, MORE_CASES)])
def test_processes_compute_what_one_device_does(case, processes):
    assert_is_that_of_one_device(case, processes)


def assert_is_that_of_one_device(case, processes):
    count, out, *_ = processes
    assert_has_run(case, "npz", processes)
    found = [np.load(out / f"{case}-{index}.npz") for index in range(count)]
    found = [{name: each[name] for name in each.files} for each in found]
    assert_same_outcome(on_one_device(case), found[0])
    for name, value in found[0].items():
        assert {each[name].tobytes() for each in found} == {value.tobytes()}


@functools.cache
def on_one_device(case):
    return (CASES | MORE_CASES)[case](lambda model: model)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 63, 64])
def test_what_all_say_travels_along_a_tree(count):
    known = {index: {index} for index in range(count)}
    left = {i: [*agreement._rounds(i, count)] for i in known}
    assert max(map(len, left.values())) <= 1 + (count - 1).bit_length()
    while any(left.values()):
        pairs = {}
        for index, rounds in left.items():
            if rounds:
                pairs.setdefault(rounds[0], []).append(index)
        met = [pair for pair in pairs.values() if len(pair) == 2]
        assert met, "some wait for each other"
        for one, other in met:
            known[one] = known[other] = known[one] | known[other]
            assert left[one].pop(0) == left[other].pop(0)
    assert all(len(each) == count for each in known.values())


def test_keys_of_collectives_come_back():
    counter = tf.Variable(0)

    def keys(dtype=tf.float32, size=3, lane=0):
        each = [
            agreement.next_key(counter, of, dtype, lane)
            for of in 2 * [size, tf.constant(size)]
        ]
        return {int(key) for key in each}

    of_one = keys()
    of_others = [keys(tf.int32), keys(lane=1), keys(size=4), keys(size=9**7)]
    assert all(len(each) == 4 for each in (of_one, *of_others))
    assert len(of_one.union(*of_others)) == 4 * (1 + len(of_others))
    assert keys() == of_one
    assert max(keys(tf.uint16, (1 << 23) - 16, 1)) < 1 << 31


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the layouts have these")
def test_loops_over_three_processes(tmp_path):
    loops = ["tutorial", *["own_loop", "adversarial"] * RUN_LONG_TESTS]
    started = start(3, "process_worker.py", tmp_path, *loops)
    processes = 3, tmp_path, started, outputs(started)
    for case in loops:
        assert_is_that_of_one_device(case, processes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [*LOCAL_CASES, *map(long, MORE_LOCAL_CASES)])
def test_parts_compute_what_one_device_does_with_all(case, processes):
    count, out, *_ = processes
    assert_has_run(case, "npz", processes)
    run = (LOCAL_CASES | MORE_LOCAL_CASES)[case]
    expected = run(lambda model: model, Parts(count))
    common: dict[str, bytes] = {}
    for index in range(count):
        found = dict(np.load(out / f"{case}-{index}.npz"))
        # Each process has the predictions of its own rows. Layers may be
        # called otherwise here, after other tests.
        here = {
            name: value
            for name, value in expected.items()
            if name in found or not name.startswith("predicted by")
        }
        assert_same_outcome(here, found)
        for name, value in found.items():
            assert common.setdefault(name, value.tobytes()) == value.tobytes()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", [*FAULTS, *map(long, MORE_FAULTS)])
def test_a_fault_of_one_ends_all_in_time(fault):
    expected, seconds = (FAULTS | MORE_FAULTS)[fault]
    started = start(
        2, "process_faults.py", fault, forks=True, CONFLUX_STEP_TIMEOUT="40"
    )
    try:
        told = started[fault.startswith("first")]
        printed = "".join(told.communicate(timeout=120))
    finally:
        for each in started:
            each.kill()
            each.wait()
    found = re.search(r"(?m)^([\d.]+) s: (.*)", printed)
    assert found, printed[-3000:]
    assert re.search(expected, found[2]), found[2]
    assert float(found[1]) < seconds
    assert "weights True" in printed


ELSEWHERE = ".*not at the same place"
"""After this, processes cannot go on together."""
# By what process 1 does otherwise: what both processes raise, or print.
DIFFERENCES = {
    "another activation": "Relu in process 0, Tanh in process 1",
    "another loss": "programs for .* in process 0, .* in process 1",
    "another regularizer": "in process 0, .* in process 1",
    "another constant": r"1\.42857\d+\).* in process 0, .* 1\.6666\d+\)",
    "another frozen": "begin of fit.*`trainable` of first is True in process 0",
    "another setting": "`clipnorm` of optimizer is None in process 0, 1.0 in",
    "another first rate": "trained$",
    "another nothing": "trained$",
    "a change of rate": "execution 7 .*learning_rate is of ",
    "a change of set_weights": "execution 7 .*first/kernel is ",
    "a change of one weight": "execution 7 .*last/bias is of ",
    "a change of clipnorm": "of an epoch.*`clipnorm` of ",
    "a change of trainable": "of an epoch.*`trainable` of first",
    "a change of same weights": "trained$",
    "a change at the end": "the end of fit.*last/bias is of ",
    "evaluate after a change": "of evaluate.*first/kernel is of ",
    "predict after a change": "of predict.*last/bias is of norm ",
    "predict after none": "shown$",
    "a step after a change": "execution 2 .*last/bias is of ",
    "a step after a rate": "execution 2 .*learning_rate is of ",
    "a step after none": "trained$",
    "a loop after a change": "call 1 of .*step.* is of ",
    "a loop after a rate": "call 1 of .*step.* is of ",
    "a loop after none": "trained$",
    "a loop over parts": r"`distribute` a part that .*\.shard`",
    "a loop that splits its rows": r"`split` .* a part that .*\.shard`",
    "a loop that splits the same": r"\[16\]$",
    "a loop ahead over others": "different batches.* the same seed",
    "a loop over another second batch": "different batches: process 0: call 2 ",
    "a loop over the same": r"\[8, 8, 8, 5\]$",
    "a loop ahead over the same": r"\[8, 8, 8, 5\]$",
    "a part of another weight": "the begin of fit.*dense_1/kernel is of norm",
    "a part of an added weight": ELSEWHERE + ".*reading a sharded variable",
    "a weight read alone": ELSEWHERE + ".*reading a sharded variable",
    "a table": r"a table \d.* in process 0, .*a table \d.* in process 1",
    "the same table": "trained$",
    "predict between steps": "shown$",
    "a tf.Variable": "of an epoch.*scale:0 is of norm 1 in .*norm 2 in process",
    "a tf.Variable of each": "trained$",
    "another function": "call 1 of squared.* Mul in process 0, Add",
    "the same function": r"\[8\.0\]$",
    "the rank in a function": r"\[2\.0\]$",
    "collectives by rank": "Collective.* in process 0, .* in process 1",
}


@pytest.fixture(scope="module")
def differences(request):
    """Returns what each process has printed, whose process 1 differs."""
    names = chosen(request, "difference")
    apart = [each for each in names if DIFFERENCES[each].startswith(ELSEWHERE)]
    together = [each for each in names if each not in apart]
    runs = [[each] for each in apart] + [together] * bool(together)
    found = [outputs(start(2, "process_differences.py", *run)) for run in runs]
    return ["".join(printed) for printed in zip(*found, strict=True)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_processes_that_differ_all_say_what_differs(difference, differences):
    for printed in differences:
        found = re.search(f"(?m)^{difference}: (.*)", printed)
        assert found, printed[-3000:]
        is_error = not DIFFERENCES[difference].endswith("$")
        assert found[1].startswith("ReplicaMismatchError") == is_error
        assert re.search(DIFFERENCES[difference], found[1]), found[1]


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the network is the same")
def test_a_cut_cable_ends_the_processes_at_both_ends():
    with joined(2) as two:
        printed = outputs(
            start(2, "process_faults.py", "cable is cut", hosts=two), 120
        )
    for index, text in enumerate(printed):
        found = re.search(r"(?m)^([\d.]+) s: (.*)", text)
        assert found, text[-3000:]
        expected = f"ProcessError: .*process {1 - index} cannot be reached"
        assert re.search(expected, found[2]), found[2]
        assert float(found[1]) < 15
        assert "weights True" in text


LEGS = {2: (3, 5, 9), 4: (5, 12, 19)}
"""Of so many hosts: the largest numbers of delays that one after another pass
in a message, a sum in a loop and a step of a small model."""


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the network is the same")
@pytest.mark.parametrize("count", LEGS)
def test_no_step_waits_for_more_legs_than_counted(count):
    delay, found = 20, []
    for each in (0, delay):
        with joined(count, each / 1000) as network:
            printed = outputs(start(count, MESSAGES, 30, hosts=network), 300)
        found.append(json.loads(re.search("(?m)^{.*}$", printed[0])[0]))
    names = "message_ms", "sum_ms", "step_ms"
    legs = [(found[1][name] - found[0][name]) / delay for name in names]
    most = LEGS[count]
    assert all(x < y for x, y in zip(legs, most, strict=True)), legs


@pytest.mark.long
def test_a_killed_training_goes_on_where_it_was(tmp_path):
    run = [COMMAND, "run", "--processes", "2", "--restarts", "1"]
    script = str(HERE / "process_restart.py")
    ended = subprocess.run(
        [sys.executable, *run, script, str(tmp_path)],
        env=os.environ | ({} if ON_GPU else {"CUDA_VISIBLE_DEVICES": "-1"}),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert ended.stdout.count("trained in attempt 1") == 2, ended.stdout
    assert_trained_on(tmp_path)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU, reason="the network is the same")
def test_a_training_killed_on_one_of_two_hosts_goes_on(tmp_path):
    with joined(2, 0.002, 1e8) as network:
        for attempt in ("0", "1"):
            told = {"hosts": network, "CONFLUX_ATTEMPT": attempt}
            started = start(2, "process_restart.py", tmp_path, **told)
            printed = outputs(started, 300)
            codes = [each.returncode for each in started]
            assert codes == ([1, -signal.SIGKILL], [0, 0])[int(attempt)], (
                printed
            )
    assert_trained_on(tmp_path)


def assert_trained_on(directory):
    model = dense()
    model.fit(X, Y, batch_size=16, epochs=4, shuffle=False, verbose=0)
    for index in range(2):
        found = np.load(directory / f"{index}.npz")
        for name, expected in zip(
            found.files, model.get_weights(), strict=True
        ):
            np.testing.assert_allclose(found[name], expected, atol=1e-6)


ALONE = """
import keras_conflux as kc
try:
    kc.initialize({addresses!r}, 0, timeout=2)
except kc.ProcessError as error:
    print(error)
"""


def test_a_process_whose_others_do_not_come_says_so():
    addresses = free_addresses(2)
    ended = forked.run("-c", ALONE.format(addresses=addresses), timeout=90)
    expected = (
        f"Process 0 at {addresses[0]} could not join the 2 processes that the "
        f"arguments of initialize names: {', '.join(addresses)}. Nobody has "
        f"come in 2 s as process 1 at {addresses[1]}."
    )
    assert expected in ended.stdout, ended.stderr[-2000:]


LEFT_BEHIND = """
import keras_conflux as kc
kc.initialize({addresses!r}, 0, timeout=5)
"""


def test_a_process_whose_other_dies_while_they_connect_ends():
    addresses = free_addresses(2)
    program = LEFT_BEHIND.format(addresses=addresses)
    port = int(addresses[1].rpartition(":")[2])
    server = socket.create_server(("", port))
    left = forked.Started("-c", program)
    try:
        # This one answers the roll call, is seen to listen, and is gone.
        with server:
            server.settimeout(60)
            _, wrong = roll_call.hosts_of_all(addresses[0], 1, 2, 60)
            assert wrong is None
            server.accept()[0].close()
        _, printed = left.communicate(timeout=60)
    finally:
        left.kill()
    assert "Timeout (0:00:10)!" in printed
    assert "tensorflow_processes.py" in printed
    assert left.returncode == 1

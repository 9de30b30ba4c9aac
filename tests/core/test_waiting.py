"""Calls that hang, and the end of a process that waits for none of them."""

import textwrap

import forked
import pytest
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU

import keras_conflux as kc
from keras_conflux._replication.watchdog import StepWatchdog

PROGRAM = """
    import atexit, sys, time
    from keras_conflux._common import waiting

    atexit.register(print, "the user's own end")
    call = waiting.DaemonCall(lambda: time.sleep({seconds}))
    assert not call.wait(0.1)
    call.abandon()
    atexit.register(call.wait, {wait})
    sys.exit(3)
"""


def ended(**times):
    program = textwrap.dedent(PROGRAM).format(**times)
    return forked.run("-c", program, timeout=100)


def test_a_process_does_not_wait_for_a_call_that_is_abandoned():
    hanging = ended(seconds=1000, wait=0)
    assert hanging.returncode == 1
    assert hanging.stdout == "the user's own end\n"


def test_a_process_whose_abandoned_call_has_ended_ends_as_it_wants():
    late = ended(seconds=0.5, wait=50)
    assert late.returncode == 3
    assert late.stdout == "the user's own end\n"


@pytest.mark.skipif(
    MANY < 2 or ON_GPU, reason="GPUs that wait for each other may hang"
)
def test_only_what_may_hang_has_a_thread_of_its_own(monkeypatch):
    def looping(x):
        return tf.while_loop(lambda x: x < 3.0, lambda x: [x + 1.0], [x])[0]

    def calling(x):
        return tf.ensure_shape(tf.py_function(lambda x: x, [x], x.dtype), ())

    call, handed = StepWatchdog.call, []

    def noted(watchdog, *args):
        handed.append(watchdog.name)
        return call(watchdog, *args)

    monkeypatch.setattr(StepWatchdog, "call", noted)
    parts = kc.Replicas([tf.constant(i + 1.0) for i in range(MANY)], MANY)
    for program, times in (
        (lambda x: x * kc.allreduce("sum", x), 1),
        (tf.function(looping), 3),
        (calling, 3),
    ):
        run = kc.withdevices(program)
        for _ in range(3):
            found = run(parts)
        assert len(handed) == times
        assert len(found) == MANY
        handed.clear()

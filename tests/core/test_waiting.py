"""Calls that hang, and the end of a process that waits for none of them."""

import textwrap

import forked

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

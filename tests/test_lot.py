"""What judges runs with drawn faults sees each way in which one is wrong.

The runs themselves are in `lot.py`, and are done by hand.
"""

import dataclasses

import lot
import numpy as np
import pytest

EXPECTED = {"loss": np.asarray(0.5), "variable 0": np.asarray([1.0, 2.0])}
KILLED = lot.Draw(
    2, 1, "plain", "global", "killed", wrong=1, place="train batch", visit=3
)
ERROR = {"error": "ProcessError", "text": "", "ours": True, "at": 101.0}
WITH_ERROR = lot.Report({"loss": EXPECTED["loss"]}, error=ERROR, gone_at=102.0)
WITH_ALL = lot.Report(dict(EXPECTED), ended=True, gone_at=102.0)
WRONG = lot.Report(fault_at=100.0, gone_at=100.1)


def judged(draw, first, wrong=WRONG):
    return lot.judged(draw, [first, wrong], EXPECTED, limit=30)


def test_an_error_in_time_is_right():
    assert judged(KILLED, WITH_ERROR) == []


def test_a_fault_that_has_not_come_is_none():
    assert judged(KILLED, WITH_ALL, WITH_ALL) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"error": None}, "process 0 hangs"),
        ({"error": None, "ended": True}, "process 0 has ended well"),
        ({"error": ERROR | {"ours": False}}, "process 0 has raised"),
        ({"error": ERROR | {"at": 131.0}}, "an error after 31.0 s"),
        ({"gone_at": None}, "lives on"),
        ({"gone_at": 132.0}, "ended 31.0 s after its error"),
        ({"told": {"loss": np.asarray(0.6)}}, "loss is not that of one device"),
        ({"told": {"other": np.asarray(0)}}, "other is not that of one device"),
    ],
)
def test_what_is_wrong_is_said(changes, complaint):
    found = judged(KILLED, dataclasses.replace(WITH_ERROR, **changes))
    assert len(found) == 1
    assert complaint in found[0]


def test_a_harmless_fault_leaves_all_numbers():
    sleeps = dataclasses.replace(KILLED, fault="sleeps")
    wrong = dataclasses.replace(WITH_ALL, fault_at=100.0)
    assert judged(sleeps, WITH_ALL, wrong) == []
    assert "not ended well" in judged(sleeps, WITH_ERROR, wrong)[0]
    part = dataclasses.replace(WITH_ALL, told={"loss": EXPECTED["loss"]})
    assert "ended without {'variable 0'}" in judged(sleeps, part, wrong)[0]


def test_numbers_after_a_change_of_state_do_not_count():
    changed = dataclasses.replace(KILLED, fault="set_weights by one process")
    first = dataclasses.replace(
        WITH_ERROR, told={"loss": np.asarray(0.6)}, told_at={"loss": 100.5}
    )
    assert judged(changed, first) == []
    before = dataclasses.replace(first, told_at={"loss": 99.0})
    assert "loss is not that of" in judged(changed, before)[0]


def test_a_process_that_can_end_has_to():
    raises = dataclasses.replace(KILLED, fault="raises")
    stays = dataclasses.replace(WRONG, gone_at=None)
    assert judged(raises, WITH_ERROR) == []
    assert judged(raises, WITH_ERROR, stays) == ["process 1 has not ended"]

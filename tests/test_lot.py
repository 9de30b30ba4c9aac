"""What judges runs with drawn faults sees each way in which one is wrong.

The runs themselves are in `lot.py`, and are done by hand.
"""

import dataclasses
import json
import math

import lot
import numpy as np
import pytest
from outputs import shown

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


def test_lines_that_a_reader_has_not_got_are_said():
    lines = [f"[0] line 0 {number}\n" for number in range(4)]
    told = [[lot.Report(lines=4)]]
    # A process that was killed may have been about to print the last one.
    for read in (lines, lines[:3], lines[::-1]):
        assert list(lot.of_output("".join(read), told)) == []
    for lost in (lines[:2], lines[1:], []):
        (complaint,) = lot.of_output("".join(lost), told)
        assert "of 4 lines of process 0 in start 0" in complaint
    assert list(lot.of_output(None, told)) == []


def test_a_line_of_a_terminal_is_what_stays():
    read = b"\r\x1b[K[0] li\r\x1b[K[0] line 0 0\r\n^C\r\x1b[K[1] line 0 0\r\n"
    assert shown(read) == "[0] line 0 0\n[1] line 0 0\n"


@pytest.mark.parametrize(
    ("fault", "last", "is_right"),
    [
        ("killed", "keras-conflux run: process 1 ended with 137", True),
        ("killed", "keras-conflux run: process 0: because process 1 is", True),
        ("killed", "keras-conflux run: process 0 ended with 1", False),
        ("killed", "keras-conflux run: process 10 ended with 1", False),
        ("evaluates", "keras-conflux run: process 0 ended with 1", True),
        ("evaluates", "Traceback", False),
        ("killed", None, False),
    ],
)
def test_who_is_to_be_named(fault, last, is_right):
    draw = dataclasses.replace(KILLED, fault=fault)
    assert (not [*lot.of_last_line(draw, last, True)]) == is_right


def test_a_step_that_was_done_and_is_not_saved_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(lot.kc, "checkpoints", lambda path: [])
    (tmp_path / "fit-0" / "step-000000000006-000001").mkdir(parents=True)
    report = lot.Report(
        told_at={f"loss at batch {i} of epoch 1 of fit 0": i for i in range(5)}
    )
    draw = dataclasses.replace(KILLED, fault="SIGTERM")
    assert list(lot.of_checkpoints(draw, tmp_path, report, 0.5)) == []
    found = list(lot.of_checkpoints(draw, tmp_path, report, 2.5))
    assert found[-1] == "8 steps were done, and saved are 6"
    late = lot.of_checkpoints(draw, tmp_path, report, math.inf)
    assert len(list(late)) == 4


def test_the_summary_counts_faults():
    counts = json.loads(lot.summary([(KILLED, True), (KILLED, False)]))
    assert (counts["runs"], counts["right"]) == (2, 1)
    assert counts["fault"] == {"killed": [1, 1]}

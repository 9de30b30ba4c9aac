"""Emitted steps train as one device, whatever no rule knows.

`emitted_programs.py` runs many more programs, and prints a table.
"""

import emitted_programs
import emitted_step
import pytest
from conftest import ON_GPU
from conftest import several

from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.rule import Rule

PROGRAMS = emitted_programs.programs()
pytestmark = several


@pytest.mark.sampled(1)
@pytest.mark.skipif(ON_GPU, reason="numbers programs of three CPU devices")
@pytest.mark.parametrize(
    ("name", "most_gathered"),
    [
        ("case convolution and synchronized statistics", 0),
        ("a_program_trains_what_one_device_does 1 a metric of a weight 3", 0),
        ("what_a_layer_keeps 6 _sums_by_samples False", 1),
        ("losses_that_compare_samples 0 0", 9),
    ],
)
def test_an_emitted_step_is_that_of_one_device(name, most_gathered):
    with emitted_step.in_place_of_replicas() as emitted:
        PROGRAMS[name]()
    assert emitted
    assert all(each.counts["in parts"] for each in emitted)
    assert max(each.counts["gathered"] for each in emitted) <= most_gathered


def test_a_wrong_rule_is_found(monkeypatch):
    wrong = Rule(lambda *_: EQUAL, Form.ROWS, Form.EQUAL)
    monkeypatch.setitem(rules.RULES, "Sum", (wrong,))
    with emitted_step.in_place_of_replicas(), pytest.raises(AssertionError):
        PROGRAMS["what_a_layer_keeps 2 _sums False"]()

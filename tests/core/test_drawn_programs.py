"""Drawn programs train as on one device, or a warning says what may differ.

Some run in CI. `drawn_programs.py` trains many, and prints what is wrong.
"""

import dataclasses

import drawn_trainings
import keras
import pytest
from conftest import MANY
from conftest import several
from drawn_lot import FAULTS
from drawn_programs import CHOICES
from drawn_programs import OF_BRANCHES
from drawn_programs import Program

from keras_conflux._batch_analysis import OwnGradients
from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.rule import Rule
from keras_conflux._fit.numerics import layers

pytestmark = several


@pytest.fixture(autouse=True)
def _float64():
    for dtype in ("float64", "float32"):
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(dtype)
        if dtype == "float64":
            yield


@pytest.mark.sampled(20)
@pytest.mark.parametrize("number", range(90))
def test_a_drawn_program_equals_one_device(number):
    judged = drawn_trainings.verdict_of(number, MANY)
    assert judged.verdict not in FAULTS, str(judged)


MIXES = ("v1", "tf.cumsum(p, 0)"), ("v2", "tf.reduce_mean(v1 * y)")
IN_A_LAYER = ("v1", "tf.sort(x, 0)"), ("v2", "x - v1")
APART = ("v1", "tf.map_fn(tf.tanh, x)"), ("v2", "x - v1")
OPTIONS = {
    **{"devices": 2, "optimizer": "sgd", "of optimizer": {}},
    **{"seed": 0, "last": 4},
}
LOSS = Program("loss", True, MIXES, OPTIONS | {"form": "function"})
LAYER = Program("layer", True, IN_A_LAYER, OPTIONS)


@pytest.mark.long
def test_a_wrong_rule_is_found(monkeypatch):
    assert drawn_trainings.judge(LOSS)[0] == "equal"
    wrong = Rule(lambda _, inputs: inputs[0], Form.ROWS, Form.EQUAL)
    monkeypatch.setitem(rules.RULES, "Cumsum", (wrong,))
    assert drawn_trainings.judge(LOSS)[0] == "WRONG"


@pytest.mark.long
def test_a_missing_warning_is_found(monkeypatch):
    assert drawn_trainings.judge(LAYER)[0] == "equal"
    monkeypatch.setattr(layers, "_own", lambda value, _: value)
    assert drawn_trainings.judge(LAYER)[0] == "warned"
    monkeypatch.setattr(layers, "_warn_of_mixing", lambda *_: None)
    assert drawn_trainings.judge(LAYER)[0] == "WRONG"


@pytest.mark.long
def test_a_false_alarm_is_found(monkeypatch):
    program = dataclasses.replace(LAYER, mixes=False, lines=APART)
    assert drawn_trainings.judge(program)[0] == "equal"
    monkeypatch.setattr(layers, "rows_by_trial", lambda *_: None)
    assert drawn_trainings.judge(program)[0] == "FALSE ALARM"


@pytest.mark.long
def test_a_model_is_given_what_a_part_of_the_batch_cannot_compute():
    lines = ("v1", "tf.nn.top_k(y[:, 0], 4).values"), ("v2", "x * v1[3]")
    program = Program("input", True, lines, OPTIONS | {"site": "input"})
    assert drawn_trainings.judge(program)[0] == "equal"


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line",
    [
        "tf.reshape(v1, [-1, tf.shape(v1)[1]])",
        "tf.broadcast_to(v1, tf.shape(v1))",
        "v1 / tf.cast(tf.shape(v1)[0], 'float64')",
    ],
)
def test_what_a_part_of_the_batch_cannot_compute_is_not_run_on_it(line):
    # No replica has a fourth sample.
    chosen = "tf.gather(p, 3 * tf.cast(p[:, 0] > 0.1, 'int32'))"
    lines = ("v1", chosen), ("v2", line), ("v3", "tf.reduce_sum(v2 ** 2)")
    program = dataclasses.replace(LOSS, lines=lines)
    assert drawn_trainings.judge(program)[0] == "equal"


@pytest.mark.long
def test_what_is_computed_once_more_has_a_shape():
    chosen = "tf.argmax(p, 1)[:, None]"
    lines = (
        # Its rank is set by Python code.
        ("v1", f"tf.gather_nd(p, {chosen}, batch_dims=1)"),
        ("v2", "tf.reduce_sum(v1)"),
    )
    program = Program("metric", False, lines, OPTIONS | {"form": "sum"})
    assert drawn_trainings.judge(program)[0] == "equal"


@pytest.mark.long
def test_fixed_rows_are_averaged():
    lines = ("v1", "tf.gather_nd(x * x, [[0], [2]])"), ("v2", "v1 * 0.5")
    options = OPTIONS | {"site": "state", "form": "moving", "used": False}
    program = Program("state", True, lines, options)
    assert drawn_trainings.judge(program)[0] == "equal"


@pytest.mark.sampled(12)
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("form", OF_BRANCHES)
def test_a_branch_that_is_chosen_by_all_samples(by, form):
    options = OPTIONS | {"site": "branch", "form": form, "by": by}
    program = Program("branch", True, MIXES, options)
    assert drawn_trainings.judge(program) == ("equal", "")


@pytest.mark.long
@pytest.mark.parametrize("form", ["layer", "loss", "sum", "rows"])
def test_a_gradient_that_a_program_defines(form, monkeypatch):
    options = OPTIONS | {"form": form, "forward": "identity"}
    lines = ("v1", "d / (0.1 + tf.norm(d))"), ("v2", "v1 * 0.5")
    mixes = Program("slope", True, lines, options)
    expected = "warned" if form == "layer" else "equal"
    assert drawn_trainings.judge(mixes)[0] == expected
    lines = ("v1", "tf.clip_by_value(d, -0.1, 0.1)"), ("v2", "-v1")
    apart = Program("slope", False, lines, options)
    assert drawn_trainings.judge(apart)[0] == "equal"
    monkeypatch.setattr(OwnGradients, "mixes", lambda *_: False)
    assert drawn_trainings.judge(mixes)[0] == "WRONG"

"""What each rule says of an operation is proven by running the operation.

The table of rules is walked. Each type of operation is called in the ways that
`rule_cases` names, on tensors of each kind that a rule accepts, of several
ranks and axes. It is computed for a batch and for uneven parts of it, one of
which has no samples, and the claim is compared with the numbers. Then claims
are made wrong, and have to be refuted by the numbers of at least one call.
"""

import pytest
import rule_mutants
import tensorflow as tf
from rule_cases import CASES
from rule_cases import ENTRY_BY_ENTRY_TYPES
from rule_walk import Walk
from rule_walk import faults

from keras_conflux._fit.global_batch import drawn
from keras_conflux._fit.global_batch.rules import RULES

OTHERS = sorted(set(RULES) - set(ENTRY_BY_ENTRY_TYPES))
NOT_REFUTED = {
    **dict.fromkeys(("OnesLike", "ZerosLike"), "the values say nothing"),
    **dict.fromkeys(("Sign", "Angle"), "a quotient has the sign of its rows"),
    **dict.fromkeys(
        ("IsFinite", "IsInf", "IsNan"), "a quotient has the holes of its rows"
    ),
    **dict.fromkeys(drawn.RULES, "random numbers are others in each run"),
}
"""Operations whose claims are known to hold in more cases than are claimed."""


def check(name):
    walk = Walk(name, CASES[name])
    assert not list(faults(walk))
    assert not [f"{call}: {why}" for call, why in walk.failed]
    fired = {call.fired for call in walk.calls}
    assert fired == set(range(len(RULES[name]))), "a rule never says a word"
    refuted = rule_mutants.of_claims(walk)
    if name not in NOT_REFUTED:
        assert not [key for key, is_wrong in refuted.items() if not is_wrong]


def test_all_types_exist():
    unknown = [name for name in RULES if not hasattr(tf.raw_ops, name)]
    assert not unknown


def test_all_types_have_cases():
    assert set(CASES) == set(RULES)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_numbers_are_as_rules_say(name):
    check(name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ENTRY_BY_ENTRY_TYPES)
def test_numbers_are_as_rules_say_entry_by_entry(name):
    check(name)

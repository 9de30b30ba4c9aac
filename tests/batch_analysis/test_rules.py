"""What each rule says of an operation is proven by running the operation.

The table of rules is walked. Each type of operation is called in the ways that
`rule_cases` names, on tensors of each kind that a rule accepts, of several
ranks and axes. It is computed for a batch and for uneven parts of it, one of
which has no samples, and the claim is compared with the numbers. Then claims
are made wrong, and rules are made to accept more than they do, and each of
these mutants has to be refuted by the numbers of at least one call.
"""

import collections

import pytest
import rule_mutants
from conftest import ON_GPU
from rule_acceptance import CAUGHT
from rule_acceptance import Acceptance
from rule_cases import CASES
from rule_cases import ENTRY_BY_ENTRY_TYPES
from rule_equivalents import CLAIMS
from rule_equivalents import NOT_WALKED
from rule_equivalents import WIDER
from rule_walk import Walk
from rule_walk import faults
from rule_walk import function_of

from keras_conflux._batch_analysis.rules import RULES

pytestmark = pytest.mark.skipif(ON_GPU, reason="the numbers are of CPUs")
OTHERS = sorted(set(RULES) - set(ENTRY_BY_ENTRY_TYPES))


@pytest.fixture
def proven(record_property):
    """Notes what is counted below the results of the tests."""
    counts = collections.Counter()
    yield counts
    record_property("proven", dict(counts))  # which processes can exchange


def check_claims(name, proven):
    walk = Walk(name, CASES[name])
    assert not list(faults(walk))
    assert not [f"{call}: {why}" for call, why in walk.failed]
    fired = {call.fired for call in walk.calls}
    assert fired == set(range(len(RULES[name]))), "a rule never says a word"
    refuted = rule_mutants.of_claims(walk)
    left = {str(key) for key, is_wrong in refuted.items() if not is_wrong}
    assert left == set(CLAIMS.get(name, ())), "not refuted"
    proven["types"] += 1
    proven["rules"] += len(RULES[name])
    proven["calls"] += len(walk.calls)
    proven["wrong claims"] += len(refuted)
    proven["wrong claims refuted"] += sum(refuted.values())


def test_all_types_exist():
    unknown = [name for name in RULES if function_of(name) is None]
    assert not unknown


def test_all_types_have_cases():
    assert set(CASES) == set(RULES)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", OTHERS)
def test_numbers_are_as_rules_say(name, proven):
    check_claims(name, proven)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ENTRY_BY_ENTRY_TYPES)
def test_numbers_are_as_rules_say_entry_by_entry(name, proven):
    check_claims(name, proven)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", [*OTHERS, *ENTRY_BY_ENTRY_TYPES])
def test_rules_that_accept_more_are_refuted(name, proven):
    """Each rule accepts one form more, at each of its inputs."""
    if name in NOT_WALKED:
        pytest.skip("its mutants have not been looked at")
    verdicts = Acceptance(name, CASES[name]).verdicts
    left = {
        str(mutant): verdict
        for mutant, verdict in verdicts.items()
        if verdict not in CAUGHT
    }
    assert set(left) == set(WIDER.get(name, ())), f"not refuted: {left}"
    proven["wider rules"] += len(verdicts)
    for verdict in verdicts.values():
        proven[f"wider rules: {verdict}"] += 1

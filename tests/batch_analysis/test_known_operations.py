"""The list of known operations is what the rules are, and what there is.

It names the versions of Keras and TensorFlow that it was made with. With others
only what does not depend on them is compared.
"""

import known_operations
import pytest
from rule_walk import function_of

from keras_conflux._batch_analysis.rules import RULES

TEXT = known_operations.PAGE.read_text()
ROWS, FAILED, COUNT, VERSIONS = known_operations.read(TEXT)
AGAIN = "run `tests/batch_analysis/known_operations.py --{}`"


def is_here(kind):
    return function_of(kind) is not None


def test_statuses_are_those_of_the_rules():
    wrong = {
        row.kind: row.status
        for row in ROWS
        if is_here(row.kind)
        and row.status != known_operations.status_of(row.kind)
    }
    assert not wrong, AGAIN.format("update")


def test_every_rule_is_listed():
    assert known_operations.updated(TEXT) == TEXT, AGAIN.format("update")
    assert all(f"`{kind}`" in TEXT for kind in RULES)


def test_what_is_not_called_is_little():
    assert len(FAILED) < 0.05 * COUNT


@pytest.mark.long
def test_all_that_is_public_is_listed():
    found = known_operations.collected()
    made = {kind: len(names) for kind, names in found.makers.items()}
    assert len(found.failed) < 0.1 * found.count
    if known_operations.versions() == VERSIONS:
        listed = {row.kind: row.count for row in ROWS}
        assert made == listed, AGAIN.format("write")
        assert sorted(found.failed) == sorted(FAILED)
    else:
        kinds = {row.kind for row in ROWS if is_here(row.kind)}
        assert len(kinds & set(made)) > 0.9 * len(kinds)

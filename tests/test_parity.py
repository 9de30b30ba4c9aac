"""Each row of docs/parity.md is shown by code that runs."""

import pathlib
import re

import pytest
from conftest import several
from parity_lines import LINES

ROOT = pathlib.Path(__file__).parent.parent
TABLES = (ROOT / "docs" / "parity.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in TABLES.splitlines()
    if line.startswith("| ") and not line.startswith("| feature")
]
TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
SECTION = re.compile(r"\]\(([\w/-]+\.md)#([\w-]+)\)")
WORD = re.compile(r"(open|not needed): \S")


def sections(document: str) -> set[str]:
    """Returns what links to a document's sections end with, as on GitHub."""
    text = (ROOT / "docs" / document).read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in titles
    }


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_is_shown_or_says_why_not(row):
    feature, who, here, shown = row
    assert feature
    assert who
    assert here
    tests, links = TEST.findall(shown), SECTION.findall(shown)
    assert tests or links or WORD.match(shown)
    for file, name in tests:
        (path,) = (ROOT / "tests").rglob(file)
        assert f"\ndef {name}(" in path.read_text()
    for document, section in links:
        assert section in sections(document)
    left = TEST.sub("", SECTION.sub("", shown))
    assert "test_" not in left, "write `test_file.py::test_name`"


@several
@pytest.mark.parametrize("feature", [row[0] for row in ROWS])
def test_a_line_of_code_shows_it(feature):
    assert LINES[feature]()


def test_no_line_is_left_without_a_row():
    assert {*LINES} == {row[0] for row in ROWS}

"""docs/reference/ describes every public name once, and no other."""

import pathlib
import re

import pytest

import keras_conflux as kc

REFERENCE = pathlib.Path(__file__).parent.parent / "docs" / "reference"
PAGES = sorted(set(REFERENCE.glob("*.md")) - {REFERENCE / "index.md"})


def described(page: pathlib.Path) -> list[str]:
    """Returns the names for which a page shows the docstring."""
    return re.findall(r"^::: *(\S+)", page.read_text(), re.MULTILINE)


def test_each_public_name_is_described_once():
    found = [name for page in PAGES for name in described(page)]
    public = [f"keras_conflux.{name}" for name in kc.__all__]
    assert sorted(found) == sorted(public)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_index_links_to_each_page(page):
    assert f"]({page.name})" in (REFERENCE / "index.md").read_text()

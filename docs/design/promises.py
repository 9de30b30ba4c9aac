"""Prints each file of tests, with the promises that it shows and its tests."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
HEAD = """# The tests of each promise

Every file of tests: its first sentence, the rows of
[guarantees](../guarantees.md) that it shows, and the names of its tests.
`python docs/design/promises.py` prints this page.
"""


def rows() -> list[tuple[str, list[str]]]:
    """Returns each promise of the guarantees, and the files that it names."""
    text = (ROOT / "docs" / "guarantees.md").read_text()
    lines = text.replace("](", "](../").splitlines()
    cells = [
        line.strip("| ").split(" | ") for line in lines if line[:2] == "| "
    ]
    return [
        (": ".join(promise), re.findall(r"\w+\.py", named))
        for *promise, named in cells
        if named != "test"
    ]


def page() -> str:
    """Returns the text of the page."""
    return "\n".join([HEAD, *map(_section, sorted(_files()))])


def _files() -> list[pathlib.Path]:
    return [*(ROOT / "tests").rglob("test_*.py")]


def _section(path: pathlib.Path) -> str:
    tree = ast.parse(path.read_text())
    sentence = (ast.get_docstring(tree) or "").partition("\n")[0]
    promises = [f"* {each}" for each, files in rows() if path.name in files]
    heading = f"## `{path.relative_to(ROOT).as_posix()}`"
    names = ", ".join(_tests(tree) + _cases(path))
    return "\n".join([heading, "", sentence, "", *promises, "", names, ""])


def _tests(tree: ast.Module) -> list[str]:
    return [
        f"`{node.name}`"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    ]


def _cases(path: pathlib.Path) -> list[str]:
    if path.name != "test_equal.py":
        return []
    table = (ROOT / "tests" / "cases.py").read_text()
    return re.findall(r'^ *case\(\s*f?("[^"]+")', table, re.MULTILINE)


if __name__ == "__main__":
    print(page(), end="")

"""The Python of README.md and docs/ runs, and what they quote is said."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SETUP = "from docs_setup import *"
FENCE = re.compile(r"^```(.*)$")


def languages(document: pathlib.Path) -> list[str]:
    """Returns for each line the language of its block, "" for prose."""
    found, language = [], ""
    for line in document.read_text().splitlines():
        fence = FENCE.match(line)
        if fence:
            language = "" if language else fence[1] or "text"
        found.append("" if fence else language)
    return found


def program(document: pathlib.Path) -> str:
    """Returns a document's Python as one program.

    Its lines stay where they are, so that an error names the document's line.
    In place of the title stands what the document takes for granted, unless
    it begins with imports of its own.
    """
    lines = document.read_text().splitlines()
    kept = [
        line if language == "python" else ""
        for line, language in zip(lines, languages(document), strict=True)
    ]
    alone = "".join(kept).startswith("import ")
    return "\n".join(["" if alone else SETUP, *kept[1:], ""])


@pytest.mark.parametrize(
    "document",
    [each for each in DOCUMENTS if "python" in languages(each)],
    ids=lambda document: document.stem,
)
def test_python_runs(document, tmp_path):
    script = tmp_path / f"{document.stem}.md.py"
    script.write_text(program(document))
    result = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        # On CPU devices everywhere, of which there are as many as it takes.
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr

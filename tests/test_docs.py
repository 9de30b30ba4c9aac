"""The Python of README.md and docs/ runs, and what they quote is said."""

import ast
import functools
import json
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import document_sizes
import forked
import pytest

import keras_conflux as kc

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
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
    it imports Keras itself.
    """
    lines = document.read_text().splitlines()
    kept = [
        line if language == "python" else ""
        for line, language in zip(lines, languages(document), strict=True)
    ]
    first = "" if "import keras" in kept else SETUP
    return "\n".join([first, *kept[1:], ""])


PROGRAMS = [each for each in DOCUMENTS if "python" in languages(each)]
TRANSLATIONS = [each for each in PROGRAMS if "julia" in each.parent.name]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "document",
    [each for each in PROGRAMS if each not in TRANSLATIONS],
    ids=lambda document: document.stem,
)
def test_python_runs(document, tmp_path):
    script = tmp_path / f"{document.stem}.md.py"
    script.write_text(program(document))
    run(script)


@pytest.mark.parametrize(
    "document", TRANSLATIONS, ids=lambda document: document.stem
)
def test_a_translation_equals_one_device(document, tmp_path):
    assert "np.testing.assert_allclose(weight, " in program(document)
    test_python_runs(document, tmp_path)


def test_python_has_all_its_names(tmp_path):
    """Of all documents, while only some of them run in CI."""
    given = f"{SETUP[:-1]}{', '.join(sorted(names_of_setup()))}"
    for document in DOCUMENTS:
        script = tmp_path / f"{document.stem}.md.py"
        script.write_text(program(document).replace(SETUP, given))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated"]
    found = subprocess.run(
        [*ruff, "--select=F821", "--output-format=concise", tmp_path],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def names_of_setup() -> set[str]:
    """Returns what the documents take for granted."""
    source = (ROOT / "tests" / "docs_setup.py").read_text()
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
    return {name for name in names if name.isidentifier()}


def test_the_notebook_runs(tmp_path):
    notebook = ROOT / "examples" / "notebook.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    sources = [
        "".join(cell["source"])
        for cell in cells
        if cell["cell_type"] == "code" and cell["source"][0][0] != "%"
    ]
    script = tmp_path / "notebook.py"
    script.write_text("\n".join(sources))
    assert "weights differ by at most" in run(script)


def run(script: pathlib.Path) -> str:
    """Returns what a script has printed."""
    result = forked.run(
        script,
        cwd=script.parent,
        # On CPU devices everywhere, of which there are as many as it takes.
        env=os.environ
        | {"PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def template(node: ast.AST) -> str:
    """Returns a string as the source has it, with "..." for other values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else "..."


@functools.cache
def said() -> list[str]:
    """Returns the strings that the package passes on or returns."""
    return [
        template(value)
        for path in pathlib.Path(kc.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call | ast.keyword | ast.Return)
        for value in ast.iter_child_nodes(node)
    ]


@pytest.mark.parametrize(
    "message",
    [
        quoted.strip()
        for _, quoted in re.findall(
            r"^### (`+)(.*)\1$",
            (ROOT / "docs" / "troubleshooting.md").read_text(),
            re.MULTILINE,
        )
    ],
)
def test_quoted_message_is_said(message):
    beginning = ".*".join(map(re.escape, message.split("...")))
    assert any(re.match(beginning, each) for each in said())


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        text = document.read_text()
        for target in re.findall(r"\]\((?!https?:)([^)#:]+)[^)]*\)", text):
            assert (document.parent / target).exists(), (document, target)


@pytest.mark.long
def test_a_link_to_nowhere_ends_the_build_of_the_site(tmp_path):
    pytest.importorskip("mkdocs_autorefs")
    for name in ("mkdocs.yml", *(path.name for path in ROOT.glob("*.md"))):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copy(ROOT / "LICENSE", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "keras_conflux").symlink_to(ROOT / "keras_conflux")
    planted = {
        "devices.md": "[a page](no-page.md)",
        "quickstart.md": "[an anchor](devices.md#no-anchor)",
        "recipes.md": '<img src="images/none.svg" alt="a picture">',
        "starting.md": '<a href="../devices/#nowhere">an anchor in HTML</a>',
        "design/measuring.md": "[of this page](#no-heading)",
    }
    for name, link in planted.items():
        with (tmp_path / "docs" / name).open("a") as document:
            document.write(f"\n{link}\n")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 1, built.stderr
    for name in planted:
        page = name.replace(".md", "/index.html")
        assert f"{page} links to" in built.stderr
    assert built.stderr.count("leads nowhere") == len(planted), built.stderr


def test_every_block_says_its_language():
    # `py` needs what the tests do not; see test_throughput.py.
    known = {"", "python", "py", "sh", "julia", "pytorch", "text", "yaml"}
    for document in DOCUMENTS:
        assert set(languages(document)) <= known, document


def test_loops_weight_their_means():
    programs = [*DOCUMENTS, *(ROOT / "examples").glob("*.py")]
    programs += (ROOT / "keras_conflux").rglob("*.py")
    for path in programs:
        for call in re.findall(r"reduce\(\s*.mean.,[^()]*\)", path.read_text()):
            about = re.search(r"\b(gradients|loss|weights|averages)\b", call)
            assert not about or "weight=" in call, (path, call)


def test_users_have_few_words_to_read():
    counted = document_sizes.words()
    assert {"README.md", "quickstart.md", "guarantees.md"} <= counted.keys()
    assert sum(counted.values()) <= 14_000, "move evidence to docs/design"


def test_guarantees_name_tests_that_exist():
    program = runpy.run_path(str(ROOT / "docs" / "design" / "promises.py"))
    sections = {
        section.partition("`")[0].rpartition("/")[2]: section
        for section in program["page"]().split("\n## `")[1:]
    }
    rows = program["rows"]()
    assert len(rows) > 60
    for promise, files in rows:
        for file in files:
            section = sections.get(file, "")
            assert f"* {promise}\n" in section, (promise, file)
            assert "`test_" in section, file

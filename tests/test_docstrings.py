"""The docstrings of all public names are complete, and their examples run."""

import ast
import dataclasses
import inspect
import os
import pathlib
import re
import sys
import textwrap

import forked
import pytest

import keras_conflux as kc

TESTS = pathlib.Path(__file__).parent
SECTION = re.compile(r"^(\w+):\n((?:    .*\n|\n)*)", re.MULTILINE)
ENTRY = re.compile(r"^    \*{0,2}(\w+): ", re.MULTILINE)
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def public_objects():
    """Yields the public functions and classes, and their public members."""
    for name in kc.__all__:
        thing = getattr(kc, name)
        yield name, thing
        if inspect.isclass(thing):
            for member, value in vars(thing).items():
                value = getattr(value, "__func__", value)
                is_code = inspect.isfunction(value) or isinstance(
                    value, property
                )
                if is_code and not member.startswith("_"):
                    yield f"{name}.{member}", value


OBJECTS = dict(public_objects())


def docstring(name):
    return inspect.cleandoc(OBJECTS[name].__doc__ or "") + "\n"


def sections(name):
    return dict(SECTION.findall(docstring(name)))


def examples(name):
    return [
        textwrap.dedent(block)
        for block in BLOCK.findall(sections(name).get("Example", ""))
    ]


def parameters(thing):
    """Returns what a caller gives to a function, or to make an instance."""
    if isinstance(thing, property):
        return []
    if inspect.isclass(thing):
        makes = vars(thing).get("__init__")
        if makes is None or dataclasses.is_dataclass(thing):
            return []  # errors, and what only the package makes
        thing = makes
    names = inspect.signature(thing).parameters
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("name", OBJECTS)
def test_arguments_are_those_of_the_signature(name):
    described = ENTRY.findall(sections(name).get("Args", ""))
    assert described == parameters(OBJECTS[name])


@pytest.mark.parametrize(
    "name", [name for name in OBJECTS if inspect.isfunction(OBJECTS[name])]
)
def test_what_is_returned_is_described(name):
    returned = inspect.signature(OBJECTS[name]).return_annotation
    assert ("Returns" in sections(name)) == (returned is not None)
    # What stands before a colon is shown as a type.
    assert ": " not in sections(name).get("Returns", "")


@pytest.mark.parametrize("name", kc.__all__)
def test_there_is_an_example(name):
    assert examples(name)


def fields(tree):
    """Yields each annotated name of a class, and what stands behind it."""
    for line, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(line, ast.AnnAssign):
            yield line.target.id, following


@pytest.mark.parametrize(
    "name", [name for name in OBJECTS if inspect.isclass(OBJECTS[name])]
)
def test_attributes_are_described(name):
    (tree,) = ast.parse(inspect.getsource(OBJECTS[name])).body
    for field, following in fields(tree):
        is_text = isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        )
        assert is_text or field.startswith("_"), field


def test_no_docstring_begins_with_what():
    begins = re.compile(r'^\s*r?"""What\b', re.MULTILINE)
    files = pathlib.Path(kc.__file__).parent.rglob("*.py")
    assert not [file for file in files if begins.search(file.read_text())]


RUN_ALL = """
import pathlib, runpy, sys, traceback, warnings
import docs_setup, keras, tensorflow as tf

failed = False
for script in sorted(pathlib.Path("examples").iterdir()):
    given = runpy.run_path(docs_setup.__file__)
    given = {name: given[name] for name in given if not name.startswith("__")}
    try:
        with warnings.catch_warnings():
            runpy.run_path(str(script), given, "__main__")
    except Exception:
        failed = True
        traceback.print_exc()
    # What an example chooses for the whole program.
    keras.distribution.set_distribution(None)
    tf.config.run_functions_eagerly(False)
    docs_setup.kc.replicate(devices="all")
sys.exit(failed)
"""


def test_examples_run(tmp_path):
    (tmp_path / "examples").mkdir()
    for name in OBJECTS:
        for index, example in enumerate(examples(name)):
            script = tmp_path / "examples" / f"{name}-{index}.py"
            script.write_text(example)
    (tmp_path / "run_all.py").write_text(RUN_ALL)
    path = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    result = forked.run(
        "run_all.py",
        cwd=tmp_path,
        # On CPU devices everywhere, of which there are as many as it takes.
        env=os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert result.returncode == 0, result.stdout + result.stderr

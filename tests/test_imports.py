"""What importing needs, and that modules import downwards only."""

import ast
import pathlib
import subprocess
import sys

import keras_conflux as kc

PACKAGE = pathlib.Path(kc.__file__).parent


def import_with(setup: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", f"{setup}\nimport keras_conflux"],
        env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "2", **environment},
        capture_output=True,
        text=True,
    )


def test_without_tensorflow():
    hide = (
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *a: "
        "None if name == 'tensorflow' else find(name, *a)"
    )
    result = import_with(hide)
    assert result.returncode != 0
    assert "pip install 'keras-conflux[cuda]'" in result.stderr
    assert result.stderr.count("Error: ") == 1


def test_with_another_backend():
    result = import_with("import keras; keras.backend.backend = lambda: 'jax'")
    assert result.returncode != 0
    assert "KERAS_BACKEND=tensorflow" in result.stderr


def modules() -> dict[str, set[str]]:
    """Returns each module's imports of the package, at any depth."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE.parent).with_suffix("")
        name = ".".join(relative.parts).removesuffix(".__init__")
        imports = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                imports.add(node.module)
                imports |= {f"{node.module}.{a.name}" for a in node.names}
        found[name] = imports
    return {
        name: {other for other in imports if other in found and other != name}
        - {"keras_conflux"}
        for name, imports in found.items()
    }


def test_imports_point_downwards():
    graph = modules()
    assert len(graph) > 10
    done: set[str] = set()
    while graph:
        ready = {name for name, imports in graph.items() if imports <= done}
        assert ready, f"these import each other: {sorted(graph)}"
        done |= ready
        graph = {k: v for k, v in graph.items() if k not in ready}


def test_private_names_live_in_two_modules():
    for path in PACKAGE.rglob("*.py"):
        if path.name in ("_keras.py", "_tensorflow.py"):
            continue
        source = path.read_text()
        assert "keras.src" not in source, path
        assert "tensorflow.python" not in source, path

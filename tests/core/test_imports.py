"""What importing needs, and that modules import downwards only."""

import ast
import importlib
import os
import pathlib
import subprocess

import forked
import size_figures

import keras_conflux as kc

PACKAGE = pathlib.Path(kc.__file__).parent


def import_with(setup: str) -> subprocess.CompletedProcess:
    return forked.run(
        *("-c", f"{setup}\nimport keras_conflux"),
        env={"PATH": "", "TF_CPP_MIN_LOG_LEVEL": "2"},
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
    assert "pip install 'tensorflow[and-cuda]'" in result.stderr
    assert result.stderr.count("Error: ") == 1


def test_with_another_backend():
    result = import_with("import keras; keras.backend.backend = lambda: 'jax'")
    assert result.returncode != 0
    assert "KERAS_BACKEND=tensorflow" in result.stderr


def test_a_name_that_the_core_needs_is_missing():
    """It is said before a module that needs it is imported."""
    result = import_with(
        "from keras.src.backend.common import masking\n"
        "del masking.get_keras_mask, masking.set_keras_mask"
    )
    assert result.returncode != 0
    assert "`keras.src.backend.common.masking:get_keras_mask` is missing" in (
        result.stderr
    )
    assert "keras_conflux does not fit Keras" in result.stderr


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
    folders = {".".join(name.split(".")[:-1]) for name in found}
    return {
        name: {other for other in imports if other in found and other != name}
        - {"keras_conflux"}
        - folders
        for name, imports in found.items()
    }


MODULES = modules()


def test_tests_of_public_behaviour_know_no_private_module():
    for path in (PACKAGE.parent / "tests").glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                assert not node.module.startswith("keras_conflux"), path.name
            elif isinstance(node, ast.Import):
                names = [each.name for each in node.names]
                assert not any("keras_conflux." in name for name in names)


def test_all_modules_can_be_imported():
    for name in modules():
        if not name.endswith(".__main__"):  # which runs when it is imported
            importlib.import_module(name)


def test_what_modules_are_asked_for_exists():
    """Type checkers are not asked: TensorFlow makes its modules as it runs."""
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        known = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for each in node.names:
                    full = f"{node.module}.{each.name}"
                    if full in MODULES:
                        known[each.asname or each.name] = full
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(
                node.value, ast.Name
            ):
                module = known.get(node.value.id)
                if module is not None:
                    found = importlib.import_module(module)
                    assert hasattr(found, node.attr), (path, node.lineno)


def test_imports_point_downwards():
    graph = modules()
    assert len(graph) > 10
    done: set[str] = set()
    while graph:
        ready = {name for name, imports in graph.items() if imports <= done}
        assert ready, f"these import each other: {sorted(graph)}"
        done |= ready
        graph = {k: v for k, v in graph.items() if k not in ready}


# Each folder imports from itself and from those before it.
CORE = [
    "_common",
    "_compat",
    "_cluster",
    "_devices",
    "_communication.transports",
    "_communication",
    "_replication",
    "_data",
    "_fit.input",
    "_fit.numerics",
    "_fit.execution",
    "_fit",
]
EXTENSIONS = [
    "_extensions.launchers",
    "_extensions.keras_distribution",
    "_extensions.diagnostics",
    "_extensions.out_of_memory",
    "_extensions.kernels",
    "_extensions.memory",
    "_extensions.optimizers",
    "_extensions.program_cache",
    "_extensions.recomputation",
    "_extensions.sharding",
    "_extensions.throughput",
    "_extensions.resume.compat",
    "_extensions.resume",
]
ANALYSIS = "_batch_analysis"
OWN_LOOPS = "_custom_loops"
GRAPHS = "_graphs"
FLOORS = [
    GRAPHS,
    ANALYSIS,
    *CORE,
    OWN_LOOPS,
    "_extensions.common",
    *EXTENSIONS,
    "_extensions",
    "",  # the package's own __init__
    "tools",
    "tools.checks",
    "tools.cli",
]


def folder(module: str) -> str:
    """Returns a module's folder, as `FLOORS` names it."""
    if module == "keras_conflux.__main__":
        return "tools.cli"  # its other name
    parts = module.split(".")[1:]
    is_folder = (PACKAGE / "/".join(parts)).is_dir()
    return ".".join(parts if is_folder else parts[:-1])


def test_folders_import_from_those_below():
    found = {
        (name, other) for name, all_ in modules().items() for other in all_
    }
    assert {folder(name) for name in modules()} == set(FLOORS)
    for name, other in found:
        upper, lower = map(FLOORS.index, (folder(name), folder(other)))
        assert lower <= upper, f"{name} imports {other}"


def test_the_analysis_is_a_library():
    """It imports nothing else, and shows what the package's `__init__` has."""
    for name, imports in modules().items():
        inside = {each for each in imports if folder(each) == ANALYSIS}
        below = {each for each in imports if folder(each) == GRAPHS}
        if folder(name) == ANALYSIS:
            assert inside | below == imports, name
        else:
            assert not inside, name


def test_the_analysis_shows_what_is_asked_for_alone():
    init = ast.parse((PACKAGE / ANALYSIS / "__init__.py").read_text())
    shown = {
        each.name
        for node in init.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    asked = set()
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / ANALYSIS not in path.parents:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module == (
                    f"keras_conflux.{ANALYSIS}"
                ):
                    asked |= {each.name for each in node.names}
    assert shown == asked


def extension(folder: str) -> str:
    """Returns which extension a folder is of."""
    return ".".join(folder.split(".")[:2])


def test_extensions_are_strangers():
    for name, imports in modules().items():
        if folder(name) in EXTENSIONS:
            own = extension(folder(name))
            others = {folder(each) for each in imports} & set(EXTENSIONS)
            assert {extension(each) for each in others} <= {own}, name


def test_the_core_needs_no_extension():
    """Replicas compute what one device does, by what the core does alone."""
    program = """
import keras, numpy as np, sys
from keras_conflux._fit.execution import traced_program
from keras_conflux._fit.input import calls
import tensorflow as tf
import keras_conflux as kc
assert len(traced_program.makers) == len(calls.observers) == 1
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
for asked in (
    lambda: kc.replicate(shard="weights"), lambda: kc.Resume("runs")
):
    try:
        asked()
        sys.exit("an extension")
    except NotImplementedError as error:
        assert "CONFLUX_EXTENSIONS=0" in str(error)
x = np.random.default_rng(0).normal(size=(22, 4)).astype("float32")
found = []
for devices in (None, 2):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    if devices:
        kc.replicate(model, devices)
    model.fit(x, x[:, :3], batch_size=8, epochs=2, verbose=0)
    found.append(model.get_weights()[0])
np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-7)
"""
    environment = {**os.environ, "CONFLUX_EXTENSIONS": "0"}
    ended = forked.run("-c", program, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_figures_are_of_the_shelves():
    found = size_figures.figures(PACKAGE.parent)
    files = [folder(name).split(".")[0] for name in modules()]
    outside = 0
    for shelf, folders in size_figures.SHELVES.items():
        count = sum(each in folders for each in files)
        assert found[f"files of the {shelf}"] == count > 0
        outside += count
    assert found["files of the package"] == len(files)
    assert found["files of the core"] == len(files) - outside
    assert found["fields of the step's record"] > 0
    assert found["ties of a file to a field"] > 0
    assert found["patches for speed in the core's table"] == 0


def test_input_and_numerics_of_fit_are_strangers():
    for name, imports in modules().items():
        if folder(name) in ("_fit.input", "_fit.numerics"):
            others = {folder(each) for each in imports} - {folder(name)}
            assert not {each for each in others if each.startswith("_fit")}


def test_the_namespace_is_the_public_names():
    public = {name for name in vars(kc) if not name.startswith("_")}
    on_top = {"tools"}  # where a test has imported it
    assert public - on_top == set(kc.__all__)
    assert set(dir(kc)) == set(kc.__all__)


def test_no_module_has_the_name_of_a_public_function():
    for path in PACKAGE.rglob("*.py"):
        assert path.stem not in kc.__all__

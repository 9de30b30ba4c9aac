"""Prints how large the package is, and how far its parts are tied together.

    python tests/size_figures.py [CHECKOUT]
    python tests/size_figures.py --lower

Lines and files are Python's, with comments, blank lines and `__init__`. The
core is all that is on no other shelf. `size_limits.toml` holds the figures that
may only fall. `--lower` writes down a figure that has fallen.
"""

import ast
import pathlib
import re
import sys
import tomllib

ROOT = pathlib.Path(__file__).parent.parent
LIMITS = pathlib.Path(__file__).parent / "size_limits.toml"
SHELVES = {
    "graphs": ("_graphs",),
    "analysis": ("_batch_analysis",),
    "own loops": ("_custom_loops",),
    "extensions": ("_extensions",),
    "tools": ("tools", "bench", "__main__.py"),
}
"""What is no core, and where it is in the package."""
SPEED = {
    "ATTENTION",
    "DECAY_WEIGHTS",
    "EINSUM",
    "EINSUM_DENSE_CALL",
    "GELU",
    "UPDATE_VARIABLES",
}
"""Patched methods that compute the same in fewer or faster operations."""


def figures(root: pathlib.Path) -> dict[str, int]:
    """Returns each figure by what it counts.

    Args:
        root: Of a checkout.
    """
    package = root / "keras_conflux"
    files = [*package.rglob("*.py")]
    shelves: dict[str, list[pathlib.Path]] = {
        each: [] for each in ("core", *SHELVES)
    }
    for path in files:
        shelves[shelf(path.relative_to(package))].append(path)
    core = shelves["core"]
    record = package / "_replication" / "steps.py"
    fields = fields_of(record, "Step")
    found = {}
    for name, each in shelves.items():
        found[f"lines of the {name}"] = sum(map(lines, each))
        found[f"files of the {name}"] = len(each)
    return {
        **found,
        "lines of the core with the analysis": (
            found["lines of the core"]
            + found["lines of the graphs"]
            + found["lines of the analysis"]
        ),
        "lines of the package": sum(map(lines, files)),
        "files of the package": len(files),
        "fields of the step's record": len(fields),
        "ties of a file to a field": sum(
            len(fields_read(path) & fields) for path in core if path != record
        ),
        "private names": sum(map(private_names, files)),
        "words of the longest way in": words(root / "docs"),
        "words of the log": words_in(root / "docs", "log*"),
        "words of the design": words_in(root / "docs", "design"),
        "words of the notes": words_in(root / "docs", "notes"),
        "patches for speed in the core's table": len(
            patched_by(package / "_fit" / "keras_patches.py") & SPEED
        ),
    }


def shelf(path: pathlib.Path) -> str:
    """Returns the shelf of a file.

    Args:
        path: In the package.
    """
    return next(
        (name for name, own in SHELVES.items() if path.parts[0] in own), "core"
    )


def lines(path: pathlib.Path) -> int:
    """Returns the number of lines of a file."""
    return path.read_text().count("\n")


def fields_of(path: pathlib.Path, name: str) -> set[str]:
    """Returns the fields of a dataclass."""
    return {
        statement.target.id
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
    }


def fields_read(path: pathlib.Path) -> set[str]:
    """Returns what a file reads or sets of what it calls a context or step."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and re.fullmatch(r"_?(.*_)?(context|step)", node.value.id)
    }


def patched_by(path: pathlib.Path) -> set[str]:
    """Returns the names of the methods in a table of patches."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Patched"
    }


def private_names(path: pathlib.Path) -> int:
    """Returns how many private names of Keras and TensorFlow a file lists.

    A table of methods lists one by each keyword.
    """
    counted = {"Private": lambda call: 1, "_methods": _keywords}
    return sum(
        counted[node.func.id](node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in counted
    )


def _keywords(call: ast.Call) -> int:
    return len(call.keywords)


def words_in(docs: pathlib.Path, pattern: str) -> int:
    """Returns the words of pages, and of all pages in folders, of a name."""
    pages = [
        page
        for found in docs.glob(pattern)
        for page in (found.rglob("*.md") if found.is_dir() else [found])
    ]
    return sum(len(page.read_text().split()) for page in pages)


def words(docs: pathlib.Path) -> int:
    """Returns the words of the page from which one can change the core."""
    core = docs / "design" / "core.md"
    page = core if core.exists() else docs / "design.md"
    return len(page.read_text().split())


def limits() -> dict[str, int]:
    """Returns the figures that may only fall."""
    return tomllib.loads(LIMITS.read_text())["limits"]


def lower() -> None:
    """Writes down the figures that have fallen."""
    text = LIMITS.read_text()
    found = figures(ROOT)
    for what, limit in limits().items():
        smaller = min(limit, found[what])
        text = text.replace(f'"{what}" = {limit}', f'"{what}" = {smaller}')
    LIMITS.write_text(text)


def main() -> None:
    """Prints a table, or lowers the limits."""
    if sys.argv[1:] == ["--lower"]:
        lower()
        return
    root = pathlib.Path(sys.argv[1]) if sys.argv[1:] else ROOT
    for what, count in figures(root).items():
        print(f"{count:7,d}  {what}")


if __name__ == "__main__":
    main()

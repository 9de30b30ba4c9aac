"""Prints every file of the package, and its first sentence."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
HEAD = """# The tree

Every file of the package, with the first sentence that it says of itself.
`python docs/design/tree.py` prints this page.

"""


def first_line(path: pathlib.Path) -> str:
    """Returns the first line of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].rstrip(".")


def page() -> str:
    """Returns the text of the page."""
    return HEAD + "\n".join(_lines(ROOT / "keras_conflux", "##")) + "\n"


def _lines(folder: pathlib.Path, heading: str) -> list[str]:
    here = folder.relative_to(ROOT)
    said = first_line(folder / "__init__.py")
    lines = [f"{heading} `{here.as_posix()}/`", ""]
    lines += [f"{said}.", ""] if said else []
    files = [
        f"| `{path.name}` | {first_line(path)} |"
        for path in sorted(folder.glob("*.py"))
        if path.name != "__init__.py"
    ]
    if files:
        lines += ["| file | |", "|---|---|", *files, ""]
    for below in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += _lines(below, heading)
    return lines


if __name__ == "__main__":
    print(page(), end="")

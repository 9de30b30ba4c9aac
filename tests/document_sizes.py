"""Prints how many words users have to read, page by page.

    python tests/document_sizes.py [CHECKOUT]

Users read the README and the first level of the site: the pages that
`mkdocs.yml` lists under "User guide" and "What to expect". Blocks of code and
comments do not count.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
USERS_READ = ("User guide", "What to expect")


def words(root: pathlib.Path = ROOT) -> dict[str, int]:
    """Returns the number of words of each page for users.

    Args:
        root: Of a checkout.
    """
    pages = {"README.md": root / "README.md"}
    section = ""
    for line in (root / "mkdocs.yml").read_text().splitlines():
        if title := re.fullmatch(r"  - (.+):", line):
            section = title[1]
        elif section in USERS_READ and line.endswith(".md"):
            name = line.split()[-1]
            pages[name] = root / "docs" / name
    return {name: _words(path.read_text()) for name, path in pages.items()}


def _words(text: str) -> int:
    prose = re.sub(
        r"^ *```.*?^ *```$|<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE
    )
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def main() -> None:
    """Prints a table."""
    root = pathlib.Path(sys.argv[1]) if sys.argv[1:] else ROOT
    counted = words(root)
    for name, count in counted.items():
        print(f"{count:7,d}  {name}")
    print(f"{sum(counted.values()):7,d}  in all")


if __name__ == "__main__":
    main()

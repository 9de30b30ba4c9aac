"""Lets the site show the same files as the repository, links included.

README.md and other files outside of `docs/` become pages of the site. Links are
written as paths in the repository, and become paths in the site.
"""

import pathlib
import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).parent.parent
OUTSIDE_DOCS = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE",
}
"""Files of the repository, and where they are in the site."""
NOT_IN_SITE = ("docs/log.md", "docs/notes/", "docs/design/", "tests/")
"""The beginnings of paths that links lead to in the repository."""
DESIGN = [
    f"docs/design/{name}.md"
    for name in (
        "core",
        "beside-mirrored-strategy",
        "guarantees-tests",
        "measuring",
    )
]
"""The pages of the design that are in the site all the same."""
REPOSITORY = "https://github.com/keras-conflux/keras-conflux/blob/main"
SEARCH = {
    ("changelog",): {"exclude": True},
    ("design/", "contributing", "keras-suite", "parity"): {"boost": 0.2},
    ("recipes", "troubleshooting"): {"boost": 2},
    ("index", "questions", "quickstart"): {"boost": 4},
}
"""How pages are found that do not begin with the others' weight of 1."""

_LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")([^)#:"\s]+)')


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that lie outside of `docs/`."""
    for source, page in OUTSIDE_DOCS.items():
        path = str(ROOT / source)
        file = File.generated(config, page, abs_src_path=path)
        file.edit_uri = f"../{source}"
        files.append(file)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Turns links to files into links to pages, and weighs what is searched."""
    here = page.file.src_uri
    for pages, search in SEARCH.items():
        if here.startswith(pages):
            page.meta["search"] = search
    if here == "index.md":
        page.meta["hide"] = ["navigation"]

    def in_site(link: re.Match[str]) -> str:
        # MkDocs turns links in Markdown alone into addresses.
        start = posixpath.dirname(here) if link[1] == "](" else page.url
        return link[1] + _in_site(link[2], here, start)

    return _LINK.sub(in_site, markdown)


def _in_site(target: str, here: str, start: str) -> str:
    """Returns the link from the page `here` to `target`, seen from `start`."""
    in_repository = {page: source for source, page in OUTSIDE_DOCS.items()}
    source = in_repository.get(here, f"docs/{here}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith(NOT_IN_SITE) and path not in DESIGN:
        return f"{REPOSITORY}/{path}"
    page = OUTSIDE_DOCS.get(path) or path.removeprefix("docs/")
    return posixpath.relpath(page, start or ".")

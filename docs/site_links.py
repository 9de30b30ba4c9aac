"""Names the links of the built site that lead nowhere, as errors of the build.

MkDocs warns of such links only in Markdown, and `-q` hides warnings from
`--strict`. So each page is read as it was written: links, pictures and anchors.
"""

import logging
import pathlib
from html.parser import HTMLParser
from urllib.parse import unquote
from urllib.parse import urldefrag
from urllib.parse import urljoin
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig

_log = logging.getLogger("mkdocs.hooks.site_links")


class _Page(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str | None] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(
        self, tag: str, attrs: list[tuple[str, str | None]]
    ) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.links.add(value or "")
            elif name == "srcset":
                choices = (value or "").split(",")
                self.links.update(each.split()[0] for each in choices)


def on_post_build(config: MkDocsConfig) -> None:
    """Logs an error for each link that leads nowhere."""
    site = pathlib.Path(config.site_dir)
    root = config.site_url or "http://site/"
    pages = {
        path.relative_to(site).as_posix(): _Page(path.read_text("utf-8"))
        for path in sorted(site.rglob("*.html"))
    }

    def leads_somewhere(link: str) -> bool:
        target, anchor = urldefrag(link)
        if urlsplit(target)[:2] != urlsplit(root)[:2]:
            return True  # to another site, which is not asked
        if not target.startswith(root):
            return False
        name = unquote(urlsplit(target.removeprefix(root)).path)
        if not name or name.endswith("/"):
            name += "index.html"
        if name not in pages:
            return (site / name).is_file()
        return not anchor or unquote(anchor) in pages[name].anchors

    for name, page in pages.items():
        for link in sorted(page.links):
            if not leads_somewhere(urljoin(root + name, link)):
                _log.error("%s links to %r, which leads nowhere", name, link)

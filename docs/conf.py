"""Configuration of the documentation site (``make docs-site``): Sphinx with MyST.

The site consists of the pages in docs/ and of CONTRIBUTING.md, SECURITY.md and
CHANGELOG.md. The tables of docs/index.md are its table of contents.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FILES = {
    "contributing": "CONTRIBUTING.md",
    "security": "SECURITY.md",
    "changelog": "CHANGELOG.md",
}

MOVED = {"hangs.md": "troubleshooting.md#debugging-a-hang"}
"""Pages that entries of older releases link to, and their present place."""

project = "rlpost"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "rlpost"
html_copy_source = False  # the theme's link to it is outside of all landmarks
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]


def contents(index: str) -> str:
    """Return a hidden ``toctree`` for each table of docs/index.md, in its order.

    The first cell of a table's header is the caption; its links are the pages.
    """
    trees = []
    for table in re.findall(r"(?:^\|.*\n)+", index, re.MULTILINE):
        caption = table.split("|")[1].strip().capitalize()
        pages = dict.fromkeys(re.findall(r"\(([\w-]+)\.md\)", table))
        trees.append(_toctree(caption, list(pages)))
    return "\n".join([*trees, _toctree("Project", ["contributing", "security", "changelog"])])


def _toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def page_source(name: str, source: str) -> str:
    """Return the text of a page with links as they are in docs/."""
    if name in FILES:
        file = (ROOT / FILES[name]).read_text()
        source = file.replace("](docs/", "](")
        for page, place in MOVED.items():
            source = source.replace(f"]({page})", f"]({place})")
    if name == "index":
        source += "\n" + contents(source)
    for page, file in FILES.items():
        source = source.replace(f"](../{file}", f"]({page}.md").replace(f"]({file}", f"]({page}.md")
    return source


def _read(app: Any, name: str, source: list[str]) -> None:
    source[0] = page_source(name, source[0])


# What the theme's markup lacks for screen readers and keyboards, by rule of axe-core.
ACCESSIBLE = (
    # aria-required-attr
    ('class="caption" role="heading">', 'class="caption" role="heading" aria-level="2">'),
    # landmark-unique
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Site">'),
    ('<aside class="toc-drawer', '<aside aria-label="Page" class="toc-drawer'),
    # scrollable-region-focusable
    ("<pre>", '<pre tabindex="0">'),
    ('<pre  class="mermaid">', '<pre tabindex="0" class="mermaid">'),
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    # page-has-heading-one
    ('<div id="search-results"></div>', '<h1>Search</h1>\n<div id="search-results"></div>'),
    # empty-table-header
    ('<th class="head"><p></p></th>', "<td></td>"),
)


def accessible(page: str) -> str:
    """Return a page of the site with what ``ACCESSIBLE`` adds."""
    for theirs, ours in ACCESSIBLE:
        page = page.replace(theirs, ours)
    return page


def _mend(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for path in Path(app.outdir).rglob("*.html"):
            path.write_text(accessible(path.read_text()))


def setup(app: Any) -> None:
    """Connect the hooks that Sphinx calls for each page and at the end."""
    app.connect("source-read", _read)
    app.connect("build-finished", _mend)

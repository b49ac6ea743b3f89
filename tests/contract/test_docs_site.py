"""The documentation site, built by the real Sphinx.

It has no warnings, lists all pages in its contents, and has no broken links.
"""

import json
import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        str(ROOT / "docs"),
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def pages_of(site: Path) -> list[Path]:
    """The pages of the site, by resolved path."""
    return [page.resolve() for page in site.glob("*.html")]


def test_every_page_is_in_the_contents_under_the_headings_of_the_index(site):
    text = (site / "index.html").read_text()
    assert re.findall(r'caption-text">([^<]*)', text) == [
        "Tutorials",
        "Guides",
        "Reference",
        "Explanation",
        "Project",
    ]
    listed = set(
        re.findall(
            r'class="toctree-l1[^"]*"><a class="reference internal" href="([^"]+)\.html"', text
        )
    )
    assert listed == {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}


def test_every_local_link_leads_to_a_file_and_a_heading(site):
    ids = {page: set(re.findall(r' id="([^"]+)"', page.read_text())) for page in pages_of(site)}
    broken = []
    for page in pages_of(site):
        for link in re.findall(r'<a [^>]*href="([^"]+)"', page.read_text()):
            target, _, anchor = unquote(unescape(link)).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            path = (page.parent / target).resolve() if target else page
            if not path.exists() or (anchor and path in ids and anchor not in ids[path]):
                broken.append((page.name, link))
    assert not broken


JOURNEYS = ("one-box", "slurm", "cluster", "speed", "rewards", "agents", "layouts", "migrating")
JOURNEYS += ("troubleshooting", "models")


def test_the_search_index_holds_every_journey_with_its_title(site):
    """Sphinx's own search: the browser reads an index of the pages from the folder."""
    text = (site / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    assert set(JOURNEYS) <= set(index["docnames"])
    for name in JOURNEYS:
        title = (ROOT / f"docs/{name}.md").read_text().splitlines()[0].removeprefix("# ")
        assert index["titles"][index["docnames"].index(name)] == title
    scripts = re.findall(r'<script src="([^"]+)"', (site / "search.html").read_text())
    assert scripts and not [script for script in scripts if "://" in script]


def test_the_search_index_holds_the_settings(site):
    """Search needs no server and no network."""
    assert "use-kl-loss" in (site / "settings.html").read_text()
    assert '"settings"' in (site / "searchindex.js").read_text()


def test_pages_are_accessible_to_screen_readers_and_keyboards(site):
    """Attributes that axe-core requires and the theme lacks; see ``ACCESSIBLE`` in docs/conf.py."""
    for page in pages_of(site):
        text = page.read_text()
        assert "<h1" in text, page.name
        for element, attribute in (
            (r'<p class="caption" role="heading"[^>]*>', "aria-level="),
            (r"<aside[^>]*>", "aria-label="),
            (r"<pre[^>]*>", "tabindex="),
            (r'<div[^>]*class="table-wrapper[^>]*>', "tabindex="),
        ):
            assert all(attribute in found for found in re.findall(element, text)), page.name
        assert not re.search(r"<th[^>]*>(<p>\s*</p>)?</th>", text), page.name
        labels = re.findall(r'<aside[^>]*aria-label="([^"]*)"', text)
        assert labels and len(labels) == len(set(labels)), page.name

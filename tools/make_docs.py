"""Write the generated pages of docs/ and the stubs of rlpost: ``python tools/make_docs.py [--check]``.

With --check nothing is written; the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pages.api import api_page as api
from pages.layouts import layouts_page as layouts
from pages.metrics import metrics_page as metrics
from pages.migrating import migrating_page as migrating
from pages.models import models_page as models
from pages.published_runs import speed_page as speed
from pages.recipes import recipes_page as recipes
from pages.settings import settings_page as settings
from pages.slime_flags import slime_flags_page as slime_flags
from pages.stub import extensions_stub, public_stub

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {
    "models.md": models,
    "settings.md": settings,
    "metrics.md": metrics,
    "recipes.md": recipes,
    "api.md": api,
    "layouts.md": layouts,
    "slime-flags.md": slime_flags,
    "migrating.md": migrating,
    "speed.md": speed,
    "../rlpost/__init__.pyi": public_stub,
    "../rlpost/extensions/__init__.pyi": extensions_stub,
}


def generated() -> dict[str, str]:
    """Return the text of every generated page, by path below docs/."""
    return {name: page() for name, page in PAGES.items()}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    os.environ.pop("RLPOST_ASSETS", None)  # so that pages are the same on every machine
    check = parser.parse_args().check
    num_stale = 0
    for name, text in generated().items():
        path = DOCS / name
        if check:
            num_stale += not path.exists() or path.read_text() != text
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(name)
    return 1 if num_stale else 0


if __name__ == "__main__":
    sys.exit(main())

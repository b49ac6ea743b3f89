"""Write docs/settings.md from the tree of settings: ``python tools/make_docs.py [--check]``.

With --check nothing is written; the exit code is 1 when the page differs from the tree.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rlpost.config.show import reference

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    if parser.parse_args().check:
        return 0 if PAGE.exists() and PAGE.read_text() == reference() else 1
    PAGE.write_text(reference())
    print(PAGE.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

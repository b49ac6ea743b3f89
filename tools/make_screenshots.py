"""Make the pictures of docs/seeing.md from a run: ``python -m tools.make_screenshots RUN``. Needs
chromium.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from rlpost.cli.runs import find_run, job_ids
from rlpost.cli.watch import page, read_view
from rlpost.report.write import write_report
from tests.browser import Browser, find_browser

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS = 100
# name, width, height of what is shown, dark
VIEWS = (
    ("report", 1280, 1420, False),
    ("report-dark", 1280, 1420, True),
    ("report-phone", 400, 1420, True),
)


def main() -> int:
    """Write the pictures; return 2 if there is no browser."""
    run = find_run(sys.argv[1] if len(sys.argv) > 1 else None, Path("runs"))
    IMAGES.mkdir(exist_ok=True)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(page(read_view(run, (job_ids(run) or [None])[-1], None), COLUMNS))
    drawn = console.export_svg(title=f"rlpost status --watch {run.root.name}")
    # Remove Rich's reference to a font on another host: the picture must not load anything.
    (IMAGES / "status.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    program = find_browser()
    if program is None:
        print("no browser here; tools/install_system.sh installs chromium")
        return 2
    report = write_report(run)
    with tempfile.TemporaryDirectory() as profile, Browser(program, Path(profile)) as browser:
        for name, width, height, dark in VIEWS:
            browser.open(report, width=width, dark=dark)
            browser.picture(IMAGES / f"{name}.png", height=height)
    return 0


if __name__ == "__main__":
    sys.exit(main())

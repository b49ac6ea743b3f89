"""Make the pictures of docs/seeing.md. Needs chromium.

python -m tests.make_screenshots RUN         of a run: terminal, report on desktop and phone
python -m tests.make_screenshots --examples  of runs that it makes up: 200 attempts, an early failure
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from common.run_folder import RunFolder
from rlpost.cli.runs import find_run, job_ids
from rlpost.extensions.watching.report.write import write_report
from rlpost.extensions.watching.watch import page, read_view
from tests.browser import Browser, find_browser
from tests.unit.watching.report.runs import make_failed_run, make_run

IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLUMNS = 100
DESKTOP, PHONE = 1280, 400
EXAMPLES = "--examples"
# name, width, height of what is shown, dark
View = tuple[str, int, int, bool]
VIEWS: tuple[View, ...] = (
    ("report", DESKTOP, 1420, False),
    ("report-dark", DESKTOP, 1420, True),
    ("report-phone", PHONE, 1420, True),
)
ATTEMPTS_VIEWS: tuple[View, ...] = (
    ("report-attempts", DESKTOP, 1420, False),
    ("report-attempts-phone", PHONE, 1420, True),
)
FAILED_VIEWS: tuple[View, ...] = (
    ("report-failed", DESKTOP, 1000, False),
    ("report-failed-phone", PHONE, 1000, True),
)


def many_attempts(root: Path) -> RunFolder:
    """A run of 3,000 steps and 200 attempts: each tenth lost a node, the others were preempted."""
    ends = tuple(range(15, 3000, 15))
    return make_run(root, num_steps=3000, preempted_at=ends, lost_at=ends[::10])


def draw(browser: Browser, run: RunFolder, views: tuple[View, ...]) -> None:
    """Write the pictures of a run's report."""
    report = write_report(run)
    for name, width, height, dark in views:
        browser.open(report, width=width, dark=dark)
        browser.picture(IMAGES / f"{name}.png", height=height)


def draw_terminal(run: RunFolder) -> None:
    """Write the picture of ``rlpost status --watch``."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(page(read_view(run, (job_ids(run) or [None])[-1], None), COLUMNS))
    drawn = console.export_svg(title=f"rlpost status --watch {run.root.name}")
    # Remove Rich's reference to a font on another host: the picture must not load anything.
    (IMAGES / "status.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))


def main() -> int:
    """Write the pictures; return 2 if there is no browser."""
    words = sys.argv[1:]
    IMAGES.mkdir(exist_ok=True)
    if EXAMPLES not in words:
        run = find_run(words[0] if words else None, Path("runs"))
        draw_terminal(run)
    program = find_browser()
    if program is None:
        print("no browser here; tools/install_system.sh installs chromium")
        return 2
    with tempfile.TemporaryDirectory() as folder, Browser(program) as browser:
        if EXAMPLES not in words:
            draw(browser, run, VIEWS)
            return 0
        draw(browser, many_attempts(Path(folder) / "runs/made-up-200-attempts"), ATTEMPTS_VIEWS)
        draw(browser, make_failed_run(Path(folder) / "runs/made-up-failure"), FAILED_VIEWS)
    return 0


if __name__ == "__main__":
    sys.exit(main())

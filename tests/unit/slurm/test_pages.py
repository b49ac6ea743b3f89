"""The pages on the cluster, containers and preemption are right: their settings load, their commands
parse.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlpost.cli.command_line import make_parser
from rlpost.config.flags import fields, parse
from rlpost.config.load import files_of, load, unknown_keys

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / f"docs/{name}.md" for name in ("cluster", "containers", "preemption")]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_settings_on_a_page_load(page: Path) -> None:
    found = blocks(page, "toml")
    assert found
    for text in found:
        values = tomllib.loads(text)
        assert not unknown_keys(values, page.name)
        load([], values)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_keys_in_tables_are_settings(page: Path) -> None:
    named = re.findall(r"^\| ((?:`\w+`[, ]*)+) \|", page.read_text(), re.MULTILINE)
    keys = [key for cell in named for key in re.findall(r"`(\w+)`", cell)]
    other = {
        "done",
        "config",
        "requeue",
        "failed",
        "submitted",
        "attempt",
        "started",
        "ready",
        "committed",
        "engine_lost",
        "recovered",
        "fleet",
        "hang",
        "slow_host",
    }
    events = {"preempted", "verdict", "chained", "cancelled", "sandboxes"}  # of the ledger
    assert set(keys) - other - events <= set(fields())


def test_the_commands_on_the_pages_are_understood() -> None:
    """rlpost's are parsed unchanged, including files; the image's command prints its help."""
    commands = [
        line[2:] for page in PAGES for text in blocks(page, "console") for line in text.splitlines()
    ]
    assert len(commands) == 3
    submit, image, scancel = (shlex.split(command) for command in commands)
    made = make_parser("test", "")
    made.add_argument("--dry-run", action="store_true")
    namespace, _ = parse(made, submit[3:])
    assert submit[:3] == ["python", "-m", "rlpost.submit"] and namespace.dry_run
    load(files_of(ROOT / namespace.recipe, namespace.cluster), {})
    usage = subprocess.run(
        [sys.executable, *image[1:3], "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(word in usage.stdout for word in image if word.startswith("--"))
    assert scancel == ["scancel", "--batch", "--signal=USR2", "JOBID"]


def test_every_profile_is_on_its_page() -> None:
    named = set(re.findall(r"\| `([\w-]+\.toml)` \|", PAGES[0].read_text()))
    assert named == {path.name for path in (ROOT / "jobs/clusters").glob("*.toml")}

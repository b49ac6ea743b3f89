"""The example files of docs/extending.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/extending.md"
FILE = re.compile(r"^`([\w./-]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)


def write_examples(folder: Path) -> Path:
    """Write each file of the page below ``folder``; return the folder."""
    for name, text in FILE.findall(PAGE.read_text()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def install(package: Path, target: Path) -> Path:
    """Install a package of the page below ``target``, without a network."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
    ]
    subprocess.run(
        [*command, "--disable-pip-version-check", "--target", target, package], check=True
    )
    return target

"""rlpost installed from its wheel, as on a login node: no checkout, only the declared requirements.

The environment is new. It links the packages of ``install_requires`` and, transitively, their
requirements from this environment, so a requirement that is not declared is missing there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
BUILD = "from setuptools import build_meta as backend; print(backend.build_{kind}({folder!r}))"


PACKAGES = ("rlpost", "slurm", "bootstrap", "common", "jobs")


def tracked() -> list[Path]:
    """Files of the checkout that git does not ignore, relative to its root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split("\0") if name and (ROOT / name).is_file()]


@dataclass(frozen=True, slots=True)
class Built:
    """A wheel, and the files of the packages from which it was built."""

    wheel: Path
    files: frozenset[str]


def build_wheel(folder: Path) -> Built:
    """Build a wheel from a source distribution of the checkout, as a package index would."""
    checkout, paths = folder / "checkout", tracked()
    for path in paths:
        (checkout / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, checkout / path)
    source = _build("sdist", checkout, folder)
    shutil.unpack_archive(source, folder)
    wheel = _build("wheel", folder / source.name.removesuffix(".tar.gz"), folder)
    return Built(wheel, frozenset(str(path) for path in paths if path.parts[0] in PACKAGES))


def _build(kind: str, source: Path, folder: Path) -> Path:
    command = [sys.executable, "-c", BUILD.format(kind=kind, folder=str(folder))]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


def clean_environment(folder: Path, wheel: Path) -> Path:
    """Create a virtual environment with the wheel; return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "--disable-pip-version-check",
    ]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    (own,) = (Distribution.at(path) for path in packages.glob("rlpost-*.dist-info"))
    for name in _needed(own, set()):
        for top in {file.parts[0] for file in distribution(name).files or ()} - {".."}:
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "bin"


def _needed(asking: Distribution, seen: set[str]) -> Iterator[str]:
    """Names of the requirements of a distribution without extras, and of theirs, transitively."""
    for requirement in map(Requirement, asking.requires or ()):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in seen and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            seen.add(name)
            yield name
            yield from _needed(distribution(name), seen)

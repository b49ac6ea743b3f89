"""``tools/install.sh``: the check of Python's version, and the calls of pip on a machine with GPUs."""

import configparser
import os
import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def test_an_old_python_is_refused_before_anything_is_created(tmp_path):
    """As on a login node; pip would report that no such version of torch exists."""
    old = tmp_path / "python3.9"
    old.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.18\n[ "$1" = -V ]\n')
    old.chmod(0o755)
    command = [ROOT / "tools/install.sh", tmp_path / "venv"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHON": str(old)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"{old} is Python 3.9.18, needed is 3.11 or newer: PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


PYTHON = """#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in
*--compiled*) echo transformer-engine==PINNED ;;
*--no-build-isolation*) exit {code} ;;
esac
"""


@pytest.mark.parametrize(
    ("has_nvcc", "code", "why"),
    [
        (True, 0, None),
        (True, 1, "its compilation failed"),
        (False, 0, "there is no nvcc to compile it"),
    ],
)
def test_with_gpus_transformer_engine_is_compiled_last_and_its_absence_is_reported(
    has_nvcc, code, why, tmp_path
):
    """With a stand-in for pip. Where the compilation fails, everything else is installed."""
    bin_folder, venv = tmp_path / "bin", tmp_path / "venv"
    scripts = {
        bin_folder / "nvidia-smi": "#!/bin/sh\n",
        venv / "bin/pip": "#!/bin/sh\n",
        venv / "bin/python": PYTHON.format(folder=tmp_path, code=code),
    }
    if has_nvcc:
        scripts[bin_folder / "nvcc"] = "#!/bin/sh\n"
    for path, text in scripts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    environ = {"PATH": f"{bin_folder}:/usr/bin:/bin", "CUDA_HOME": str(tmp_path / "nowhere")}
    command = [ROOT / "tools/install.sh", venv]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0 and (venv / ".installed").exists(), done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    (stack,) = (index for index, call in enumerate(calls) if "-r tools/locks/gpu.txt" in call)
    assert "--require-hashes" in calls[stack]
    compiled = [index for index, call in enumerate(calls) if "--no-build-isolation" in call]
    assert len(compiled) == has_nvcc and all(index > stack for index in compiled)
    if has_nvcc:
        assert (venv / "compiled.txt").read_text() == "transformer-engine==PINNED\n"
    assert (why is None) == ("without TransformerEngine" not in done.stderr)
    assert why is None or why in done.stderr


@pytest.mark.parametrize(
    ("lock", "extras"), [("cpu.txt", ("cpu", "dev", "otlp")), ("gpu.txt", ("gpu", "dev", "otlp"))]
)
def test_every_requirement_is_locked_with_hashes(lock, extras):
    """Run ``make lock`` after a change to setup.cfg."""
    locked = {}
    for block in re.split(r"\n(?=\S)", (ROOT / "tools/locks" / lock).read_text()):
        name, version = re.match(r"([a-zA-Z0-9._-]+)==([^ ;\\]+)", block).groups()
        locked.setdefault(canonicalize_name(name), set()).add(version)
        assert "--hash=sha256:" in block, name
    for requirement in requirements(extras):
        name = canonicalize_name(requirement.name)
        if (lock, name) == ("cpu.txt", "torch"):
            continue  # installed first, from the index of the machine
        assert name in locked, f"{requirement}: not in tools/locks/{lock}; make lock"
        assert any(version in requirement.specifier for version in locked[name]), requirement


def requirements(extras):
    """The requirements of setup.cfg for these extras, with those they include."""
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    for extra in extras:
        for line in options["options.extras_require"][extra].splitlines():
            if line.strip() and not line.startswith("#"):
                yield Requirement(line)
    for line in options["options"]["install_requires"].splitlines():
        if line.strip():
            yield Requirement(line)

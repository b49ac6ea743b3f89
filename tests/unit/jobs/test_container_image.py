"""The image's Dockerfile, parsed as docker parses it: one place for versions, no secrets, only pinned
images.
"""

from __future__ import annotations

import fnmatch
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from setuptools.config.setupcfg import read_configuration

from slurm.image import uri

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "jobs/container"
DOCKERFILE = FOLDER / "Dockerfile"
INSTRUCTIONS = {"ARG", "FROM", "SHELL", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}
SECRET = re.compile(r"token|secret|passw|api_?key|credential", re.IGNORECASE)


def instructions() -> list[tuple[str, str]]:
    """(instruction, arguments), without comments and with continued lines joined."""
    lines = [
        line for line in DOCKERFILE.read_text().splitlines() if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


def arguments(kind: str) -> list[str]:
    return [rest for word, rest in instructions() if word == kind]


def moves(image: str) -> bool:
    """Whether a name may refer to another image later: no digest, and no tag or the tag latest."""
    return "@sha256:" not in image and (
        ":" not in image.rpartition("/")[2] or image.endswith(":latest")
    )


def test_it_has_only_instructions_that_these_tests_know():
    assert {word for word, _ in instructions()} == INSTRUCTIONS
    assert instructions()[0][0] == "ARG" and instructions()[1] == ("FROM", "${BASE}")


def test_the_base_image_has_the_version_of_the_pinned_sglang():
    """Every other image in the file and on the page is pinned too."""
    base = next(rest.removeprefix("BASE=") for rest in arguments("ARG") if rest.startswith("BASE="))
    assert not moves(base)
    pinned = next(
        str(one.specifier) for one in map(Requirement, extras()["gpu"]) if one.name == "sglang"
    )
    assert base == f"lmsysorg/sglang:v{pinned.removeprefix('==')}"
    uri(base)  # as enroot import takes it
    named = re.findall(
        r"\b(?:nvidia/cuda|lmsysorg/sglang|slimerl/slime)[:@][\w.:@-]+\w", DOCKERFILE.read_text()
    )
    named += re.findall(r"\b(?:nvidia/cuda|lmsysorg/sglang|slimerl/slime)[:@][\w.:@-]+\w", page())
    assert len(named) > 2 and not [image for image in named if moves(image)]


def page() -> str:
    return (ROOT / "docs/containers.md").read_text()


def extras() -> dict[str, list[str]]:
    """The extras of setup.cfg, read by setuptools: independent of the reader under test."""
    options = read_configuration(ROOT / "setup.cfg")["options"]
    return {
        name: [*options["install_requires"], *lines]
        for name, lines in options["extras_require"].items()
    }


PACKAGES = {
    "ethtool": "ethtool", "free": "procps", "ibstat": "infiniband-diags", "ibv_devinfo": "ibverbs-utils",
    "ip": "iproute2", "iperf3": "iperf3", "ping": "iputils-ping", "ps": "procps",
}  # fmt: skip
"""Packages of Debian and Ubuntu, by a command that they contain."""
ELSEWHERE = {"hostname", "sh", "df", "nvidia-smi", "ray"}  # in every image, of the driver, by pip


def test_the_commands_that_the_pages_advise_are_installed():
    text = (ROOT / "docs/troubleshooting.md").read_text()
    advised = {
        match[1] for match in re.finditer(r"`rlpost exec (?:--node \w+ )?(?:-- )?([\w-]+)", text)
    }
    assert {"ping", "iperf3", "ethtool", "ibstat"} <= advised
    assert advised <= PACKAGES.keys() | ELSEWHERE
    installed = next(run for run in arguments("RUN") if "apt-get install" in run).split()
    assert {PACKAGES[command] for command in advised - ELSEWHERE} <= set(installed)


def test_the_installed_packages_are_those_of_setup_cfg_and_megatron():
    """The list that the image installs and the doctor checks, compared with setuptools' reading."""
    words = shlex.split(
        next(run for run in arguments("RUN") if "--requirements" in run).partition(">")[0]
    )
    default = next(
        shlex.split(rest.partition("=")[2])[0]
        for rest in arguments("ARG")
        if rest.startswith("EXTRAS=")
    )
    assert words[:4] == ["python3", "-m", "bootstrap.image.doctor", "--requirements"] and words[
        4:
    ] == ["${EXTRAS}"]
    command = [sys.executable, *words[1:4], *default.split()]
    printed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    wanted = {*extras()["gpu"], *extras()["wandb"], *extras()["tensorboard"]}
    assert {str(Requirement(line)) for line in printed} == {
        str(Requirement(line)) for line in wanted
    } | {megatron()}


def megatron() -> str:
    """The pinned version of Megatron-core, which two files must agree on."""
    lines = (ROOT / "bootstrap/image/no_deps.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("megatron-core"))
    assert f"{line} \\\n" in (ROOT / "tools/locks/gpu.txt").read_text()
    return line


def test_transformer_engine_is_compiled_by_default_after_torch_and_against_it():
    """Without build isolation, which would compile against another torch."""
    defaults = dict(rest.split("=", 1) for rest in arguments("ARG"))
    assert defaults["COMPILED"] == "te"
    runs = arguments("RUN")
    (index,) = (index for index, run in enumerate(runs) if "--no-build-isolation" in run)
    assert any("-r requirements.txt" in run for run in runs[:index]), "torch is installed before"
    assert (
        "bootstrap.image.doctor --compiled > compiled.txt" in runs[index]
        and "setuptools wheel" in runs[index]
    )
    assert "--no-build-isolation -r compiled.txt" in runs[index]


@pytest.mark.parametrize(("compiled", "installs"), [("te", True), ("", False)])
def test_an_empty_argument_leaves_transformer_engine_out(compiled, installs, tmp_path):
    run = next(run for run in arguments("RUN") if "--no-build-isolation" in run)
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    python.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "COMPILED": compiled}
    subprocess.run(["bash", "-euo", "pipefail", "-c", run], cwd=tmp_path, env=environ, check=True)
    calls = (tmp_path / "calls").read_text() if installs else ""
    assert ("pip install --no-build-isolation -r compiled.txt" in calls) == installs
    assert (tmp_path / "calls").exists() == installs


def test_transformer_engine_is_in_no_other_extra():
    """A login node or a machine without a GPU never installs it."""
    named = [
        name
        for name, lines in extras().items()
        if any("transformer-engine" in line for line in lines)
    ]
    assert named == ["te"]


def test_it_repeats_no_version_of_a_package():
    for run in [*arguments("RUN"), *arguments("ENV")]:
        assert not re.search(r"[<>=~!]=\s*\d", run), run


def test_it_contains_no_secret():
    for word, rest in instructions():
        assert not SECRET.search(rest), f"{word} {rest}"
    assert not re.search(r"https?://|curl|wget", "\n".join(arguments("RUN")))


def test_package_lists_of_apt_are_fetched_used_and_removed_in_one_layer():
    (run,) = (run for run in arguments("RUN") if "apt-get" in run)
    assert (
        "apt-get update" in run
        and "--no-install-recommends" in run
        and run.endswith("rm -rf /var/lib/apt/lists/*")
    )
    packages = re.search(r"--no-install-recommends(.*?)&&", run)[1].split()
    assert packages == sorted(packages)


def test_the_commands_of_its_layers_are_valid_bash():
    for run in arguments("RUN"):
        subprocess.run(["bash", "-n"], input=run, text=True, check=True)


def copied() -> list[str]:
    """The files that are copied into the image, those of folders included."""
    sources = [source for rest in arguments("COPY") for source in rest.split()[:-1]]
    found = [path for source in sources for path in _files(ROOT / source)]
    return [path.relative_to(ROOT).as_posix() for path in found]


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def test_copied_files_exist_and_nothing_else_is_sent_to_docker():
    lines = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*" and all(rule.startswith("!") for rule in rules[1:])
    for source in copied():
        assert (ROOT / source).is_file(), source
        assert any(fnmatch.fnmatch(source, rule[1:]) for rule in rules[1:]), source


def test_the_copied_files_suffice_to_check_the_image(tmp_path):
    """The command of the last layer with those files alone; it may report faults of a machine
    without GPUs.
    """
    for source in copied():
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_bytes((ROOT / source).read_bytes())
    assert (
        arguments("RUN")[-1]
        == "python3 -m bootstrap.image.doctor ${COMPILED:+--te-for=COMPILED=te}"
    )
    command = [sys.executable, "-m", "bootstrap.image.doctor", "--te-for=COMPILED=te"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode in (0, 1) and "packages" in done.stdout, done.stderr


@pytest.mark.parametrize("image", ["lmsysorg/sglang", "a/b:latest", "localhost:5000/a"])
def test_images_without_a_pinned_version_are_found(image):
    assert moves(image) and not moves(f"{image}@sha256:{'0' * 64}")

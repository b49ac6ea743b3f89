"""Which container a job gets (``slurm/container_choice.py``); settings on a login node read the variable
in the same way.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlpost.config.load import load
from rlpost.errors import ConfigError
from slurm.container_choice import choose
from slurm.errors import SpecError
from tests.unit.slurm.stand_ins import NO_PYXIS, PYXIS, commands

IMAGE = "/images/a.sqsh"


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RLPOST_CONTAINER", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def cluster(monkeypatch: pytest.MonkeyPatch, folder: Path, **texts: str) -> None:
    monkeypatch.setenv("PATH", commands(folder / "bin", **texts))


@pytest.mark.parametrize(
    ("has", "chosen", "why"),
    [
        ({"srun": PYXIS, "enroot": ""}, "pyxis", "srun --help lists --container-image"),
        ({"enroot": ""}, "enroot", "enroot is on the PATH"),
        ({}, "none", "enroot is not on the PATH"),
    ],
)
def test_what_the_cluster_has_is_chosen_with_its_reason(
    has: dict[str, str], chosen: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path, **has)
    backend, said = choose("auto", IMAGE)
    assert backend == chosen and said.startswith(f"{chosen}: ") and why in said
    assert len(said.splitlines()) == 1
    assert ("not used" in said) == (chosen == "none")


@pytest.mark.parametrize("word", ["pyxis", "enroot", "none"])
def test_the_variable_wins_over_what_the_cluster_has_in_the_job_and_in_the_settings(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path, srun=PYXIS, enroot="")
    monkeypatch.setenv("RLPOST_CONTAINER", word)
    assert choose("auto", IMAGE) == (word, choose("auto", IMAGE)[1])
    assert load([], {"cluster": {"container": "auto"}}).config.cluster.container == word
    assert load([], {"cluster": {"container": "pyxis"}}).config.cluster.container == "pyxis"


def test_a_profile_that_names_a_container_wins_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path, srun=PYXIS)
    monkeypatch.setenv("RLPOST_CONTAINER", "none")
    assert choose("pyxis", IMAGE) == (
        "pyxis",
        "pyxis: the cluster profile says so, RLPOST_CONTAINER=none has no effect",
    )


def test_a_word_that_is_no_choice_is_refused_by_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path)
    monkeypatch.setenv("RLPOST_CONTAINER", "docker")
    needed = "RLPOST_CONTAINER=docker is not a choice; use pyxis, enroot or none"
    with pytest.raises(SpecError, match=needed):
        choose("auto", IMAGE)
    with pytest.raises(ConfigError, match=needed):
        load([], {"cluster": {"container": "auto"}})


def test_an_image_is_needed_for_a_container_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path)
    assert choose("auto", "")[0] == "none"
    cluster(monkeypatch, tmp_path, enroot="")
    with pytest.raises(SpecError) as refused:
        choose("auto", "", ["HOME", "RLPOST_NOWHERE"])
    assert "export RLPOST_IMAGE=/path/image.sqsh" in str(refused.value)
    assert "RLPOST_CONTAINER=none" in str(
        refused.value
    ) and "not set: RLPOST_IMAGE RLPOST_NOWHERE;" in str(refused.value)


def test_a_relative_path_is_not_taken_for_a_name_in_a_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path, enroot="")
    for image in ("images/a.sqsh", "./a"):
        with pytest.raises(SpecError, match=f"RLPOST_IMAGE={image}: .* absolute path"):
            choose("auto", image)
    assert choose("auto", "nvcr.io/nvidia/pytorch:25.01-py3")[0] == "enroot"


@pytest.mark.parametrize("backend", ["auto", "pyxis"])
def test_without_pyxis_it_is_refused_before_any_step(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun would reject the option at every attempt."""
    cluster(monkeypatch, tmp_path, srun=NO_PYXIS)
    if backend == "auto":
        monkeypatch.setenv("RLPOST_CONTAINER", "pyxis")
    remedy = "RLPOST_CONTAINER=none" if backend == "auto" else "--container none"
    with pytest.raises(SpecError, match=f"lists no --container-image .* {remedy}"):
        choose(backend, IMAGE)


def test_a_login_node_may_lack_the_enroot_that_the_nodes_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(monkeypatch, tmp_path)
    assert choose("enroot", IMAGE)[0] == "enroot"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with pytest.raises(SpecError, match=f"enroot is not on the PATH of {os.uname().nodename}"):
        choose("enroot", IMAGE)

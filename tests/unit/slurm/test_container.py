"""Valid values of a container, and what is rendered from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from common.run_folder import RunFolder, create_run_folder
from slurm.batch.place import Place
from slurm.batch.steps import in_container
from slurm.container import Container
from slurm.errors import SpecError, SubmitError
from slurm.executor import submit
from slurm.render import render_sbatch
from slurm.spec import completed
from tests.settings import a_job
from tests.unit.slurm.test_spec import HOSTILE, options

IMAGE = "/images/a.sqsh"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"backend": "docker"}, "container"),
        ({"image": ""}, "container_image"),
        ({"image": "relative file.sqsh"}, "container_image"),
        ({"image": "$(touch x)"}, "container_image"),
        ({"image": "a/b:c"}, "image_cache"),
        ({"image": "a/b:c", "cache": "relative"}, "image_cache"),
        ({"mounts": ("relative",)}, "container_mounts"),
        ({"mounts": ("/a,/b",)}, "container_mounts"),
        ({"mounts": ("/a b",)}, "container_mounts"),
        ({"mounts": ("/a:/b:umount",)}, "container_mounts"),
        ({"mounts": ('/a"; touch x',)}, "container_mounts"),
        ({"mounts": ("/$HOME",)}, "container_mounts"),
    ],
)
def test_a_container_that_cannot_be_asked_for_is_refused(
    values: dict[str, Any], field: str
) -> None:
    with pytest.raises(SpecError, match=f"^{field}: "):
        Container(**{"backend": "pyxis", "image": IMAGE, **values})


@pytest.mark.parametrize("field", ["home", "run_folder"])
def test_a_folder_that_no_list_of_mounts_can_hold_is_refused(field: str) -> None:
    with pytest.raises(SpecError, match=f"^{field}: "):
        a_job(container=Container("pyxis", IMAGE), **{field: "/a b"})
    a_job(**{field: "/a b"})


def place(backend: str) -> Place:
    mounts = ("/a", "/b:/c:ro", "/d:/e:rw")
    return Place("/code", "/run", "python3", backend, IMAGE, "rlpost_7_0", mounts)


def test_mounts_are_one_list_for_pyxis_and_one_option_each_for_enroot() -> None:
    (mounts,) = (word for word in in_container(place("pyxis")) if "-mounts=" in word)
    assert mounts == "--container-mounts=/run:/run,/code:/code,/a:/a,/b:/c:ro,/d:/e"
    words = in_container(place("enroot"))
    assert words[words.index("rlpost_7_0") + 3 :] == [
        "/a:/a:x-create=auto,rbind",
        "/b:/c:x-create=auto,rbind,ro",
        "/d:/e:x-create=auto,rbind",
        "--",
    ]


def test_in_a_container_the_interpreter_is_the_images_and_on_the_host_the_systems(
    tmp_path: Path,
) -> None:
    spec = completed(a_job(container=Container("pyxis", IMAGE)), RunFolder(tmp_path), home=tmp_path)
    assert spec.python == "python3"
    assert "exec python3 -m slurm.batch run " in render_sbatch(spec)
    with pytest.raises(SpecError, match=r"^python: "):
        replace(spec, python="-c 'x'")


def test_without_slurm_a_container_is_refused_rather_than_left_out(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path / "run", "{}")
    with pytest.raises(SubmitError, match="pyxis"):
        submit(a_job(container=Container("pyxis", IMAGE)), run, home=tmp_path, where="local")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("qos", HOSTILE),
        ("reservation", "a b"),
        ("constraint", HOSTILE),
        ("constraint", ""),
        ("exclude", ("n[3-1]",)),
        ("exclude", (HOSTILE,)),
        ("exclude", ("n$(x)",)),
        ("requeue", "sometimes"),
        ("environment", (("A B", "x"),)),
        ("environment", (("SLURM_JOB_ID", "x"),)),
        ("environment", (("A", "x\ny"),)),
        ("setup_commands", ("a\nb",)),
        ("spare_nodes", -1),
        ("max_failures", -1),
        ("max_stalled_attempts", 0),
    ],
)
def test_profile_values_that_slurm_or_the_shell_would_misread_are_refused(
    field: str, value: Any
) -> None:
    with pytest.raises(SpecError, match=f"^{field}: "):
        a_job(**{field: value})


def test_the_jobs_of_a_chain_wait_for_their_own_run_alone(tmp_path: Path) -> None:
    """Singleton compares job names: equal for all jobs of a run, different between runs."""
    spec = a_job(job_name="rl", requeue="chain")
    names = [
        completed(spec, RunFolder(tmp_path / run), home=tmp_path).job_name
        for run in ("a", "a", "b")
    ]
    assert names[0] == names[1] != names[2] and names[0].startswith("rl-")
    assert "--dependency=singleton" in options(render_sbatch(spec))

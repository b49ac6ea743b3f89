"""Flags of [cluster] after a batch file's name: the script refuses those that are part of its text."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli.job import job_spec
from rlpost.config.flags import flag
from rlpost.config.groups.cluster import ClusterConfig
from rlpost.config.load import JOBS, load
from slurm.late_flags import BY_RENDERING, BY_SBATCH, BY_VARIABLE, late_flags
from slurm.render import render_sbatch

LATE = {*BY_SBATCH, *BY_VARIABLE, *BY_RENDERING}
# A value that differs from the settings below, by key.
OTHER: dict[str, Any] = {
    "actor_num_nodes": 1,
    "assets_dir": "/other",
    "container": "pyxis",
    "container_image": "/other.sqsh",
    "container_mounts": ["/other"],
    "environment": {"A": "b"},
    "exclude": ["n7"],
    "gpu_hour_price": 2.5,
    "gpu_request": "none",
    "requeue": "never",
    "setup_commands": ["true"],
    "time": "01:00:00",
    "ray_dashboard_host": "::",
    "preflight_bandwidth_gbps": 1.5,
    "offload_train": True,
    "trainer_standby": True,
    "offload_rollout": True,
    "ray_object_store_memory": 1 << 30,
    "image_cache": "/other",
    "python": "/other",
    "runs_dir": "/other",
    "nodes": 3,
    "sbatch": ["--comment=other"],
    "segment": 2,
}
GIVEN = {"nodes": 2, "container": "enroot", "container_image": "a/b:c", "ray_dashboard": True}
# a batch file gets its run folder and its interpreter from variables
ONLY_FOR_SUBMIT = {"runs_dir", "python"}
# rendered with the container "command" alone, which needs one
ONLY_WITH_ITS_CONTAINER = {"container_command"}
# the script has it for a check of the preflight; the driver's late value decides for the run
ONLY_FOR_CHECKS = {"colocate"}


def script(**values: Any) -> str:
    cluster = {"container_mounts": ["$RLPOST_ASSETS"], **GIVEN, **values}
    return render_sbatch(job_spec(load([], {"cluster": cluster}, base=Path("/here")).config))


def other(key: str) -> Any:
    if key in OTHER:
        return OTHER[key]
    default = getattr(ClusterConfig(**GIVEN), key)
    if isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "other"


def test_exactly_the_settings_in_the_text_of_a_script_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails for a new setting of the cluster that is in neither list."""
    for name in ("RLPOST_ASSETS", "RLPOST_CONTAINER", "RLPOST_IMAGE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    plain = script()
    rendered = {key for key in ClusterConfig.model_fields if script(**{key: other(key)}) != plain}
    also = ONLY_FOR_SUBMIT | ONLY_WITH_ITS_CONTAINER
    assert (rendered - ONLY_FOR_CHECKS) | also == LATE
    commands = ({"container": "command", "container_command": f"{word} {{image}}"} for word in "ab")
    assert len({script(**values, container_mounts=[]) for values in commands}) == 2


@pytest.mark.parametrize("key", sorted({*LATE, "run_folder", "resume"}))
@pytest.mark.parametrize("form", ["{} v", "{}=v", "{}"])
def test_a_late_flag_is_refused_in_every_form_with_its_remedy(key: str, form: str) -> None:
    words = ["--num-rollout", "3", *form.format(flag(key)).split()]
    (line,) = late_flags(words)
    assert line.startswith(form.format(flag(key)).replace("=", " ") + ": ") and "; use " in line
    if key in BY_SBATCH:
        assert f"use sbatch {flag(key)}={'v' if 'v' in form else 'VALUE'} FILE" in line
    assert key not in BY_VARIABLE or f"export {BY_VARIABLE[key]}=" in line


def test_other_flags_are_accepted() -> None:
    words = [
        "--num-rollout",
        "3",
        "--colocate",
        "--lr=1e-6",
        "--actor-num-nodes",
        "2",
        "--save",
        "a b; $(touch x)",
    ]
    assert late_flags(words) == []


@pytest.mark.parametrize("name", ["glm45_355b", "tiny", "convert_qwen3_4b"])
def test_a_job_with_a_late_flag_ends_before_it_creates_anything(name: str, tmp_path: Path) -> None:
    environ = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    environ |= {"RLPOST_HOME": str(JOBS.parent), "RLPOST_RUN_FOLDER": str(tmp_path / "run")}
    words = ["bash", str(JOBS / f"{name}.sbatch"), "--partition", "a", "--socket-ifname", "eth1"]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 78, done
    assert "--partition a: " in done.stdout and "--socket-ifname eth1: " in done.stdout
    assert list(tmp_path.iterdir()) == []

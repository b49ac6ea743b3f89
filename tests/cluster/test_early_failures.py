"""What the files of a run say about a container that cannot start, on real Slurm.

All scenarios run at the same time, one GPU each, on shared nodes. The stand-ins for pyxis and
enroot fail with the messages of enroot 4.1.2 and pyxis 0.24; how srun reports the failed tasks is
real.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from common.ledger import Ledger
from slurm.container import Container
from slurm.render import render_sbatch
from slurm.states import JobInfo, JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import search_path
from tests.settings import a_job

FAKES = Path(__file__).parents[1] / "fakes"
REGISTRY = "registry.site.org/rl/train"


@dataclass(frozen=True)
class Ended:
    """A job that is over, and its folder."""

    info: JobInfo
    folder: Path

    @property
    def verdicts(self) -> list[dict[str, Any]]:
        entries = Ledger(self.folder / "ledger.jsonl").read()
        return [entry for entry in entries if entry["event"] == "verdict"]

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("slurm-*.out"))


def scenarios(lab: Lab) -> dict[str, dict[str, Any]]:
    image, damaged, cache = (
        str(lab.shared / name) for name in ("image.sqsh", "damaged.sqsh", "cache")
    )
    return {
        "missing": {"container": Container("pyxis", "/nowhere/image.sqsh")},
        "damaged": {"container": Container("enroot", damaged)},
        "mount": {"container": Container("enroot", image, ("/nonexistent/data:/data:ro",))},
        "no-enroot": {"container": Container("pyxis", f"{REGISTRY}:1.2", (), cache)},
        "interpreter": {"container": Container("pyxis", image), "python": "/nowhere/python"},
        "rc-interpreter": {"container": Container("enroot", image), "python": "/nowhere/python"},
        "tag": {"container": Container("enroot", f"{REGISTRY}:9.9", (), cache)},
        "no-pyxis": {"container": Container("pyxis", image)},
        "outage": {
            "container": Container("pyxis", f"{REGISTRY}:1.2", (), cache),
            "max_failures": 1,
        },
    }


@pytest.fixture(scope="module")
def ended(lab: Lab) -> Iterator[Mapping[str, Ended]]:
    """All scenarios, submitted at the same time, when they are over."""
    home, registry = lab.shared / "code", lab.shared / "registry"
    home.mkdir()
    registry.mkdir()
    for name in ("bootstrap", "slurm", "common"):
        lab.run("ctl", ["cp", "-rL", str(FAKES / "cluster_home" / name), str(home)])
    content = {"environment": {"PATH": "/usr/bin:/bin"}, "hides": str(lab.shared)}
    (lab.shared / "image.sqsh").write_text("hsqs" + json.dumps(content))
    (lab.shared / "damaged.sqsh").write_text("not a squashfs")
    (registry / "images.json").write_text("{}")
    (registry / "broken").write_text("docker://registry.site.org#rl/train:1.2\n")
    environment = {"PATH": f"{FAKES / 'bin'}:{search_path()}", "STANDIN_REGISTRY": str(registry)}
    only_pyxis = lab.shared / "only-pyxis"
    only_pyxis.mkdir()
    (only_pyxis / "srun").symlink_to(FAKES / "bin/srun")
    without_enroot = {**environment, "PATH": f"{only_pyxis}:{search_path()}"}
    jobs = {}
    for name, values in scenarios(lab).items():
        folder = lab.shared / name
        folder.mkdir()
        common = {
            "nodes": 2,
            "num_gpus_per_node": 1,
            "exclusive": False,
            "time": "10",
            "driver_args": ("done",),
        }
        places = {"home": str(home), "run_folder": str(folder), "output": f"{folder}/slurm-%j.out"}
        script = render_sbatch(a_job(**{**common, **places, **values}))
        # where there is no pyxis, srun is Slurm's own
        variables = {"no-pyxis": {}, "no-enroot": without_enroot}.get(name, environment)
        jobs[name] = sbatch(lab, f"{name}.sbatch", script, env=variables)
    for name, job in jobs.items():
        until(
            lambda job=job: job_info(lab, job).state.is_over, lab, f"{name} is over", deadline_s=240
        )
    yield {name: Ended(job_info(lab, job), lab.shared / name) for name, job in jobs.items()}


@pytest.mark.parametrize(
    ("name", "headline", "remedy"),
    [
        ("missing", "the image or mount /nowhere/image.sqsh does not exist", "--container-image"),
        (
            "damaged",
            "the image {shared}/damaged.sqsh is damaged or unreadable",
            "--container-image",
        ),
        ("mount", "the mount source /nonexistent/data does not exist", "--container-mounts"),
        (
            "interpreter",
            "the interpreter cannot be run (/nowhere/python: No such file or directory)",
            "--python",
        ),
        ("rc-interpreter", "the interpreter cannot be run (", "--python"),
    ],
)
def test_a_container_that_fails_on_every_node_ends_the_job_at_the_first_attempt(
    lab: Lab, ended: Mapping[str, Ended], name: str, headline: str, remedy: str
) -> None:
    run = ended[name]
    assert (run.info.state, run.info.exit_code, run.info.num_restarts) == (
        JobState.FAILED,
        78,
        0,
    ), run.log
    (verdict,) = run.verdicts
    assert verdict["verdict"] == "config"
    first, second = verdict["cause"].splitlines()[:2]
    hosts, _, what = first.partition(": ")
    assert len(hosts.split(", ")) == 2 and what.startswith(headline.format(shared=lab.shared))
    assert second.startswith("remedy: ") and remedy in second
    assert first in run.log and second in run.log


def test_a_cluster_without_pyxis_is_refused_before_the_first_attempt(
    ended: Mapping[str, Ended],
) -> None:
    run = ended["no-pyxis"]
    assert (run.info.state, run.info.exit_code, run.info.num_restarts) == (
        JobState.FAILED,
        78,
        0,
    ), run.log
    assert "has no pyxis" in run.log
    assert not (run.folder / "attempts").exists()


def test_an_import_that_cannot_succeed_ends_the_job_with_its_cause_in_the_ledger(
    ended: Mapping[str, Ended],
) -> None:
    run = ended["tag"]
    assert (run.info.state, run.info.exit_code, run.info.num_restarts) == (
        JobState.FAILED,
        78,
        0,
    ), run.log
    (verdict,) = run.verdicts
    assert verdict["verdict"] == "config" and "error code: 404 Not Found" in verdict["cause"]
    assert "404 Not Found" in run.log
    assert not list((run.folder / "attempts/0").glob("agent-*.log"))


def test_a_refusal_of_the_import_is_the_cause_and_ends_the_job(ended: Mapping[str, Ended]) -> None:
    """Without a known pattern: its exit code says that no retry helps."""
    run = ended["no-enroot"]
    assert (run.info.exit_code, run.info.num_restarts) == (78, 0), run.log
    (verdict,) = run.verdicts
    assert verdict["verdict"] == "config"
    assert verdict["cause"].startswith(
        f"no enroot on this host to import {REGISTRY}:1.2; import it"
    )


def test_an_import_from_a_registry_in_an_outage_is_retried_within_the_budget(
    ended: Mapping[str, Ended],
) -> None:
    run = ended["outage"]
    assert (run.info.state, run.info.exit_code, run.info.num_restarts) == (JobState.FAILED, 1, 1), (
        run.log
    )
    assert [(entry["verdict"], entry["answer"]) for entry in run.verdicts] == [
        ("failed", "again"),
        ("failed", 1),
    ]
    assert all("error code: 503" in entry["cause"] for entry in run.verdicts)
    assert "max_failures is 1" in run.verdicts[1]["reason"]

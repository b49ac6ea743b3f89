"""Agents in containers on real Slurm, against stand-ins for pyxis and enroot that check every argument.

The stand-ins (tests/fakes/bin) hide the folder that the nodes share but for what is mounted; that the agents run at all
shows that code, run folder and interpreter are there. Probes run as setup commands, inside.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm.container import Container
from slurm.ledger import Ledger
from slurm.render import render_sbatch
from slurm.spec import JobSpec
from slurm.states import JobState
from tests.cluster.jobs import job_info, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import search_path

FAKES = Path(__file__).parents[1] / "fakes"
IMAGE = "registry.site.org/rl/train:1.2"
IMAGE_URI = "docker://registry.site.org#rl/train:1.2"


@dataclass(frozen=True)
class Site:
    """A lab whose nodes have containers."""

    lab: Lab
    home: Path
    registry: Path
    image: Path
    data: Path

    def run(self, name: str, container: Container, behaviour: str = "done") -> Path:
        """Run a job to its end; its folder."""
        folder = self.lab.shared / name
        folder.mkdir()
        inside = self.lab.shared / "inside"
        spec = JobSpec(
            nodes=2,
            time="10",
            driver_args=(behaviour,),
            home=str(self.home),
            run_folder=str(folder),
            output=f"{folder}/slurm-%j.out",
            container=container,
            environment=(("MARK", "of the run"),),
            setup_commands=(f"cat {inside}/weights", f"! touch {inside}/x", f"! test -e {self.data}"),
        )
        environment = {"PATH": f"{FAKES / 'bin'}:{search_path()}", "STANDIN_REGISTRY": str(self.registry)}
        job = sbatch(self.lab, f"{name}.sbatch", render_sbatch(spec), env={**environment, "MARK": "the host's"})
        until(lambda: job_info(self.lab, job).state.is_over, self.lab, f"{name} is over", deadline_s=180)
        log = (folder / f"slurm-{job}.out").read_text()
        logs = "".join(path.read_text() for path in folder.glob("attempts/*/agent-*.log"))
        assert job_info(self.lab, job).state is JobState.COMPLETED, log + logs
        return folder


@pytest.fixture(scope="module")
def site(lab: Lab) -> Site:
    """Code, model and image in the shared folder; the image would have everything its own way."""
    home, data, registry = (lab.shared / name for name in ("code", "data", "registry"))
    for folder in (data, registry):
        folder.mkdir()
    (data / "weights").write_text("weights\n")
    home.mkdir()
    for name in ("bootstrap", "slurm"):
        lab.run("ctl", ["cp", "-rL", str(FAKES / "cluster_home" / name), str(home)])
    variables = {"PATH": "/usr/bin:/bin", "IMAGE": "yes", "MARK": "the image's", "PYTHONPATH": "/image"}
    text = "hsqs" + json.dumps({"environment": {**variables, "RLPOST_HOME": "/image"}, "hides": str(lab.shared)})
    image = lab.shared / "image.sqsh"
    image.write_text(text)
    (registry / "images.json").write_text(json.dumps({IMAGE_URI: text}))
    return Site(lab, home, registry, image, data)


def facts(folder: Path, attempt: int) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"attempts/{attempt}/argv-*.json"))]
    assert len(found) == 2
    return found


def assert_inside(site: Site, folder: Path, attempt: int = 0) -> None:
    """Both agents ran in the image, in the code's folder, with our variables where it matters."""
    for agent in facts(folder, attempt):
        environment = agent["environment"]
        assert environment["IMAGE"] == "yes"
        assert environment["MARK"] == "of the run"
        assert environment["PYTHONPATH"] == environment["RLPOST_HOME"] == agent["cwd"] == str(site.home)
        assert environment["SLURM_JOB_ID"] is not None
        assert agent["driver"][0] == "python3"


def test_pyxis_runs_the_agents_of_a_site_local_image(site: Site) -> None:
    container = Container("pyxis", str(site.image), (f"{site.data}:{site.lab.shared}/inside:ro",))
    folder = site.run("pyxis", container)
    assert_inside(site, folder)
    image = Ledger(folder / "ledger.jsonl").read()[0]["image"]
    assert image == {
        "path": str(site.image),
        "size": site.image.stat().st_size,
        "mtime": int(site.image.stat().st_mtime),
    }


def test_enroot_imports_an_image_of_a_registry_once_for_all_nodes_and_attempts(site: Site) -> None:
    """Two nodes, two attempts, one pull; the ledger names the digest; nothing is left on the nodes."""
    cache = site.lab.shared / "images"
    mounts = (f"{site.data}:{site.lab.shared}/inside:ro",)
    folder = site.run("enroot", Container("enroot", IMAGE, mounts, str(cache)), "requeue-once")
    assert (site.registry / "pulled").read_text() == IMAGE_URI + "\n"
    for attempt in (0, 1):
        assert_inside(site, folder, attempt)
    images = [entry["image"] for entry in Ledger(folder / "ledger.jsonl").read() if entry["event"] == "attempt"]
    assert len(images) == 2 and images[0] == images[1]
    assert images[0]["path"] == f"{cache}/sha256-{images[0]['sha256']}.sqsh"
    for node in ("n01", "n02"):
        assert site.lab.run(node, ["ls", "/tmp/enroot-data"]).stdout == ""


def batch_file(site: Site, folder: Path, *probes: str) -> Path:
    """A script as ``jobs/`` has them: it finds out by itself where it is and which container there is."""
    spec = JobSpec(
        job_name="auto",
        nodes=2,
        time="10",
        driver_args=("done",),
        container=Container("auto", "$RLPOST_IMAGE", (f"{site.data}:{site.lab.shared}/inside:ro",)),
        environment=(("MARK", "of the run"),),
        setup_commands=probes,
    )
    folder.mkdir()
    path = folder / "auto.sbatch"
    path.write_text(render_sbatch(spec))
    return path


@pytest.mark.parametrize("chosen", ["pyxis", "enroot", "none"])
def test_one_batch_file_runs_with_pyxis_with_enroot_and_without_a_container(site: Site, chosen: str) -> None:
    """The same text; what the cluster has, or a word, decides. An image of a registry is imported once for both."""
    lab, folder = site.lab, site.lab.shared / f"auto-{chosen}"
    has = folder.with_name(f"has-{chosen}")
    has.mkdir()
    for command in {"pyxis": ("srun", "enroot"), "enroot": ("enroot",), "none": ()}[chosen]:
        (has / command).symlink_to(FAKES / "bin" / command)
    # Without a container the data is at its own place, and nothing is hidden.
    probes = (f"test -e {site.data}",) if chosen == "none" else (f"cat {lab.shared}/inside/weights",)
    script = batch_file(site, folder, *probes)
    environ = {"PATH": f"{has}:{search_path()}", "STANDIN_REGISTRY": str(site.registry), "RLPOST_HOME": str(site.home)}
    environ |= {"RLPOST_RUN_FOLDER": f"{folder}/run", "RLPOST_IMAGE_CACHE": f"{lab.shared}/auto-images"}
    environ |= {"RLPOST_PYTHON": "python3", **({} if chosen == "none" else {"RLPOST_IMAGE": IMAGE})}
    log_of_pulls = site.registry / "pulled"
    pulled = len(log_of_pulls.read_text().splitlines()) if log_of_pulls.exists() else 0
    job = lab.run("ctl", ["sbatch", "--parsable", str(script)], env=environ, cwd=folder).stdout.strip()
    until(lambda: job_info(lab, job).state.is_over, lab, f"{chosen} is over", deadline_s=180)
    log = (folder / f"slurm-{job}.out").read_text()
    logs = "".join(path.read_text() for path in folder.glob("run/attempts/*/agent-*.log"))
    assert job_info(lab, job).state is JobState.COMPLETED, log + logs
    assert log.count(f"container: {chosen}: ") == 1, log
    assert (folder / "run/attempts/0/container").read_text() == f"{chosen}\n"
    if chosen == "none":
        assert [agent["environment"]["IMAGE"] for agent in facts(folder / "run", 0)] == [None, None]
        return
    assert_inside(site, folder / "run")
    (cached,) = (lab.shared / "auto-images").glob("sha256-*.sqsh")
    assert sum(1 for _ in (lab.shared / "auto-images").glob("*.json")) == 1
    assert len(log_of_pulls.read_text().splitlines()) - pulled == (chosen == "pyxis")
    image = Ledger(folder / "run/ledger.jsonl").read()[0]["image"]
    assert image["path"] == str(cached)


def test_a_job_without_pyxis_ends_at_once_and_for_good(site: Site) -> None:
    """Instead of three attempts of an srun that does not know the option."""
    folder = site.lab.shared / "no-pyxis"
    script = batch_file(site, folder)
    environ = {"PATH": search_path(), "RLPOST_HOME": str(site.home), "RLPOST_CONTAINER": "pyxis"}
    environ |= {"RLPOST_IMAGE": str(site.image), "RLPOST_RUN_FOLDER": f"{folder}/run"}
    job = site.lab.run("ctl", ["sbatch", "--parsable", str(script)], env=environ, cwd=folder).stdout.strip()
    until(lambda: job_info(site.lab, job).state.is_over, site.lab, "the job is over", deadline_s=60)
    info = job_info(site.lab, job)
    assert (info.exit_code, info.num_restarts) == (78, 0)
    assert "this cluster has no pyxis" in (folder / f"slurm-{job}.out").read_text()
    assert not (folder / "run").exists()

"""Agents in containers on real Slurm: a real Charliecloud where it is installed, and stand-ins for
pyxis, enroot and Apptainer that check every argument.

The stand-ins (tests/fakes/bin) hide the shared folder except for what is mounted, so an agent that
runs proves that code, run folder and interpreter are mounted. Probes run inside, as setup commands.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from common.ledger import Ledger
from rlpost.config.load import dump, load
from slurm.container import Container
from slurm.render import render_sbatch
from slurm.spec import JobSpec
from slurm.states import JobState
from tests.cluster.jobs import job_info, only_step, sbatch, until
from tests.cluster.lab import Lab
from tests.cluster.lab_host import search_path
from tests.settings import a_job

REPOSITORY = Path(__file__).parents[2]
FAKES = REPOSITORY / "tests/fakes"
NODES_OWN = "/dev/shm/enroot-data"
BIND_MOUNT = "/tmp/enroot-data"  # in the lab, /tmp of a node is a bind mount
IMAGE = "registry.site.org/rl/train:1.2"
IMAGE_URI = "docker://registry.site.org#rl/train:1.2"


@dataclass(frozen=True)
class Site:
    """A lab with containers."""

    lab: Lab
    home: Path
    registry: Path
    image: Path
    data: Path

    def environ(self, enroot_data: str) -> dict[str, str]:
        environment = {
            "PATH": f"{FAKES / 'bin'}:{search_path()}",
            "STANDIN_REGISTRY": str(self.registry),
        }
        return {**environment, "STANDIN_ENROOT_DATA": enroot_data, "MARK": "the host's"}

    def spec(self, container: Container, behaviour: str) -> JobSpec:
        """A job of two nodes whose agents see their data, read-only, and nothing else."""
        inside = self.lab.shared / "inside"
        return a_job(
            nodes=2,
            time="10",
            driver_args=(behaviour,),
            home=str(self.home),
            container=container,
            environment=(("MARK", "of the run"),),
            setup_commands=(
                f"cat {inside}/weights",
                f"! touch {inside}/x",
                f"! test -e {self.data}",
            ),
        )

    def run(
        self,
        name: str,
        container: Container,
        behaviour: str = "done",
        *,
        enroot_data: str = NODES_OWN,
    ) -> Path:
        """Run a job to its end; return its folder."""
        folder = self.lab.shared / name
        folder.mkdir()
        spec = replace(
            self.spec(container, behaviour), run_folder=str(folder), output=f"{folder}/slurm-%j.out"
        )
        job = sbatch(self.lab, f"{name}.sbatch", render_sbatch(spec), env=self.environ(enroot_data))
        until(
            lambda: job_info(self.lab, job).state.is_over,
            self.lab,
            f"{name} is over",
            deadline_s=180,
        )
        log = (folder / f"slurm-{job}.out").read_text()
        logs = "".join(path.read_text() for path in folder.glob("attempts/*/agent-*.log"))
        assert job_info(self.lab, job).state is JobState.COMPLETED, log + logs
        assert "may be left" not in log, log
        return folder

    def left(self, enroot_data: str) -> list[str]:
        """Names of the files in the data folders of both nodes."""
        listed = (self.lab.run(node, ["ls", enroot_data]).stdout for node in ("n01", "n02"))
        return sorted(name for text in listed for name in text.split())


@pytest.fixture(scope="module")
def site(lab: Lab) -> Site:
    """Code, model and image in the shared folder; the image sets every variable differently."""
    home, data, registry = (lab.shared / name for name in ("code", "data", "registry"))
    for folder in (data, registry):
        folder.mkdir()
    (data / "weights").write_text("weights\n")
    home.mkdir()
    for name in ("bootstrap", "slurm", "common"):
        lab.run("ctl", ["cp", "-rL", str(FAKES / "cluster_home" / name), str(home)])
    variables = {
        "PATH": "/usr/bin:/bin",
        "IMAGE": "yes",
        "MARK": "the image's",
        "PYTHONPATH": "/image",
    }
    text = "hsqs" + json.dumps(
        {"environment": {**variables, "RLPOST_HOME": "/image"}, "hides": str(lab.shared)}
    )
    image = lab.shared / "image.sqsh"
    image.write_text(text)
    (registry / "images.json").write_text(json.dumps({IMAGE_URI: text}))
    return Site(lab, home, registry, image, data)


def facts(folder: Path, attempt: int) -> list[dict[str, Any]]:
    found = [
        json.loads(path.read_text())
        for path in sorted(folder.glob(f"attempts/{attempt}/argv-*.json"))
    ]
    assert len(found) == 2
    return found


def assert_inside(site: Site, folder: Path, attempt: int = 0) -> None:
    """Both agents ran in the image, in the code's folder, with the variables of the run."""
    for agent in facts(folder, attempt):
        environment = agent["environment"]
        assert environment["IMAGE"] == "yes"
        assert environment["MARK"] == "of the run"
        assert (
            environment["PYTHONPATH"]
            == environment["RLPOST_HOME"]
            == agent["cwd"]
            == str(site.home)
        )
        assert environment["SLURM_JOB_ID"] is not None
        assert agent["driver"][0] == "python3"


def test_pyxis_runs_the_agents_of_a_site_local_image(site: Site) -> None:
    """What a cancelled job left is removed before the image is extracted: the disk may hold one."""
    container = Container("pyxis", str(site.image), (f"{site.data}:{site.lab.shared}/inside:ro",))
    leftover = "pyxis_rlpost_99999_0"
    site.lab.run("n02", ["mkdir", "-p", f"{NODES_OWN}/{leftover}"])
    folder = site.run("pyxis", container)
    assert_inside(site, folder)
    (log,) = (path.read_text() for path in folder.glob("slurm-*.out"))
    removed = f"n02: removing the container {leftover} of an earlier start"
    assert removed in log.partition("agents ended")[0] and not list(folder.rglob("freed-*"))
    image = Ledger(folder / "ledger.jsonl").read()[0]["image"]
    assert image == {
        "path": str(site.image),
        "size": site.image.stat().st_size,
        "mtime": int(site.image.stat().st_mtime),
    }
    assert site.left(NODES_OWN) == []  # pyxis with scope "global" would leave it


def test_enroot_imports_an_image_of_a_registry_once_for_all_nodes_and_attempts(site: Site) -> None:
    """Two nodes with one data folder, two attempts, one pull. The ledger names the digest, and no
    file is left.
    """
    cache, data = site.lab.shared / "images", site.lab.shared / "enroot-data"
    mounts = (f"{site.data}:{site.lab.shared}/inside:ro",)
    folder = site.run(
        "enroot",
        Container("enroot", IMAGE, mounts, str(cache)),
        "requeue-once",
        enroot_data=str(data),
    )
    assert (site.registry / "pulled").read_text() == IMAGE_URI + "\n"
    for attempt in (0, 1):
        assert_inside(site, folder, attempt)
    images = [
        entry["image"]
        for entry in Ledger(folder / "ledger.jsonl").read()
        if entry["event"] == "attempt"
    ]
    assert len(images) == 2 and images[0] == images[1]
    assert images[0]["path"] == f"{cache}/sha256-{images[0]['sha256']}.sqsh"
    assert list(data.iterdir()) == []


def batch_file(site: Site, folder: Path, *probes: str) -> Path:
    """Write a script like those of ``jobs/``, which finds its folder and the container itself."""
    spec = a_job(
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
def test_one_batch_file_runs_with_pyxis_with_enroot_and_without_a_container(
    site: Site, chosen: str
) -> None:
    """The commands of the cluster, or a variable, decide. pyxis and enroot share one import of an
    image.
    """
    lab, folder = site.lab, site.lab.shared / f"auto-{chosen}"
    has = folder.with_name(f"has-{chosen}")
    has.mkdir()
    for command in {"pyxis": ("srun", "enroot"), "enroot": ("enroot",), "none": ()}[chosen]:
        (has / command).symlink_to(FAKES / "bin" / command)
    # Without a container the data is at its own path, and nothing is hidden.
    probes = (
        (f"test -e {site.data}",) if chosen == "none" else (f"cat {lab.shared}/inside/weights",)
    )
    script = batch_file(site, folder, *probes)
    environ = {
        **site.environ(NODES_OWN),
        "PATH": f"{has}:{search_path()}",
        "RLPOST_HOME": str(site.home),
    }
    environ |= {
        "RLPOST_RUN_FOLDER": f"{folder}/run",
        "RLPOST_IMAGE_CACHE": f"{lab.shared}/auto-images",
    }
    environ |= {"RLPOST_PYTHON": "python3", **({} if chosen == "none" else {"RLPOST_IMAGE": IMAGE})}
    log_of_pulls = site.registry / "pulled"
    pulled = len(log_of_pulls.read_text().splitlines()) if log_of_pulls.exists() else 0
    job = lab.run(
        "ctl", ["sbatch", "--parsable", str(script)], env=environ, cwd=folder
    ).stdout.strip()
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


def test_a_job_without_pyxis_fails_at_once_and_is_not_requeued(site: Site) -> None:
    """Otherwise srun would refuse the unknown option in each of three attempts."""
    folder = site.lab.shared / "no-pyxis"
    script = batch_file(site, folder)
    environ = {"PATH": search_path(), "RLPOST_HOME": str(site.home), "RLPOST_CONTAINER": "pyxis"}
    environ |= {"RLPOST_IMAGE": str(site.image), "RLPOST_RUN_FOLDER": f"{folder}/run"}
    job = site.lab.run(
        "ctl", ["sbatch", "--parsable", str(script)], env=environ, cwd=folder
    ).stdout.strip()
    until(lambda: job_info(site.lab, job).state.is_over, site.lab, "the job is over", deadline_s=60)
    info = job_info(site.lab, job)
    assert (info.exit_code, info.num_restarts) == (78, 0)
    assert "this cluster has no pyxis" in (folder / f"slurm-{job}.out").read_text()
    assert not (folder / "run").exists()


def plain_run(site: Site, container: Container, enroot_data: str) -> tuple[Path, str]:
    """Start a run by plain sbatch, without a snapshot of the code; its folder and job id, once both
    agents wait.
    """
    job = sbatch(
        site.lab,
        "plain.sbatch",
        render_sbatch(site.spec(container, "wait")),
        env=site.environ(enroot_data),
    )
    folder = site.home / f"runs/rlpost-{job}"
    until(
        lambda: len(list(folder.glob("attempts/0/argv-*.json"))) == 2, site.lab, "both agents run"
    )
    cluster = {
        "container": container.backend,
        "container_image": container.image,
        "environment": {"MARK": "of the run"},
    }
    (folder / "run.json").write_text(dump(load([], {"cluster": cluster}).config))
    return folder, job


def rlpost_exec(site: Site, folder: Path, enroot_data: str, *command: str) -> tuple[list[str], str]:
    """Run ``rlpost exec``; the sorted lines of its output, and its error output."""
    argv = [sys.executable, "-m", "rlpost", "exec", "--run", str(folder), *command]
    done = site.lab.run(
        "ctl", argv, env={**site.environ(enroot_data), "PYTHONPATH": str(REPOSITORY)}, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(
    ("backend", "enroot_data"),
    [("pyxis", NODES_OWN), ("pyxis", BIND_MOUNT), ("enroot", BIND_MOUNT)],
)
def test_a_command_runs_in_the_agents_containers(
    site: Site, backend: str, enroot_data: str
) -> None:
    """In their code's folder, with their variables and the path of the secret. Where the data is a
    bind mount, pyxis does not find the containers and starts others, which is reported. A later
    job removes what cancelled jobs left.
    """
    mounts = (f"{site.data}:{site.lab.shared}/inside:ro",)
    container = Container(backend, str(site.image), mounts)
    folder, job = plain_run(site, container, enroot_data)
    script = "echo $(hostname) $IMAGE $MARK $PWD $RAY_AUTH_MODE; ls $RAY_AUTH_TOKEN_PATH"
    lines, messages = rlpost_exec(site, folder, enroot_data, "sh", "-c", script)
    secret = f"{folder}/attempts/0/secret"
    nodes = [
        (number, f"{number}: n0{number + 1} yes of the run {site.home} token") for number in (0, 1)
    ]
    assert lines == sorted(
        line for number, first in nodes for line in (first, f"{number}: {secret}")
    )
    is_second = backend == "pyxis" and enroot_data == BIND_MOUNT
    assert ("started a second one" in messages) == is_second, messages

    site.lab.run("ctl", ["scancel", job])
    until(lambda: job_info(site.lab, job).state.is_over, site.lab, "the job is over")
    until(
        lambda: site.lab.run("ctl", ["squeue", "-h", "-j", job], check=False).stdout == "",
        site.lab,
        "the job has left the queue",
    )
    assert len(site.left(enroot_data)) == 2
    site.run(f"after-{job}", container, enroot_data=enroot_data)
    assert site.left(enroot_data) == []


COMMANDS = {
    "apptainer": "apptainer exec --nv --no-home --bind={source}:{target}:{mode} {image}",
    "ch-run": "ch-run --write --set-env --bind=/usr --bind={source}:{target} {image} --",
}


def charliecloud_image(site: Site, targets: Sequence[Path]) -> Path:
    """A folder that lacks its programs, which are the node's.

    It has the mount targets: of two nodes whose ch-run makes them at once, one fails.
    """
    image = site.lab.shared / "image"
    for name in ("ch", "dev", "etc", "home", "proc", "sys", "tmp", "usr"):
        (image / name).mkdir(parents=True)
    for name in ("passwd", "group"):
        (image / "etc" / name).touch()
    for name in ("bin", "lib", "lib64", "sbin"):
        (image / name).symlink_to(f"usr/{name}")
    for target in targets:
        (image / target.relative_to("/")).mkdir(parents=True)
    variables = {"IMAGE": "yes", "MARK": "the image's", "PYTHONPATH": "/image", "RLPOST_HOME": "/"}
    lines = (f"{name}={value}\n" for name, value in variables.items())
    (image / "ch/environment").write_text("".join(lines))
    return image


@pytest.mark.parametrize("program", COMMANDS)
def test_a_runtime_that_is_a_prefix_runs_is_entered_and_passes_signals_on(
    site: Site, program: str
) -> None:
    """TERM to the step alone, as at a preemption, reaches the agents; the run is requeued and ends.
    Nothing is imported, and nothing is left on a node.
    """
    if program == "ch-run" and shutil.which("ch-run") is None:
        pytest.skip("no ch-run on this machine; apt-get install charliecloud")
    is_real = program == "ch-run"
    inside, folder = site.lab.shared / "inside", site.lab.shared / f"run-{program}"
    image = charliecloud_image(site, [inside, folder, site.home]) if is_real else site.image
    mount = f"{site.data}:{inside}" + ("" if is_real else ":ro")
    container = Container("command", str(image), (mount,), command=COMMANDS[program])
    spec = site.spec(container, "wait-once")
    if is_real:  # it has no read-only mounts
        spec = replace(spec, setup_commands=(f"cat {inside}/weights", f"! test -e {site.data}"))
    environ = {**site.environ(NODES_OWN), "RLPOST_RUN_FOLDER": str(folder)}
    job = sbatch(site.lab, f"{program}.sbatch", render_sbatch(spec), env=environ)
    agents = folder / "attempts/0"
    until(lambda: len(list(agents.glob("argv-*.json"))) == 2, site.lab, "both agents run")
    cluster = {"container": "command", "container_image": str(image)}
    cluster |= {"container_command": container.command, "environment": {"MARK": "of the run"}}
    (folder / "run.json").write_text(dump(load([], {"cluster": cluster}).config))
    script = f"echo $(hostname) $IMAGE $MARK $PWD; cat {inside}/weights; ls $RAY_AUTH_TOKEN_PATH"
    lines, messages = rlpost_exec(site, folder, NODES_OWN, "sh", "-c", script)
    said = ("yes of the run " + str(site.home), "weights", f"{agents}/secret")
    assert lines == sorted(
        f"{number}: {f'n0{number + 1} ' if line == said[0] else ''}{line}"
        for number in (0, 1)
        for line in said
    )
    assert "error" not in messages.lower(), messages

    site.lab.run("ctl", ["scancel", "--signal=TERM", only_step(site.lab, job)])
    until(
        lambda: job_info(site.lab, job).state.is_over, site.lab, "the job is over", deadline_s=180
    )
    log = "".join(path.read_text() for path in folder.parent.glob(f"**/slurm-{job}.out"))
    assert job_info(site.lab, job).state is JobState.COMPLETED, log
    # the first agent that gets it stops the other one too
    assert "SIGTERM" in "".join(path.read_text() for path in agents.glob("signals-*"))
    for host in ("n01", "n02"):
        left = site.lab.run(host, ["sh", "-c", "ls -d /tmp/apptainer-* 2>/dev/null || true"])
        assert left.stdout == ""
    for attempt in (0, 1):
        assert_inside(site, folder, attempt)
    assert Ledger(folder / "ledger.jsonl").read()[0]["image"]["path"] == str(image)

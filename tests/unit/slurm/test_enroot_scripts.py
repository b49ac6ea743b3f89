"""Scripts around a node's container: start, a command beside the agent, removal, with a fake
enroot. It makes a root in a mount namespace, so the tests need root; test_container.py and
test_job_step.py need none.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from slurm.container import Container
from slurm.job_step import Inside, step_argv

ROOT = Path(__file__).parents[3]
FAKES = ROOT / "tests/fakes/bin"
# Of this process alone: a container's processes are found by its name on the whole machine.
JOB = str(10_000_000 + os.getpid())
UNSHARE = ["unshare", "--mount", "--propagation", "private"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run([*UNSHARE, "true"], capture_output=True).returncode != 0,
    reason="needs root and mount namespaces",
)


class Node:
    """One node of the job; its Slurm has the jobs in ``queue``, or does not answer."""

    def __init__(self, folder: Path, name: str, *, data: Path, restart: int = 0) -> None:
        self.name, self.data, self.restart = name, data, restart
        self.shared, self.bin = folder / "shared", folder / f"bin-{name}-{restart}"
        self.image = folder / "image.sqsh"
        self.started: list[subprocess.Popen[str]] = []
        for made in (self.shared, self.bin):
            made.mkdir(exist_ok=True)
        variables = {"PATH": "/usr/bin:/bin", "IMAGE": "yes"}
        self.image.write_text(
            "hsqs" + json.dumps({"environment": variables, "hides": str(self.shared)})
        )
        self.command("sleep", "exec /bin/sleep 0.01")
        self.queue(JOB)

    def command(self, name: str, text: str) -> None:
        """Put a command before the system's."""
        (self.bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (self.bin / name).chmod(0o755)

    def queue(self, *jobs: str) -> None:
        self.command("squeue", f"printf '%s\\n' {' '.join(jobs)}")

    def environ(self, path: str | None = None) -> dict[str, str]:
        return {
            "PATH": path or f"{self.bin}:{FAKES}:/usr/bin:/bin",
            "ENROOT_DATA_PATH": str(self.data),
            "SLURM_JOB_ID": JOB,
            "SLURMD_NODENAME": self.name,
            "RLPOST_HOME": str(ROOT),
            "MARK": "the host's",
        }

    def start(self, command: str) -> subprocess.Popen[str]:
        """Start an agent that runs this shell command."""
        words = [
            "bash",
            str(ROOT / "slurm/enroot_start.sh"),
            str(self.image),
            f"rlpost_{JOB}_{self.restart}",
        ]
        mounts = [f"{self.shared}:{self.shared}:x-create=auto,rbind"]
        process = subprocess.Popen(
            [*words, *mounts, "--", "env", "MARK=of the run", "sh", "-c", command],
            env=self.environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *words: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, env=self.environ(path), capture_output=True, text=True, timeout=60
        )

    def remove(
        self, backend: str = "enroot", path: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "slurm/enroot_remove.sh")
        return self.run("bash", script, backend, f"rlpost_{JOB}_{self.restart}", path=path)

    def step(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run on the node what ``rlpost exec`` passes to srun."""
        inside = Inside(
            self.shared,
            ROOT,
            Container("enroot", str(self.image)),
            self.restart,
            (("RAY_AUTH_MODE", "t"),),
        )
        argv = step_argv(JOB, command, nodes=[self.name], inside=inside)
        return self.run(*argv[argv.index("bash") :])

    def containers(self) -> set[str]:
        return {path.name for path in self.data.iterdir()}

    def leave(self, *names: str) -> None:
        """Create containers of earlier jobs, without a process."""
        for name in names:
            (self.data / name).mkdir(parents=True)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, "n01", data=tmp_path / "data")
    yield made
    for process in made.started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until_up(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if line == "up\n":
            return
    raise AssertionError("".join(said))


def test_two_nodes_start_where_their_data_folder_is_one(node: Node, tmp_path: Path) -> None:
    """With one name for both, enroot failed: create_inode: failed to create symlink .../bin,
    because File exists.
    """
    other = Node(tmp_path, "n02", data=node.data)
    agents = [node.start("echo up; exec sleep 60"), other.start("echo up; exec sleep 60")]
    node.started += other.started
    for agent in agents:
        until_up(agent)
    assert node.containers() == {f"rlpost_{JOB}_0_n01", f"rlpost_{JOB}_0_n02"}
    # requeued: n02 is still in use, as n01 is
    again = Node(tmp_path, "n01", data=node.data, restart=1)
    until_up(again.start("echo up; exec sleep 60"))
    node.started += again.started
    assert node.containers() == {
        f"rlpost_{JOB}_0_n01",
        f"rlpost_{JOB}_0_n02",
        f"rlpost_{JOB}_1_n01",
    }
    for agent in agents:
        agent.kill()
        agent.wait()
    assert node.remove().returncode == 0
    assert node.containers() == {f"rlpost_{JOB}_0_n02", f"rlpost_{JOB}_1_n01"}


def test_a_command_runs_with_the_environment_of_the_agent_although_the_data_is_a_bind_mount(
    node: Node, tmp_path: Path
) -> None:
    """``enroot list -f`` shows no process then. The command must not join a later process, which
    has other variables.
    """
    real = tmp_path / "real"
    for folder in (real, node.data):
        folder.mkdir()
    subprocess.run(["mount", "--bind", real, node.data], check=True)
    try:
        until_up(node.start("MARK=later sleep 60 & echo up; exec sleep 60"))
        done = node.step("sh", "-c", "echo $MARK, $IMAGE, $RAY_AUTH_MODE, $PWD; ls /rc")
        assert (done.stdout, done.stderr) == (f"of the run, yes, t, {ROOT}\n/rc\n", "")
        elsewhere = Node(tmp_path, "n02", data=node.data).step("true")
        assert (
            elsewhere.returncode == 1
            and f"container rlpost_{JOB}_0_n02 runs on n02" in elsewhere.stderr
        )
    finally:
        subprocess.run(["umount", "--lazy", node.data], check=True)


STALE = ("rlpost_4_0_n01", "rlpost_44_2_n01", f"rlpost_{JOB}_0_n01")
OF_OTHERS = (
    "rlpost_3_0_n01",
    "rlpost_4_0_n02",
    "rlpost_4_0_n010",
    "mine",
    "rlpost_4_0_n01_x",
    "pyxis_rlpost_4_0",
)


def test_what_cancelled_jobs_left_goes_at_the_next_start_on_the_node(
    node: Node, tmp_path: Path
) -> None:
    """Containers of this job and of jobs that left the queue are removed, unless they are in use or
    another node's.
    """
    node.leave(*STALE, *OF_OTHERS)
    node.queue("3", JOB)
    late = Node(tmp_path, "n01", data=node.data, restart=1)
    late.queue("3", JOB)
    until_up(late.start("echo up; exec sleep 60"))
    node.started += late.started
    assert node.containers() == {*OF_OTHERS, f"rlpost_{JOB}_1_n01"}


def test_a_container_in_use_stays_whatever_the_queue_says(node: Node, tmp_path: Path) -> None:
    until_up(node.start("echo up; exec sleep 60"))
    after = Node(tmp_path, "n01", data=node.data, restart=1)
    after.start("true").wait()
    assert f"rlpost_{JOB}_0_n01" in node.containers()


@pytest.mark.parametrize("answer", ["exit 1", "echo 3", ":", "exec /bin/sleep 60"])
def test_where_slurm_gives_no_answer_only_the_jobs_own_leftovers_go(
    node: Node, answer: str
) -> None:
    """squeue fails, omits this job, or hangs until its timeout."""
    node.leave(*STALE)
    node.command("squeue", answer)
    node.command("timeout", '[ "$1" -le 10 ] && shift && exec /usr/bin/timeout 0.5 "$@"')
    late = Node(node.image.parent, "n01", data=node.data, restart=1)
    for name in ("squeue", "timeout"):
        (late.bin / name).write_text((node.bin / name).read_text())
        (late.bin / name).chmod(0o755)
    assert late.start("true").wait() == 0
    assert node.containers() == {"rlpost_4_0_n01", "rlpost_44_2_n01", f"rlpost_{JOB}_1_n01"}


def test_a_node_without_squeue_removes_nothing_of_other_jobs(node: Node) -> None:
    node.leave("rlpost_4_0_n01")
    node.command("squeue", "echo squeue: not found >&2; exit 127")
    assert node.start("true").wait() == 0
    assert node.containers() == {"rlpost_4_0_n01", f"rlpost_{JOB}_0_n01"}


def test_where_no_container_was_made_none_is_said_to_be_left(node: Node) -> None:
    done = node.remove()
    assert (done.returncode, done.stderr) == (0, "")


def test_the_files_of_a_living_agent_are_not_removed(node: Node) -> None:
    agent = node.start("echo up; exec sleep 60")
    until_up(agent)
    done = node.remove()
    assert done.returncode == 1 and f"still runs in the container rlpost_{JOB}_0_n01" in done.stderr
    assert node.containers() == {f"rlpost_{JOB}_0_n01"}
    # it ends while the removal waits
    node.command("sleep", f"kill -9 {agent.pid}; exec /bin/sleep 0.2")
    assert node.remove().returncode == 0
    assert node.containers() == set()


def test_what_pyxis_leaves_in_its_global_scope_goes_with_that_of_jobs_that_are_over(
    node: Node,
) -> None:
    node.leave(
        f"pyxis_rlpost_{JOB}_0",
        "pyxis_rlpost_4_0",
        "pyxis_rlpost_3_0",
        "rlpost_4_0_n01",
        "pyxis_mine",
    )
    node.queue("3", JOB)
    script = node.bin / "enroot"  # pyxis ignores the job's ENROOT_DATA_PATH
    script.write_text(
        f'#!/bin/sh\n[ -z "$ENROOT_DATA_PATH" ] && ENROOT_DATA_PATH={node.data} exec {FAKES}/enroot "$@"\n'
    )
    script.chmod(0o755)
    assert node.remove("pyxis").returncode == 0
    assert node.containers() == {"pyxis_rlpost_3_0", "rlpost_4_0_n01", "pyxis_mine"}


@pytest.mark.parametrize("enroot", [None, "exit 1", "exit 127"])
def test_after_pyxis_nothing_that_enroot_lacks_is_an_error(node: Node, enroot: str | None) -> None:
    if enroot is not None:
        node.command("enroot", enroot)
    done = node.remove("pyxis", path=f"{node.bin}:/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_second_container_on_the_same_files_says_so(tmp_path: Path) -> None:
    """The script that pyxis runs first, in the mount namespace of the agents or in another one."""
    container = Container("pyxis", "/images/a.sqsh")
    argv = step_argv(JOB, ["echo", "a b"], nodes=["n1"], inside=Inside(tmp_path, ROOT, container))
    words = argv[argv.index("sh") :]
    agent = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "-m", "bootstrap.agent"]
    )
    try:
        deadline = time.monotonic() + 10
        while b"bootstrap.agent" not in Path(f"/proc/{agent.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline
        beside = subprocess.run(words, capture_output=True, text=True)
        elsewhere = subprocess.run([*UNSHARE, *words], capture_output=True, text=True)
    finally:
        agent.kill()
        agent.wait()
    assert (beside.stdout, beside.stderr) == ("a b\n", "")
    assert elsewhere.stdout == "a b\n" and "started a second one" in elsewhere.stderr

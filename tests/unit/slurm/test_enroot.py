"""A node's container: start, a command beside the agent, removal, with a fake enroot.

The fake makes a root in a mount namespace, so those tests need root.
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

import psutil
import pytest

from rlpost.extensions.attach.job_step import Inside, step_argv
from slurm import enroot
from slurm.container import Container

ROOT = Path(__file__).parents[3]
FAKES = ROOT / "tests/fakes/bin"
# Of this process alone: a container's processes are found by its name on the whole machine.
JOB = str(10_000_000 + os.getpid())
ENROOT = ["python3", "-I", str(ROOT / "slurm/enroot.py")]
UNSHARE = ["unshare", "--mount", "--propagation", "private"]

needs_root = pytest.mark.skipif(
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
        words = [*ENROOT, "start", str(self.image), f"rlpost_{JOB}_{self.restart}"]
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
        return self.run(*ENROOT, "remove", backend, f"rlpost_{JOB}_{self.restart}", path=path)

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
        return self.run(*argv[argv.index("python3") :])

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


@needs_root
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


@needs_root
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
QUEUE = {"3", JOB}


@pytest.mark.parametrize(
    ("backend", "node", "queue", "names"),
    [
        ("enroot", "n01", QUEUE, STALE),
        ("enroot", "n01", None, (f"rlpost_{JOB}_0_n01",)),  # Slurm gave no answer
        ("enroot", "n01", {JOB, "4", "44"}, (f"rlpost_{JOB}_0_n01", "rlpost_3_0_n01")),
        ("enroot", "n.1", QUEUE, ()),
        ("pyxis", "n01", QUEUE, ("pyxis_rlpost_4_0",)),
        ("pyxis", "n01", None, ()),
    ],
)
def test_stale_are_earlier_starts_and_jobs_that_left_the_queue(backend, node, queue, names) -> None:
    jobs = enroot.jobs_of([*STALE, *OF_OTHERS], enroot.name_pattern(backend, node))
    assert set(enroot.stale(jobs, JOB, queue)) == set(names)


# of a process in a container whose data folder is a mount, one whose data folder is a bind mount,
# and one on the node; proc(5) gives the fields
ROOTS = ("/enroot/data-0/rlpost_5_0_n01", "/rlpost_5_0_n01", "/")
OTHERS = (
    "31 30 0:27 / /sys rw - sysfs sysfs rw",
    "32 30 0:28 /rlpost_5_0_n01 /mnt rw - tmpfs t rw",
)


@pytest.mark.parametrize("root", ROOTS)
def test_a_process_is_recognised_by_the_source_of_its_root(root: str) -> None:
    mountinfo = "\n".join(
        [OTHERS[0], f"30 24 0:26 {root} / rw,relatime - ext4 /dev/sda1 rw", OTHERS[1]]
    )
    assert enroot.is_root_of(mountinfo, "rlpost_5_0_n01") == (root != "/")
    assert not enroot.is_root_of(mountinfo, "rlpost_5_0_n0.")
    assert not enroot.is_root_of(mountinfo, "0_n01")


def test_the_agent_is_the_oldest_process_whatever_the_pids() -> None:
    assert enroot.oldest({7: 900, 40_000: 800, 8: 901}) == 40_000
    assert enroot.oldest({}) is None
    before = "7 (a) b (c)) S 1 7 7 0 -1 4194560 100 0 0 0 1 2 0 0 20 0 1 0"
    assert enroot.start_time(f"{before} 4711 8192000 300") == 4711
    began = enroot.start_time(Path("/proc/self/stat").read_text()) / os.sysconf("SC_CLK_TCK")
    assert abs(psutil.boot_time() + began - psutil.Process().create_time()) < 1


@needs_root
def test_what_cancelled_jobs_left_goes_at_the_next_start_on_the_node(
    node: Node, tmp_path: Path
) -> None:
    node.leave(*STALE, *OF_OTHERS)
    late = Node(tmp_path, "n01", data=node.data, restart=1)
    late.queue(*QUEUE)
    until_up(late.start("echo up; exec sleep 60"))
    node.started += late.started
    assert node.containers() == {*OF_OTHERS, f"rlpost_{JOB}_1_n01"}


@needs_root
def test_a_container_in_use_stays_whatever_the_queue_says(node: Node, tmp_path: Path) -> None:
    until_up(node.start("echo up; exec sleep 60"))
    after = Node(tmp_path, "n01", data=node.data, restart=1)
    after.start("true").wait()
    assert f"rlpost_{JOB}_0_n01" in node.containers()


def test_enroot_becomes_the_task_with_the_signals_of_a_shell(node: Node) -> None:
    """Python ignores SIGPIPE, and setup commands with pipes would inherit that."""
    node.command("enroot", '[ "$1" != start ] || exec cat /proc/self/status')
    task = node.start("true")
    said, _ = task.communicate(timeout=60)
    status = dict(line.split(":\t", 1) for line in said.splitlines() if ":\t" in line)
    assert int(status["Pid"]) == task.pid
    assert int(status["SigIgn"], 16) & (1 << signal.SIGPIPE - 1) == 0


@pytest.mark.parametrize(("verb", "code"), [("start", 127), ("remove", 0), ("remove-stale", 0)])
def test_a_node_without_enroot(node: Node, verb: str, code: int) -> None:
    words = {"start": ["a.sqsh", "rlpost_1_0", "--", "true"], "remove": ["enroot", "rlpost_1_0"]}
    done = node.run(*ENROOT, verb, *words.get(verb, ["enroot"]), path="/usr/bin:/bin")
    assert done.returncode == code
    assert done.stderr == ("n01: enroot is not on the PATH\n" if code else "")


ANSWERS = ["exit 1", "echo 3", ":", "/bin/sleep 60", "echo squeue: not found >&2; exit 127"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_where_slurm_gives_no_answer_the_queue_is_unknown(
    node: Node, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """squeue fails, omits this job, hangs (below a wrapper), or is missing."""
    node.command("squeue", answer)
    monkeypatch.setenv("PATH", f"{node.bin}:/usr/bin:/bin")
    monkeypatch.setattr(enroot, "SQUEUE_S", 0.3)
    began = time.monotonic()
    assert enroot.jobs_in_queue({"4"}, JOB) is None
    assert time.monotonic() - began < 20
    node.queue("4", JOB)
    assert enroot.jobs_in_queue({"4", "3"}, JOB) == {"4", JOB}


@needs_root
def test_where_no_container_was_made_none_is_said_to_be_left(node: Node) -> None:
    done = node.remove()
    assert (done.returncode, done.stderr) == (0, "")


@needs_root
def test_the_files_of_a_living_agent_are_not_removed(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    agent = node.start("echo up; exec sleep 60")
    until_up(agent)
    for name, value in node.environ().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(enroot, "ENDING_S", 0.1)
    monkeypatch.setattr(enroot, "ENDING_POLL_S", 0.05)
    assert enroot.remove(f"rlpost_{JOB}_0_n01") == 1
    assert f"still runs in the container rlpost_{JOB}_0_n01" in capfd.readouterr().err
    assert node.containers() == {f"rlpost_{JOB}_0_n01"}
    # it ends while the removal waits
    monkeypatch.setattr(enroot, "ENDING_S", 60.0)
    monkeypatch.setattr(enroot.time, "sleep", lambda _: (agent.kill(), agent.wait()))
    assert enroot.remove(f"rlpost_{JOB}_0_n01") == 0
    assert node.containers() == set()


@needs_root
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
    node.queue(*QUEUE)
    script = node.bin / "enroot"  # pyxis ignores the job's ENROOT_DATA_PATH
    script.write_text(
        f'#!/bin/sh\n[ -z "$ENROOT_DATA_PATH" ] && ENROOT_DATA_PATH={node.data} exec {FAKES}/enroot "$@"\n'
    )
    script.chmod(0o755)
    before = node.run(*ENROOT, "remove-stale", "pyxis")
    assert before.stdout == "".join(
        f"n01: removing the container {name} of an earlier start\n"
        for name in sorted(["pyxis_rlpost_4_0", f"pyxis_rlpost_{JOB}_0"])
    )
    assert node.containers() == {"pyxis_rlpost_3_0", "rlpost_4_0_n01", "pyxis_mine"}
    for restart, leftovers, is_freed in ((1, (), False), (2, ("pyxis_rlpost_5_0",), True)):
        own = f"pyxis_rlpost_{JOB}_{restart}"
        node.leave(own, *leftovers)
        node.run(*ENROOT, "remove", "pyxis", own[len("pyxis_") :], str(node.shared))
        assert node.containers() == {"pyxis_rlpost_3_0", "rlpost_4_0_n01", "pyxis_mine"}
        assert (node.shared / "freed-n01").exists() == is_freed


def test_a_failed_extraction_names_the_folder_and_its_space(node: Node) -> None:
    node.command("enroot", '[ "$1" != create ] || { echo No space left on device; exit 3; }')
    task = node.start("true")
    said, _ = task.communicate(timeout=60)
    first, *_, last = said.splitlines()
    assert task.returncode == 3 and first == f"n01: extracting the image {node.image}"
    assert last.startswith(f"n01: enroot create failed (exit 3); ENROOT_DATA_PATH {node.data}: ")
    assert last.endswith(" MB free")


@pytest.mark.parametrize("enroot", [None, "exit 1", "exit 127"])
def test_after_pyxis_nothing_that_enroot_lacks_is_an_error(node: Node, enroot: str | None) -> None:
    if enroot is not None:
        node.command("enroot", enroot)
    done = node.remove("pyxis", path=f"{node.bin}:/usr/bin:/bin")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_root
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

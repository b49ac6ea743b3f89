"""The agent with real Ray on one machine.

Every way in which an attempt can end leaves a verdict and no process. An attempt waits more than it
computes, so those of ``BESIDE`` start together, beside the first test that requests them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.cluster import Cluster
from tests.processes import living

DEADLINE_S = 120
STUB_RAY = Path(__file__).parents[1] / "fakes/ray_stub"
BESIDE: dict[str, Sequence[str]] = {
    "stopped during the start": (),
    "killed agent": (),
    "killed raylet": (),
    "ignored STOP": ("--stop-grace-s=1",),
}
"""Attempts whose driver ignores the STOP file, with the agent's options; each is for one test."""
WITHOUT_RAY = "ignored STOP"
"""The attempt that gets a stub of Ray, because it is about the driver alone."""

# A driver like the trainer's: it waits for its cluster, works on it, polls the STOP file and exits
# with its own code.
DRIVER = """
import os, pathlib, sys, time
import ray
sys.path.insert(0, os.getcwd())
from common.cluster import Cluster
line = sys.stdin.readline()
if not line:
    sys.exit("no cluster")
cluster = Cluster.from_json(line)
ray.init(address=cluster.ray_address, log_to_driver=False, logging_level="ERROR")

@ray.remote
def where():
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    return ray.util.get_node_ip_address(), os.environ["GLOO_SOCKET_IFNAME"], niceness

print("worked on", *ray.get(where.remote()))
print("CPUs", ray.cluster_resources()["CPU"])
pathlib.Path(cluster.attempt_dir, ".cluster").write_text(line)
os.replace(pathlib.Path(cluster.attempt_dir, ".cluster"), pathlib.Path(cluster.attempt_dir, "cluster"))
while not cluster.stop_file.exists():
    time.sleep(0.05)
if sys.argv[1] == "work_on_when_stopped":
    print("after STOP worked on", *ray.get(where.remote()))
    sys.exit(75)
time.sleep(600)
"""


# A driver that needs no Ray and ignores the STOP file.
IDLE_DRIVER = """
import os, pathlib, sys, time
sys.path.insert(0, os.getcwd())
from common.cluster import Cluster
line = sys.stdin.readline()
folder = pathlib.Path(Cluster.from_json(line).attempt_dir)
(folder / ".cluster").write_text(line)
os.replace(folder / ".cluster", folder / "cluster")
time.sleep(600)
"""

# A driver that leaves a detached worker and dies during a call; the next driver adopts the worker.
ADOPTING_DRIVER = """
import asyncio, os, pathlib, signal, sys
sys.path.insert(0, os.getcwd())
from common.cluster import Cluster
from rlpost.driver import workers
from rlpost.driver.placement import Slot

cluster = Cluster.from_json(sys.stdin.readline())
(offer,) = workers.connect(cluster)
folder = pathlib.Path(cluster.attempt_dir)

class Place:
    def pid(self):
        return os.getpid()
    def sleep(self, seconds):
        import time
        time.sleep(seconds)

def group(name, **options):
    slot = Slot(offer.node_id, offer.ip, 1)
    return workers.WorkerGroup(
        [Place], [slot], names=[name], log_dir=folder, envs=[{}], **options
    )

async def work():
    left = workers.left_workers()
    if cluster.incarnation == 0:
        assert not left, left
        engine, actor = group("engine-0", outlive_driver=True), group("actor-0")
        pids = await engine.call("pid") + await actor.call("pid")
        (folder / "pids").write_text(" ".join(map(str, pids)))
        calls = [asyncio.ensure_future(each.call("sleep", 5.0)) for each in (engine, actor)]
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    engine = group("engine-0", standbys={0: left["engine-0"]}, outlive_driver=True)
    aside = await engine.call_aside("pid")
    actor = await group("actor-0").call("pid")  # waits for the GPU of the old one
    print("adopted", *aside, *(await engine.call("pid")), *actor, flush=True)

asyncio.run(work())
"""


class Attempt:
    """One agent and the folder of its attempt."""

    def __init__(
        self,
        folder: Path,
        *driver: str,
        options: Sequence[str] = (),
        cpus: set[int] | None = None,
        stub_ray: bool = False,
    ) -> None:
        self.folder = folder / "attempts" / "0"
        command = [
            sys.executable,
            "-u",
            "-m",
            "bootstrap.agent",
            f"--attempt-dir={self.folder}",
            "--num-gpus=2",
        ]
        command += ["--object-store-memory=100000000", "--loss-grace-s=1", *options, "--", *driver]
        # What a launcher may leave in the environment must confuse neither Ray nor the driver.
        environ = {**os.environ, "RANK": "3", "RAY_ADDRESS": "10.0.0.1:6379"}
        del environ["RAY_worker_niceness"]  # tests/conftest.py sets it for tests that start Ray
        if stub_ray:
            environ["PYTHONPATH"] = f"{STUB_RAY}:{os.getcwd()}"
        self.process = subprocess.Popen(command, env=environ)
        if cpus is not None:  # before the agent starts a process
            psutil.Process(self.process.pid).cpu_affinity(list(cpus))

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S} s"
            assert self.process.poll() is None or condition(), f"no {what}: the agent has ended"
            time.sleep(0.05)

    def wait_until_it_works(self) -> Cluster:
        self.wait_for((self.folder / "cluster").exists, "working driver")
        return Cluster.from_json((self.folder / "cluster").read_text())

    def wait(self) -> tuple[str, str]:
        """Wait until the agent exits with 0; return verdict and cause."""
        assert self.process.wait(DEADLINE_S) == 0
        document = json.loads((self.folder / "verdict.json").read_text())
        assert (self.folder / "verdict").read_text() == document["verdict"] + "\n"
        return document["verdict"], document["cause"]

    def processes(self) -> list[psutil.Process]:
        """Return the agent, its keepers and all of their descendants."""
        found = [psutil.Process(self.process.pid)]
        for process in living():
            try:
                is_ours = process.environ().get("RLPOST_JOB_ID") == f"l{self.process.pid}"
                if is_ours and "bootstrap.agent.keeper" in process.cmdline():
                    found += [process, *process.children(recursive=True)]
            except psutil.Error:
                continue
        return found

    @property
    def temp_dir(self) -> Path:
        return Path(f"/tmp/rl{self.process.pid}.0")

    @property
    def driver_log(self) -> str:
        return (self.folder / "driver.log").read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Attempt]]:
    """Start an attempt with a driver; kill its agent after the test."""
    attempts: list[Attempt] = []

    def started(*driver: str, **how: Any) -> Attempt:
        attempts.append(Attempt(tmp_path, *driver, **how))
        return attempts[-1]

    yield started
    for attempt in attempts:
        attempt.process.kill()
        attempt.process.wait()


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Attempt]]:
    """Start the attempts of ``BESIDE``, and stop the one that is stopped during the start of Ray.

    Their agents are killed after the last test.
    """
    idle = sys.executable, "-c", IDLE_DRIVER
    attempts = {
        name: Attempt(
            tmp_path_factory.mktemp("beside"),
            *(idle if name == WITHOUT_RAY else driver("ignore_stop")),
            options=options,
            stub_ray=name == WITHOUT_RAY,
        )
        for name, options in BESIDE.items()
    }
    stopped = attempts["stopped during the start"]
    try:
        stopped.wait_for(lambda: list(stopped.folder.glob("ray-*.log")), "start of Ray")
        stopped.process.send_signal(signal.SIGUSR2)
        yield attempts
    finally:
        for attempt in attempts.values():
            attempt.process.kill()
            attempt.process.wait()


def driver(mode: str) -> tuple[str, ...]:
    return sys.executable, "-c", DRIVER, mode


def ray_status(cluster: Cluster, attempt: Attempt) -> str:
    """Return what ``ray status`` prints on the head.

    It gets the secret as ``rlpost exec`` passes it.
    """
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(attempt.folder / "secret")}
    command = [
        sys.executable,
        "-m",
        "ray.scripts.scripts",
        "status",
        f"--address={cluster.ray_address}",
    ]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S)
    return done.stdout + done.stderr


def test_a_driver_works_on_the_cluster_and_strangers_do_not(start: Callable[..., Attempt]) -> None:
    """Ray gets the CPUs that the agent may use, not those of the machine, and its workers the
    niceness of the agent.
    """
    attempt = start(*driver("work_on_when_stopped"), cpus={min(os.sched_getaffinity(0))})
    cluster = attempt.wait_until_it_works()
    (node,) = cluster.nodes
    assert (node.ip, node.ifname, node.num_gpus) == ("127.0.0.2", "lo", 2)
    assert cluster.port_count > 0
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    assert f"worked on 127.0.0.2 lo {niceness}\n" in attempt.driver_log, "Ray's default adds 15"
    assert "CPUs 1.0" in attempt.driver_log

    without_token = f"import ray; ray.init(address={cluster.ray_address!r}, logging_level='ERROR'); print('INSIDE')"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    stranger = subprocess.Popen(
        [sys.executable, "-c", without_token],
        env={**environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    attempt.wait_for(
        lambda: stranger.stdout and "InvalidAuthToken" in stranger.stdout.readline(), "refusal"
    )
    stranger.kill()
    assert "INSIDE" not in stranger.communicate()[0]

    assert "1 node_" in ray_status(cluster, attempt), (
        "no monitor runs, so the GCS itself has to answer"
    )

    # SIGTERM to the agent only requests a stop: Ray keeps running, and the driver decides when to
    # exit.
    processes = attempt.processes()
    # a launcher signals the agent's process group; Ray and the driver are not in it
    group = os.getpgid(attempt.process.pid)
    assert [process.pid for process in processes if os.getpgid(process.pid) == group] == [
        attempt.process.pid
    ]
    attempt.process.send_signal(signal.SIGTERM)
    assert attempt.wait()[0] == "requeue"
    assert "SIGTERM" in json.loads((attempt.folder / "STOP").read_text())["reason"]
    assert "after STOP worked on 127.0.0.2" in attempt.driver_log
    assert not psutil.wait_procs(processes, DEADLINE_S)[1]
    attempt.wait_for(lambda: not attempt.temp_dir.exists(), "removal of Ray's folder")
    for path in attempt.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize(("code", "verdict"), [(78, "config"), (1, "failed")])
def test_a_driver_that_ends_before_the_cluster_is_up_does_not_wait_for_it(
    start: Callable[..., Attempt], code: int, verdict: str
) -> None:
    word, cause = start("sh", "-c", f"echo the recipe is wrong; exit {code}").wait()
    assert word == verdict
    assert "the recipe is wrong" in cause


def test_workers_that_outlive_a_killed_driver_are_adopted_and_end_with_the_attempt(
    start: Callable[..., Attempt], beside: dict[str, Attempt]
) -> None:
    attempt = start(sys.executable, "-c", ADOPTING_DRIVER)
    attempt.wait_for((attempt.folder / "pids").exists, "workers")
    engine, actor = map(int, (attempt.folder / "pids").read_text().split())
    processes = [psutil.Process(pid) for pid in (engine, actor)]
    assert attempt.wait()[0] == "done", attempt.driver_log
    (adopted,) = (line for line in attempt.driver_log.splitlines() if line.startswith("adopted"))
    aside, again, new_actor = map(int, adopted.split()[1:])
    assert aside == again == engine, "while it is busy, and after the dead driver's call"
    assert new_actor != actor, "a rank ends with its driver"
    assert "driver 1 of this attempt replaces one that died: signal SIGKILL" in attempt.driver_log
    assert not psutil.wait_procs(processes, DEADLINE_S)[1]


def test_a_stop_during_the_start_of_ray_ends_the_attempt(beside: dict[str, Attempt]) -> None:
    attempt = beside["stopped during the start"]
    word, cause = attempt.wait()
    assert word == "requeue" and "stopped before the run had started" in cause
    assert not (attempt.folder / "cluster").exists(), "the driver got no cluster"


def test_no_process_survives_a_kill_of_the_agent(beside: dict[str, Attempt]) -> None:
    attempt = beside["killed agent"]
    attempt.wait_until_it_works()
    processes = attempt.processes()
    # agent, two keepers, driver, `ray start`, gcs, raylet, its agents, workers
    assert len(processes) > 8
    attempt.process.kill()
    assert not psutil.wait_procs(processes, DEADLINE_S)[1]
    attempt.wait_for(lambda: not attempt.temp_dir.exists(), "removal of Ray's folder")


def test_a_killed_raylet_fails_the_attempt_in_seconds(beside: dict[str, Attempt]) -> None:
    attempt = beside["killed raylet"]
    attempt.wait_until_it_works()
    processes = attempt.processes()
    (raylet,) = (process for process in processes if process.name() == "raylet")
    killed_at = time.monotonic()
    raylet.kill()
    attempt.wait_for((attempt.folder / "verdict").exists, "verdict")
    assert time.monotonic() - killed_at < DEADLINE_S / 2  # also on a busy machine
    word, cause = attempt.wait()
    assert word == "failed"
    assert "Ray ended by itself" in cause and "raylet" in cause
    assert (attempt.folder / "STOP").exists()  # the driver was asked first
    assert list(attempt.folder.glob("ray-*/raylet.out"))  # Ray's own logs are kept
    assert not psutil.wait_procs(processes, DEADLINE_S)[1]


def test_a_driver_that_ignores_the_stop_file_is_killed_at_the_deadline(
    beside: dict[str, Attempt],
) -> None:
    """The batch script writes the STOP file as well.

    What was committed before is still valid, so the run is requeued.
    """
    attempt = beside["ignored STOP"]
    attempt.wait_until_it_works()
    processes = attempt.processes()
    (attempt.folder / "STOP").write_text('{"reason": "signal USR2"}')
    word, cause = attempt.wait()
    assert word == "requeue" and "did not exit before its deadline" in cause
    assert not psutil.wait_procs(processes, DEADLINE_S)[1]


def test_a_second_agent_in_the_same_folder_fails(start: Callable[..., Attempt]) -> None:
    first = start("sh", "-c", "exit 78")
    assert first.wait()[0] == "config"
    again = start("sh", "-c", "exit 0")
    assert again.process.wait(DEADLINE_S) == 1
    assert first.wait()[0] == "config"

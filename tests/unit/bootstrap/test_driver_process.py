"""A driver that crashes is replaced inside the attempt; only its own children end. The drivers are
small Python programs under real keepers.
"""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from bootstrap.agent import driver_process
from bootstrap.agent.driver_process import (
    WINDOW_S,
    DriverDeath,
    DriverProcess,
    last_step,
    reason_to_end,
)
from bootstrap.agent.options import parse_options
from common.cluster import Cluster, Node
from common.exit_codes import (
    EXIT_CONFIG,
    EXIT_CRASHED,
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
)

# Reads its line as the driver of a run does, leaves a child, and acts as its word says.
DRIVER = """
import json, os, pathlib, subprocess, sys, time
folder, word = pathlib.Path(sys.argv[1]), sys.argv[2:3]
(folder / f"waits-{os.getpid()}").touch()
line = sys.stdin.readline()
if not line:
    sys.exit(1)
cluster = json.loads(line)
number = cluster["incarnation"]
print("driver", number, "works", flush=True)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
(folder / f"new-{number}").write_text(json.dumps({**cluster, "pid": os.getpid(), "child": child.pid}))
os.replace(folder / f"new-{number}", folder / f"works-{number}")
if word == ["ends"]:
    sys.exit(int(sys.argv[3]))
time.sleep(600)
"""


class Attempt:
    """A driver process in a run folder."""

    def __init__(self, folder: Path, *words: str, restarts: int = 3) -> None:
        self.folder = folder / "attempts" / "0"
        self.folder.mkdir(parents=True)
        command = [sys.executable, "-c", DRIVER, str(self.folder), *words]
        orders = [f"--attempt-dir={self.folder}", "--num-gpus=0", f"--driver-restarts={restarts}"]
        self.options = parse_options([*orders, "--", *command])
        self.is_ending = False
        self.cluster = Cluster(
            "127.0.0.1:1", str(self.folder), (Node("n0", "127.0.0.1", "lo", 0),), 20000, 100
        )

    async def start(self) -> DriverProcess:
        driver = await DriverProcess.start(
            self.options, os.environ, is_ending=lambda: self.is_ending
        )
        driver.hand_over(self.cluster)
        return driver

    async def works(self, number: int) -> dict:
        """What the driver of incarnation ``number`` read."""
        path = self.folder / f"works-{number}"
        while not path.exists():
            await asyncio.sleep(0.01)
        return json.loads(path.read_text())

    def trains(self, step: int) -> None:
        with (self.folder.parents[1] / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")

    @property
    def waiting(self) -> set[int]:
        """Processes that waited for a line."""
        return {int(path.name.split("-")[1]) for path in self.folder.glob("waits-*")}

    @property
    def log(self) -> str:
        return (self.folder / "driver.log").read_text()


def run(scene) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(bounded())


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_killed_driver_is_replaced_and_only_its_own_children_end(tmp_path):
    attempt = Attempt(tmp_path)
    driver = await attempt.start()
    first = await attempt.works(0)
    assert (first["incarnation"], first["died_of"]) == (0, "")
    os.kill(first["pid"], signal.SIGKILL)
    second = await attempt.works(1)
    assert second["died_of"] == "signal SIGKILL" and second["died_at"] > 0
    given = {"ray_address", "nodes", "port_base", "port_count", "attempt_dir"}
    assert {key: first[key] for key in given} == {key: second[key] for key in given}
    assert not is_alive(first["child"]), "it may hold the router's port"
    assert is_alive(second["child"]) and not driver.exited.done()
    works, replaces, works_again = attempt.log.splitlines()
    assert (works, works_again) == ("driver 0 works", "driver 1 works")
    assert "driver 1" in replaces and "SIGKILL" in replaces
    await driver.end(0.0)
    assert not is_alive(second["pid"]) and not is_alive(second["child"])


async def test_the_standby_takes_over_and_the_next_one_is_prepared(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_process, "STANDBY_AFTER_S", 0.05)
    attempt = Attempt(tmp_path)
    driver = await attempt.start()
    first = await attempt.works(0)
    while len(attempt.waiting) < 2:
        await asyncio.sleep(0.01)
    (standby,) = attempt.waiting - {first["pid"]}
    attempt.trains(1)
    os.kill(first["pid"], signal.SIGKILL)
    assert (await attempt.works(1))["pid"] == standby
    while len(attempt.waiting) < 3:
        await asyncio.sleep(0.01)
    (next_one,) = attempt.waiting - {first["pid"], standby}
    await driver.end(0.0)
    assert not is_alive(next_one) and not is_alive(standby)
    assert "driver 2" not in attempt.log


async def test_a_standby_that_died_does_not_keep_the_driver_from_coming_back(tmp_path, monkeypatch):
    monkeypatch.setattr(driver_process, "STANDBY_AFTER_S", 0.05)
    attempt = Attempt(tmp_path)
    driver = await attempt.start()
    first = await attempt.works(0)
    while len(attempt.waiting) < 2:
        await asyncio.sleep(0.01)
    (standby,) = attempt.waiting - {first["pid"]}
    os.kill(standby, signal.SIGKILL)
    while is_alive(standby):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the keeper reports it
    os.kill(first["pid"], signal.SIGKILL)
    assert (await attempt.works(1))["pid"] not in (first["pid"], standby)
    await driver.end(0.0)


async def test_a_driver_that_dies_twice_without_progress_ends_the_attempt(tmp_path):
    attempt = Attempt(tmp_path)
    attempt.trains(4)
    driver = await attempt.start()
    for number in range(2):
        os.kill((await attempt.works(number))["pid"], signal.SIGKILL)
    assert await driver.exited == -signal.SIGKILL
    assert not (attempt.folder / "works-2").exists()
    await driver.end(0.0)


async def test_a_driver_that_trains_between_its_deaths_comes_back_up_to_the_limit(tmp_path):
    attempt = Attempt(tmp_path, restarts=2)
    driver = await attempt.start()
    for number in range(3):
        attempt.trains(number)
        os.kill((await attempt.works(number))["pid"], signal.SIGKILL)
    assert await driver.exited == -signal.SIGKILL
    await driver.end(0.0)


@pytest.mark.parametrize("code", [0, 1, 75, 78])
async def test_a_deliberate_end_is_reported_at_once(tmp_path, code):
    attempt = Attempt(tmp_path, "ends", str(code))
    driver = await attempt.start()
    assert await driver.exited == code
    assert not (attempt.folder / "works-1").exists()
    await driver.end(0.0)


@pytest.mark.parametrize("how", ["stop file", "loss"])
async def test_a_driver_that_dies_while_the_attempt_ends_is_not_replaced(tmp_path, how):
    attempt = Attempt(tmp_path)
    driver = await attempt.start()
    first = await attempt.works(0)
    if how == "loss":
        attempt.is_ending = True
    else:
        (attempt.folder / "STOP").write_text("{}")
    os.kill(first["pid"], signal.SIGKILL)
    assert await driver.exited == -signal.SIGKILL
    assert len(attempt.waiting) == 1
    await driver.end(0.0)


KILLED = -signal.SIGKILL


def judged(code, *, at=1000.0, step=5, earlier=(), most=3, is_ending=False):
    return reason_to_end(
        DriverDeath(code, at, step), earlier, max_restarts=most, is_ending=is_ending
    )


@pytest.mark.parametrize("code", [KILLED, -signal.SIGSEGV, -signal.SIGABRT, EXIT_CRASHED])
def test_a_crash_is_followed_by_a_restart(code):
    assert judged(code) is None


@pytest.mark.parametrize(
    "code",
    [EXIT_DONE, EXIT_FAILED, EXIT_CONFIG, EXIT_PREEMPTED, -signal.SIGTERM, -signal.SIGINT, 127],
)
def test_a_deliberate_end_is_not(code):
    assert judged(code) == "the driver ended by itself"


def test_nothing_is_started_again_while_the_attempt_ends_or_without_a_budget():
    assert judged(KILLED, is_ending=True) == "the attempt is ending"
    assert "0 times already" in judged(KILLED, most=0)
    deaths = tuple(DriverDeath(KILLED, 10_000.0 * number, number) for number in range(3))
    assert judged(KILLED, at=90_000.0, earlier=deaths[:2]) is None
    assert "3 times already" in judged(KILLED, at=90_000.0, earlier=deaths)


def test_a_second_death_needs_a_trained_step_or_time_since_the_first():
    first = (DriverDeath(KILLED, 1000.0, 5),)
    assert "2 times within 600 s" in judged(KILLED, at=1100.0, step=5, earlier=first)
    assert judged(KILLED, at=1100.0, step=6, earlier=first) is None
    assert judged(KILLED, at=1000.0 + WINDOW_S, step=5, earlier=first) is None


def test_a_resume_that_trains_steps_again_is_no_progress():
    """The metrics of repeated steps are written again: a death at step 3 of 5 is no progress."""
    first = (DriverDeath(KILLED, 1000.0, 5),)
    assert judged(KILLED, at=1100.0, step=3, earlier=first) is not None
    second = (*first, DriverDeath(KILLED, 1100.0, 7))
    assert judged(KILLED, at=1200.0, step=6, earlier=second) is not None


def test_the_last_step_is_that_of_the_last_complete_line(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == -1
    lines = [json.dumps({"step": step, "reward": 0.5}) for step in range(4)]
    metrics.write_text("\n".join(lines) + "\n")
    assert last_step(metrics) == 3
    metrics.write_text("\n".join([*lines, '{"step": 4, "rew']))
    assert last_step(metrics) == 3
    metrics.write_text("damaged\n[]\n")
    assert last_step(metrics) == -1

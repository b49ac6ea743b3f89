"""RUN/engines.json always names the serving engines, in a format that Prometheus reads."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.ledger import Ledger
from common.run_folder import RunFolder
from common.scrape_targets import DRIVER_TARGETS, ENGINE_TARGETS, empty_targets
from rlpost.config import extensions
from rlpost.config.engine_groups import group_config
from rlpost.config.load import load
from rlpost.engines.own_membership import OwnMembership
from rlpost.engines.places import Place, Places
from rlpost.errors import Fenced
from rlpost.extensions.tracking.engine_targets import EngineTargets, engine_targets, has_metrics
from rlpost.extensions.watching.run_status import Status, statuses
from rlpost.types import EngineAddress
from slurm.queue import QueueEntry
from slurm.states import JobState
from slurm.supervise import record_start
from tests.unit.slurm.test_supervise import what_follows

CONFIG = """\
scrape_configs:
  - job_name: sglang
    file_sd_configs: [{files: [engines.json]}]
  - job_name: rlpost
    file_sd_configs: [{files: [prometheus.json]}]
"""


def fleet_of(*urls: str) -> SimpleNamespace:
    """Return a fleet of engines that all serve."""
    addresses = tuple(EngineAddress(url=url, num_gpus=1) for url in urls)
    serving = SimpleNamespace(places=Places())
    return SimpleNamespace(
        group="policy",
        addresses=addresses,
        members=OwnMembership(len(urls)),
        serving=serving,
        name=lambda index: f"engine-{index}",
    )


def served(path: Path) -> dict[str, str]:
    """Return address -> label ``engine`` of the file."""
    found = json.loads(path.read_text())
    return {one["targets"][0]: one["labels"]["engine"] for one in found}


async def becomes(path: Path, wanted: dict[str, str]) -> None:
    """Wait until the file names exactly these addresses."""
    async with asyncio.timeout(10):
        while not path.exists() or served(path) != wanted:
            await asyncio.sleep(0.01)


async def test_the_file_follows_restarts_moves_and_the_fleet(tmp_path: Path) -> None:
    fleet = fleet_of("http://10.0.0.1:30000", "http://[fd00::2]:30001")
    path, moved = tmp_path / ENGINE_TARGETS, EngineAddress(url="http://10.0.0.9:30000", num_gpus=1)
    targets = EngineTargets(
        tmp_path, lambda: engine_targets([fleet], "a"), check=lambda: None, poll_s=0.01
    )
    await targets.begin()
    assert served(path) == {"10.0.0.1:30000": "0", "[fd00::2]:30001": "1"}
    fleet.members.stopped(0)
    await becomes(path, {"[fd00::2]:30001": "1"})
    fleet.addresses = (moved, fleet.addresses[1])
    fleet.members.started(0)
    fleet.members.sent(1)
    fleet.members.admitted([0])
    await becomes(path, {"10.0.0.9:30000": "0", "[fd00::2]:30001": "1"})
    fleet.serving.places.set_joined([Place("http://10.0.1.1:5", "key", 1, is_own=False)])
    joined = {"10.0.0.9:30000": "0", "[fd00::2]:30001": "1", "10.0.1.1:5": "fleet"}
    await becomes(path, joined)
    path.write_text("[]")  # as `rlpost status` does when it has read an outdated state
    await becomes(path, joined)
    await targets.close()
    assert path.read_text() == "[]"
    assert sorted(one.name for one in tmp_path.iterdir()) == [ENGINE_TARGETS]


async def test_an_older_attempt_does_not_overwrite_the_file_of_a_newer_one(tmp_path: Path) -> None:
    path, owners = tmp_path / ENGINE_TARGETS, ["this"]

    def check() -> None:
        if owners[-1] != "this":
            raise Fenced("a newer attempt owns the run")

    targets = EngineTargets(tmp_path, lambda: '["old"]', check=check, poll_s=0.01)
    await targets.begin()
    owners.append("another")
    path.write_text('["new"]')
    await asyncio.sleep(0.05)
    await targets.close()
    assert path.read_text() == '["new"]'


async def test_a_write_that_storage_delays_past_the_end_names_no_engine(tmp_path: Path) -> None:
    path, texts = tmp_path / ENGINE_TARGETS, ["[1]", "[2]"]
    delayed, may_write = threading.Event(), threading.Event()
    others = set(threading.enumerate())  # threads of earlier tests

    def check() -> None:
        if path.exists() and not delayed.is_set():
            delayed.set()
            assert may_write.wait(10)

    targets = EngineTargets(tmp_path, lambda: texts[0], check=check, poll_s=0.01)
    await targets.begin()
    texts.pop(0)
    async with asyncio.timeout(10):
        while not delayed.is_set():
            await asyncio.sleep(0.01)
    closing = asyncio.create_task(targets.close())
    await asyncio.sleep(0.1)  # if writes were not ordered, the write of close() would end first
    may_write.set()
    await closing
    async with asyncio.timeout(10):
        while any(one.daemon for one in set(threading.enumerate()) - others):
            await asyncio.sleep(0.01)
    assert path.read_text() == "[]"


async def test_a_file_that_is_not_text_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / ENGINE_TARGETS
    path.write_bytes(b"\xff\xfe")
    targets = EngineTargets(tmp_path, lambda: "[1]", check=lambda: None)
    await targets.begin()
    assert path.read_text() == "[1]"
    await targets.close()


async def test_failing_storage_causes_one_warning_and_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "gone" / ENGINE_TARGETS
    targets = EngineTargets(path.parent, lambda: "[1]", check=lambda: None, poll_s=0.01)
    await targets.begin()
    await asyncio.sleep(0.05)
    assert len(caplog.records) == 1 and str(path) in caplog.text
    path.parent.mkdir()
    async with asyncio.timeout(10):
        while not path.exists():
            await asyncio.sleep(0.01)
    await targets.close()
    assert path.read_text() == "[]"


def left_behind(root: Path) -> RunFolder:
    """Return the run folder of an attempt whose agent and driver were killed."""
    run = RunFolder(root)
    run.new_attempt()
    run.run_json.write_text("{}")
    for name in (DRIVER_TARGETS, ENGINE_TARGETS):
        (root / name).write_text('[{"targets": ["10.0.0.1:1"], "labels": {"run": "a"}}]')
    return run


def contents(root: Path) -> set[str]:
    return {(root / name).read_text() for name in (DRIVER_TARGETS, ENGINE_TARGETS)}


def test_the_batch_host_empties_the_files_of_an_attempt_that_was_killed(tmp_path: Path) -> None:
    """It does so at the end of the job or, if the batch host died too, at the next start."""
    left_behind(tmp_path)
    what_follows(tmp_path, 137)
    assert contents(tmp_path) == {"[]"}
    assert Ledger(tmp_path / "ledger.jsonl").read()[-1]["event"] == "verdict"
    left_behind(tmp_path)  # creates attempt 1: attempt 0 ends late, and leaves its files alone
    what_follows(tmp_path, 137)
    assert "[]" not in contents(tmp_path)
    record_start(tmp_path, 2, "7", "", {"SLURM_JOB_NODELIST": "n01"})
    assert contents(tmp_path) == {"[]"}


@pytest.mark.parametrize(
    ("state", "is_emptied"),
    [
        (JobState.RUNNING, False),
        (JobState.PENDING, False),
        (JobState.PREEMPTED, False),
        (JobState.NODE_FAIL, True),
        (JobState.CANCELLED, True),
    ],
)
def test_status_empties_the_files_of_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: JobState, is_emptied: bool
) -> None:
    run = left_behind(tmp_path / "a")
    run.ledger.append("submitted", job_id="7")
    monkeypatch.setattr(
        "rlpost.extensions.watching.run_status.queue",
        lambda jobs: {job: QueueEntry(job, state) for job in jobs},
    )
    (found,) = statuses([run])
    assert isinstance(found, Status) and found.state == state
    assert (contents(run.root) == {"[]"}) is is_emptied


def test_files_that_cannot_be_emptied_are_returned(tmp_path: Path) -> None:
    left_behind(tmp_path)
    (tmp_path / ENGINE_TARGETS).unlink()
    (tmp_path / ENGINE_TARGETS).mkdir()
    assert empty_targets(tmp_path) == [tmp_path / ENGINE_TARGETS]
    assert (tmp_path / DRIVER_TARGETS).read_text() == "[]"


def test_engines_without_metrics_have_no_file() -> None:
    groups = {"a": {"model": "/m", "sglang_enable_metrics": True}, "b": {"model": "/m"}}
    config = load([], {"engines": groups}).config
    assert not has_metrics(config)
    assert has_metrics(group_config(config, "a")) and not has_metrics(group_config(config, "b"))


async def test_the_file_names_the_engines_of_groups_that_serve_metrics_alone(
    tmp_path: Path,
) -> None:
    (follow,) = extensions.engine_followers()
    groups = {"a": {"model": "/m", "sglang_enable_metrics": True}, "b": {"model": "/m"}}
    config, path = load([], {"engines": groups}).config, tmp_path / ENGINE_TARGETS
    engines = {"a": fleet_of("http://10.0.0.2:30000"), "b": fleet_of("http://10.0.0.3:30000")}
    assert await follow(config, {"b": engines["b"]}, tmp_path, lambda: None) is None
    assert not path.exists()
    close = await follow(config, engines, tmp_path, lambda: None)
    assert close is not None and served(path) == {"10.0.0.2:30000": "0"}
    await close()
    assert served(path) == {}


def test_the_engines_of_groups_have_the_label_of_their_group() -> None:
    policy, judge = fleet_of("http://10.0.0.1:30000"), fleet_of("http://10.0.0.2:30000")
    judge.name = lambda index: f"engine-judge-{index}"
    labels = {
        one["targets"][0]: one["labels"]["engine"]
        for one in json.loads(engine_targets([policy, judge], "a"))
    }
    assert labels == {"10.0.0.1:30000": "0", "10.0.0.2:30000": "judge-0"}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool: apt install prometheus")
def test_promtool_reads_the_files_and_refuses_a_broken_one(tmp_path: Path) -> None:
    fleet = fleet_of("http://10.0.0.1:30000", "http://[fd00::2]:30001")
    (tmp_path / ENGINE_TARGETS).write_text(engine_targets([fleet], 'a "run"'))
    (tmp_path / DRIVER_TARGETS).write_text("[]")
    (tmp_path / "prometheus.yml").write_text(CONFIG)

    def check() -> subprocess.CompletedProcess[str]:
        words = ["promtool", "check", "config", "prometheus.yml"]
        return subprocess.run(words, cwd=tmp_path, env=os.environ, capture_output=True, text=True)

    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    discovered = subprocess.run(
        ["promtool", "check", "service-discovery", "--timeout=5s", "prometheus.yml", "sglang"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = {one["labels"]["__address__"] for one in json.loads(discovered.stdout)}
    assert found == {"10.0.0.1:30000", "[fd00::2]:30001"}
    (tmp_path / ENGINE_TARGETS).write_text("[{")
    assert check().returncode != 0

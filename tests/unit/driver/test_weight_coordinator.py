"""Weight updates by the coordinator: stops between buckets, broken broadcasts, folders, copies."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rlpost.config.load import load
from rlpost.driver import weight_coordinator
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.weight_coordinator import WeightCoordinator
from rlpost.driver.worker_groups import ActorGroup
from rlpost.engines import engine_side_weights
from rlpost.errors import EngineDied, Preempted, RolloutError, SyncError, TrainerDied
from rlpost.types import Bucket, EngineAddress

BUCKETS = [Bucket((f"w{i}",), ((2, 2),), ("float32",)) for i in range(4)]
ACTOR, NEAR, FAR = Slot("n0", "10.0.0.1", 1), Slot("n1", "10.0.0.2", 4), Slot("n2", "10.0.0.3", 4)
PORTS = Ports((), (), 0, (20010,))
MOVES = ("send_bucket", "share_bucket", "write_engine_folder")


class Engine:
    """A client whose engine accepts every request, unless its URL is in ``dead``."""

    dead: ClassVar[set[str]] = set()
    adapters: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, url: str, api_key: str, *, timeout_s: float) -> None:
        self.url, self.version = url, "0"

    async def update_weights(self, bucket, *, group_name, version):
        await self._take(version)

    async def update_weights_from_handles(self, handles, *, version):
        await self._take(version)

    async def update_weights_from_disk(self, folder, *, version):
        await self._take(version)

    async def replace_adapter(self, folder, *, version):
        assert Path(folder).is_dir()
        Engine.adapters.append((self.url, Path(folder).name))
        await self._take(version)

    async def _take(self, version: int | None) -> None:
        await asyncio.sleep(0)
        if self.url in Engine.dead:
            raise EngineDied(f"engine {self.url} is gone")
        if version is not None:
            self.version = str(version)

    async def weight_version(self) -> str:
        return self.version

    async def request(self, *_) -> None:
        pass

    def __getattr__(self, name: str) -> Callable:
        """Return a method that succeeds, for pausing, joining a group, resuming and so on."""

        async def succeed(*_, **__) -> bool:
            return True

        return succeed


class Actors:
    """Ranks that record the start and end of transfers; a stop is requested during the second."""

    def __init__(self, stop_file: Path, *, backend: str = "gloo") -> None:
        self.stop_file, self.begun, self.ended = stop_file, [], []
        self.swaps: list[tuple[object, ...]] = []  # method, version, transfers that had ended
        self.answers = {
            "bucket_plan": [BUCKETS],
            "sync_stage": [0],
            "broadcast_backend": [backend],
        }

    async def call(self, method, *arguments):
        if method.startswith("old_policy."):
            self.swaps.append((method, *arguments, len(self.ended)))
        return (
            await self.transfer(method, *arguments)
            if method in MOVES
            else self.answers.get(method, [None])
        )

    async def call_each(self, method, arguments):
        return [None] * len(arguments)

    async def transfer(self, method, *arguments):
        self.begun.append(method)
        await asyncio.sleep(0.01)
        if len(self.begun) == 2:
            self.stop_file.write_text("now")
        self.ended.append(method)
        return ["handle"]


@pytest.fixture(autouse=True)
def _engines(monkeypatch):
    monkeypatch.setattr(engine_side_weights, "EngineClient", Engine)
    monkeypatch.setattr(Engine, "dead", set())


def coordinator(actors, folder, *, num_engines=1, engines=((NEAR,),), **settings):
    addresses = tuple(EngineAddress(f"http://{name}", 1) for name in "ab"[:num_engines])
    return WeightCoordinator(
        load([], {"rollout": {"num_rollout": 1}, **settings}).config,
        SimpleNamespace(addresses=addresses, receivers=addresses, api_key="k"),
        ActorGroup(actors),
        placement=Placement((ACTOR,), engines),
        ports=PORTS,
        folder=folder,
        stop=StopRequest(actors.stop_file),
    )


async def updated(one, *versions):
    await one.connect()
    for version in versions:
        await one.update(version)


SHARED = {"cluster": {"colocate": True}}
ON_ITS_GPU = ((Slot("n0", "10.0.0.1", 1, (0,)),),)


@pytest.mark.parametrize(
    ("engines", "settings"), [(((NEAR,),), {}), (ON_ITS_GPU, SHARED)], ids=["broadcast", "sharing"]
)
def test_a_stop_request_completes_the_current_bucket_and_starts_no_other(
    engines, settings, tmp_path
):
    actors = Actors(tmp_path / "STOP")
    with pytest.raises(Preempted):
        asyncio.run(
            updated(coordinator(actors, tmp_path / "weights", engines=engines, **settings), 7)
        )
    assert len(actors.begun) == len(actors.ended) == 2


class Blocked(Actors):
    """Ranks in a broadcast that ends only when it is aborted, and then raises SyncError."""

    def __init__(self, stop_file: Path, *, backend: str) -> None:
        super().__init__(stop_file, backend=backend)
        self.aborted = asyncio.Event()

    async def transfer(self, method, *arguments):
        await asyncio.shield(self.aborted.wait())
        raise SyncError("aborted")

    async def call_aside(self, method, *arguments):
        assert method == "broadcast.abort"
        self.aborted.set()
        return [None]


@pytest.mark.parametrize("sync", [{}, {"update_weight_transport": "disk"}])
async def test_nothing_is_sent_without_an_engine_of_the_run(sync, tmp_path):
    actors, ready = Actors(tmp_path / "STOP"), []
    one = coordinator(actors, tmp_path / "weights", num_engines=0, engines=(), sync=sync)
    await one.connect()

    async def note():
        ready.append(True)

    await one.update(3, ready=note)
    assert not actors.begun and ready == [True]


def test_the_trainer_is_released_from_a_broadcast_as_soon_as_an_engine_fails(tmp_path):
    """It is not released only at the deadline of the broadcast, which is minutes later."""
    actors = Blocked(tmp_path / "STOP", backend="nccl")
    one = coordinator(actors, tmp_path / "weights", num_engines=2)
    Engine.dead.add("http://b")
    with pytest.raises(SyncError, match="is gone"):
        asyncio.run(asyncio.wait_for(updated(one, 7), timeout=20))
    assert actors.aborted.is_set()
    assert one.engines_are_stuck, "the other engine waits in the same broadcast"


def test_on_gloo_engines_are_not_stuck_in_a_broken_broadcast(tmp_path):
    actors = Blocked(tmp_path / "STOP", backend="gloo")
    actors.aborted.set()
    one = coordinator(actors, tmp_path / "weights")
    with pytest.raises(SyncError, match="aborted"):
        asyncio.run(updated(one, 7))
    assert not one.engines_are_stuck


class Killed(Actors):
    """Ranks of which the sender is killed during a broadcast."""

    async def transfer(self, method, *arguments):
        raise TrainerDied("actor-0 died", [0])


@pytest.mark.parametrize(("backend", "are_stuck"), [("nccl", True), ("gloo", False)])
def test_engines_whose_sender_dies_are_stuck_in_its_broadcast_on_nccl(tmp_path, backend, are_stuck):
    one = coordinator(Killed(tmp_path / "STOP", backend=backend), tmp_path / "weights")
    with pytest.raises(TrainerDied):
        asyncio.run(updated(one, 7))
    assert one.engines_are_stuck == are_stuck


def test_after_a_stop_request_no_folder_of_weights_is_started(tmp_path):
    actors = Actors(tmp_path / "STOP")
    (tmp_path / "STOP").write_text("now")
    one = coordinator(actors, tmp_path / "weights", sync={"update_weight_transport": "disk"})
    with pytest.raises(Preempted):
        asyncio.run(updated(one, 7))
    assert actors.begun == []


class AdapterWriters(Actors):
    """Two ranks, of which only the second writes a folder."""

    def __init__(self, stop_file: Path) -> None:
        super().__init__(stop_file)
        self.folders: list[Path] = []

    async def transfer(self, method, *arguments):
        self.begun.append(method)
        self.folders.append(Path(arguments[0]))
        Path(arguments[0]).mkdir(parents=True)
        return [None, 202]


def test_adapters_are_written_once_per_version_and_every_engine_loads_them(tmp_path, monkeypatch):
    """The size of an update is that of the adapters; no folder is left behind."""
    monkeypatch.setattr(Engine, "adapters", [])
    actors = AdapterWriters(tmp_path / "STOP")
    sync = {"update_weight_transport": "disk", "update_weight_mode": "adapter"}
    one = coordinator(actors, tmp_path / "weights", num_engines=2, sync=sync, lora={"lora_rank": 4})
    asyncio.run(updated(one, 1, 2))
    assert actors.begun == ["write_engine_folder"] * 2
    assert sorted(Engine.adapters) == [
        (f"http://{name}", f"version-000000{version}") for name in "ab" for version in (1, 2)
    ]
    assert one.num_bytes == 202
    assert list((tmp_path / "weights").iterdir()) == []


def test_the_end_of_a_run_does_not_wait_for_a_hung_folder_of_weights(tmp_path, monkeypatch):
    answers = threading.Event()
    sync = {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path)}
    one = coordinator(Actors(tmp_path / "STOP"), tmp_path / "weights", sync=sync)
    monkeypatch.setattr(weight_coordinator, "REMOVAL_S", 0.1)
    monkeypatch.setattr(Path, "rmdir", lambda _: answers.wait(20))
    began = time.monotonic()
    try:
        asyncio.run(one.close())
    finally:
        answers.set()
    assert time.monotonic() - began < 10


def test_only_the_runs_own_files_are_removed_from_a_shared_folder(tmp_path, monkeypatch):
    """--update-weight-disk-dir may hold a foreign folder version-2, or files of another run."""
    shared = tmp_path / "scratch"
    theirs = [".version-0000001", "version-0000001", "version-2"]
    for name in theirs:
        (shared / name).mkdir(parents=True)
        (shared / name / "model.safetensors").write_text("somebody's")
    actors = AdapterWriters(tmp_path / "STOP")
    folder = tmp_path / "run" / "attempts" / "0" / "weights"
    sync = {
        "update_weight_transport": "disk",
        "update_weight_mode": "adapter",
        "update_weight_disk_dir": str(shared),
    }
    monkeypatch.setattr(Engine, "adapters", [])
    one = coordinator(actors, folder, sync=sync, lora={"lora_rank": 4})
    asyncio.run(updated(one, 1))
    assert {path.parent.parent for path in actors.folders} == {shared}
    asyncio.run(one.close())
    assert sorted(path.name for path in shared.iterdir()) == theirs
    assert all((path / "model.safetensors").exists() for path in shared.iterdir())


@pytest.mark.parametrize("interval", [1, 2])
def test_engines_get_the_version_that_is_asked_for_and_the_trainer_keeps_its_own(
    tmp_path, interval
):
    actors = Actors(tmp_path / "STOP")
    sent = ("old_policy.swap_in", 2, 0), ("old_policy.swap_out", 1)
    one = coordinator(
        actors,
        tmp_path / "weights",
        rollout={"num_rollout": 4, "update_weights_interval": interval},
        sync={"update_weight_transport": "disk"},
    )
    asyncio.run(updated(one, 2))
    assert actors.swaps == list(sent)
    Engine.dead.add("http://a")
    with pytest.raises(SyncError):
        asyncio.run(updated(one, 2))
    assert [method for method, *_ in actors.swaps[2:]] == [method for method, *_ in sent]


def test_the_trainer_does_not_wait_in_a_group_for_a_dead_engine(tmp_path, monkeypatch):
    joined = []
    actors = Actors(tmp_path / "STOP")

    async def call_each(method, arguments):
        joined.append(method)
        return [None] * len(arguments)

    actors.call_each = call_each

    async def refuse(self, *_):
        raise RolloutError("cannot connect")

    monkeypatch.setattr(Engine, "request", refuse)
    with pytest.raises(SyncError, match="cannot connect"):
        asyncio.run(coordinator(actors, tmp_path / "weights").connect())
    assert "broadcast.connect" not in joined


def test_a_connection_leaves_out_engines_that_are_lent_and_includes_them_again(
    tmp_path, monkeypatch
):
    """A process group admits no new member, so each change connects again."""
    left = []
    leave = engine_side_weights.WeightUpdate.leave_groups

    async def noted(self, name, stages):
        left.append([one.address.url for one in self.receivers])
        await leave(self, name, stages)

    monkeypatch.setattr(engine_side_weights.WeightUpdate, "leave_groups", noted)

    async def run():
        one = coordinator(
            Actors(tmp_path / "STOP"), tmp_path, num_engines=2, engines=((NEAR,), (NEAR,))
        )
        one._stop = SimpleNamespace(check=lambda: None)
        fleet, names = one._engines, []
        for lent in ((), ("http://b",), ()):
            fleet.receivers = tuple(a for a in fleet.addresses if a.url not in lent)
            await one.connect()
            await one.update(len(names))
            names.append(one._group_name)
        return one, names

    one, names = asyncio.run(run())
    assert len(set(names)) == 3
    assert left == [["http://a", "http://b"], ["http://a"]], "also those that are lent leave"
    assert len(one._update.receivers) == 2

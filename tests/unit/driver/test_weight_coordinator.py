"""Weight updates by the coordinator: stops between buckets, broken broadcasts, folders, copies."""

import asyncio
import base64
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rlpost.config.load import load
from rlpost.config.plan.shard_plan import SentTensor, Unit
from rlpost.driver import weight_coordinator
from rlpost.driver.placement import Placement, Ports, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.weight_coordinator import WeightCoordinator
from rlpost.driver.worker_groups import ActorGroup
from rlpost.engines import engine_side_weights, shard_mover
from rlpost.engines.engine_side_weights import BroadcastMover
from rlpost.engines.shard_mover import ShardMover
from rlpost.errors import (
    EngineDied,
    EngineNotPrepared,
    Preempted,
    RolloutError,
    SyncError,
    TrainerDied,
    WeightError,
)
from rlpost.models.regions import group_to_json, grouped, whole
from rlpost.types import Bucket, EngineAddress

BUCKETS = [Bucket((f"w{i}",), ((2, 2),), ("float32",)) for i in range(4)]
ACTOR, NEAR, FAR = Slot("n0", "10.0.0.1", 1), Slot("n1", "10.0.0.2", 4), Slot("n2", "10.0.0.3", 4)
PORTS = Ports((), (), 0, (20010,))
MOVES = ("send_bucket", "share_bucket", "write_engine_folder")


def units_of(tensors):
    """Units of one tensor each; a draft layer's may be left out."""
    sent = [SentTensor(name, (2, 2), "float32") for name in tensors]
    return tuple(Unit(0, (one,), is_optional=one.name.startswith("mtp")) for one in sent)


class Engine:
    """A client whose engine accepts every request, unless its URL is in ``dead``.

    Its model skips the names in ``skipped``.
    """

    dead: ClassVar[set[str]] = set()
    skipped: ClassVar[set[str]] = set()
    log: ClassVar[list[str]] = []
    adapters: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, url: str, api_key: str, *, timeout_s: float, selector: str) -> None:
        self.url, self.version, self.selector = url, "0", selector

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

    async def send_to_loader(self, payloads, *, version=None):
        ((text, _),) = pickle.loads(base64.b64decode(payloads[0]))
        message = json.loads(text)
        self.log.append(message["do"])
        await asyncio.sleep(0.01)
        if message["do"] != "record":
            await self._take(version)
        else:
            types = json.loads(Path(message["tensors"]).read_text())
            numbers = {name: number for number, name in enumerate(types)}
            regions = [whole(name, shape) for name, (shape, _) in types.items()]
            held = grouped([one for one in regions if one.tensor not in self.skipped])
            boxes = [group_to_json(one, numbers) for one in held]
            answer = {"boxes": boxes, "together": [], "reasons": {}, "filled": {}}
            Path(message["answer"]).write_text(json.dumps(answer))

    async def weight_version(self) -> str:
        return self.version

    async def request(self, *_) -> None:
        pass

    async def has_shard_loader(self) -> bool:
        return True

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
            "shards.list_units": [units_of(name for one in BUCKETS for name in one.names)],
        }

    async def call(self, method, *arguments):
        if method.startswith("old_policy."):
            self.swaps.append((method, *arguments, len(self.ended)))
        return (
            await self.transfer(method, *arguments)
            if method in MOVES
            else self.answers.get(method, [None])
        )

    def __len__(self) -> int:
        return 1

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
    monkeypatch.setattr(Engine, "log", [])


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


SLICES = {"sync": {"update_weight_transport": "slices"}}
DISK = {"sync": {"update_weight_transport": "disk"}}
SHARED = {"cluster": {"colocate": True}}
ON_ITS_GPU = ((Slot("n0", "10.0.0.1", 1, (0,)),),)
TRANSPORTS = pytest.mark.parametrize(
    ("engines", "settings"),
    [(((NEAR,),), {}), (ON_ITS_GPU, SHARED), (((NEAR,),), DISK), (((NEAR,),), SLICES)],
    ids=["broadcast", "sharing", "disk", "slices"],
)


@TRANSPORTS
def test_an_engine_that_loads_nothing_of_a_tensor_is_refused_before_the_first_byte(
    engines, settings, tmp_path, monkeypatch
):
    """On each transport by the same rule; the engine that replaces it is asked again."""
    actors = Joining(tmp_path / "STOP")
    one = coordinator(actors, tmp_path / "weights", engines=engines, **settings)
    monkeypatch.setattr(Engine, "skipped", {"v"})
    with pytest.raises(WeightError, match=r"^v: the ranks of engine \S+ load nothing of it"):
        asyncio.run(updated(one, 7))
    assert actors.moved == [] and Engine.log == ["record"]
    assert list((tmp_path / "slices").iterdir()) == []
    monkeypatch.setattr(Engine, "skipped", set())
    asyncio.run(updated(one, 7, 8))
    assert actors.moved
    assert Engine.log.count("record") == 2, "once a connection, not once an update"


@TRANSPORTS
def test_a_draft_layer_may_be_skipped(engines, settings, tmp_path, monkeypatch):
    actors = Joining(tmp_path / "STOP", tensors=("w", "mtp"))
    one = coordinator(actors, tmp_path / "weights", engines=engines, **settings)
    monkeypatch.setattr(Engine, "skipped", {"mtp"})
    asyncio.run(updated(one, 7))
    assert actors.moved


@pytest.mark.parametrize("settings", [{}, DISK], ids=["broadcast", "disk"])
def test_engines_that_cannot_be_checked_are_named_once_and_get_weights(
    settings, tmp_path, monkeypatch, caplog
):
    """One lacks rlpost's loader, as an external one; the other does not see the run's folder."""

    class Elsewhere(Engine):
        async def has_shard_loader(self) -> bool:
            return self.url == "http://b"

        async def send_to_loader(self, payloads, *, version=None):
            raise RolloutError("no such file")

    monkeypatch.setattr(engine_side_weights, "EngineClient", Elsewhere)
    actors = Joining(tmp_path / "STOP")
    one = coordinator(actors, tmp_path / "weights", num_engines=2, **settings)
    asyncio.run(updated(one, 7))
    asyncio.run(updated(one, 8))
    assert len(actors.moved) >= 2
    for said in ("http://a: .* without rlpost's loader", "http://b: .* no such file"):
        assert len(re.findall(said, caplog.text)) == 1


async def test_an_engine_that_dies_while_it_records_is_an_error_that_its_restart_mends(
    tmp_path, refusing
):
    refusing("record", EngineDied("engine http://a is gone"))
    actors = Joining(tmp_path / "STOP")
    one = coordinator(actors, tmp_path / "weights")
    with pytest.raises(SyncError, match="http://a is gone"):
        await updated(one, 7)
    assert not actors.moved


def test_engines_get_slices_only_if_all_of_them_can_receive_them(tmp_path, monkeypatch, caplog):
    one = coordinator(Actors(tmp_path / "STOP"), tmp_path / "weights", num_engines=1, **SLICES)
    asyncio.run(one.connect())
    assert isinstance(one._mover, ShardMover)

    async def lacks(self) -> bool:
        return False

    monkeypatch.setattr(Engine, "has_shard_loader", lacks)
    asyncio.run(one.connect())
    assert isinstance(one._mover, BroadcastMover)
    assert "http://a cannot receive slices" in caplog.text


def test_engines_that_move_experts_receive_all_weights(tmp_path, caplog):
    args = {"sglang": {"sglang_enable_eplb": True}}
    one = coordinator(Actors(tmp_path / "STOP"), tmp_path / "weights", **SLICES, **args)
    asyncio.run(one.connect())
    assert isinstance(one._mover, BroadcastMover)
    assert "--sglang-enable-eplb moves experts" in caplog.text


def test_weights_are_broadcast_to_more_engines_than_the_trainer_has_ranks(tmp_path):
    """Each rank would send its shards to each of them."""
    one = coordinator(Actors(tmp_path / "STOP"), tmp_path / "weights", num_engines=2, **SLICES)
    asyncio.run(one.connect())
    assert isinstance(one._mover, BroadcastMover)


@pytest.mark.parametrize(
    ("is_trained", "path", "selector"),
    [(True, None, "all"), (False, None, "target"), (True, "/eagle", "target")],
)
def test_a_draft_model_gets_the_weights_of_the_trained_layer_alone(
    is_trained, path, selector, tmp_path
):
    """Another would load the policy's weights of the same names, such as model.norm."""
    one = coordinator(
        Actors(tmp_path / "STOP"),
        tmp_path / "weights",
        grpo={"enable_mtp_training": is_trained},
        sglang={"sglang_speculative_draft_model_path": path},
    )
    asyncio.run(one.connect())
    assert one._update.receivers[0].client.selector == selector


TENSORS = ("w", "v")
"""Each as large as a bucket."""
MISSING_VERSION = 6


class Joining(Actors):
    """A rank whose ``connect`` for slices ends only when it is aborted, and then raises SyncError.

    So does ``blocks``. It sends and packs a bucket for longer than an engine takes to refuse it.
    """

    def __init__(
        self,
        stop_file: Path,
        *,
        backend: str = "gloo",
        blocks: str = "",
        tensors: Sequence[str] = TENSORS,
    ) -> None:
        super().__init__(stop_file, backend=backend)
        self.blocks, self.called = blocks, []
        self.moved: list[str] = []
        self.aborted = asyncio.Event()
        regions = grouped([whole(name, (2, 2)) for name in tensors])
        self.answers["shards.list_units"] = [units := units_of(tensors)]
        self.answers["shards.describe"] = [(units, regions, frozenset())]

    async def call(self, method, *arguments):
        self.called.append(method)
        if method in (*MOVES, "shards.send"):
            self.moved.append(method)
        blocks = self.blocks or (Refusing.at == "connect" and "shards.connect")
        if method == blocks and not self.aborted.is_set():
            await asyncio.shield(self.aborted.wait())
            raise SyncError("aborted")
        if method in ("shards.send", "pack_shards"):
            await asyncio.sleep(0.1)
        if method == "old_policy.swap_in" and arguments[0] == MISSING_VERSION:
            raise SyncError("the ranks do not have it")
        return await super().call(method, *arguments)

    async def call_aside(self, method, *arguments):
        assert method == "shards.abort"
        self.aborted.set()
        return [None]

    async def transfer(self, method, *arguments):
        return ["handle"]


class Refusing(Engine):
    """An engine that fails at one message to its loader."""

    at, error = "", RolloutError("no such kernel")

    async def send_to_loader(self, payloads, *, version=None):
        await super().send_to_loader(payloads, version=version)
        do = self.log[-1]
        if do == self.at and (do != "receive" or self.log.count(do) == 1):
            raise self.error


BACKENDS = pytest.mark.parametrize("backend", ["gloo", "nccl"])


@pytest.fixture
def refusing(monkeypatch):
    """Makes all engines refuse a message."""
    monkeypatch.setattr(engine_side_weights, "EngineClient", Refusing)

    def refuse(at: str, error: Exception = Refusing.error) -> None:
        monkeypatch.setattr(Refusing, "at", at)
        monkeypatch.setattr(Refusing, "error", error)

    refuse("")
    return refuse


@BACKENDS
@pytest.mark.parametrize("at", ["record", "plan", "connect", "receive"])
def test_engines_that_refuse_slices_get_all_weights_in_the_same_update(
    at, backend, tmp_path, refusing, caplog
):
    """The trainer does not wait for them in the group; later connections do not ask again.

    The memory of both sides is freed, and nothing is left of the files.
    """
    refusing(at)
    actors = Joining(tmp_path / "STOP", backend=backend)
    one = coordinator(actors, tmp_path / "weights", **SLICES)
    asyncio.run(asyncio.wait_for(updated(one, 7), timeout=20))
    assert isinstance(one._mover, BroadcastMover)
    assert actors.aborted.is_set() == (at == "connect")
    assert "no such kernel" in caplog.text and "all engines receive all weights" in caplog.text
    assert Refusing.log[-2:] == ["disconnect", "record"] and "shards.release" in actors.called
    assert list((tmp_path / "slices").iterdir()) == []
    asyncio.run(one.connect())
    assert isinstance(one._mover, BroadcastMover)
    if at == "connect":
        assert "ranks from 0 are the trainer's, from 1 those of http://a" in caplog.text


@BACKENDS
def test_an_engine_that_has_changed_records_once_more_and_receives_slices(
    backend, tmp_path, refusing
):
    refusing("receive", EngineNotPrepared("parameters have other shapes"))
    actors = Joining(tmp_path / "STOP", backend=backend)
    one = coordinator(actors, tmp_path / "weights", **SLICES)
    asyncio.run(asyncio.wait_for(updated(one, 7), timeout=20))
    assert isinstance(one._mover, ShardMover)
    assert Refusing.log == ["record", "plan", "connect", "receive"] * 2 + ["receive"]


@pytest.mark.parametrize(("at", "blocks"), [("receive", "shards.send"), ("connect", "shards.meet")])
def test_on_nccl_engines_blocked_by_the_refusal_of_one_get_all_weights_after_a_restart(
    at, blocks, tmp_path, monkeypatch, refusing
):
    monkeypatch.setattr(shard_mover, "REFUSAL_S", 0.1)
    refusing(at)
    actors = Joining(tmp_path / "STOP", backend="nccl", blocks=blocks)
    one = coordinator(actors, tmp_path / "weights", **SLICES)

    async def run() -> None:
        await one.connect()
        with pytest.raises(SyncError, match="no such kernel"):
            await one.update(7)
        assert one.engines_are_stuck
        await updated(one, 7)  # what ``EngineHealth`` does after the restart

    asyncio.run(asyncio.wait_for(run(), timeout=20))
    assert isinstance(one._mover, BroadcastMover) and not one.engines_are_stuck


async def test_only_a_failure_of_slices_counts_as_a_refusal_of_slices(
    tmp_path, monkeypatch, refusing
):
    one = coordinator(Joining(tmp_path / "STOP"), tmp_path / "weights", **SLICES)
    pauses = []

    class Busy(Refusing):
        async def pause(self, mode: str) -> None:
            pauses.append(mode)
            if len(pauses) == 1:
                raise RolloutError("answered 503: busy")

    monkeypatch.setattr(engine_side_weights, "EngineClient", Busy)
    await one.connect()
    for version, problem in ((5, "503: busy"), (MISSING_VERSION, "do not have it")):
        with pytest.raises(SyncError, match=problem):
            await one.update(version)
    await updated(one, 7)
    assert isinstance(one._mover, ShardMover)


async def test_gathered_weights_that_do_not_arrive_either_are_no_reason_to_gather_later(
    tmp_path, monkeypatch, refusing
):
    refusing("plan")
    one = coordinator(Joining(tmp_path / "STOP"), tmp_path / "weights", **SLICES)

    async def fail(*_, **__) -> None:
        raise RolloutError("answered 400: no")

    monkeypatch.setattr(Refusing, "update_weights", fail)
    with pytest.raises(SyncError, match="400: no"):
        await updated(one, 7)
    await one.connect()
    assert isinstance(one._mover, ShardMover)


async def test_engines_that_have_taken_slices_take_them_after_a_reconnect_too(tmp_path, refusing):
    """A failure then has another reason, which a restart mends."""
    one = coordinator(Joining(tmp_path / "STOP"), tmp_path / "weights", **SLICES)
    await updated(one, 1, 2)
    await one.connect()
    refusing("plan")
    with pytest.raises(SyncError, match="no such kernel"):
        await one.update(3)
    await one.connect()
    assert isinstance(one._mover, ShardMover)


@BACKENDS
def test_an_engine_that_dies_while_it_connects_is_an_error_that_its_restart_mends(
    backend, tmp_path, refusing
):
    """The others wait for it in the store of the group, not in a kernel."""
    refusing("connect", EngineDied("engine http://a is gone"))
    actors = Joining(tmp_path / "STOP", backend=backend)
    one = coordinator(actors, tmp_path / "weights", **SLICES)
    with pytest.raises(SyncError, match="http://a is gone"):
        asyncio.run(asyncio.wait_for(updated(one, 7), timeout=20))
    assert actors.aborted.is_set() and not one.engines_are_stuck
    asyncio.run(one.connect())
    assert isinstance(one._mover, ShardMover), "the engine that replaces it is asked again"


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

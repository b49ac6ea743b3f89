"""A stop within a weight sync: between two buckets, with no rank of the trainer left in a collective."""

import asyncio
from pathlib import Path

import pytest

from common.cluster import Cluster
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.errors import EngineDied, Preempted, SyncError
from rlpost.orchestration import startup, weight_coordinator
from rlpost.orchestration.placement import Placement, Slot
from rlpost.orchestration.preemption import StopRequest
from rlpost.orchestration.weight_coordinator import WeightCoordinator, nccl_environment
from rlpost.orchestration.worker_groups import ActorGroup
from rlpost.rollout.engine_side_weights import BroadcastMover, DiskMover, Receiver, SharingMover
from rlpost.types import Bucket, EngineAddress
from rlpost.weights.delta import Written

BUCKETS = [Bucket((f"w{i}",), ((2, 2),), ("float32",)) for i in range(4)]


class Engine:
    """Takes what comes."""

    async def update_weights(self, bucket, *, group_name, version):
        await asyncio.sleep(0)

    async def update_weights_from_handles(self, handles, *, version):
        await asyncio.sleep(0)

    async def update_weights_from_disk(self, folder, *, version):
        await asyncio.sleep(0)


class Actors:
    """Note what they begin and what they end; a stop is requested while they send the second bucket."""

    def __init__(self, stop_file):
        self.stop_file, self.begun, self.ended = stop_file, [], []

    async def call(self, method, *arguments):
        self.begun.append(method)
        await asyncio.sleep(0.01)
        if len(self.begun) == 2:
            self.stop_file.write_text("now")
        self.ended.append(method)
        return ["handle"]


def movers(sync):
    return {
        "broadcast": BroadcastMover(BUCKETS, sync._send, group_name="g"),
        "sharing": SharingMover(BUCKETS, sync._share, ranks_of=[[0]]),
    }


@pytest.fixture
def sync(tmp_path):
    actors = Actors(tmp_path / "STOP")
    stop = StopRequest(tmp_path / "STOP")
    one = WeightCoordinator(Config(), None, ActorGroup(actors), placement=None, ports=None, folder=tmp_path, stop=stop)
    return one, actors


@pytest.mark.parametrize("way", ["broadcast", "sharing"])
def test_the_bucket_under_way_arrives_and_none_is_begun_after_it(sync, way):
    one, actors = sync
    receiver = Receiver(EngineAddress("http://engine", 1), Engine())
    with pytest.raises(Preempted):
        asyncio.run(movers(one)[way].move([receiver], 7))
    assert len(actors.begun) == len(actors.ended) == 2


class Blocked:
    """Actors of which one is in a broadcast that ends only when it is aborted, and then tells so."""

    def __init__(self):
        self.aborted = asyncio.Event()
        self.failed = ""

    async def call(self, method, *arguments):
        if method == "broadcast.backend":
            return ["nccl"]
        await asyncio.shield(self.aborted.wait())
        raise SyncError("aborted")

    async def call_aside(self, method, *arguments):
        assert method == "broadcast.abort"
        self.aborted.set()
        return [None]


class Refusing(Engine):
    """Fails over the first bucket."""

    async def update_weights(self, bucket, *, group_name, version):
        raise EngineDied("engine http://engine is gone")


def test_the_trainer_is_released_from_a_broadcast_as_soon_as_an_engine_fails(tmp_path):
    """Not at the deadline of the broadcast, which is one of minutes."""
    actors = Blocked()
    stop = StopRequest(tmp_path / "STOP")
    one = WeightCoordinator(Config(), None, ActorGroup(actors), placement=None, ports=None, folder=tmp_path, stop=stop)
    one._backend = "nccl"
    mover = BroadcastMover(BUCKETS, one._send, group_name="g")
    receivers = [Receiver(EngineAddress("http://a", 1), Engine()), Receiver(EngineAddress("http://b", 1), Refusing())]
    with pytest.raises(SyncError, match="is gone"):
        asyncio.run(asyncio.wait_for(mover.move(receivers, 7), timeout=20))
    assert actors.aborted.is_set()
    assert one.engines_are_stuck, "the other engine waits in the same broadcast"


def test_engines_leave_a_broken_broadcast_by_themselves_on_gloo(tmp_path):
    actors = Blocked()
    actors.aborted.set()
    stop = StopRequest(tmp_path / "STOP")
    one = WeightCoordinator(Config(), None, ActorGroup(actors), placement=None, ports=None, folder=tmp_path, stop=stop)
    one._backend = "gloo"
    with pytest.raises(SyncError, match="aborted"):
        asyncio.run(one._send(0))
    assert not one.engines_are_stuck


@pytest.mark.parametrize(
    ("sglang", "given", "wanted"),
    [
        ({}, {}, "0"),
        ({}, {"NCCL_CUMEM_ENABLE": "1"}, "1"),
        ({"sglang_enable_symm_mem": True}, {}, "1"),
        ({"sglang_enable_symm_mem": True}, {"NCCL_CUMEM_ENABLE": "0"}, "1"),
    ],
)
def test_the_trainer_imports_memory_of_its_peers_as_the_engines_do(sglang, given, wanted, tmp_path, monkeypatch):
    """The same rule as in SGLang (tests/contract/cuda), in the environment that the actors' workers get."""
    config = load([], {"sglang": sglang}).config
    assert nccl_environment(config, given) == {"NCCL_CUMEM_ENABLE": wanted}
    envs = []
    monkeypatch.setattr(startup, "WorkerGroup", lambda *_, **options: envs.extend(options["envs"]))
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    for key, value in given.items():
        monkeypatch.setenv(key, value)
    cluster = Cluster("10.0.0.1:1", str(tmp_path), (), 20000, 100)
    startup.Startup(config, cluster, stop=StopRequest(tmp_path / "STOP")).actor_workers(Placement((ACTOR, ACTOR), ()))
    assert [env["NCCL_CUMEM_ENABLE"] for env in envs] == [wanted] * 2


def test_a_folder_of_weights_is_not_begun(sync, tmp_path):
    one, actors = sync
    (tmp_path / "STOP").write_text("now")
    with pytest.raises(Preempted):
        asyncio.run(DiskMover(one._write).move([Receiver(EngineAddress("http://engine", 1), Engine())], 7))
    assert actors.begun == []


class Copies:
    """A group of workers that hold a copy of the weights each; told what it was made of and what it was asked."""

    def __init__(self, makes, slots, *, names, log_dir, envs):
        assert len(makes) == len(slots) == len(names) == len(envs)
        self.folders, self.slots, self.asked = [make().folder for make in makes], slots, []

    async def call(self, method, *arguments):
        self.asked.append((method, *arguments))
        return [None] * len(self.slots)


class Writers(Actors):
    """Two ranks, of which the first writes."""

    async def call(self, method, *arguments):
        await super().call(method, *arguments)
        self.wanted = [*getattr(self, "wanted", []), arguments]
        return [Written(100, 0.02), None]


ACTOR, NEAR, FAR = Slot("n0", "10.0.0.1", 1), Slot("n1", "10.0.0.2", 4), Slot("n2", "10.0.0.3", 4)


def delta_sync(tmp_path, monkeypatch, **settings):
    monkeypatch.setattr(weight_coordinator, "WorkerGroup", Copies)
    given = {"sync": {"update_weight_mode": "delta", "update_weight_transport": "disk", **settings}}
    config = load([], {**given, "rollout": {"num_rollout": 1}}).config
    placement = Placement((ACTOR, ACTOR), ((NEAR, FAR), (NEAR,)))
    folder = tmp_path / "run" / "attempts" / "0" / "weights"
    actors = Writers(tmp_path / "STOP")
    return (
        WeightCoordinator(
            config,
            None,
            ActorGroup(actors),
            placement=placement,
            ports=None,
            folder=folder,
            stop=StopRequest(tmp_path / "STOP"),
        ),
        actors,
        folder,
    )


def test_one_copy_lies_where_the_trainer_writes_and_takes_what_it_wrote(tmp_path, monkeypatch):
    one, actors, folder = delta_sync(tmp_path, monkeypatch)
    mover = one._delta_mover()
    receiver = Receiver(EngineAddress("http://engine", 1), Engine())
    for version in (1, 2):
        asyncio.run(mover.move([receiver], version))
    names = [str(folder / f"version-000000{version}") for version in (1, 2)]
    assert actors.wanted == [(names[0], 1, True), (names[1], 2, False)]
    assert one._copies._workers.slots == [Slot("n0", "10.0.0.1", 0)] and one._copies._workers.folders == [
        folder / "copy"
    ]
    assert one._copies._workers.asked == [("take", names[0]), ("take", names[1])]
    assert (one.num_bytes, one.changed_frac) == (100, 0.02)
    asyncio.run(one.close())
    assert one._copies._workers.asked[-1] == ("remove",)


def test_a_folder_on_every_host_is_one_a_node_with_engines_and_the_runs_own(tmp_path, monkeypatch):
    """However many engines a node has; a repair makes a mover anew, and no copy."""
    one, _, _ = delta_sync(tmp_path, monkeypatch, update_weight_local_checkpoint_dir="/dev/shm")
    one._delta_mover()
    copies = one._copies._workers
    assert [(slot.node_id, slot.num_gpus) for slot in copies.slots] == [("n1", 0), ("n2", 0)]
    (folder,) = set(copies.folders)
    assert str(folder).startswith("/dev/shm/run-")
    one._delta_mover()
    assert one._copies._workers is copies


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_in_a_folder_that_others_use_too_only_the_runs_own_files_go(tmp_path, monkeypatch, mode):
    """--update-weight-disk-dir may hold a folder version-2 of somebody's, or the files of another run."""
    shared = tmp_path / "scratch"
    theirs = [".version-0000001", "copy", "version-0000001", "version-2"]
    for name in theirs:
        (shared / name).mkdir(parents=True)
        (shared / name / "model.safetensors").write_text("somebody's")
    one, actors, _ = delta_sync(tmp_path, monkeypatch, update_weight_disk_dir=str(shared), update_weight_mode=mode)
    if mode == "delta":
        mover = one._delta_mover()
        asyncio.run(mover.move([Receiver(EngineAddress("http://engine", 1), Engine())], 1))
        assert {path.parent.parent for path in one._copies._workers.folders} == {shared}
        assert {Path(words[0]).parent.parent for words in actors.wanted} == {shared}
    one._remove_files()
    asyncio.run(one.close())
    assert sorted(path.name for path in shared.iterdir()) == theirs
    assert all((path / "model.safetensors").exists() for path in shared.iterdir())


def test_a_host_that_does_not_answer_at_the_end_is_told_and_no_error(tmp_path, monkeypatch, caplog):
    one, _, _ = delta_sync(tmp_path, monkeypatch)
    one._delta_mover()

    async def died(method):
        raise SyncError("weights-0 died")

    one._copies._workers.call = died
    asyncio.run(one.close())
    assert "weights-0 died" in caplog.text

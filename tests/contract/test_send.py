"""Transfer of batches from the driver to the ranks.

A real Ray of two nodes, with workers that compute nothing.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlpost.columns import FloatColumn, IntColumn
from rlpost.config.tree import Config
from rlpost.driver.calls import Calls
from rlpost.driver.placement import Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.training import Training, train_calls
from rlpost.driver.worker_groups import (
    Actor,
    ActorGroup,
    RemoteCall,
    StoredBatches,
    received,
    remote,
)
from rlpost.driver.workers import WorkerGroup
from rlpost.errors import Interrupted
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.types import (
    Sample,
    SampleGroup,
    ScoredSample,
    StepPlace,
    StepResult,
    TrainBatch,
    TrainSample,
)
from tests.ray_sessions import disable_authentication

pytestmark = pytest.mark.timeout(120)
ray = pytest.importorskip("ray")

NUM_NODES, RANKS_OF_NODE = 2, 2
NUM_RANKS = NUM_NODES * RANKS_OF_NODE
LENGTH = 100_000
"""Tokens of an answer.

Enough that Ray keeps its arrays in the object store instead of sending them in the call.
"""


def place_of(column: IntColumn | FloatColumn) -> str:
    """Return the file of shared memory that holds an array, and its offset there.

    The result is equal for processes that share the memory.
    """
    array = column.array
    assert not array.flags.owndata
    assert not array.flags.writeable
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, device, inode, *_ = line.split()
        first, last = (int(part, 16) for part in span.split("-"))
        if first <= address < last:
            return f"{device} {inode} {int(offset, 16) + address - first}"
    raise AssertionError("the array is in no mapping")


class Rank:
    """A rank; only those of the second node, as the last pipeline stage, have log-probs."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def setup(self, rank: int) -> None:
        self.rank = rank

    def compute_logprobs(self, batch: TrainBatch) -> list[list[FloatColumn]]:
        return self._logprobs("old", batch)

    def compute_ref_logprobs(self, batch: TrainBatch) -> list[list[FloatColumn]]:
        return self._logprobs("ref", batch)

    def _logprobs(self, name: str, batch: TrainBatch) -> list[list[FloatColumn]]:
        self._see(name, batch)
        if self.rank < RANKS_OF_NODE:
            return []
        return [[sample.rollout_logprobs[:] for sample in micro] for micro in batch.micro_batches]

    def train_step(
        self, batch: TrainBatch, old_logprobs: Any, advantages: Any, place: StepPlace
    ) -> StepResult:
        self._see("train", batch)
        assert (old_logprobs is None) == (self.rank < RANKS_OF_NODE)
        for sample, own in zip(
            batch.samples, [one for micro in old_logprobs or [] for one in micro], strict=False
        ):
            assert own == sample.rollout_logprobs
            place_of(own)
        return StepResult({"train/grad_norm": 1.0})

    def stop(self, batch: TrainBatch) -> None:
        raise Interrupted("stopped")

    def _see(self, what: str, batch: TrainBatch) -> None:
        sample = batch.samples[0]
        self.seen.append((what, place_of(sample.token_ids), place_of(sample.rollout_logprobs)))


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[dict[str, Any]]]:
    from ray.cluster_utils import Cluster

    disable_authentication()
    store = {"num_cpus": 1, "object_store_memory": 100 * 1024**2}
    cluster = Cluster(initialize_head=True, head_node_args=store | {"include_dashboard": False})
    for _ in range(NUM_NODES - 1):
        cluster.add_node(**store)
    ray.init(address=cluster.address, log_to_driver=False)
    yield ray.nodes()
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def workers(nodes: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> WorkerGroup:
    slots = [
        Slot(node["NodeID"], node["NodeManagerAddress"], 0)
        for node in nodes
        for _ in range(RANKS_OF_NODE)
    ]
    names = [f"actor-{rank}" for rank in range(NUM_RANKS)]
    folder = tmp_path_factory.mktemp("logs")
    group = WorkerGroup(
        [Rank] * NUM_RANKS, slots, names=names, log_dir=folder, envs=[{}] * NUM_RANKS
    )
    asyncio.run(group.call_each("setup", [(rank,) for rank in range(NUM_RANKS)]))
    return group


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often this process pickles columns, by type, and how many bytes."""
    found: Counter[str] = Counter()

    def counted(column_type: type, reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def counting(self: Any) -> Any:
            found[column_type.__name__] += 1
            found["bytes"] += self.array.nbytes
            return reduce(self)

        return counting

    for column_type in (IntColumn, FloatColumn):
        monkeypatch.setattr(column_type, "__reduce__", counted(column_type, column_type.__reduce__))
    return found


def sample_of(prompt_id: int, index: int) -> Sample:
    ids = range(prompt_id, prompt_id + LENGTH)
    return Sample(prompt_id, index, (1, 2), ids, [-0.5 - index] * LENGTH, "", "stop", 0)


def a_batch() -> TrainBatch:
    sample = sample_of(7, 0)
    one = TrainSample(
        sample.prompt_ids + sample.response_ids, 2, sample.mask, sample.rollout_logprobs, 0.5
    )
    return TrainBatch(((one,),), num_samples=1, num_tokens=LENGTH)


def stored_objects(nodes: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
    """Return (objects, bytes) in the object store of each node."""
    from ray._private.internal_api import node_stats

    stats = [
        node_stats(node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
        for node in nodes
    ]
    return [(each.num_local_objects, each.object_store_bytes_used) for each in stats]


async def settled(nodes: Sequence[dict[str, Any]], expected: list[tuple[int, int]]) -> None:
    """Wait until the stores hold ``expected``; Ray frees objects in the background."""
    for _ in range(100):
        if stored_objects(nodes) == expected:
            return
        await asyncio.sleep(0.1)
    assert stored_objects(nodes) == expected


def forward(compute: Any, batches: StoredBatches) -> list[RemoteCall[Any, Any]]:
    """The calls of a forward pass."""
    return [remote(compute, received(batch)) for batch in batches]


@pytest.mark.parametrize("num_ranks", [1, NUM_RANKS])
def test_a_batch_is_pickled_once_for_any_number_of_ranks(
    workers: WorkerGroup, pickled: Counter[str], num_ranks: int
) -> None:
    async def run() -> None:
        actors, batch = ActorGroup(workers), a_batch()
        stored = await actors.send([batch], [0] * num_ranks)
        if num_ranks == len(workers):
            await actors.each_stored(forward(Actor.compute_logprobs, stored))
            await actors.each_stored(forward(Actor.compute_ref_logprobs, stored))

    asyncio.run(run())
    assert pickled == {"IntColumn": 1, "FloatColumn": 1, "bytes": 4 * (LENGTH + 2) + 4 * LENGTH}


def test_a_batch_given_by_value_is_pickled_for_each_rank(
    workers: WorkerGroup, pickled: Counter[str]
) -> None:
    """What the count above would be if the batch was not stored."""
    asyncio.run(workers.call_each("compute_logprobs", [(a_batch(),)] * NUM_RANKS))
    assert pickled["IntColumn"] == pickled["FloatColumn"] == NUM_RANKS


def test_the_ranks_of_a_node_read_the_same_memory_in_every_pass(
    workers: WorkerGroup, nodes: list[dict[str, Any]]
) -> None:
    """Each node received the batch once; the second node's copy is in another file."""

    async def run() -> list[list[tuple[str, str, str]]]:
        await workers.call("seen.clear")
        # Ray frees the objects of other tests in the background
        await settled(nodes, [(0, 0)] * NUM_NODES)
        actors = ActorGroup(workers)
        stored = await actors.send([a_batch()], [0] * NUM_RANKS)
        old = await actors.each_stored(forward(Actor.compute_logprobs, stored))
        await actors.each(train_calls(stored, old, [None] * NUM_RANKS, StepPlace(1, 1, 1, 0)))
        counts = [count for count, _ in stored_objects(nodes)]
        assert counts == [1, 1 + RANKS_OF_NODE], (
            "the batch on each node, log-probs only on the second"
        )
        return await workers.call("seen")

    seen = asyncio.run(run())
    assert [what for what, *_ in seen[0]] == ["old", "train"]
    places = [{tuple(place) for _, *place in of_rank} for of_rank in seen]
    assert all(len(of_rank) == 1 for of_rank in places), "a pass read another copy"
    for node in range(NUM_NODES):
        of_node = places[node * RANKS_OF_NODE : (node + 1) * RANKS_OF_NODE]
        assert len(set.union(*of_node)) == 1
    assert len(set.union(*places)) == NUM_NODES


def test_log_probs_do_not_pass_through_the_driver(
    workers: WorkerGroup, pickled: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        actors = ActorGroup(workers)
        stored = await actors.send([a_batch()], [0] * NUM_RANKS)
        pickled.clear()
        monkeypatch.setattr(FloatColumn, "view", None)  # unpickling a column would call it
        old = await actors.each_stored(forward(Actor.compute_logprobs, stored))
        assert [own is None for own in old] == [True] * RANKS_OF_NODE + [False] * RANKS_OF_NODE
        await actors.each(train_calls(stored, old, [None] * NUM_RANKS, StepPlace(1, 1, 1, 0)))
        monkeypatch.undo()
        assert not pickled
        assert old[-1] is not None
        columns = await actors.fetch_columns(old, [0] * NUM_RANKS, 0)
        assert columns is not None
        (found,) = columns
        assert found == [-0.5] * LENGTH

    asyncio.run(run())


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_nothing_is_left_in_the_object_store_after_a_rollout(
    workers: WorkerGroup, nodes: list[dict[str, Any]], pickled: Counter[str], kl_coef: float
) -> None:
    """A rollout has two optimizer steps.

    With a penalty in the reward the same stored batches are trained.
    """
    config = Config.model_validate(
        {
            "cluster": {"actor_num_nodes": NUM_NODES, "actor_num_gpus_per_node": RANKS_OF_NODE},
            "perf": {"pipeline_model_parallel_size": NUM_NODES},
            "rollout": {
                "rollout_batch_size": 4,
                "n_samples_per_prompt": 1,
                "num_steps_per_rollout": 2,
            },
            "grpo": {"kl_coef": kl_coef},
        }
    )
    data_ranks = [*range(RANKS_OF_NODE)] * NUM_NODES
    groups = [SampleGroup(i, (ScoredSample(sample_of(i, 0), float(i)),)) for i in range(4)]

    async def run() -> None:
        await workers.call("seen.clear")
        stop = StopRequest(Path("/nowhere"))
        actors = ActorGroup(workers)
        calls = Calls(actors, stop)
        training = Training(config, actors, data_ranks, calls=calls, is_fresh=True, break_even=1e9)
        for rollout in range(1, 4):
            pickled.clear()
            await training.train(groups, rollout, PolicyVersions())
            assert pickled["IntColumn"] == len(groups)
            await settled(nodes, [(0, 0)] * NUM_NODES)

    asyncio.run(run())
    passes = ["old", "ref", "train"] if kl_coef else ["old", "train"]
    for of_rank in asyncio.run(workers.call("seen")):
        assert [what for what, *_ in of_rank[: 2 * len(passes)]] == [
            one for one in passes for _ in range(2)
        ]
        of_rollout = [tuple(place) for _, *place in of_rank[: 2 * len(passes)]]
        assert of_rollout == of_rollout[:2] * len(passes), (
            "every pass reads the batches that the first one read"
        )


def test_an_interruption_of_stored_calls_reaches_the_driver(workers: WorkerGroup) -> None:
    async def run() -> None:
        stored = await workers.put(a_batch())
        with pytest.raises(Interrupted, match="stopped"):
            await workers.call_each_stored("stop", [(stored,)] * NUM_RANKS)

    asyncio.run(run())

"""Reordered workers of a real Ray: calls, results and logs follow the new ranks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.placement import Slot
from rlpost.driver.workers import WorkerGroup
from tests.ray_sessions import disable_authentication

pytestmark = pytest.mark.timeout(120)
ray = pytest.importorskip("ray")


class Rank:
    """A worker that knows its GPU, as an actor does."""

    def gpu(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def setup(self, rank: int) -> None:
        print(f"rank {rank} with GPU {self.gpu()}", flush=True)


@pytest.fixture(scope="module")
def node() -> Any:
    disable_authentication()
    ray.init(
        num_cpus=1,
        num_gpus=3,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 1024**2,
    )
    yield ray.nodes()[0]
    ray.shutdown()


def test_reordered_workers_get_the_calls_and_logs_of_their_new_ranks(
    node: Any, tmp_path: Path
) -> None:
    slots = [Slot(node["NodeID"], node["NodeManagerAddress"], 1)] * 3
    names = [f"actor-{rank}" for rank in range(3)]

    async def run() -> list[str]:
        group = WorkerGroup([Rank] * 3, slots, names=names, log_dir=tmp_path, envs=[{}] * 3)
        given = await group.call("gpu")
        assert sorted(given) == ["0", "1", "2"], (
            "Ray gives each one of its logical GPUs, in no promised order"
        )
        wanted = ["2", "0", "1"]
        await group.reorder([given.index(gpu) for gpu in wanted])
        assert await group.call("gpu") == wanted
        await group.call_each("setup", [(rank,) for rank in range(3)])
        return wanted

    wanted = asyncio.run(run())
    for rank, gpu in enumerate(wanted):
        assert f"rank {rank} with GPU {gpu}" in (tmp_path / f"actor-{rank}.log").read_text()

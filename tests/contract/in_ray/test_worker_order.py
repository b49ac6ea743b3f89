"""Reordered workers of a real Ray: calls, results and logs follow the new ranks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.placement import Slot
from rlpost.driver.workers import WorkerGroup
from tests.contract.in_ray.conftest import NUM_GPUS

pytestmark = pytest.mark.timeout(120)


class Rank:
    """A worker that knows its GPU, as an actor does."""

    def gpu(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def setup(self, rank: int) -> None:
        print(f"rank {rank} with GPU {self.gpu()}", flush=True)


def test_reordered_workers_get_the_calls_and_logs_of_their_new_ranks(
    node: Any, tmp_path: Path
) -> None:
    slots = [Slot(node["NodeID"], node["NodeManagerAddress"], 1)] * NUM_GPUS
    names = [f"actor-{rank}" for rank in range(NUM_GPUS)]

    async def run() -> list[str]:
        envs: list[dict[str, str]] = [{}] * NUM_GPUS
        group = WorkerGroup([Rank] * NUM_GPUS, slots, names=names, log_dir=tmp_path, envs=envs)
        try:
            given = await group.call("gpu")
            assert sorted(given) == ["0", "1", "2", "3"], (
                "Ray gives each one of its logical GPUs, in no promised order"
            )
            wanted = ["2", "0", "3", "1"]
            await group.reorder([given.index(gpu) for gpu in wanted])
            assert await group.call("gpu") == wanted
            await group.call_each("setup", [(rank,) for rank in range(NUM_GPUS)])
            return wanted
        finally:
            await group.kill()

    wanted = asyncio.run(run())
    for rank, gpu in enumerate(wanted):
        assert f"rank {rank} with GPU {gpu}" in (tmp_path / f"actor-{rank}.log").read_text()

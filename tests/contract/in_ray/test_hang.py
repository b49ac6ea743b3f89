"""A rank that skips a collective is named: real gloo ranks in workers of a real Ray.

The second thread of each worker reads the stack and the collective counts of the first, which is
blocked in a collective. What the real actor reports is tested without Ray.
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rlpost.driver.calls import Calls, EndWhenHanging
from rlpost.driver.hang_report import HANG_FILE, HangReport
from rlpost.driver.placement import Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.training import train_calls
from rlpost.driver.worker_groups import ActorGroup
from rlpost.driver.workers import WorkerGroup
from rlpost.errors import Hang
from rlpost.observe.progress.overdue import ENOUGH, OverdueRule
from rlpost.types import StepPlace
from tests.contract.actor_ranks import positions_of_a_step, run_ranks
from tests.contract.in_ray.conftest import NUM_GPUS
from tests.contract.samples import STEPS
from tests.contract.test_actor import models, settings  # noqa: F401
from tests.ports import free_port

pytestmark = pytest.mark.timeout(180)

WORLD = NUM_GPUS
PLACE = StepPlace(1, 1, 1, old_version=0)
ODD = 2  # in the tensor-parallel group of ranks 2 and 3
RULE = OverdueRule(factor=5.0, min_s=2.0)
TIMEOUT_S = 120.0  # of a collective


class Rank:
    """A worker whose step has two collectives in a tensor-parallel pair and one in the world."""

    def setup(self, rank: int, world: int, port: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        pairs = [(first, first + 1) for first in range(0, world, 2)]
        groups = [dist.new_group(pair, group_desc="tensor parallel") for pair in pairs]
        self.rank, self.pair = rank, groups[rank // 2]

    def counts(self) -> dict[str, int]:
        from rlpost.trainer.progress import group_counts

        return {group.name: group.entered for group in group_counts()}

    def exchange(self) -> None:
        import torch
        import torch.distributed as dist

        peer = self.rank ^ 1
        if self.rank % 2:
            dist.recv(torch.zeros(1), peer)
        else:
            dist.send(torch.ones(1), peer)

    def train_step(
        self, batch: None, old_logprobs: str, advantages: None, place: StepPlace
    ) -> None:
        import torch
        import torch.distributed as dist

        for number in range(2):
            if old_logprobs == "skips" and self.rank == ODD and number == 1:
                continue
            dist.all_reduce(torch.ones(1), group=self.pair)
        dist.all_reduce(torch.ones(1))

    @property
    def position(self) -> Any:
        from rlpost.observe.progress.position import RECORDER
        from rlpost.trainer.progress import group_counts

        return RECORDER.position(group_counts())

    def write_flight_record(self, folder: str) -> str | None:
        from rlpost.trainer.progress import write_flight_record

        return write_flight_record(folder)


async def hang(node: Any, folder: Path) -> tuple[Hang, float]:
    """Train until a rank skips a collective; return the error and the seconds until it."""
    slots = [Slot(node["NodeID"], node["NodeManagerAddress"], 1)] * WORLD
    names = [f"actor-{rank}" for rank in range(WORLD)]
    envs = [
        {"GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "TORCH_FR_BUFFER_SIZE": "100"}
    ] * WORLD
    workers = WorkerGroup([Rank] * WORLD, slots, names=names, log_dir=folder, envs=envs)
    hosts = {node["NodeManagerAddress"]: "n01"}
    group, port = ActorGroup(workers), free_port()
    report = HangReport(folder, hosts=hosts)
    hangs = EndWhenHanging(group, RULE, report, is_stopping=lambda: False)
    calls = Calls(group, StopRequest(folder / "STOP"), hangs)

    async def train_step(how: str) -> None:
        arguments: Any = ([None] * WORLD, [how] * WORLD, [None] * WORLD, PLACE)
        send = partial(group.each, train_calls(*arguments))
        await calls.make("train_step", send, may_leave=True)

    try:
        await workers.call_each("setup", [(rank, WORLD, port) for rank in range(WORLD)])
        await workers.call("exchange")
        uneven = await workers.call("counts")
        assert any(one["default_pg"] for one in uneven), (
            "why groups of pipeline stages are left out"
        )
        for _ in range(ENOUGH):
            await train_step("trains")
        began = time.monotonic()
        with pytest.raises(Hang) as found:
            await train_step("skips")
        return found.value, time.monotonic() - began
    finally:
        await workers.kill()


def test_a_rank_that_skips_a_collective_is_named(node: Any, tmp_path: Path) -> None:
    error, seconds = asyncio.run(hang(node, tmp_path))
    assert error.details["ranks"] == [ODD], error
    assert error.details["hosts"] == ["n01"]
    assert seconds < TIMEOUT_S / 2  # also on a busy machine
    text = (tmp_path / HANG_FILE).read_text()
    assert text.count("  8 collectives of tensor parallel (ranks ") == WORLD - 1
    assert text.count("  7 collectives of tensor parallel (ranks 2, 3)") == 1
    assert "in all_reduce, at " in text and "test_hang.py" in text
    assert f"actor-{ODD} on n01" in str(error) and "it skipped one" in str(error)
    for rank in range(WORLD):
        assert "all_reduce" in (tmp_path / f"flight-{rank}.json").read_text()


def test_the_actor_reports_micro_batches_groups_and_own_time(models: Path) -> None:  # noqa: F811
    for found in run_ranks(
        positions_of_a_step, 2, settings(models, "untied", "dp2"), samples=STEPS[0]
    ):
        positions = found["positions"]
        number = len(positions)
        assert number > 1
        assert [one.micro_batch for one in positions] == [None, *range(number - 1)]
        assert {one.num_micro_batches for one in positions} == {number}
        assert {one.call for one in positions} == {"train_step"}
        assert all(any(f.function == "train_step" for f in one.stack) for one in positions)
        names = {group.name for group in positions[0].groups}
        assert "DATA_PARALLEL_GROUP_WITH_CP" in names
        assert "PIPELINE_MODEL_PARALLEL_GROUP" not in names
        assert (found["after"].call, found["after"].micro_batch) == (None, None)
        assert 0.0 < found["own_s"] < found["s"]

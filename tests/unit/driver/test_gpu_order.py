"""Ranks are assigned by the GPUs of their workers before setup; engines get their ranks' GPUs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rlpost.config.load import load
from rlpost.driver import startup
from rlpost.driver.engines import own_engines
from rlpost.driver.placement import Offer, place, service_ports
from rlpost.driver.preemption import StopRequest
from rlpost.driver.worker_groups import Actor, ActorGroup, remote

SETTINGS = {
    "colocate": True, "nodes": 2, "num_gpus_per_node": 2, "actor_num_gpus_per_node": 2,
    "rollout_num_gpus_per_engine": 2,
}  # fmt: skip


class Actors:
    """Four workers with one GPU each, in Ray's order; records the GPU of each rank at setup."""

    def __init__(self, gpus: list[str]) -> None:
        self.workers = list(gpus)
        self.ranks: dict[int, str] = {}

    async def call(self, method, *arguments):
        answers = {
            "gpu_position": lambda gpu: int(gpu) if gpu else None,
            "visible_gpu": lambda gpu: gpu,
            "data_parallel_rank": lambda gpu: 0,
        }
        return [answers.get(method, lambda gpu: None)(gpu) for gpu in self.workers]

    async def reorder(self, order):
        self.workers = [self.workers[index] for index in order]

    async def call_each(self, method, arguments, **keywords):
        if method == "load":
            assert keywords == {"is_compared": True}
            return
        assert method == "setup"
        self.ranks = {rank: gpu for gpu, (rank, *_) in zip(self.workers, arguments, strict=True)}

    def __len__(self) -> int:
        return len(self.workers)


class Group:
    """Replaces the workers of an engine."""

    made: ClassVar[list[Group]] = []

    def __init__(self, makes, slots, *, names, log_dir, envs, **others) -> None:
        self.envs = envs
        Group.made.append(self)


@pytest.mark.parametrize(
    ("gpus", "ranks", "of_engines"),
    [
        (["1", "0", "0", "1"], ["0", "1", "0", "1"], ["0,1", "0,1"]),
        (["0", "1", "0", "1"], ["0", "1", "0", "1"], ["0,1", "0,1"]),
        (["", "", "", ""], ["", "", "", ""], [None, None]),
    ],
)
async def test_ranks_and_engines_follow_the_gpus(gpus, ranks, of_engines, tmp_path, monkeypatch):
    config = load([], {"cluster": SETTINGS}).config
    placement = place([Offer(f"id{i}", f"10.0.0.{i}", 2) for i in range(2)], config)
    ports = service_ports(20000, 100, engines=placement.engines, num_stages=1)
    actors = Actors(gpus)
    monkeypatch.setattr(startup, "Training", lambda *given, **more: None)
    monkeypatch.setattr(own_engines, "WorkerGroup", Group)
    monkeypatch.setattr(Group, "made", [])
    cluster = SimpleNamespace(
        attempt_dir=str(tmp_path), secret="s", nodes=[SimpleNamespace(host="n1", ip="10.0.0.0")]
    )
    group = ActorGroup(actors)
    begin = startup.Startup(config, cluster, stop=StopRequest(tmp_path / "STOP"), break_even=1e9)
    await begin.trainer(group, placement, ports, Path("/checkpoint"), is_compared=True)
    fleet = own_engines.OwnEngines(config, cluster, placement, ports)
    visible = await group.all(remote(Actor.visible_gpu))
    for index in range(2):
        fleet._group(index, visible)
    assert [actors.ranks[rank] for rank in range(4)] == ranks
    assert [group.envs[0].get("CUDA_VISIBLE_DEVICES") for group in Group.made] == of_engines

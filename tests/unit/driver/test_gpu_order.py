"""Ranks are assigned by the GPUs of their workers before setup; engines get their ranks' GPUs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from common.local_gpus import LocalGpu
from rlpost.config.load import load
from rlpost.driver import startup
from rlpost.driver.engines import engines
from rlpost.driver.placement import Offer, place, service_ports
from rlpost.driver.preemption import StopRequest
from rlpost.driver.worker_groups import ActorGroup, TrainingRanks
from rlpost.errors import PlacementError
from rlpost.trainer import device

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

    async def call_each(self, method, arguments):
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
    monkeypatch.setattr(engines, "WorkerGroup", Group)
    monkeypatch.setattr(Group, "made", [])
    cluster = SimpleNamespace(
        attempt_dir=str(tmp_path), secret="s", nodes=[SimpleNamespace(host="n1", ip="10.0.0.0")]
    )
    group = ActorGroup(actors)
    begin = startup.Startup(config, cluster, stop=StopRequest(tmp_path / "STOP"), break_even=1e9)
    await begin.trainer(TrainingRanks(group), placement, ports, Path("/checkpoint"))
    fleet = engines.Fleet(config, cluster, placement, ports)
    visible = await group.visible_gpus()
    for index in range(2):
        fleet._group(index, visible)
    assert [actors.ranks[rank] for rank in range(4)] == ranks
    assert [group.envs[0].get("CUDA_VISIBLE_DEVICES") for group in Group.made] == of_engines


class Workers(Group):
    """Replaces ranks to which Ray has given one GPU each."""

    def __init__(self, makes, slots, **given) -> None:
        super().__init__(makes, slots, **given)
        self.slots, self.names, self.died = slots, given["names"], given["died"]

    async def call(self, method):
        assert method == "visible_gpu"
        return ["1", "0"]


@pytest.mark.parametrize("own_gpus", [False, True])
def test_a_critic_with_its_own_layout_sees_the_gpus_of_the_policy(own_gpus, tmp_path, monkeypatch):
    """Each critic rank shares the GPU of one policy rank, which Ray counts only once.

    If the critic has exclusive GPUs, Ray sets the variable. Dead critic ranks are numbered after
    the policy's ranks.
    """
    given = {
        "cluster": SETTINGS | {"nodes": 2 if own_gpus else 1, "actor_num_nodes": 1},
        "grpo": {"advantage_estimator": "ppo"},
        "critic": {"critic_tensor_model_parallel_size": 2, "critic_own_gpus": own_gpus},
    }
    config = load([], given).config
    placement = place([Offer(f"id{i}", f"10.0.0.{i}", 2) for i in range(2)], config)
    monkeypatch.setattr(startup, "WorkerGroup", Workers)
    monkeypatch.setattr(Group, "made", [])
    cluster = SimpleNamespace(attempt_dir=str(tmp_path), nodes=[])
    begin = startup.Startup(config, cluster, stop=StopRequest(tmp_path / "STOP"), break_even=1e9)
    asyncio.run(begin.workers(placement))
    policy, critic = Group.made
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in policy.envs] == [None, None]
    expected = [None, None] if own_gpus else ["1", "0"]
    assert [env.get("CUDA_VISIBLE_DEVICES") for env in critic.envs] == expected
    assert [slot.shared_with for slot in critic.slots] == ([()] * 2 if own_gpus else [(0,), (1,)])
    assert critic.names == ["critic-0", "critic-1"]
    assert critic.died("gone", [1]).ranks == (3,)


@pytest.mark.parametrize(
    ("visible", "position"),
    [("3", 3), ("", None), ("GPU-bb", 1), ("GPU-zz", None), ("0,1", None)],
)
def test_a_rank_knows_the_position_of_its_gpu(visible, position, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(
        device, "read_local_gpus", lambda: (LocalGpu(-1, "GPU-aa"), LocalGpu(-1, "GPU-bb"))
    )
    assert device.position() == position


@pytest.mark.parametrize(("use_prometheus", "fits"), [(False, True), (True, False)])
def test_the_last_port_of_the_block_is_kept_for_prometheus(monkeypatch, use_prometheus, fits):
    config = load([], {"cluster": SETTINGS, "observe": {"use_prometheus": use_prometheus}}).config
    offers = [Offer(f"id{n}", f"10.0.0.{n}", 2) for n in range(2)]
    monkeypatch.setattr(startup, "connect", lambda cluster: offers)
    cluster = SimpleNamespace(nodes=(), port_base=20_000, port_count=4)  # 2 an engine, 1, 1 stage
    started = startup.Startup(config, cluster, stop=None, break_even=1e9)
    if not fits:
        with pytest.raises(PlacementError, match="need 4 ports, the job's block has 3"):
            started.layout()
        return
    placement, ports = started.layout()
    assert placement == place(offers, config)
    assert ports == service_ports(20_000, 4, engines=placement.engines, num_stages=1)

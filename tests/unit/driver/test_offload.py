"""Offload of policy, critic and engines that share GPUs, around a save."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from rlpost.config.load import load
from rlpost.driver.debug_modes import TrainOnly
from rlpost.driver.offload import SAVED, CriticOffload, Offload
from rlpost.driver.worker_groups import ActorGroup
from rlpost.errors import CheckpointError, TrainerDied
from tests.unit.driver.engines.test_engine_health import FakeActors, FakeFleet

SHARED = {
    "cluster": {"colocate": True},
    "grpo": {"advantage_estimator": "ppo"},
    "critic": {"critic_tensor_model_parallel_size": 1},
}


class OnSharedGpus:
    """Policy, critic and engines on the same GPUs."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.policy, self.critic = FakeActors(self.fleet.log), FakeActors(self.fleet.log)
        self.critic.here = set()
        self.fleet.trainer = (self.policy, self.critic)
        actors, critics = ActorGroup(self.policy), ActorGroup(self.critic)
        self.critic_offload = CriticOffload(actors, critics)
        self.offload = Offload(load([], SHARED).config, actors, self.fleet, critics=critics)


class Fleet(FakeFleet):
    """Engines whose cache fits only while policy and critic are offloaded."""

    trainer: tuple[FakeActors, ...] = ()

    async def restore_memory(self, *tags: str) -> None:
        if "kv_cache" in tags:
            assert not any(each.here for each in self.trainer)
        await super().restore_memory(*tags)


async def test_a_save_on_shared_gpus_onloads_no_gradients() -> None:
    gpus = OnSharedGpus()
    await gpus.offload.generate()
    async with gpus.offload.save():
        async with gpus.critic_offload.critic_onloaded(*SAVED):
            assert (gpus.policy.here, gpus.critic.here) == (set(), {"weights", "optimizer"})
        assert (gpus.policy.here, gpus.critic.here) == ({"weights", "optimizer"}, set())
    assert gpus.fleet.log[-1] == "resume"


async def test_engines_resume_after_a_failed_save_of_the_critic() -> None:
    gpus = OnSharedGpus()
    await gpus.offload.generate()
    async with gpus.offload.save():
        with contextlib.suppress(CheckpointError):  # only logged: the next save replaces it
            async with gpus.critic_offload.critic_onloaded(*SAVED):
                raise CheckpointError("no space left on device")
    assert gpus.critic.here == set() and gpus.fleet.released == set()
    assert gpus.fleet.log[-1] == "resume"


async def test_ranks_are_not_called_after_a_death_in_a_save() -> None:
    """A hanging rank would not answer, and restarting the ranks frees the GPUs anyway."""
    gpus = OnSharedGpus()
    at_death: list[int] = []
    with pytest.raises(TrainerDied, match="critic-0 died"):
        await gpus.offload.generate()
        async with gpus.offload.save(), gpus.critic_offload.critic_onloaded(*SAVED):
            at_death.append(len(gpus.fleet.log))
            raise TrainerDied("critic-0 died", [2])
    assert gpus.fleet.log[at_death[0] :] == []


@pytest.mark.parametrize("fails", [False, True])
def test_without_engines_the_policy_is_onloaded_after_a_save(fails: bool) -> None:
    gpus = OnSharedGpus()

    async def save_ranks(*_: object, **__: object) -> None:
        with contextlib.suppress(CheckpointError):
            async with gpus.critic_offload.critic_onloaded(*SAVED):
                if fails:
                    raise CheckpointError("no space left on device")

    stages = SimpleNamespace(critic_offload=gpus.critic_offload, save_ranks=save_ranks)
    asyncio.run(TrainOnly.save(stages, None, wait=False))  # type: ignore[arg-type]
    assert gpus.policy.here == {"weights", "grads", "optimizer"} and gpus.critic.here == set()


async def test_the_weights_of_an_offloaded_trainer_are_onloaded_for_a_repair() -> None:
    """Engines have separate GPUs; the trainer may be offloaded, for example for its critic."""
    fleet = FakeFleet()
    policy = FakeActors(fleet.log)
    config = load([], {"cluster": {"offload_train": True}}).config
    offload = Offload(config, ActorGroup(policy), fleet)
    await offload.generate()
    assert policy.here == set()
    async with offload.weights_onloaded():
        assert policy.here == {"weights"}
    assert policy.here == set() and fleet.released == set()

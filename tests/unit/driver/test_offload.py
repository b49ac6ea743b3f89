"""Offload of trainer and engines that share GPUs, around a save."""

import pytest

from rlpost.config.load import load
from rlpost.driver.offload import Offload
from rlpost.driver.worker_groups import ActorGroup
from rlpost.errors import TrainerDied
from tests.unit.driver.engines.test_engine_health import FakeActors, FakeFleet


class OnSharedGpus:
    """Trainer and engines on the same GPUs."""

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.fleet.trainer = FakeActors(self.fleet.log)
        actors = ActorGroup(self.fleet.trainer)
        self.offload = Offload(load([], {"cluster": {"colocate": True}}).config, actors, self.fleet)


class Fleet(FakeFleet):
    """Engines whose cache fits only while the trainer is offloaded."""

    trainer: FakeActors

    async def restore_memory(self, *tags: str) -> None:
        if "kv_cache" in tags:
            assert not self.trainer.here
        await super().restore_memory(*tags)


async def test_a_save_on_shared_gpus_onloads_no_gradients() -> None:
    gpus = OnSharedGpus()
    await gpus.offload.generate()
    async with gpus.offload.save():
        assert gpus.fleet.trainer.here == {"weights", "optimizer"}
    assert gpus.fleet.trainer.here == set() and gpus.fleet.released == set()
    assert gpus.fleet.log[-1] == "resume"


async def test_ranks_are_not_called_after_a_death_in_a_save() -> None:
    """A hanging rank would not answer, and restarting the ranks frees the GPUs anyway."""
    gpus = OnSharedGpus()
    at_death: list[int] = []
    with pytest.raises(TrainerDied, match="actor-0 died"):
        await gpus.offload.generate()
        async with gpus.offload.save():
            at_death.append(len(gpus.fleet.log))
            raise TrainerDied("actor-0 died", [0])
    assert gpus.fleet.log[at_death[0] :] == []


async def test_the_weights_of_an_offloaded_trainer_are_onloaded_for_a_repair() -> None:
    """Engines have separate GPUs; the trainer is offloaded all the same."""
    fleet = FakeFleet()
    policy = FakeActors(fleet.log)
    config = load([], {"cluster": {"offload_train": True}}).config
    offload = Offload(config, ActorGroup(policy), fleet)
    await offload.generate()
    assert policy.here == set()
    async with offload.weights_onloaded():
        assert policy.here == {"weights"}
    assert policy.here == set() and fleet.released == set()

"""Real SGLang engines that load the trainer's adapters beside the base: each family's log-probs are
those of the trainer, and an adapter is replaced while requests of the old one end in every way.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rlpost.actor.settings import ActorSettings
from rlpost.config.engine_args import adapter_args
from rlpost.config.tree import Config
from rlpost.rollout.engine import Engine
from rlpost.rollout.engine_side_weights import AdapterMover, WeightUpdate
from rlpost.types import EngineAddress
from tests.contract.actor_ranks import run_ranks
from tests.contract.conftest import START_DEADLINE_S
from tests.contract.families import make_family
from tests.contract.lora_ranks import versions_of_adapters
from tests.contract.samples import STEPS
from tests.contract.test_served_families import KEY, difference, scores
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(600)
RANK, ALPHA = 4, 8.0
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ATTENTION = TARGETS[:2]
FAMILIES = {
    "qwen3": TARGETS,
    "qwen2.5": TARGETS,
    "llama3": TARGETS,
    "gemma3": TARGETS,
    "glm4-0414": TARGETS,
    "qwen3-moe": ATTENTION,
    "glm4.5-moe": ATTENTION,
}


def config_of(targets: tuple[str, ...]) -> Config:
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": targets}
    sync = {"update_weight_transport": "disk", "update_weight_mode": "adapter"}
    return Config.model_validate({"lora": lora, "sync": sync})


def trained_versions(folder: Path, name: str, targets: tuple[str, ...]) -> list[list[list[float]]]:
    """Make the model in ``folder/base`` and two versions of its adapters beside it."""
    make_family(folder / "base", name)
    settings = ActorSettings(
        str(folder / "base"),
        lr=3e-2,
        distributed_timeout_minutes=5,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_targets=targets,
        update_weight_mode="adapter",
    )
    (found,) = run_ranks(versions_of_adapters, 1, settings, steps=STEPS[:2], folder=str(folder))
    return found


def made_engine(folder: Path, targets: tuple[str, ...], **more: Any) -> Engine:
    return Engine(
        model_path=str(folder / "base"),
        api_key=KEY,
        server_args={"skip_tokenizer_init": True, **adapter_args(config_of(targets)), **more},
        log_path=folder / "engine.log",
    )


async def updated(address: EngineAddress, folder: Path, version: int) -> None:
    async def written(number: int) -> str:
        return str(folder / str(number))

    update = WeightUpdate([address], api_key=KEY, timeout_s=60)
    await update.update(version, AdapterMover(written), pause="abort")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_with_an_adapter_has_the_log_probs_of_the_trainer(
    tmp_path: Path, name: str
) -> None:
    """With the base, and with each version of the adapter after another."""
    targets = FAMILIES[name]
    expected = trained_versions(tmp_path, name, targets)
    engine = made_engine(tmp_path, targets)
    found = []
    try:
        address = engine.start("127.0.0.1", free_ports(1)[0], deadline_s=START_DEADLINE_S)
        found.append(asyncio.run(scores(address, STEPS[0])))
        for version in (1, 2):
            asyncio.run(updated(address, tmp_path, version))
            found.append(asyncio.run(scores(address, STEPS[0])))
    finally:
        engine.stop()
    for version, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        print(name, version, difference(ours, theirs))
        assert difference(ours, theirs) < 1e-4, f"version {version}"
    assert difference(found[0], found[1]) > 0.1
    assert difference(found[1], found[2]) > 0.1

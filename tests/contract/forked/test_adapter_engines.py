"""Real SGLang engines load the trainer's adapters beside the base weights.

The log-probs of each family are those of the trainer, and an adapter is replaced while requests for
the old one end in every way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlpost.config.engine_args import adapter_args
from rlpost.config.tree import Config
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import AdapterMover, WeightUpdate
from rlpost.errors import RolloutError
from rlpost.types import EngineAddress
from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.forked.test_served_families import KEY, difference, scores
from tests.contract.lora_ranks import versions_of_adapters
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(600)
RANK, ALPHA = 4, 8.0
TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
ATTENTION = TARGETS[:2]
LONG = 3000
"""Tokens of an answer that a new version aborts."""
RUNNING, ASKED = 2, 16
"""Requests that an engine runs at the same time, and that it is sent."""
FAMILIES = {
    "qwen2.5": TARGETS,
    "llama3": TARGETS,
    "gemma3": TARGETS,
    "glm4-0414": TARGETS,
    "glm4.5-moe": ATTENTION,
    "qwen3-moe-served": ATTENTION,
}


def config_of(targets: tuple[str, ...]) -> Config:
    lora = {"lora_rank": RANK, "lora_alpha": ALPHA, "lora_targets": targets}
    sync = {"update_weight_transport": "disk", "update_weight_mode": "adapter"}
    return Config.model_validate({"lora": lora, "sync": sync})


def trained_versions(folder: Path, name: str, targets: tuple[str, ...]) -> list[list[list[float]]]:
    """Make the model in ``folder/base`` and two versions of its adapters, in ``1`` and ``2``.

    Returns the trainer's log-probs of each version, the base first.
    """
    make_family(folder / "base", name)
    settings = rank_config(
        str(folder / "base"),
        lr=3e-2,
        distributed_timeout_minutes=5,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        lora_targets=targets,
        update_weight_mode="adapter",
    )
    (found,) = run_ranks(versions_of_adapters, 1, settings, steps=STEPS[:2], folder=str(folder))
    assert {path.name for path in folder.iterdir()} == {"base", "1", "2"}, "nothing is left beside"
    return found


async def updated(address: EngineAddress, folder: Path, version: int) -> None:
    async def written(number: int) -> str:
        return str(folder / str(number))

    update = WeightUpdate([address], api_key=KEY, timeout_s=60)
    await update.update(version, AdapterMover(written), pause="abort")


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[list[float]]]]:
    """Return the folder of a dense model and its adapters, and the trainer's log-probs."""
    folder = tmp_path_factory.mktemp("adapters")
    return folder, trained_versions(folder, "qwen3-wide", TARGETS)


@contextmanager
def started(
    forked: ForkedSglang, folder: Path, targets: tuple[str, ...], **more: object
) -> Iterator[EngineAddress]:
    """Run an engine of ``folder/base``; ``more``: further fields of SGLang's ServerArgs."""
    server_args = {**adapter_args(config_of(targets)), **more}
    try:
        yield forked.start(folder / "base", KEY, folder / "engine.log", **server_args)
    finally:
        forked.stop()


def check_versions(address: EngineAddress, folder: Path, expected: list[list[list[float]]]) -> None:
    """Assert that an engine has the trainer's log-probs with the base and with each version."""
    found = [asyncio.run(scores(address, STEPS[0]))]
    for version in (1, 2):
        asyncio.run(updated(address, folder, version))
        found.append(asyncio.run(scores(address, STEPS[0])))
    for version, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert difference(ours, theirs) < 1e-4, f"version {version}"
    assert difference(found[0], found[1]) > 0.1
    assert difference(found[1], found[2]) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_of_each_family_has_the_log_probs_of_the_trainer(
    forked: ForkedSglang, tmp_path: Path, name: str
) -> None:
    expected = trained_versions(tmp_path, name, FAMILIES[name])
    with started(forked, tmp_path, FAMILIES[name]) as address:
        check_versions(address, tmp_path, expected)


def test_an_engine_of_two_ranks_has_the_log_probs_of_the_trainer(forked, qwen3) -> None:
    folder, expected = qwen3
    with started(forked, folder, TARGETS, tp_size=2) as address:
        check_versions(address, folder, expected)


async def asked(session: aiohttp.ClientSession, address: EngineAddress, number: int) -> Any:
    """Return the answer to one of many long requests."""
    body = {
        "input_ids": [5, 6, 7 + number],
        "sampling_params": {"temperature": 1.0, "max_new_tokens": LONG, "ignore_eos": True},
    }
    async with session.post(f"{address.url}/generate", json=body) as response:
        return await response.json()


async def until_waiting(client: EngineClient, number: int) -> None:
    """Wait until this number of requests waits in the engine's queue, and others run."""
    async with asyncio.timeout(60):
        while True:
            (load,) = (await client.request("GET", "/v1/loads", None))["loads"]
            if load["num_waiting_reqs"] == number and load["num_running_reqs"]:
                return
            await asyncio.sleep(0.01)


async def replaced_amid_requests(address: EngineAddress, folder: Path) -> list[Any]:
    """Load version 1, send requests, and load version 2 while most requests are queued.

    After a load that fails, another load succeeds.

    Returns: the answers. The client of one further request disconnects, and one request is refused
    before generation.
    """
    await updated(address, folder, 1)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        asking = [asyncio.ensure_future(asked(session, address, one)) for one in range(ASKED)]
        refused = session.post(f"{address.url}/generate", json={"input_ids": [5] * 100_000})
        assert (await refused).status == 400
        client = EngineClient(address.url, KEY)
        await until_waiting(client, ASKED - RUNNING)
        asking.pop().cancel()
        async with asyncio.timeout(60):
            await updated(address, folder, 2)
        assert await client.adapters() == ["version-2"]
        assert await client.weight_version() == "2"
        with pytest.raises(RolloutError, match="load_lora_adapter"):
            await client.replace_adapter(str(folder / "nowhere"), version=3)
        assert await client.adapters() == []
        await updated(address, folder, 2)
        assert await client.adapters() == ["version-2"]
        return await asyncio.gather(*asking)


def test_an_adapter_is_replaced_while_its_requests_run_queue_disconnect_and_fail(
    forked, qwen3
) -> None:
    """Without rlpost SGLang would wait forever for requests that were aborted in its queue."""
    folder, expected = qwen3
    with started(forked, folder, TARGETS, max_running_requests=RUNNING) as address:
        answers = asyncio.run(replaced_amid_requests(address, folder))
        after = asyncio.run(scores(address, STEPS[0]))
    reasons = [answer["meta_info"]["finish_reason"]["type"] for answer in answers]
    lengths = [len(answer["output_ids"]) for answer in answers]
    assert reasons.count("abort") > 8
    assert 0 in lengths, "aborted while it waited"
    assert any(0 < length < LONG for length in lengths), "aborted amid its answer"
    assert difference(after, expected[2]) < 1e-4

"""The memory that a real SGLang engine releases while the trainer works, and its restoration."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
import torch

from rlpost.engines.engine import Engine
from rlpost.engines.engine_client import EngineClient
from tests.gpu.models import make_gpu_model
from tests.ports import free_port

pytestmark = [pytest.mark.timeout(900), pytest.mark.needs("sglang")]
KEY, GIB = "gpu-key", 2**30
PARTS = ("kv_cache", "cuda_graph", "weights")
# On CUDA the default backend of prefill graphs refuses a memory saver that covers graphs.
ON_CUDA = {
    "enable_memory_saver": True,
    "mem_fraction_static": 0.4,
    "cuda_graph_backend_prefill": "disabled",
}


@pytest.fixture(scope="module")
def free_before(device: str) -> int:
    """Return the free bytes of device memory before the engine starts."""
    return free_bytes(device)


@pytest.fixture(scope="module")
def engine(
    device: str, free_before: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineClient]:
    folder = tmp_path_factory.mktemp("engine")
    model = make_gpu_model(folder / "model")
    started = Engine(
        model_path=str(model),
        api_key=KEY,
        server_args=ON_CUDA if device == "cuda" else {},
        log_path=folder / "engine.log",
    )
    try:
        address = started.start("127.0.0.1", free_port(), deadline_s=600)
        yield EngineClient(address.url, KEY, timeout_s=120)
    finally:
        started.stop()


def free_bytes(device: str) -> int:
    """Return the free bytes of device memory; 0 without CUDA."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


async def greedy(client: EngineClient) -> list[int]:
    sampling = {"temperature": 0.0, "max_new_tokens": 8}
    answer = await client.request(
        "POST", "/generate", {"text": "12+34=", "sampling_params": sampling}
    )
    return answer["output_ids"]


def test_an_engine_releases_its_memory_and_generates_again_afterwards(
    engine: EngineClient, free_before: int, device: str, record_property
) -> None:
    async def away_and_back() -> tuple[list[int], float]:
        """Release and restore the engine's memory.

        Returns the free bytes while the engine holds everything, nothing, and everything again, and
        the seconds of both directions together.
        """
        found, started = [free_bytes(device)], time.monotonic()
        await engine.release_memory(PARTS)
        found.append(free_bytes(device))
        await engine.restore_memory(PARTS)
        seconds = time.monotonic() - started
        found.append(free_bytes(device))
        await engine.resume()
        return found, seconds

    async def whole() -> tuple[list[int], list[int], float]:
        await greedy(engine)
        free, seconds = await away_and_back()
        answer = await greedy(engine)  # its content does not matter: the weights are undefined
        return answer, free, seconds

    answer, (full, empty, full_again), seconds = asyncio.run(whole())
    assert len(answer) == 8
    if device == "cuda":
        held, left = free_before - full, free_before - empty
        record_property(
            "figure", f"{held / GIB:.1f} GiB held, {left / GIB:.1f} GiB while away, {seconds:.1f} s"
        )
        assert left < 0.3 * held, f"{left / GIB:.1f} of {held / GIB:.1f} GiB stay with the engine"
        assert full_again == pytest.approx(full, abs=GIB)

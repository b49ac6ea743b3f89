"""What reading cannot tell: memory that processes hold on a GPU, and what comes back of it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rlpost.extensions.planning.nccl_memory import CUDA_CONTEXT
from tests.contract.actor_ranks import run_ranks
from tests.contract.families import make_family
from tests.contract.local_layers import use_local_layers
from tests.gpu.gpu_ranks import share_unread
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
MIB, GB = 2**20, 10**9
STANDBY_LIMIT = 64 * MIB
PLANNED_SHARE = 1.25
"""A context may take this many times what the plan counts, which leaves a reserve of 5 %."""

STANDBY = """
import sys
from functools import partial

from rlpost.driver.startup import at_low_priority, make_actor
from tests.settings import rank_config

actor = at_low_priority(partial(make_actor, rank_config({model!r})))
import torch

print("ready", torch.cuda.is_initialized(), flush=True)
sys.stdin.read()
"""
CONTEXT = """
import sys

import torch

square = torch.ones(1024, 1024, device="cuda")
(square @ square).sum().item()
print("ready", torch.cuda.memory_reserved(), flush=True)
sys.stdin.read()
"""
SAVER = """
import torch
from torch_memory_saver import torch_memory_saver

with torch_memory_saver.region(tag="kept"):
    tensor = torch.full((64 * 2**20,), 7, dtype=torch.uint8, device="cuda")
torch_memory_saver.pause("kept")
torch_memory_saver.resume("kept")
print("ready", int(tensor.count_nonzero()), flush=True)
"""


@contextmanager
def beside(code: str) -> Iterator[str]:
    """Run a program until the end of the block; yield what it says when it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        said = next((line for line in process.stdout if line.startswith("ready ")), None)
        assert said is not None, f"it ended with exit code {process.wait(30)}"
        yield said.split()[1]
    finally:
        process.stdin.close()
        try:
            process.wait(30)
        finally:
            process.kill()


def used(device: str) -> int:
    """Bytes of the GPU that all processes hold; 0 without CUDA."""
    if device == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("facts") / "model"
    make_family(folder, "qwen3")
    return folder


def test_a_standby_has_no_cuda_context_and_no_gpu_memory(
    model: Path, device: str, record_property
) -> None:
    """Libraries of a rank may use CUDA when they are imported."""
    before = used(device)
    with beside(STANDBY.format(model=str(model))) as is_initialized:
        held = used(device) - before
    record_property("figure", f"{held / MIB:.0f} MiB")
    assert is_initialized == "False", "an import of a rank's libraries has started CUDA"
    assert held < STANDBY_LIMIT


@pytest.mark.needs(cuda=True)
def test_a_cuda_context_takes_what_the_plan_counts(device: str, record_property) -> None:
    before = used(device)
    with beside(CONTEXT) as reserved:
        held = used(device) - before - int(reserved)
    record_property("figure", f"{held / GB:.2f} GB, planned {CUDA_CONTEXT / GB:.2f} GB")
    assert 0 < held <= PLANNED_SHARE * CUDA_CONTEXT


@pytest.mark.parametrize(
    "is_read",
    [
        pytest.param(False, id="not read"),
        pytest.param(True, id="its reader was killed", marks=pytest.mark.needs("sglang")),
    ],
)
def test_memory_of_shared_buckets_comes_back_after_a_failed_update(
    model: Path, device: str, is_read: bool, record_property
) -> None:
    settings = rank_config(str(model), bf16=None, update_weight_buffer_size=40_000)
    (found,) = run_ranks(share_unread, 1, settings, before=use_local_layers, is_read=is_read)
    before, shared, after = found["bytes"]
    record_property("figure", f"{shared - before} bytes shared, {after - before} left")
    assert found["num_pieces"] == 2
    assert after <= before


@pytest.mark.needs("torch-memory-saver", cuda=True)
def test_memory_that_the_engines_memory_saver_brings_back_is_zero() -> None:
    """So parameters that no update sends are 0 after a release, for example scales of a cache."""
    import torch_memory_saver

    with torch_memory_saver.configure_subprocess(), beside(SAVER) as num_nonzero:
        assert num_nonzero == "0"


def test_copies_from_pinned_memory_are_at_least_as_fast(device: str, record_property) -> None:
    """The weights of an optimizer in host memory are copied to the GPU in each step."""
    has_cuda = device == "cuda"
    size = GB if has_cuda else 16 * MIB
    target = torch.empty(size, dtype=torch.uint8, device=device)
    rates = {}
    for is_pinned in (False, has_cuda):
        source = torch.ones(size, dtype=torch.uint8)
        source = source.pin_memory() if is_pinned else source
        seconds = []
        for _ in range(4):
            started = time.monotonic()
            target.copy_(source)
            if has_cuda:
                torch.cuda.synchronize()
            seconds.append(time.monotonic() - started)
        rates[is_pinned] = size / min(seconds) / GB
    assert target.cpu().equal(source.cpu())
    record_property("figure", " and ".join(f"{rate:.1f} GB/s" for rate in rates.values()))
    assert not has_cuda or rates[True] >= rates[False]

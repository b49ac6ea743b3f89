"""Ranks of which one fails in an exchange of whole tensors, one case after the other."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlpost.models.families import family
from rlpost.trainer.weights import whole_tensors
from rlpost.trainer.weights.box_exchange import BoxExchange
from rlpost.trainer.weights.exporter import Exporter
from rlpost.trainer.weights.folder_export import export_folder
from rlpost.trainer.weights.inventory import Groups, Held, Inventory
from rlpost.trainer.weights.safetensors_files import TensorFile
from rlpost.trainer.weights.shard_sources import ShardSources
from rlpost.trainer.weights.whole_tensors import WholeTensors, weights_hash
from tests.unit.trainer.weights.quantised_ranks import (
    DIMS,
    WORLD,
    Case,
    model,
    quantisation,
)

FAILING = 1
KILLED = 9
TIMEOUT = timedelta(minutes=10)
"""Of a collective, as a run has it: a rank that waits for a failed one exceeds the test's deadline."""
BUCKET_BYTES = 10**5
LOST = "model.layers.0.self_attn.o_proj.weight"


def disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("out of memory")


def not_listed(*_: object, **__: object) -> None:
    raise KeyError("decoder.layers.0")


@contextmanager
def second_bucket_fails() -> Iterator[None]:
    """Let this rank fail when it packs its second bucket."""
    pack = BoxExchange.pack

    def fails(exchange: BoxExchange, index: int, buffer: torch.Tensor) -> Any:
        return no_memory() if index == 1 else pack(exchange, index, buffer)

    with patch.object(BoxExchange, "pack", fails):
        yield


@contextmanager
def without_a_tensor() -> Iterator[None]:
    """Let this rank not have its shard of a tensor."""
    regions = ShardSources.__init__

    def without(sources: ShardSources, *args: Any, **options: Any) -> None:
        regions(sources, *args, **options)
        sources.regions = [one for one in sources.regions if one.tensor != LOST]

    with patch.object(ShardSources, "__init__", without):
        yield


FAILURES: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "disk full": (partial(patch.object, TensorFile, "write", disk_full), "export"),
    "no sync": (partial(patch.object, TensorFile, "close", disk_full), "export"),
    "no memory to pack": (second_bucket_fails, "export"),
    "no memory for a bucket": (
        partial(patch.object, whole_tensors._Buckets, "_allocate", no_memory),
        "hash",
    ),
    "no memory to hash": (partial(patch.object, whole_tensors, "_digest", no_memory), "hash"),
    "no memory to reserve": (partial(patch.object, ShardSources, "reserve", no_memory), "hash"),
    "no description": (partial(patch.object, ShardSources, "__init__", not_listed), "hash"),
    "a tensor missing": (without_a_tensor, "hash"),
    "no memory to join": (
        partial(patch.object, whole_tensors._Unfinished, "complete_with", no_memory),
        "to the first rank",
    ),
}
"""How this rank fails, and in which call."""
CASES = [Case("tensor", tensor=2), Case("pipeline", pipeline=2)]


def run(rank: int, port: int, folder: Path, results: Any) -> None:
    """Put what each rank raises in each case, and a hash after it; then let a rank die."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    where = {"init_method": f"tcp://127.0.0.1:{port}", "timeout": TIMEOUT}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, **where)  # type: ignore[arg-type]
    everyone, alone = dist.group.WORLD, [dist.new_group([one]) for one in range(WORLD)][rank]
    assert everyone is not None
    pick = lambda size: everyone if size > 1 else alone  # noqa: E731
    known = set(distributed_c10d._world.pg_map)
    for case in CASES:
        groups = Groups(pick(case.tensor), alone, pick(case.expert), pick(case.pipeline), TIMEOUT)
        inventory = Inventory(
            [model(rank, case)],
            family=family("Qwen3MoeForCausalLM"),
            dims=DIMS,
            groups=groups,
            tied=False,
        )
        calls = {
            "export": partial(export, inventory, folder, folder / case.name),
            "hash": partial(weights_hash, inventory, max_bytes=BUCKET_BYTES),
            "to the first rank": partial(to_first_rank, inventory),
        }
        for name, (fail, call) in FAILURES.items():
            with fail() if rank == FAILING else nullcontext():
                raised = raised_by(calls[call])
            left = set(distributed_c10d._world.pg_map) - known
            results.put((case.name, name, rank, raised, len(left), calls["hash"]()))
    inventory = tensor_parallel(rank, everyone, alone)
    gather_fails(inventory, rank, results)
    with patch.object(BoxExchange, "transfer", dies if rank == FAILING else BoxExchange.transfer):
        raised = raised_by(partial(weights_hash, inventory, max_bytes=BUCKET_BYTES))
    left = set(distributed_c10d._world.pg_map) - known
    results.put(("tensor", "killed", rank, raised, len(left), ""))
    os._exit(0)  # the world has a dead rank


def dies(*_: object) -> None:
    os._exit(KILLED)


def tensor_parallel(rank: int, everyone: dist.ProcessGroup, alone: dist.ProcessGroup) -> Inventory:
    groups = Groups(everyone, alone, alone, alone, TIMEOUT)
    chunks = [model(rank, CASES[0])]
    return Inventory(
        chunks, family=family("Qwen3MoeForCausalLM"), dims=DIMS, groups=groups, tied=False
    )


def gather_fails(inventory: Inventory, rank: int, results: Any) -> None:
    """Let the value of each weight fail on one rank, while both gather those that are computed."""
    sources = ShardSources(inventory, quantisation(), gathers=True)
    sources.reserve()
    assert sources.gathered
    names = [tensor.name for unit in sources.units for tensor in unit.tensors]
    no_value = PropertyMock(side_effect=MemoryError("out of memory"))
    with patch.object(Held, "value", no_value) if rank == FAILING else nullcontext():
        raised = raised_by(partial(sources.prepare, names))
    sources.prepare(names)  # both are in step
    results.put(("tensor", "gather", rank, raised, 0, ""))


def export(inventory: Inventory, template: Path, target: Path) -> None:
    export_folder(
        Exporter(inventory),
        target,
        template=template,
        shard_bytes=4 * 10**5,
        bucket_bytes=BUCKET_BYTES,
    )


def to_first_rank(inventory: Inventory) -> None:
    whole = WholeTensors(inventory)
    whole.to_first_rank(lambda tensors: None, max_bytes=BUCKET_BYTES)


def raised_by(act: Callable[[], object]) -> tuple[str, str, float]:
    """Return class and text of what ``act`` raises, and after how many seconds."""
    started = time.monotonic()
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - started
    return "", "nothing was raised", 0.0

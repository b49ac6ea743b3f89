"""Functions that ranks of ``actor_ranks`` run to show what their device holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpost.types import TrainSample
from tests.contract.actor_ranks import hash_of_saved, my_batch

PARTS = ("weights", "grads", "optimizer")


def leave_and_return(actor: Any, steps: Sequence[Sequence[TrainSample]]) -> dict[str, Any]:
    """Train a step, offload and restore everything, and train another step.

    Returns the hash of the weights before and after the offload, the loss of the second step, the
    bytes of each part that was offloaded, and the bytes that torch counted on the device before,
    during and after it (zeros without CUDA).
    """
    import torch

    def allocated() -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    actor.import_weights()
    actor.train_step(my_batch(actor, steps[0], max_tokens=None))
    hashes, bytes_held = [actor.weights_hash()], [allocated()]
    freed = actor.memory.offload(*PARTS)
    bytes_held.append(allocated())
    actor.memory.restore(*PARTS)
    hashes.append(actor.weights_hash())
    bytes_held.append(allocated())
    loss = actor.train_step(my_batch(actor, steps[1], max_tokens=None)).metrics["train/loss"]
    return {"hashes": hashes, "bytes": bytes_held, "freed": freed, "loss": loss}


def train_and_save(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Train all steps but the last, save, load the checkpoint, and train the last step.

    Returns weights and moments of the checkpoint, in the form of ``hash_of_saved``, and the metrics
    of the last step.
    """
    actor.import_weights()
    for samples in steps[:-1]:
        actor.train_step(my_batch(actor, samples, max_tokens=None))
    actor.save(folder, len(steps) - 1)
    saved = hash_of_saved(actor, folder=folder)
    metrics = actor.train_step(my_batch(actor, steps[-1], max_tokens=None)).metrics
    return {"saved": saved, "metrics": dict(metrics)}


def load_and_train(actor: Any, samples: Sequence[TrainSample], *, folder: str) -> dict[str, Any]:
    """Load a checkpoint as a resumed process; return its hash and the metrics of the first step."""
    saved = hash_of_saved(actor, folder=folder)
    metrics = actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics
    return {"saved": saved, "metrics": dict(metrics)}


def parent_of(actor: Any) -> int:
    """Return the id of the parent process."""
    import os

    return os.getppid()


def receive_on(
    device: str, backend: str, port: int, group_name: str, plan: Sequence[Any], results: Any
) -> None:
    """Receive a broadcast as an engine does, in a process outside the trainer's world.

    Joins the group as SGLang does, receives every bucket on ``device`` and puts {name: array of
    bytes} into ``results``.
    """
    import os

    os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang sets it in its own process
    from datetime import timedelta

    import torch
    from torch.distributed.distributed_c10d import (
        Backend,
        PrefixStore,
        _new_process_group_helper,
        _world,
        rendezvous,
    )

    from common.attempt import attempt_secret
    from common.torch_store import replace_rendezvous

    if device != "cpu":
        torch.cuda.set_device(device)
    replace_rendezvous(attempt_secret())
    timeout = timedelta(seconds=90)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 1, 2, timeout=timeout))
    store.set_timeout(timeout)
    options: dict[str, Any] = {
        "group_name": group_name,
        "backend_options": None,
        "timeout": timeout,
    }
    group, _ = _new_process_group_helper(
        2, 1, [], Backend(backend), PrefixStore(group_name, store), **options
    )
    # The helper leaves it to its caller to register the ranks of the group.
    _world.pg_group_ranks[group] = {0: 0, 1: 1}
    found: dict[str, Any] = {}
    for bucket in plan:
        numbers = [torch.Size(shape).numel() for shape in bucket.shapes]
        sizes = [
            n * getattr(torch, dtype).itemsize
            for n, dtype in zip(numbers, bucket.dtypes, strict=True)
        ]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        torch.distributed.broadcast(flat, group=group, group_src=0)
        found |= {
            name: part.cpu().numpy()
            for name, part in zip(bucket.names, flat.split(sizes), strict=True)
        }
    results.put(found)
    torch.distributed.destroy_process_group(group)

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


READER = """
import sys

from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

monkey_patch_torch_reductions()
opened = MultiprocessingSerializer.deserialize(sys.argv[1])
print("opened", opened["flattened_tensor"].sum().item(), flush=True)
sys.stdin.read()
"""


def share_unread(actor: Any, *, is_read: bool) -> dict[str, Any]:
    """Share two buckets as for an update that fails, and release them.

    ``is_read``: an engine's process has opened the second one and is killed. Returns the bytes that
    torch counted on the device before, then, and afterwards, and the number of buffers.
    """
    import subprocess
    import sys

    import torch

    def allocated() -> int:
        return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    actor.import_weights()
    found = [allocated()]
    handles = [actor.share_bucket(index) for index in range(2)]
    if is_read:
        reader = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", READER, handles[1]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert reader.stdout is not None
        assert any(line.startswith("opened ") for line in reader.stdout)
        reader.kill()
        reader.wait()
    found.append(allocated())
    num_pieces = len(actor.sharing.pieces)
    actor.sharing.release()
    found.append(allocated())
    return {"bytes": found, "num_pieces": num_pieces}


def send_to_a_peer_that_leaves(actor: Any, *, port: int, group_name: str) -> tuple[str, float]:
    """Broadcast all buckets to a peer that takes one; return the error and the seconds it took."""
    import time
    from datetime import timedelta

    from rlpost.errors import SyncError
    from rlpost.trainer import device

    actor.import_weights()
    actor.broadcast.timeout = timedelta(seconds=60)
    actor.broadcast.connect("127.0.0.1", port, 1, f"{group_name}-0", 60.0)
    said, started = "", time.monotonic()
    try:
        for index in range(len(actor.buckets)):
            actor.send_bucket(index)
    except SyncError as error:
        said = str(error)
    device.synchronise()  # no kernel of the broadcast is left
    return said, time.monotonic() - started


def train_and_save(
    actor: Any, steps: Sequence[Sequence[TrainSample]], *, folder: str
) -> dict[str, Any]:
    """Train all steps but the last, save, load the checkpoint, and train the last step.

    Returns weights and moments of the checkpoint, in the form of ``hash_of_saved``, the metrics of
    the last step, and whether all weights of an optimizer in host memory are pinned.
    """
    from rlpost.trainer.torch_dist.optimizer_state import inner

    actor.import_weights()
    for samples in steps[:-1]:
        actor.train_step(my_batch(actor, samples, max_tokens=None))
    actor.save(folder, len(steps) - 1)
    saved = hash_of_saved(actor, folder=folder)
    metrics = actor.train_step(my_batch(actor, steps[-1], max_tokens=None)).metrics
    on_host = [
        weight
        for one in inner(actor.optimizer)
        for weight in getattr(one.optimizer, "cpu_copys_map_gpu_param", ())
    ]
    is_pinned = all(weight.is_pinned() for weight in on_host)
    return {"saved": saved, "metrics": dict(metrics), "is_pinned": is_pinned}


def load_and_train(actor: Any, samples: Sequence[TrainSample], *, folder: str) -> dict[str, Any]:
    """Load a checkpoint as a resumed process; return its hash and the metrics of the first step."""
    saved = hash_of_saved(actor, folder=folder)
    metrics = actor.train_step(my_batch(actor, samples, max_tokens=None)).metrics
    return {"saved": saved, "metrics": dict(metrics)}


def rank_on_its_own_gpu(
    pipe: Any,
    rank: int,
    world_size: int,
    port: int,
    settings: Any,
    function: Any,
    kwargs: dict[str, Any],
) -> None:
    """Run a rank that sees one GPU, as in a run, with memory of NCCL that can be released."""
    import os

    from tests.contract.actor_ranks import _rank_main

    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    os.environ["NCCL_CUMEM_ENABLE"] = "1"
    _rank_main(pipe, None, None, function, (rank, world_size, "127.0.0.1", port), settings, kwargs)


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

"""Offload the trainer's device memory while engines generate on the same GPUs, and onload it.

Input: the model's DDP chunks and the optimizer. Output: three parts that are offloaded and onloaded
by name: ``weights``, ``grads`` and ``optimizer``. Invariant: after onload every tensor is bitwise
unchanged (gradients: zeros) and every view of it is valid, because storage is resized in place and
no tensor is replaced (as Megatron does with its own buffers, ``param_and_grad_buffer.py``). With
``--offload-nccl`` NCCL has no buffers while all parts are offloaded.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from rlpost.errors import MemoryHeld
from rlpost.trainer import device
from rlpost.trainer.parallel import Communicators

logger = logging.getLogger(__name__)

WEIGHTS, GRADS, OPTIMIZER = "weights", "grads", "optimizer"
PIECE_BYTES = 256 * 1024**2
FREE_S, RESERVE_S, FREE_POLL_S = 60.0, 5.0, 0.05
"""Deadline until device memory is free for a part, and for a reserve; interval between two checks."""


class DeviceMemory:
    """This rank's device memory, in parts that can be offloaded."""

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        optimizer: object,
        critic: tuple[Sequence[torch.nn.Module], object] | None = None,
        *,
        frozen: Sequence[torch.nn.Module] = (),
        communicators: Communicators | None = None,
    ) -> None:
        """Create the parts.

        Args:
            model: chunks of the policy.
            optimizer: of the policy.
            critic: chunks and optimizer of a critic in this rank. Engines get none of its weights,
                so these are offloaded with the optimizers.
            frozen: modules without gradients, which are offloaded with the weights.
            communicators: those of this rank, if NCCL's buffers are offloaded too.
        """
        chunks, adam = critic or ((), None)
        self._find: Mapping[str, Callable[[], Iterable[torch.Tensor]]] = {
            WEIGHTS: lambda: _weights([*model, *frozen]),
            GRADS: lambda: _grads([*model, *chunks]),
            OPTIMIZER: lambda: itertools.chain(
                _optimizer_tensors(optimizer), _weights(chunks), _optimizer_tensors(adam)
            ),
        }
        self._chunks = (*model, *chunks)
        self.lock = threading.RLock()
        """Held while memory moves; hold it to read tensors from another thread."""
        self._communicators = communicators
        self._offloaded: dict[str, list[tuple[torch.UntypedStorage, HostCopy | None, int]]] = {}
        self._reserve = 0  # most bytes that a step took in addition to the parts

    def offload(self, *parts: str) -> dict[str, int]:
        """Copy parts to host memory (gradients are dropped) and free their device memory.

        Parts that are already offloaded are skipped. Collective with ``communicators``.

        Returns:
            Bytes of each part that was offloaded now.

        Raises:
            ConfigError: NCCL does not release its buffers.
        """
        device.synchronise()
        if GRADS in parts and not self._offloaded:  # at the end of a step
            self._reserve = max(self._reserve, device.passing_memory())
        with self.lock:
            freed = {part: self._offload(part) for part in parts if part not in self._offloaded}
            if WEIGHTS in freed:
                drop_fp8_copies(self._chunks)
        if self._communicators is not None and len(self._offloaded) == len(self._find):
            freed["buffers of NCCL"] = self._communicators.suspend()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _report("offloaded", freed)
        return freed

    def restore(self, *parts: str) -> dict[str, int]:
        """Onload parts; those on the device are skipped. Return the bytes of each onloaded part.

        Collective with ``communicators``.

        Before gradients are onloaded, memory has to be free for a step as well: activations are
        allocated next, and nothing waits for those.

        Raises:
            MemoryHeld: another process has not freed the memory within ``FREE_S``.
        """
        missing = [part for part in parts if part in self._offloaded]
        num_bytes = sum(size for part in missing for _, _, size in self._offloaded[part])
        if missing and self._communicators is not None:
            num_bytes += self._communicators.num_bytes
        reserve = self._reserve if GRADS in missing else 0
        wait_until_free(num_bytes, " and ".join(missing), reserve=reserve)
        if missing and self._communicators is not None:
            self._communicators.resume()
        with self.lock:
            taken = {part: self._restore(part) for part in parts if part in self._offloaded}
            device.synchronise()
        _report("restored", taken)
        return taken

    def tensors(self, part: str) -> Iterable[torch.Tensor]:
        """Return the tensors of a part, views of one storage included."""
        return self._find[part]()

    def resident(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a flat tensor [N], or its copy in host memory if it is offloaded.

        Requires ``lock``.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() or not tensor.numel():
            return tensor
        offloaded = itertools.chain.from_iterable(self._offloaded.values())
        hosts = {_id_of(each): host for each, host, _ in offloaded}
        host = hosts.get(_id_of(storage))
        assert host is not None, "this tensor has no memory, but offload did not free it"
        begin = tensor.storage_offset() * tensor.itemsize
        return host.part(begin, begin + tensor.nbytes).view(tensor.dtype)

    def _offload(self, part: str) -> int:
        found = []
        # In fp32 the optimizer's tensors are views of the weights, which are another part.
        shared = storages(self._find[WEIGHTS]()) if part == OPTIMIZER else []
        keep = set(map(_id_of, shared))
        for storage in storages(self._find[part]()):
            if _id_of(storage) in keep:
                continue
            size = storage.nbytes()
            host = None if part == GRADS else HostCopy(bytes_of(storage))
            storage.resize_(0)
            found.append((storage, host, size))
        self._offloaded[part] = found
        return sum(size for _, _, size in found)

    def _restore(self, part: str) -> int:
        taken = 0
        for storage, host, size in self._offloaded.pop(part):
            storage.resize_(size)
            if host is None:
                bytes_of(storage).zero_()
            else:
                host.fill(bytes_of(storage))
            taken += size
        return taken


def wait_until_free(num_bytes: int, what: str, *, reserve: int = 0) -> None:
    """Wait until this rank's GPU has memory for ``what``; return at once on a CPU.

    An engine of several GPUs answers that it has released its memory when its first rank has
    (SGLang's ``release_memory_occupation`` has no barrier after the release), and memory of a
    killed process is free only when the driver has ended its context.

    Args:
        num_bytes: what is allocated next.
        what: its name in messages.
        reserve: bytes for what follows. Without them this returns after ``RESERVE_S``.

    Raises:
        MemoryHeld: ``num_bytes`` are not free after ``FREE_S``.
    """
    started = time.monotonic()
    while num_bytes and (free := device.free_memory()) is not None and free < num_bytes + reserve:
        waited = time.monotonic() - started
        rank = dist.get_rank() if dist.is_initialized() else 0
        needs = f"rank {rank}: {what} need {num_bytes / 1e9:.1f} GB of its GPU"
        if free >= num_bytes and waited > RESERVE_S:
            logger.warning(
                "%s, and the step that follows took %.1f GB before; %.1f GB are free after %.0f s",
                *(needs, reserve / 1e9, free / 1e9, RESERVE_S),
            )
            return
        if waited > FREE_S:
            raise MemoryHeld(
                f"{needs}, and {free / 1e9:.1f} GB are free after {FREE_S:.0f} s: another process "
                "holds the rest",
                rank,
            )
        time.sleep(FREE_POLL_S)


class HostCopy:
    """Bytes of a storage in host memory, in pieces; pinned with CUDA.

    torch rounds each pinned allocation up to a power of two (CachingHostAllocator): one copy of
    10.5 GB would use 16 GiB on every rank. Here only the last piece is rounded.
    """

    def __init__(self, values: torch.Tensor, *, piece_bytes: int = PIECE_BYTES) -> None:
        """Copy ``values``: [num_bytes], uint8."""
        pinned = torch.cuda.is_available()
        self._piece_bytes = piece_bytes
        self._pieces = [
            torch.empty(len(part), dtype=torch.uint8, pin_memory=pinned).copy_(part)
            for part in values.split(piece_bytes)
        ]

    def fill(self, values: torch.Tensor) -> None:
        """Copy the bytes into ``values`` [N], uint8; asynchronous on a GPU."""
        for piece, part in zip(self._pieces, values.split(self._piece_bytes), strict=True):
            part.copy_(piece, non_blocking=True)

    def part(self, begin: int, end: int) -> torch.Tensor:
        """Bytes ``begin`` to ``end``, [N] uint8: a view if they are in one piece, else a copy."""
        first, last = begin // self._piece_bytes, (end - 1) // self._piece_bytes
        held = self._pieces[first] if first == last else torch.cat(self._pieces[first : last + 1])
        offset = first * self._piece_bytes
        return held[begin - offset : end - offset]


def _weights(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for parameter in chunk.parameters():
            yield parameter.data


def drop_fp8_copies(chunks: Sequence[torch.nn.Module]) -> None:
    """Free TransformerEngine's copies of weights in FP8; the next pass makes them again.

    A pass begins with ``set_is_first_microbatch`` (``schedules.py`` of megatron-core 0.16.1), and
    a linear layer then looks for no copy (``module/base.py`` of TransformerEngine 2.11).
    """
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _grads(model: Sequence[torch.nn.Module]) -> Iterator[torch.Tensor]:
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data


def _optimizer_tensors(optimizer: object) -> Iterator[torch.Tensor]:
    """State and main weights of every optimizer in a chain."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = getattr(one, "optimizer", None)
        if inner is None:  # a rank without weights of this kind
            continue
        for group in inner.param_groups:
            yield from (parameter.data for parameter in group["params"])
        for state in inner.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the unique storages of tensors of any shape on this rank's device.

    On a GPU, tensors in host memory are ignored.
    """
    here = device.current()
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if tensor.device.type == here.type and storage.nbytes() and tensor.dim():
            found.setdefault(_id_of(storage), storage)
    return list(found.values())


def _id_of(storage: torch.UntypedStorage) -> int:
    """Return an id that survives a resize; torch creates a new Python object at each access."""
    return storage._cdata


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of a storage: [num_bytes], uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _report(what: str, sizes: Mapping[str, int]) -> None:
    if sizes:
        parts = ", ".join(f"{part} {size / 2**20:.1f} MiB" for part, size in sizes.items())
        logger.info(
            "%s %s; device memory in use %.1f MiB", what, parts, device.memory_in_use() / 2**20
        )

"""A plain copy of tensors to another process, the reference for ``benchmarks.weight_sync``."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from tests.ports import free_port

HAS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if HAS_CUDA else torch.device("cpu")
BACKEND = "nccl" if HAS_CUDA else "gloo"


def reader(
    orders: Connection, memory: torch.Tensor, device: torch.device, port: int | None, path: str
) -> None:
    """Run the other process: read the bytes over the medium of each order, then confirm.

    Without a ``port`` nothing is broadcast.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if port is not None:
        dist.init_process_group(
            BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2
        )
    own = torch.empty(len(memory), dtype=torch.uint8, device=device)
    from_disk = (
        own
        if device.type == "cpu"
        else torch.empty(len(memory), dtype=torch.uint8, pin_memory=True)
    )
    while (order := orders.recv()) is not None:
        medium, size = order
        if medium == "memory":
            own[:size].copy_(memory[:size])
        elif medium == "broadcast":
            dist.broadcast(own[:size], src=0)
        else:
            with open(path, "rb") as file:
                file.readinto(from_disk[:size].numpy())
            if from_disk is not own:
                own[:size].copy_(from_disk[:size])
        synchronise()
        orders.send(True)


def synchronise() -> None:
    """Wait for the device, whose work is asynchronous."""
    if HAS_CUDA:
        torch.cuda.synchronize()


class PlainCopy:
    """Moves tensors of bytes to another process, whose device is ``device``."""

    def __init__(
        self, flats: list[torch.Tensor], path: Path, *, device: torch.device, broadcasts: bool
    ) -> None:
        self.flats = flats
        self.path = path
        self.broadcasts = broadcasts
        torch.multiprocessing.set_sharing_strategy("file_system")
        self.memory = torch.empty(max(map(len, self.flats)), dtype=torch.uint8, device=DEVICE)
        if not HAS_CUDA:
            self.memory.share_memory_()
        self.orders, theirs = multiprocessing.Pipe()
        port = free_port() if broadcasts else None
        arguments = (theirs, self.memory, device, port, str(path))
        self.process = multiprocessing.get_context("spawn").Process(
            target=reader, args=arguments, daemon=True
        )
        self.process.start()
        if broadcasts:
            dist.init_process_group(
                BACKEND, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2
            )

    def move(self, medium: str) -> None:
        for flat in self.flats:
            if medium == "memory":
                self.memory[: len(flat)].copy_(flat)
                synchronise()  # the other process's stream does not wait for this one
            elif medium == "disk":
                self.path.unlink(missing_ok=True)
                with self.path.open("wb") as file:
                    file.write(memoryview(flat.cpu().numpy()))
            self.orders.send((medium, len(flat)))
            if medium == "broadcast":
                dist.broadcast(flat, src=0)
            self.orders.recv()

    def close(self) -> None:
        self.orders.send(None)
        self.process.join()
        if self.broadcasts:
            dist.destroy_process_group()

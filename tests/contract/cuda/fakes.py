"""Fakes of CUDA and of a world of ranks, in one process that builds a model and computes nothing.

Only ``observations.py`` imports this, because the import changes the CPU stand-in for CUDA in the
whole process. ``faked_cuda``: torch reports that CUDA is available, and whatever the trainer,
Megatron-core and TransformerEngine put on the GPU is on the device "meta", so that tensors left on
the CPU can be found.
``faked_world``: any rank of a world of any size; its groups exist and its collectives do nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from rlpost.extensions.on_cpu import megatron as megatron_on_cpu
from rlpost.trainer.attention_backends import Gpu

# Before the first import of Megatron-core, whose optimizers compare Tensor.type() with these names.
megatron_on_cpu.TYPE_NAMES.update(
    {name: name.replace(".cuda.", ".meta.") for name in megatron_on_cpu.TYPE_NAMES}
)

from rlpost.trainer import device, parallel  # noqa: E402

META = torch.device("meta")


H100 = (9, 0)


class OnMeta(TorchFunctionMode):
    """Creates on "meta" what a library creates on "cuda" itself, as TransformerEngine does."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with "meta" for every "cuda"."""
        if func is torch.Tensor.cuda:
            return args[0].to(META)
        given = {name: _on_meta(value) for name, value in (kwargs or {}).items()}
        return func(*map(_on_meta, args), **given)


def _on_meta(value: Any) -> Any:
    is_device = isinstance(value, str | torch.device)
    return META if is_device and str(value).partition(":")[0] == "cuda" else value


@contextmanager
def faked_cuda(
    capability: tuple[int, int] = H100, *, has_flash_attention: bool = False
) -> Iterator[None]:
    """Make CUDA available within the block, with "meta" as the GPU."""
    gpu = Gpu(capability, has_flash_attention)
    properties = SimpleNamespace(
        name="H100", major=capability[0], minor=capability[1], multi_processor_count=132
    )
    with ExitStack() as stack:
        for name, stand_in in {
            "is_available": lambda: True,
            "Stream": lambda: None,
            "set_device": lambda device: None,
            "current_device": lambda: 0,
            "get_device_capability": lambda *_: capability,
            "get_device_properties": lambda *_: properties,
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        stack.enter_context(OnMeta())
        stack.enter_context(mock.patch.object(device, "gpu", lambda: gpu))
        stack.enter_context(mock.patch.object(device, "current", lambda: META))
        yield


@contextmanager
def faked_world(rank: int, size: int) -> Iterator[None]:
    """Make ``parallel.initialise`` join a world of ``size`` that has only this process."""
    join, new_group = dist.init_process_group, dist.new_group

    def init_process_group(*_: Any, **__: Any) -> None:
        join("fake", rank=rank, world_size=size, store=FakeStore())

    def all_gather_object(found: list[Any], mine: Any, group: Any = None) -> None:
        """Other ranks send the same object, unless ``found`` already holds theirs."""
        found[:] = [mine if said is None else said for said in found]
        found[rank if group is None else group.rank()] = mine

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **(options | {"backend": "fake"}))

    with ExitStack() as stack:
        stack.callback(parallel.destroy)
        stack.enter_context(mock.patch.object(parallel, "open_store", lambda *_, **__: FakeStore()))
        stack.enter_context(mock.patch.object(parallel, "join_ranks", lambda *_: None))
        stack.enter_context(mock.patch.object(dist, "init_process_group", init_process_group))
        stack.enter_context(mock.patch.object(dist, "all_gather_object", all_gather_object))
        stack.enter_context(mock.patch.object(dist, "new_group", fake_group))
        yield


@contextmanager
def listening(name: str) -> Iterator[list[str]]:
    """Collect the warnings of a logger."""
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler, logger = Kept(logging.WARNING), logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)

"""CPU stand-in for the CUDA calls of megatron-core 0.16. A no-op on a machine with CUDA.

Input: imports of ``megatron.core`` modules. Output: the same modules, usable on a CPU with gloo.
``install`` adds one import hook. Its changes are confined to those modules:

1. Their global name ``torch`` is a proxy. It replaces a few ``torch.cuda`` calls, and factories
   with ``device="cuda"``; all other names are those of torch.
2. The optimizers compare ``Tensor.type()`` with names such as ``torch.cuda.FloatTensor``. These
   constants are rewritten in the modules' code (in memory; the bytecode cache keeps the original).
3. ``megatron.core.jit`` compiles nothing, the random-state helpers use the CPU generator, the split
   sizes of the experts' all-to-all become numbers, shards of unequal length are broadcast, and
   the rotary embedding of a context-parallel rank is selected by slicing.
4. One method calls ``Tensor.cpu()`` instead of ``Tensor.cuda()``.

Invariant: torch and its classes are not modified, and other libraries are not affected. A patched
``torch.empty_like`` would leave buffers of transformers' models uninitialised, without an error.

This module becomes obsolete once megatron-core uses ``torch.accelerator`` (or the device of a
parameter) instead of CUDA.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

PACKAGE = "megatron.core"
FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "tensor",
    "zeros",
    "zeros_like",
)
# as Tensor.type() spells them
TYPE_NAMES = {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}


def install() -> None:
    """Install the import hook; call it before the first import of ``megatron.core``. Idempotent.

    Raises:
        RuntimeError: ``megatron.core`` was imported before, on a machine without CUDA.
    """
    if any(isinstance(finder, _MegatronFinder) for finder in sys.meta_path):
        return
    if PACKAGE in sys.modules and not _has_cuda():
        raise RuntimeError(
            "megatron.core was imported before rlpost.trainer; import rlpost.trainer first on a CPU"
        )
    sys.meta_path.insert(0, _MegatronFinder())


def _device() -> torch.device:
    """Return what replaces "cuda": the CPU, or the meta device of a rehearsal."""
    from rlpost.trainer import device

    return device.current()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


class _MegatronFinder(MetaPathFinder):
    """Finds modules of megatron.core as Python does, and loads them with ``_MegatronLoader``."""

    proxy: types.ModuleType | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        if _has_cuda():
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            self.proxy = self.proxy or _torch_proxy()
            spec.loader = _MegatronLoader(spec.loader.name, spec.loader.path, self.proxy)
        return spec


class _MegatronLoader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, proxy: types.ModuleType) -> None:
        super().__init__(fullname, path)
        self.proxy = proxy

    def get_code(self, fullname: str) -> types.CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else _with_cpu_type_names(code)

    def exec_module(self, module: types.ModuleType) -> None:
        import torch

        super().exec_module(module)
        if module.__dict__.get("torch") is torch:
            module.torch = self.proxy  # type: ignore[attr-defined]
        if adapt := _ADAPTERS.get(module.__name__):
            adapt(module)


def _with_cpu_type_names(code: types.CodeType) -> types.CodeType:
    """Replace the names of CUDA tensor types in a code object, including nested ones."""
    return code.replace(co_consts=tuple(map(_constant, code.co_consts)))


def _constant(constant: object) -> object:
    if isinstance(constant, types.CodeType):
        return _with_cpu_type_names(constant)
    if isinstance(constant, tuple):
        return tuple(map(_constant, constant))
    return TYPE_NAMES.get(constant, constant) if isinstance(constant, str) else constant


class _Proxy(types.ModuleType):
    """A module with some names replaced; all others are those of the real module."""

    def __init__(self, real: types.ModuleType, own: Mapping[str, object]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real)

    def __getattr__(self, name: str) -> object:
        return getattr(self.__dict__["_real"], name)


def _torch_proxy() -> types.ModuleType:
    import torch

    def on_cpu(factory: Callable[..., object]) -> Callable[..., object]:
        def make(*args: object, **kwargs: object) -> object:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = _device()
            kwargs.pop("pin_memory", None)
            return factory(*args, **kwargs)

        return make

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    # also an event
    no_stream = types.SimpleNamespace(wait_stream=nothing, wait=nothing, synchronize=nothing)
    no_stream.record_event = lambda *args: no_stream
    cuda = _Proxy(
        torch.cuda,
        {
            "current_device": _device,
            "synchronize": nothing,
            "empty_cache": nothing,
            "manual_seed": lambda seed: torch.manual_seed(seed),
            "get_rng_state": lambda *args: torch.get_rng_state(),
            "set_rng_state": lambda state, *args: torch.set_rng_state(state),
            "Stream": lambda *args, **kwargs: no_stream,  # a CPU has one order of execution
            "current_stream": lambda *args: no_stream,
            "default_stream": lambda *args: no_stream,
            "stream": lambda *args: contextlib.nullcontext(),
        },
    )
    return _Proxy(
        torch, {"cuda": cuda, **{name: on_cpu(getattr(torch, name)) for name in FACTORIES}}
    )


def _adapt_jit(module: types.ModuleType) -> None:
    """Make the decorators of later imports no-ops; torch.compile would need a C++ compiler."""
    module.disable_jit_fuser()


def _adapt_random(module: types.ModuleType) -> None:
    """Replace two helpers that access CUDA generators through private names of torch."""
    import torch

    module._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()  # type: ignore[attr-defined]
    module._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _adapt_moe(module: types.ModuleType) -> None:
    """Convert split sizes to numbers.

    Megatron does so only for tensors on a GPU; gloo and NCCL reject tensors.
    """
    import torch

    original = module.maybe_move_tensor_to_cpu  # type: ignore[attr-defined]

    def on_host(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.numpy()
        return original(tensor, as_numpy, record_stream)

    module.maybe_move_tensor_to_cpu = on_host  # type: ignore[attr-defined]


def _adapt_language_module(module: types.ModuleType) -> None:
    """Replace ``Tensor.cuda()`` by ``Tensor.cpu()``.

    Megatron calls it for embeddings that are tied across pipeline stages.
    """
    method = module.LanguageModule.setup_embeddings_and_output_layer  # type: ignore[attr-defined]
    names = tuple("cpu" if name == "cuda" else name for name in method.__code__.co_names)
    method.__code__ = method.__code__.replace(co_names=names)


def _adapt_mappings(module: types.ModuleType) -> None:
    """Gather and scatter shards of unequal length, which gloo does not support.

    Expert-tensor parallelism needs them.
    """
    import torch.distributed as dist

    def all_gather(parts: list[torch.Tensor], mine: torch.Tensor, group: dist.ProcessGroup) -> None:
        parts[group.rank()].copy_(mine)
        for rank, part in enumerate(parts):
            if part.numel():
                dist.broadcast(part, group=group, group_src=rank)

    def reduce_scatter(
        mine: torch.Tensor, parts: list[torch.Tensor], group: dist.ProcessGroup
    ) -> None:
        for rank, part in enumerate(parts):
            if part.numel():
                summed = part.clone()
                dist.reduce(summed, group=group, group_dst=rank)
                if rank == group.rank():
                    mine.copy_(summed)

    replacements = {"all_gather": all_gather, "reduce_scatter": reduce_scatter}
    module.torch = _Proxy(module.torch, {"distributed": _Proxy(dist, replacements)})  # type: ignore[attr-defined]


def _adapt_rotary(module: types.ModuleType) -> None:
    """Select the chunks of a context-parallel rank without ``Tensor.cuda()``.

    YaRN's rotary embedding does so when it is built, for a table that only its fused kernel reads.
    """
    import torch

    def on_this_rank(
        table: torch.Tensor, seq_dim: int, cp_group: dist.ProcessGroup
    ) -> torch.Tensor:
        rank, num_chunks = cp_group.rank(), 2 * cp_group.size()
        chunks = table.chunk(num_chunks, dim=seq_dim)
        return torch.cat([chunks[rank], chunks[num_chunks - 1 - rank]], dim=seq_dim)

    module.get_pos_emb_on_this_cp_rank = on_this_rank  # type: ignore[attr-defined]


_ADAPTERS: dict[str, Callable[[types.ModuleType], None]] = {
    "megatron.core.jit": _adapt_jit,
    "megatron.core.models.common.language_module.language_module": _adapt_language_module,
    "megatron.core.models.common.embeddings.rope_utils": _adapt_rotary,
    "megatron.core.tensor_parallel.mappings": _adapt_mappings,
    "megatron.core.tensor_parallel.random": _adapt_random,
    "megatron.core.transformer.moe.moe_utils": _adapt_moe,
}

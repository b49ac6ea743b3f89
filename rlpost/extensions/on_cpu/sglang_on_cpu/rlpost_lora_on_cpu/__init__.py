"""LoRA adapters on a machine without CUDA, as a plugin of SGLang. See ../README.md.

SGLang's LoRA backend in plain torch (``lora/backend/torch_backend.py``) allocates its small tensors in
pinned memory, so that copies to a GPU are asynchronous. torch refuses that where no accelerator exists.
Within the functions below a request for pinned memory gets ordinary memory.

It becomes unnecessary when SGLang asks for pinned memory only where ``is_pin_memory_available`` is true.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode

MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"
PINNING = ("init_state", "load_lora_adapter", "fetch_new_loras", "prepare_lora_batch")
"""Methods that allocate pinned memory, directly or in functions that they call."""


class Unpinned(TorchFunctionMode):
    """A context in which torch does not pin memory."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Call ``func`` without its request for pinned memory."""
        if func is torch.Tensor.pin_memory:
            return args[0]
        given = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **given)


def without_pinning(original: Callable[..., object], *args: object, **options: object) -> object:
    """Call a function of SGLang; without CUDA nothing in it is pinned."""
    if torch.cuda.is_available():
        return original(*args, **options)
    with Unpinned():
        return original(*args, **options)


def register() -> None:
    """Register the plugin; SGLang calls this in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name in PINNING:
        HookRegistry.register(f"{MANAGER}.{name}", without_pinning, HookType.AROUND)

"""Stand-in for SGLang's compiled kernels: names can be imported, not called. See ../README.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch

TAKEN_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
"""Operators of torch that ``models/qwen3_5.py`` takes when it is imported.

The processor of images of all Qwen models imports it (``multimodal/processors/qwen_vl.py``).
"""


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):  # the import system asks for __path__ and the like
        raise AttributeError(name)

    def refuse(*_args: object, **_kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} needs SGLang's compiled kernels; this server runs without CUDA"
        )

    return refuse


for _name in TAKEN_AT_IMPORT:
    if not hasattr(torch.ops.sgl_kernel, _name):
        setattr(torch.ops.sgl_kernel, _name, __getattr__(_name))

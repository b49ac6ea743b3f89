"""Packages of SGLang that Megatron-core imports in every rank, where they are not used. No torch.

Megatron's ``fused_a2a`` imports ``deep_ep`` wherever it is installed, also for dense models. On a
machine with a GPU that import runs native code and asserts that a CUDA toolkit and a single NCCL
are there; Megatron catches ImportError alone, so a rank would end with a bare AssertionError. Its
contexts for inference import ``flashinfer``, which takes seconds. SGLang's requirements install
both everywhere, so they are hidden from ranks that do not use them.

Input: ``VARIABLE``, which the driver sets for ranks that dispatch with DeepEP. Output: ``deep_ep``
as Megatron-core 0.16 expects it, or as if it were not installed; ``deep_ep_problem`` says why.
"""

from __future__ import annotations

import importlib
import os
import sys

VARIABLE = "RLPOST_DEEP_EP"
"""1 in ranks with ``--moe-token-dispatcher-type flex``."""

UNUSED = ("flashinfer",)
"""Hidden from every process that imports the trainer."""
_problems: list[str] = []


def prepare() -> None:
    """Hide the packages that are not used; call it before Megatron's import.

    ``deep_ep`` is imported if ``VARIABLE`` is 1.

    Megatron-core 0.16.1 imports ``EventOverlap`` from ``deep_ep.utils``, where DeepEP 2 no longer
    has it.
    """
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    if "deep_ep" in sys.modules:
        return
    if os.environ.get(VARIABLE) != "1":
        sys.modules["deep_ep"] = None  # type: ignore[assignment]  # as if it were not installed
        return
    try:
        package = importlib.import_module("deep_ep")
        utils = importlib.import_module("deep_ep.utils")
    except (ImportError, AssertionError, OSError, RuntimeError) as error:
        _problems.append(str(error) or f"a bare {type(error).__name__}: no CUDA toolkit is found")
        sys.modules["deep_ep"] = None  # type: ignore[assignment]
        return
    if not hasattr(utils, "EventOverlap") and hasattr(package, "EventOverlap"):
        utils.EventOverlap = package.EventOverlap  # type: ignore[attr-defined]


def deep_ep_problem() -> str | None:
    """Return why Megatron has no DeepEP in this process; None if it has."""
    from megatron.core.transformer.moe import fused_a2a

    if fused_a2a.HAVE_DEEP_EP:
        return None
    if _problems:
        return f"DeepEP cannot be imported on this node ({_problems[0]})"
    if os.environ.get(VARIABLE) != "1":
        return f"DeepEP is not imported in this process ({VARIABLE} is not 1)"
    return "DeepEP (the package deep_ep) is not installed on this node, or Megatron cannot use it"

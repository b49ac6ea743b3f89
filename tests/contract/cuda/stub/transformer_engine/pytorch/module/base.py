"""Base class of the modules with weights: its extra state, and the marks of sharded parameters."""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine.pytorch.kernels import absent

get_dummy_wgrad = absent("get_dummy_wgrad")


class TransformerEngineBaseModule(torch.nn.Module):
    """Base of all modules with weights.

    Without FP8 the extra state is an empty uint8 tensor, and loading accepts any empty tensor
    (v2.11 base.py).
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Do nothing, as FP8 is off."""

    def get_extra_state(self) -> torch.Tensor:
        """Return the value of the key ``_extra_state``."""
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Accept the result of ``get_extra_state``, or None."""
        if state is not None and state.numel():
            raise NotImplementedError("FP8")


def weight_parameter(
    rows: int, columns: int, *, dim: int, device: Any, dtype: torch.dtype
) -> torch.nn.Parameter:
    """Return a weight with Megatron's tensor-parallel attributes.

    ``dim`` is 1 in "row" mode and 0 in every other mode, None included.
    """
    parameter = torch.nn.Parameter(torch.empty(rows, columns, device=device, dtype=dtype))
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = (
        True,
        dim,
        1,
    )
    return parameter

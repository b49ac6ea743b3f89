"""Compare both ways of ``rlpost.trainer.delta_rule`` in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

LENGTHS = (1, 9, 70)
"""Shorter and longer than a chunk of 64 tokens."""
KEY_HEADS, REPEATS, KEY_DIM, VALUE_DIM = 1, 2, 16, 16
NAMES = ("query", "key", "value", "decay", "beta")
TOLERANCE = 1e-4


def interpret() -> None:
    """Let Triton's interpreter run the kernels as they are.

    It has no device to choose a configuration of a kernel by time, so the first one is used. In a
    kernel ``range`` counts with Python's numbers, which have no ``to``, where a compiler has tensors.
    """
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import _implicit_cvt

    def run(self: Any, *args: Any, **options: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        return self.fn.run(*args, **options, **self.configs[0].all_kwargs())

    def numbers(*bounds: Any) -> Iterator[Any]:
        yield from map(_implicit_cvt, range(*map(int, bounds)))

    Autotuner.run = run
    chunk_delta_h.range = numbers


def random_inputs() -> list[torch.Tensor]:
    torch.manual_seed(5)
    total, heads = sum(LENGTHS), KEY_HEADS * REPEATS
    key = F.normalize(torch.randn(total, KEY_HEADS, KEY_DIM), dim=-1)
    query, value = torch.randn(total, KEY_HEADS, KEY_DIM), torch.randn(total, heads, VALUE_DIM)
    decay, beta = -torch.rand(total, heads) * 3, torch.rand(total, heads)
    return [each.requires_grad_() for each in (query, key, value, decay, beta)]


def main() -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from rlpost.trainer import delta_rule

    interpret()
    inputs, starts = random_inputs(), torch.tensor([0, *LENGTHS]).cumsum(0).int()
    outputs, gradients = [], []
    for kernels in (None, chunk_gated_delta_rule):
        delta_rule.kernels = lambda kernels=kernels: kernels
        output = delta_rule.delta_rule(*inputs, starts)
        weight = torch.linspace(-1, 1, output.numel()).view_as(output)
        outputs.append(output)
        gradients.append(torch.autograd.grad((output * weight).sum(), inputs))
    ours, theirs = ((one, *more) for one, more in zip(outputs, gradients, strict=True))
    for name, expected, found in zip(("output", *NAMES), ours, theirs, strict=True):
        assert expected.abs().max() > 0.01, name
        torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=name)
    print("equal:", ", ".join(NAMES))


if __name__ == "__main__":
    main()

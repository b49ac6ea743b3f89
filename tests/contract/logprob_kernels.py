"""Compare both ways of ``rlpost.trainer.logprobs`` in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from rlpost.trainer import logprobs, parallel
from rlpost.trainer.logprobs import LogitRows

ROWS, WIDTH, VALID, BLOCK = 9, 45, 83, 16
"""Each of two ranks has 45 columns, the last 7 of the second are padding."""
CASES = ("one rank", "two ranks", "a rank without tokens", "bfloat16", "one temperature", "no rows")
INDEX = [5, 0, 8, 3, 7]
TARGETS = [0, 44, 45, 82, 17]


class Group:
    """One of ``count`` tensor-parallel ranks."""

    def __init__(self, rank: int, count: int) -> None:
        self._rank, self._count = rank, count

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._count


def of_rank(logits: torch.Tensor, rows: LogitRows, *, with_entropy: bool) -> list[torch.Tensor]:
    """Log-probs, entropies and the gradient of the logits."""
    own = logits.clone().requires_grad_()
    found = logprobs.response_logprobs(own, rows, with_entropy=with_entropy)
    device = logits.device
    loss = (torch.linspace(-1, 2, len(found[0]), device=device) * found[0]).sum()
    if with_entropy:
        loss = loss + (torch.linspace(0.5, -3, len(found[1]), device=device) * found[1]).sum()
    loss.backward()
    assert own.grad is not None and own.grad.dtype == logits.dtype
    return [*(value.detach() for value in found), own.grad.float()]


class Reduced:
    """All-reduces of ranks that run one after the other, repeated until the results are all known."""

    def __init__(self, count: int) -> None:
        self.known: list[torch.Tensor] = []
        self.calls: list[list[Any]] = [[] for _ in range(count)]

    def __call__(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, *, group: Group) -> None:
        calls = self.calls[group.rank()]
        calls.append((tensor.clone(), op))
        if len(calls) <= len(self.known):
            tensor.copy_(self.known[len(calls) - 1])

    def reduce(self) -> None:
        """Reduce what the ranks gave, and start again."""
        self.known = []
        for ranks in zip(*self.calls, strict=True):
            values = torch.stack([tensor for tensor, _ in ranks])
            is_sum = ranks[0][1] == dist.ReduceOp.SUM
            self.known.append(values.sum(0) if is_sum else values.amax(0))
        self.calls = [[] for _ in self.calls]


def of_all(
    logits: torch.Tensor, rows: LogitRows, valid: list[int], *, with_entropy: bool
) -> list[list[torch.Tensor]]:
    """The results of each rank."""
    all_reduce = Reduced(len(valid))
    for _ in range(3):  # the maximum, the sums, and a pass with both
        results = []
        for rank, part in enumerate(logits.chunk(len(valid), 1)):
            with (
                patch.object(parallel, "tensor_parallel_group", partial(Group, rank, len(valid))),
                patch.object(logprobs.dist, "all_reduce", all_reduce),
            ):
                one = replace(rows, num_valid=valid[rank])
                results.append(of_rank(part, one, with_entropy=with_entropy))
        all_reduce.reduce()
    return results


def compare(case: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(ROWS, 2 * WIDTH, generator=generator) * 6
    index, targets = torch.tensor(INDEX), torch.tensor(TARGETS)
    temperature, valid, tolerance = 0.7, [WIDTH, VALID - WIDTH], 1e-5
    if case == "one rank":
        valid = [VALID]
    elif case == "a rank without tokens":
        valid, targets = [WIDTH, 0], targets % WIDTH
    elif case == "bfloat16":
        # the interpreter truncates to bfloat16, a GPU rounds
        logits, tolerance = logits.bfloat16(), 2**-7
    elif case == "one temperature":
        temperature = 1.0
    elif case == "no rows":
        index, targets = index[:0], targets[:0]
    plain = LogitRows(index, targets, temperature, num_valid=0, chunk_size=100)
    for with_entropy in (True, False):
        both = [
            of_all(logits, replace(plain, fused=fused), valid, with_entropy=with_entropy)
            for fused in (False, True)
        ]
        assert replace(plain, fused=True).has_kernel
        assert (both[1][0][2] != 0).any() == (len(index) > 0)
        for expected, found in zip(*both, strict=True):
            torch.testing.assert_close(found[:2], expected[:2], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(found[2], expected[2], rtol=tolerance, atol=1e-6)


def compiled(capability: int) -> list[str]:
    """Names of the kernels that compile to machine code for a compute capability."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from rlpost.trainer import logprob_kernels

    types = {
        "logits": "*bf16", "gradient": "*bf16", "index": "*i64", "row_of": "*i64",
        "target": "*i64", "stride": "i64", "width": "i32", "num_valid": "i32",
        "temperature": "fp32", "block": "constexpr", "with_entropy": "constexpr",
    }  # fmt: skip
    constants = {"block": logprob_kernels.BLOCK, "with_entropy": True}
    names = []
    for kernel in (logprob_kernels._sums_kernel, logprob_kernels._gradient_kernel):
        signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
        source = ASTSource(
            kernel, signature, {name: constants[name] for name in constants if name in signature}
        )
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
        assert made.asm["cubin"]
        names.append(kernel.__name__)
    return names


def main() -> None:
    from rlpost.trainer import logprob_kernels

    logprob_kernels.BLOCK = BLOCK
    for case in CASES:
        compare(case)
    print("equal:", ", ".join(CASES))


if __name__ == "__main__":
    main()

"""``python -m benchmarks.delta_rule [--tokens N ...]``: the gated delta rule in chunks beside the plain
recurrence.

The recurrence is transformers' ``torch_recurrent_gated_delta_rule``, one sequence at a time.
Output: a table of the seconds of one forward and backward pass, the best of three.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from rlpost.actor.delta_rule import gated_delta_rule

HEADS, WIDTH, SEQUENCES = 16, 128, 4


def inputs_of(tokens: int) -> list[torch.Tensor]:
    """Query, key, value, decay and beta of a row."""
    torch.manual_seed(1)
    query, key, value = (torch.randn(tokens, HEADS, WIDTH) for _ in range(3))
    decay, beta = -torch.rand(tokens, HEADS), torch.rand(tokens, HEADS)
    inputs = [F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, decay, beta]
    return [each.requires_grad_() for each in inputs]


def chunked(*inputs: torch.Tensor) -> torch.Tensor:
    """The packed row at once."""
    tokens = len(inputs[0])
    starts = torch.arange(SEQUENCES + 1) * (tokens // SEQUENCES)
    return gated_delta_rule(*inputs, starts)


def recurrent(*inputs: torch.Tensor) -> torch.Tensor:
    """Each sequence token by token."""
    parts = (each.unsqueeze(0).chunk(SEQUENCES, dim=1) for each in inputs)
    found = [
        torch_recurrent_gated_delta_rule(
            query, key, value, decay, beta, initial_state=None, output_final_state=False
        )[0]
        for query, key, value, decay, beta in zip(*parts, strict=True)
    ]
    return torch.cat(found, dim=1)[0]


def seconds(compute: Callable[..., torch.Tensor], tokens: int) -> float:
    """Of a forward and backward pass; the best of three."""
    inputs, found = inputs_of(tokens), []
    for _ in range(3):
        start = time.perf_counter()
        torch.autograd.grad(compute(*inputs).sum(), inputs)
        found.append(time.perf_counter() - start)
    return min(found)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048])
    print("| tokens of the row | in chunks | token by token |")
    print("|---|---|---|")
    for tokens in parser.parse_args(arguments).tokens:
        ours, theirs = seconds(chunked, tokens), seconds(recurrent, tokens)
        print(f"| {tokens} | {ours:.2f} | {theirs:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

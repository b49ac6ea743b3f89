"""Seconds that the planner's arithmetic predicts, beside those that a GPU took. Pure.

Input: the card, and what a GPU took. Output: predictions, and the lines of a table.
``tests/gpu/test_predictions.py`` times the kernels of ``kernel_seconds``; the training step is that
of ``benchmarks/train_step.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlpost.config.plan.cards import Card
from rlpost.config.plan.shape import Layout, Shape
from rlpost.extensions.planning.rates import RATES, Rates
from rlpost.extensions.planning.train_time import Training, forward_pass_time, train_step

SIDE, NARROW = 8192, 512
"""Rows and columns of products, and the smallest dimension of one of them."""
TOKENS, HEADS, HEAD = 8192, 32, 128
"""One sequence of attention."""
ROWS, VOCAB = 4096, 151_936
"""Logits."""
COPIED = 10**9
"""Bytes of a copy."""
WIDE_PRODUCT, NARROW_PRODUCT = "product, 8192 x 8192 x 8192", "product, 8192 x 8192 x 512"
FORWARD, BACKWARD = "attention, 8192 tokens, forward", "attention, 8192 tokens, backward"
LOGPROBS = "log-probs of 4096 x 151,936 logits"
MEMORY, HOST = "copy of 1 GB on the GPU", "copy of 1 GB from pinned memory"


@dataclass(frozen=True, slots=True)
class BenchmarkStep:
    """The model and the samples of ``benchmarks/train_step.py``."""

    hidden: int
    layers: int
    heads: int
    groups: int
    ffn: int
    vocab: int
    lengths: Sequence[int]
    max_tokens: int


def kernel_seconds(card: Card, rates: Rates = RATES) -> dict[str, float]:
    """Return the predicted seconds of single kernels, by name."""
    peak, memory = card.tflops * 1e12, card.memory_gbps * 1e9 * rates.memory

    def product(width: int) -> float:
        share = rates.products * width / (width + rates.half_width)
        return 2 * SIDE * SIDE * width / peak / share

    attention = 2 * TOKENS * TOKENS * HEADS * HEAD / peak  # half of all pairs
    return {
        WIDE_PRODUCT: product(SIDE),
        NARROW_PRODUCT: product(NARROW),
        FORWARD: attention / rates.attention_forward,
        BACKWARD: 2.5 * attention / rates.attention_backward,
        LOGPROBS: ROWS * VOCAB * rates.logit_bytes / memory,
        MEMORY: 2 * COPIED / memory,
        HOST: COPIED / (rates.pcie_gbps * 1e9),
    }


def step_seconds(step: BenchmarkStep, card: Card) -> float:
    """Return the predicted seconds of log-probs, forward, backward and the optimizer on one GPU."""
    width = step.hidden // step.heads
    shape = Shape(
        step.hidden,
        step.ffn,
        step.heads,
        step.groups,
        width,
        step.vocab,
        (False,) * step.layers,
    )
    total = sum(step.lengths)
    tokens = min(total, step.max_tokens)
    job = Training(
        shape,
        Layout(1),
        card,
        1,
        tokens=tokens,
        batches=total / tokens,
        attended=sum(length**2 for length in step.lengths) / total,
        fuses_gradients=True,
    )
    return forward_pass_time(job) + sum(train_step(job).values())


def compared_table(rows: Sequence[tuple[str, float, float]]) -> list[str]:
    """Return the lines of a table; none without rows. A ratio above 1 is slower than predicted.

    Args:
        rows: name, predicted seconds and measured seconds.
    """
    if not rows:
        return []
    title = "rlpost plan beside this GPU"
    width = max(len(title), *(len(name) for name, _, _ in rows))
    lines = ["", f"{title:<{width}}     predicted     measured  ratio"]
    for name, predicted, measured in rows:
        seconds = f"{1e3 * predicted:10.2f} ms{1e3 * measured:10.2f} ms"
        lines.append(f"{name:<{width}} {seconds} {measured / predicted:6.2f}")
    return lines

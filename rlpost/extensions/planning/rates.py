"""The rates that the arithmetic of a step assumes. Data, with sources.

``RATES`` is the only place with efficiencies, bandwidths and latencies.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpost.config.plan.cards import CARDS


def nearest_card(gpu_bytes: int) -> str:
    """Return the name of the card whose memory is nearest to ``gpu_bytes``, H100 before A100."""

    def distance(name: str) -> tuple[float, bool]:
        difference = abs(round((CARDS[name].gib or 0) * 2**30) - gpu_bytes)
        return (0 if difference <= 1 else 1 + difference // 10**9), name != "H100"

    return min((name for name in CARDS if CARDS[name].gib), key=distance)


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of a card's rates that kernels and collectives reach, bytes and latencies.

    Values without a source are estimates; the published runs of docs/speed.md check them.
    """

    products: float = 0.74
    """Of the peak, by matrix products whose smallest dimension is large."""
    half_width: float = 250
    """Smallest dimension at which a matrix product reaches half of that."""
    attention_forward: float = 0.50
    """Of the peak, by packed attention (FlashAttention-3, arXiv 2407.08608, figure 5, causal)."""
    attention_backward: float = 0.40
    """Its backward pass, of 2.5 times the operations (the same, figure 6)."""
    memory: float = 0.80
    """Of the memory bandwidth, by elementwise kernels."""
    nvlink: float = 0.75
    """Of NVLink, by ring collectives (nccl-tests: 330 to 370 of 450 GB/s)."""
    network: float = 0.85
    """Of the network card (nccl-tests: 42 of 50 GB/s)."""
    tensor_exposed: float = 1.0
    """Share of tensor-parallel collectives that no product hides."""
    reduce_exposed: float = 0.2
    """The same of gradient reductions with ``--overlap-grad-reduce``."""
    dense_launch_s: float = 150e-6
    """Launching the kernels of the forward pass of a dense layer; a backward pass takes twice."""
    sparse_launch_s: float = 600e-6
    """The same of a layer with experts, whose sizes the host waits for."""
    logit_bytes: float = 6
    """Memory traffic for each logit, log-probs forward and backward, by kernels that read the logit
    once each way and write its gradient (``trainer/logprob_kernels.py``)."""
    chunked_logit_bytes: float = 128
    """The same by operators on float32 chunks, counted from ``trainer/logprobs.py``: 50 forward with
    the entropy, 78 backward."""
    host_gbps: float = 250
    """GB/s of a node's memory while Adam runs on it."""
    pcie_gbps: float = 25
    """GB/s of a GPU to pinned host memory while all GPUs of the node copy."""
    decode_products: float = 0.5
    """Of the peak, by the products of a large decode batch and of prefill."""
    decode_memory: float = 0.65
    """Of the memory bandwidth, by decoding."""
    decode_layer_s: float = 25e-6
    """Kernels of a layer in a CUDA graph beyond bytes and operations, a decode step."""
    decode_reduce_s: float = 12e-6
    """Latency of an all-reduce of a small decode batch inside a node."""
    network_latency_s: float = 40e-6
    """The same over nodes."""
    bucket_s: float = 0.02
    """Request, open and load of a bucket of weights on an engine, after its bytes."""
    mean_share: float = 0.5
    """Mean length of a sample over the longest: lengths spread evenly."""
    attended_share: float = 2 / 3
    """Mean over tokens of the length of their sample, over the longest, for the same lengths."""


RATES = Rates()

"""GPUs by name, and the rates that the arithmetic of a step assumes. Data, with sources.

One table for memory (``rlpost plan --gpu-memory``), for the peak of ``perf/mfu_frac`` and for the
time of a step. ``RATES`` is the only place with efficiencies, bandwidths and latencies.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU. Rates are those of data sheets."""

    tflops: float
    """Dense TFLOP/s in bfloat16."""
    memory_gbps: float
    """GB/s of its memory."""
    nvlink_gbps: float
    """GB/s to the other GPUs of its NVLink domain, in one direction; PCIe where there is none."""
    network_gbps: float = 50.0
    """GB/s of its network card, in one direction, in a node of the maker's reference design."""
    gib: float | None = None
    """GiB that CUDA reports; None: not offered as a name for ``--gpu-memory``."""
    domain: int = 8
    """GPUs of an NVLink domain where it is larger than a node."""
    capability: tuple[int, int] = (9, 0)
    """Compute capability."""


CARDS = {
    "GB200": Card(2500, 8000, 900, gib=184.31, domain=72, capability=(10, 0)),
    "GB300": Card(2500, 8000, 900, 100, domain=72, capability=(10, 3)),
    "B300": Card(2250, 8000, 900, 100, gib=267.69, capability=(10, 3)),
    "B200": Card(2250, 8000, 900, gib=178.35, capability=(10, 0)),
    "GH200": Card(989.4, 4000, 450),  # before the name that it contains
    "H200": Card(989.4, 4800, 450, gib=139.80),
    "H100 PCIe": Card(756, 2000, 64),
    "H100": Card(989.4, 3350, 450, gib=79.11),
    "H800": Card(989.4, 3350, 200),
    "H20": Card(148, 4000, 450),
    "A100": Card(312, 2039, 300, 25, gib=79.14, capability=(8, 0)),
    "A800": Card(312, 2039, 200, 25, capability=(8, 0)),
    "RTX PRO 6000": Card(503.8, 1792, 64, gib=94.97, capability=(12, 0)),
    "L40S": Card(362, 864, 32, 25, capability=(8, 9)),
    "L40": Card(181, 864, 32, 25, capability=(8, 9)),
    "A10G": Card(70, 600, 16, 12.5, capability=(8, 6)),
}
"""By a substring of the name that CUDA gives; the first match counts.

Rates: NVIDIA's data sheets and, of RTX PRO 6000, the white paper of its architecture.
Memory: the least that torch's out-of-memory messages name in public: H100 vllm-project/vllm#27508,
GB200 vllm-project/vllm#43951, B200 pytorch/ao#4002; the others in logs. nvidia-smi names more, with
what the driver keeps: 81559 MiB of an H100 (modal-labs/modal-client#2797), 143771 MiB of an H200
(sgl-project/sglang#3196).
"""


def card_of(device_name: str) -> Card | None:
    """Return the card that CUDA names so; None for one that the table lacks."""
    return next((card for part, card in CARDS.items() if part in device_name), None)


def capability_of(gpu_type: str | None) -> tuple[int, int] | None:
    """Return the compute capability of a GPU that Slurm names so; None for one it cannot tell.

    >>> capability_of("nvidia_h100_80gb_hbm3"), capability_of("b200"), capability_of("a6000")
    ((9, 0), (10, 0), None)
    """
    card = card_of((gpu_type or "").upper().replace("_", " "))
    return None if card is None else card.capability


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

"""GPUs by name. Data, with sources.

One table for memory (``rlpost plan --gpu-memory``), for the peak of ``perf/mfu_frac`` and for the
time of a step.
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


RESERVE = 0.95
"""Usable share of a GPU: the caching allocator leaves gaps."""


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

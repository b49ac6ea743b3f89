"""Check ``cluster.environment`` for values that NCCL or Gloo ignores or misinterprets. Pure.

Input: a ``Config``. Output: one line for each problem. The ranges are those of the NCCL user guide
(Environment Variables, June 2026). NCCL treats a number that it cannot parse as unset and logs this
at level INFO only, so a typo would go unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rlpost.config.tree import Config


@dataclass(frozen=True, slots=True)
class Range:
    """Valid whole numbers of a variable; ``remedy`` explains the choice."""

    low: int
    high: int
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """Valid words of a variable, besides legacy numbers up to ``highest_number``."""

    words: tuple[str, ...]
    highest_number: int = -1


_DISTANCES = ("LOC", "PIX", "PXB", "PHB", "SYS")
_SWITCH = Range(0, 1)

RULES: Mapping[str, Range | Words] = {
    "NCCL_IB_TIMEOUT": Range(
        1,
        31,
        "0 and 32 or more disable the timeout; 14 to 22 detect a dead link after 0.5 s to 2 minutes (4.096 us x "
        "2^timeout x NCCL_IB_RETRY_CNT), NCCL's default 20 after half a minute",
    ),
    "NCCL_IB_RETRY_CNT": Range(0, 7),
    "NCCL_IB_GID_INDEX": Range(
        -1, 255, "show_gids lists the indices of a host; with -1 NCCL chooses"
    ),
    "NCCL_IB_TC": Range(0, 255),
    "NCCL_IB_FIFO_TC": Range(0, 255),
    "NCCL_IB_SL": Range(0, 15),
    "NCCL_IB_QPS_PER_CONNECTION": Range(1, 128),
    "NCCL_IB_SPLIT_DATA_ON_QPS": _SWITCH,
    "NCCL_IB_DISABLE": _SWITCH,
    "NCCL_IB_ROCE_VERSION_NUM": Range(1, 2),
    "NCCL_CROSS_NIC": Range(0, 2),
    "NCCL_PXN_DISABLE": _SWITCH,
    "NCCL_P2P_DISABLE": _SWITCH,
    "NCCL_SHM_DISABLE": _SWITCH,
    "NCCL_CUMEM_ENABLE": _SWITCH,
    "NCCL_NVLS_ENABLE": Range(0, 2),
    "NCCL_MIN_CTAS": Range(1, 64),
    "NCCL_MAX_CTAS": Range(1, 64),
    "NCCL_NET_GDR_LEVEL": Words(_DISTANCES, highest_number=4),
    "NCCL_P2P_LEVEL": Words(("LOC", "NVL", *_DISTANCES[1:]), highest_number=4),
    "NCCL_SOCKET_FAMILY": Words(("AF_INET", "AF_INET6")),
    "NCCL_IB_ADDR_FAMILY": Words(("AF_INET", "AF_INET6")),
}

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator; the second name is the older one."""
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_BARE_NAMES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PATTERN_SIGNS = re.compile(r"[=^*\s]")


def environment_problems(config: Config) -> list[str]:
    """Values outside the library's documented range."""
    environment = config.cluster.environment
    return [
        *(
            f"--environment {name}={environment[name]}: {problem}"
            for name in environment
            for problem in _problems(name, environment[name])
        ),
        *allocator_problems(config, environment),
        *_communicator_problems(config),
    ]


def _communicator_problems(config: Config) -> list[str]:
    """Settings that --offload-nccl excludes."""
    if not config.cluster.offload_nccl:
        return []
    cumem_enable = config.cluster.environment.get("NCCL_CUMEM_ENABLE", "1")
    rules = [
        (
            not (config.cluster.colocate and config.offload_train),
            "--offload-nccl true: no engine uses the memory of the trainer's GPUs while the trainer "
            "is offloaded; use it with --colocate and --offload-train, or leave it out",
        ),
        (
            cumem_enable == "0",
            f"--environment NCCL_CUMEM_ENABLE={cumem_enable} with --offload-nccl true: NCCL releases only "
            "what it allocated with 1; leave the variable out",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def allocator_problems(config: Config, environ: Mapping[str, str]) -> list[str]:
    """Return the settings of torch's allocator in ``environ`` that the engines cannot have.

    torch_memory_saver 0.0.10 raises for expandable segments under the older name, and does not
    notice the newer one: their memory is not released. Between trainer and colocated engines,
    handles of such memory need ``pidfd_getfd``, which Yama's ptrace_scope = 1 forbids.
    """
    if not (config.cluster.colocate or config.offload_rollout):
        return []
    return [
        f"--environment {name}={environ[name]}: with --colocate or --offload-rollout engines "
        "cannot release memory of expandable segments, and the trainer cannot share it with them; "
        "unset the variable (in a profile or an image too), or use expandable_segments:False"
        for name in ALLOCATOR
        if _EXPANDABLE.search(environ.get(name, ""))
    ]


def _problems(name: str, value: str) -> Iterator[str]:
    rule = RULES.get(name)
    if isinstance(rule, Range):
        yield from _outside(rule, value)
    elif isinstance(rule, Words):
        is_legacy = value.isdigit() and int(value) <= rule.highest_number
        if value not in rule.words and not is_legacy:
            yield f"NCCL takes {', '.join(rule.words)}; use one of them, or unset it for NCCL's default"
    elif name in _BARE_NAMES and _PATTERN_SIGNS.search(value):
        bare = _PATTERN_SIGNS.sub("", value)
        yield f"takes interface names, not patterns as in NCCL; use {bare}"


def _outside(rule: Range, value: str) -> Iterator[str]:
    if re.fullmatch(r"-?\d+", value) is None:
        yield f"must be a whole number, else NCCL ignores it; use {rule.low} to {rule.high}"
    elif not rule.low <= int(value) <= rule.high:
        yield f"must be {rule.low} to {rule.high}" + (f": {rule.remedy}" if rule.remedy else "")

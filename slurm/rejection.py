"""The probable remedy for a job that sbatch rejects. Pure.

Input: sbatch's message and the output of ``sinfo``. Output: one line: the flag to change, and the
values that the cluster's partitions allow. The messages are those of ``slurm_strerror``
(src/common/slurm_errno.c) and of sbatch itself, Slurm 21.08 to 25.11.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

SINFO = ("sinfo", "--noheader", "--format=%P|%a|%l|%D|%G|%f")
"""Partition (``*``: the default), availability, time limit, nodes, gres, features; man sinfo."""
_NOTHING = ("(null)", "N/A", "")
_ASSOCIATIONS = "sacctmgr show associations user=$USER format=account,partition,qos"


@dataclass(frozen=True, slots=True)
class NodesOfPartition:
    """Nodes of one kind in a partition, one line of ``SINFO``."""

    partition: str
    availability: str
    time_limit: str
    num_nodes: str
    gres: str
    features: str


def parse_sinfo(text: str) -> list[NodesOfPartition]:
    """Parse what ``SINFO`` printed; lines of another form are left out.

    >>> parse_sinfo("gpu*|up|1-00:00:00|4|gpu:8|h100\\n")[0].time_limit
    '1-00:00:00'
    """
    rows = [line.strip().split("|") for line in text.splitlines()]
    return [NodesOfPartition(*row) for row in rows if len(row) == 6]


def explain_rejection(words: str, sinfo: str) -> str:
    """sbatch's message, each line once, and the probable remedy if there is one.

    Args:
        words: standard error of sbatch.
        sinfo: output of ``SINFO``; empty if it gave none.
    """
    lines = dict.fromkeys(line.rstrip() for line in words.strip().splitlines())
    remedy = _remedy(words, parse_sinfo(sinfo))
    return "\n".join([*lines, *([f"remedy: {remedy}"] if remedy else [])])


def _remedy(words: str, nodes: Sequence[NodesOfPartition]) -> str:
    for pattern, change, facts in _REMEDIES:
        if re.search(pattern, words, re.IGNORECASE):
            known = facts(nodes)
            return f"{change}; sinfo: {known}" if known else change
    return ""


def _partitions(nodes: Sequence[NodesOfPartition]) -> str:
    """``gpu (default), cpu (down)``."""
    shown = {}
    for one in nodes:
        name = one.partition.removesuffix("*")
        remarks = ["default"] if one.partition.endswith("*") else []
        remarks += [one.availability] if one.availability != "up" else []
        shown[name] = f"{name} ({', '.join(remarks)})" if remarks else name
    return ", ".join(shown.values())


def _time_limits(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: one.time_limit)


def _node_counts(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, _nodes)


def _features(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: _or_none(one.features))


def _sizes(nodes: Sequence[NodesOfPartition]) -> str:
    return _per_partition(nodes, lambda one: f"{_nodes(one)} with {_or_none(one.gres)}")


def _nothing(nodes: Sequence[NodesOfPartition]) -> str:
    return ""


def _per_partition(
    nodes: Sequence[NodesOfPartition], fact: Callable[[NodesOfPartition], str]
) -> str:
    """``gpu: 4 nodes with gpu:8 or 2 nodes with gpu:4, cpu: 9 nodes with none``."""
    facts: dict[str, dict[str, None]] = {}
    for one in nodes:
        facts.setdefault(one.partition.removesuffix("*"), {})[fact(one)] = None
    return ", ".join(f"{name}: {' or '.join(values)}" for name, values in facts.items())


def _nodes(one: NodesOfPartition) -> str:
    return f"{one.num_nodes} node" if one.num_nodes == "1" else f"{one.num_nodes} nodes"


def _or_none(text: str) -> str:
    return "none" if text in _NOTHING else text


_REMEDIES: tuple[tuple[str, str, Callable[[Sequence[NodesOfPartition]], str]], ...] = (
    # The first pattern that is found decides: an account's message also mentions partitions.
    (
        r"violates accounting/QOS policy|AssocMax|AssocGrp|QOSMax|QOSGrp",
        f"the account or its QOS limits this job; see its limits: {_ASSOCIATIONS},maxjobs,maxtres, "
        "and choose --account, --qos, --time and --nodes within them",
        _time_limits,
    ),
    (r"account", f"choose --account, and --partition, from: {_ASSOCIATIONS}", _partitions),
    (r"invalid qos", f"choose --qos from: {_ASSOCIATIONS}", _nothing),
    (
        r"not permitted to use this partition|partition.*(inactive|down)|partition.*in drain",
        "choose another --partition",
        _partitions,
    ),
    (r"invalid partition|no partition specified", "choose --partition", _partitions),
    (
        r"time limit|partition configuration not available",
        "choose --time and --nodes within the limits of the partition",
        lambda nodes: _per_partition(
            nodes, lambda one: f"{_nodes(one)} for at most {one.time_limit}"
        ),
    ),
    (
        r"generic resource|\bgres\b|node configuration is not available|TRES",
        "choose --num-gpus-per-node, --nodes and --partition that exist, or how GPUs are requested "
        "(--gpu-request gres, gpus-per-node or none)",
        _sizes,
    ),
    (
        r"node count specification|more processors requested|too many nodes",
        "choose --nodes",
        _node_counts,
    ),
    (r"invalid feature", "choose --constraint", _features),
    (r"reservation", "choose --reservation from: scontrol show reservation", _nothing),
    (
        r"unable to contact slurm controller|socket timed out",
        "submit again when scontrol ping says that the controller is up",
        _nothing,
    ),
)

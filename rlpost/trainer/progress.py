"""Read the counters of torch.distributed: the collectives that this rank has entered.

Output: their number in each process group, and torch's record of the newest ones. Call from a
second thread: everything here reads, and takes no lock that a collective holds.

Torch counts collectives itself. Gloo increments its sequence number at the start of each
collective, NCCL increments ``seqCollective_``
(``torch/csrc/distributed/c10d/ProcessGroupGloo.cpp``, ``ProcessGroupNCCL.cpp``; the statement about
NCCL is from its source, not tested). Two kinds of groups are left out:

- groups of pipeline stages, and of an exchange of slices: gloo counts point-to-point messages too,
  NCCL a batch of them as one collective (``startCoalescing``), and ranks send different numbers of
  them;
- the group of background saves: another thread uses it.

On NCCL a collective is entered when it is enqueued, so the counts show the progress of each rank's
Python thread, not that of its GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from rlpost.observe.progress.position import GroupCount

DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
SAVE_GROUP = "SAVE_GROUP"
"""Description of the process group of background saves."""
EXCHANGE_GROUP = "EXCHANGE_GROUP"
"""Description of the process group in which ranks exchange slices of weights."""
_UNEVEN = ("PIPELINE_MODEL_PARALLEL_GROUP", SAVE_GROUP, EXCHANGE_GROUP)
BUFFER_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def group_counts() -> tuple[GroupCount, ...]:
    """Return the number of collectives entered in each process group of this rank."""
    if not dist.is_initialized():
        return ()
    found = []
    for group, ranks in list(distributed_c10d._world.pg_group_ranks.items()):
        if not isinstance(group, dist.ProcessGroup):  # a number stands for groups of other ranks
            continue
        name = group.group_desc or group.group_name
        entered = None if name in _UNEVEN else _sequence_number(group)
        if entered is not None:
            found.append(GroupCount(group.group_name, name, tuple(ranks), entered))
    return tuple(sorted(found, key=lambda one: one.key))


def _sequence_number(group: dist.ProcessGroup) -> int | None:
    """Return None for a backend that does not count, such as that of a simulated group."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return None


def write_flight_record(folder: str | Path) -> str | None:
    """Write torch's record of the newest collectives of this rank into ``folder``.

    Returns:
        The path; None when torch records nothing (TORCH_FR_BUFFER_SIZE is not set) or cannot.
    """
    if not any(os.environ.get(name, "0") not in ("", "0") for name in BUFFER_SIZES):
        return None
    c10d = torch._C._distributed_c10d
    dump = next((getattr(c10d, name) for name in DUMPS if hasattr(c10d, name)), None)
    if dump is None or not dist.is_initialized():
        return None
    path = Path(folder) / f"flight-{dist.get_rank()}.json"
    path.write_text(_text(dump()))
    return str(path)


def _text(record: str | bytes) -> str:
    return record if isinstance(record, str) else record.decode(errors="replace")

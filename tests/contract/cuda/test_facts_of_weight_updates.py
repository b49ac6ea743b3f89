"""Facts of the installed torch that weight updates rely on; each test names its fact.

On a machine without a GPU, only these tests fail when an upgrade changes such a fact.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch.distributed import distributed_c10d


def test_torch_aborts_a_group_without_waiting_for_it() -> None:
    """``destroy_process_group`` calls ``shutdown``, which on NCCL first flushes work in flight."""
    aborting = inspect.getsource(distributed_c10d._abort_process_group)
    assert "pg.abort()" in aborting and "shutdown" not in aborting
    assert "pg.shutdown()" in inspect.getsource(distributed_c10d.destroy_process_group)


def test_torch_reads_its_watchdogs_switch_when_a_group_is_made() -> None:
    """The header has the variable's name and the member, but not the constructor that reads it."""
    headers = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"
    text = (headers / "ProcessGroupNCCL.hpp").read_text()
    assert '"TORCH_NCCL_BLOCKING_WAIT"' in text
    assert "bool blockingWait_ = false;" in text

"""Measure all-reduce between neighbours: a process per node, a child per GPU.

Input: rank and size of the measurement on the command line, the network variables in the
environment. Output: the last line of standard output, ``{"gbps": BEST}``: bus bandwidth in GB/s (as
defined by nccl-tests, 2 (n-1)/n bytes over time) with the better of the two neighbours. Uses NCCL
on GPUs, else gloo.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

from bootstrap.preflight.bandwidth import rounds_of
from common.attempt import attempt_secret

_NUM_BYTES = {"cuda": 256 << 20, "cpu": 4 << 20}
_NUM_WARMUPS, _NUM_TIMED = 2, 5


def measure(options: argparse.Namespace) -> float:
    """Measure in this process; return GB/s with the better neighbour."""
    import torch
    import torch.distributed as dist

    from common.torch_store import close_store, join_ranks, open_store

    device = "cuda" if options.num_gpus and torch.cuda.is_available() else "cpu"
    timeout = timedelta(seconds=options.deadline_s)
    world = options.num_nodes * options.processes
    rank = options.rank * options.processes + options.local
    store = open_store(
        options.address,
        options.port,
        rank=rank,
        world_size=world,
        secret=attempt_secret(),
        timeout=timeout,
    )
    join_ranks(store, rank, world)
    if device == "cuda":
        torch.cuda.set_device(options.local)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    tensor = torch.zeros(_NUM_BYTES[device] // 4, device=device)
    best = 0.0
    for pairs in rounds_of(options.num_nodes):
        for pair in pairs:
            members = [
                node * options.processes + local
                for node in pair
                for local in range(options.processes)
            ]
            group = dist.new_group(members)  # collective: every process creates every group
            if rank in members:
                mine, num_members = group, len(members)
        if any(options.rank in pair for pair in pairs):
            seconds = _seconds(partial(dist.all_reduce, tensor, group=mine), device)
            best = max(
                best, 2 * (num_members - 1) / num_members * _NUM_BYTES[device] / seconds / 1e9
            )
        dist.barrier()
    dist.destroy_process_group()
    close_store(store)
    return best


def _seconds(reduce: Callable[[], object], device: str) -> float:
    """Shortest of a few runs: other load on the machine only makes runs longer."""
    import torch

    times = []
    for _ in range(_NUM_WARMUPS + _NUM_TIMED):
        started_at = time.perf_counter()
        reduce()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started_at)
    return min(times[_NUM_WARMUPS:])


def main(argv: Sequence[str] | None = None) -> int:
    """Start one process per GPU and print the result of the first; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m bootstrap.preflight.bandwidth_probe")
    parser.add_argument("--address", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True, help="of this node")
    parser.add_argument("--num-nodes", type=int, required=True)
    parser.add_argument("--num-gpus", type=int, required=True)
    parser.add_argument("--deadline-s", type=float, required=True)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--local", type=int, default=0)
    options = parser.parse_args(argv)
    if not options.processes:
        import torch

        has_gpus = options.num_gpus and torch.cuda.is_available()
        options.processes = options.num_gpus if has_gpus else 1
    words = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "bootstrap.preflight.bandwidth_probe", *words]
    command.append(f"--processes={options.processes}")
    ranks = range(1, options.processes) if options.local == 0 else ()
    others = [subprocess.Popen([*command, f"--local={rank}"]) for rank in ranks]
    gbps = measure(options)
    for other in others:
        other.wait()
    if options.local == 0:
        print(json.dumps({"gbps": gbps}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

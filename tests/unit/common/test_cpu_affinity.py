"""A process with GPUs is bound to the CPUs next to them, within those of its job; a rank uses its
share of the cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from common import cpu_affinity
from common.cpu_affinity import (
    choose_binding,
    cpu_list,
    num_cores,
    read_siblings,
    threads_of_rank,
)
from common.local_gpus import LocalGpu, parse_cpu_list
from rlpost.trainer import device
from tests.settings import rank_config

# A DGX H100 by `nvidia-smi topo -m`: two sockets with 56 cores of two threads, four GPUs each.
SOCKETS = (parse_cpu_list("0-55,112-167"), parse_cpu_list("56-111,168-223"))
DGX = tuple(LocalGpu(index, f"GPU-{index:08x}-aa", cpus=SOCKETS[index // 4]) for index in range(8))
ALL = SOCKETS[0] | SOCKETS[1]
DGX_SIBLINGS = {cpu: (cpu % 112, cpu % 112 + 112) for cpu in ALL}


def bound(names, allowed=ALL, gpus=DGX, gpus_per_node=8):
    return choose_binding(names, gpus, allowed, gpus_per_node=gpus_per_node)


@pytest.mark.parametrize(
    ("name", "socket"), [("0", 0), ("3", 0), ("4", 1), ("GPU-00000006-aa", 1), ("GPU-00000002", 0)]
)
def test_a_rank_runs_beside_its_gpu_by_index_or_uuid(name, socket):
    made = bound([name])
    assert made.cpus == SOCKETS[socket]
    assert "bound to the 112 CPUs" in made.said and cpu_list(SOCKETS[socket]) in made.said


def test_an_engine_with_gpus_of_one_socket_runs_there_and_one_of_both_is_not_bound():
    assert bound(["4", "5", "6", "7"]).cpus == SOCKETS[1]
    made = bound([str(index) for index in range(8)])
    assert made.cpus is None and "all 224" in made.said


def test_a_binding_stays_within_the_cpus_of_the_step():
    step = parse_cpu_list("0-7,56-63")
    assert bound(["5"], step).cpus == parse_cpu_list("56-63")
    assert bound(["5"], step).cpus <= step


def test_a_step_without_cpus_next_to_the_gpu_is_not_bound():
    made = bound(["5"], parse_cpu_list("0-15"))
    assert made.cpus is None and "none of those next to GPU 5" in made.said


def test_a_rank_is_not_bound_to_less_than_its_even_share():
    """Slurm gave 60 CPUs of one socket and 4 of the other: too few for four ranks."""
    step = parse_cpu_list("0-55,112-115,56-59")
    made = bound(["6"], step)
    assert made.cpus is None and "has 4, less than the even share of 8" in made.said
    assert bound(["2"], step).cpus == parse_cpu_list("0-55,112-115")
    assert bound(["6"], step, gpus_per_node=16).cpus == parse_cpu_list("56-59")


def test_an_unknown_gpu_or_its_cpus_are_reported_and_a_host_without_gpus_is_not_bound():
    assert bound(["9"]).cpus is None and "GPU 9 is not known" in bound(["9"]).said
    blind = tuple(LocalGpu(index, gpu.uuid) for index, gpu in enumerate(DGX))
    assert bound(["0"], gpus=blind).cpus is None and bound(["0"], gpus=blind).said
    assert bound([]).said == bound(["0"], gpus=()).said == ""


def test_a_machine_of_one_numa_node_is_not_bound():
    one = (LocalGpu(0, "GPU-a", cpus=parse_cpu_list("0-15")),)
    assert bound(["0"], parse_cpu_list("0-15"), gpus=one, gpus_per_node=1).cpus is None


def test_cpu_lists_have_the_format_of_the_kernel():
    for text in ("0-55,112-167", "3", "0,2,4-5"):
        assert cpu_list(parse_cpu_list(text)) == text


def test_threads_of_one_core_count_once():
    assert num_cores(ALL, DGX_SIBLINGS) == 112
    assert num_cores(SOCKETS[0], DGX_SIBLINGS) == 56
    assert num_cores({0, 1}, {}) == 2, "where the kernel reports no siblings"
    here = os.sched_getaffinity(0)
    assert 1 <= num_cores(here, read_siblings(here)) <= len(here)


@pytest.mark.parametrize(
    ("arguments", "threads"),
    [
        ({"uses_cpu": False, "cores": 112, "num_sharing": 8}, 1),
        ({"uses_cpu": True, "cores": 112, "num_sharing": 8}, 14),
        ({"uses_cpu": True, "cores": 112, "num_sharing": 8, "own_cores": 56}, 14),
        ({"uses_cpu": True, "cores": 112, "num_sharing": 2, "own_cores": 28}, 28),
        ({"uses_cpu": True, "cores": 4, "num_sharing": 8}, 1),
        ({"requested": 6, "uses_cpu": False, "cores": 112, "num_sharing": 8}, 6),
        ({"requested": 6, "uses_cpu": True, "cores": 4, "num_sharing": 8}, 6),
    ],
)
def test_threads_of_a_rank(arguments, threads):
    assert threads_of_rank(**{"requested": None, **arguments}) == threads


@pytest.mark.parametrize(
    ("offloads", "cuda", "threads"),
    [(True, True, 7), (False, True, 1), (True, False, 3), (False, False, 3)],
)
def test_a_rank_that_computes_on_the_cpu_uses_its_share_of_the_cores(
    monkeypatch, offloads, cuda, threads
):
    """A share of the CPUs of the step, not of the socket to which the rank was bound just before.

    Without CUDA, engines may compute in the slots that the ranks leave.
    """
    affinity, asked = [set(range(28))], []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(affinity[-1]))
    monkeypatch.setattr(device, "read_siblings", lambda cpus: {})
    monkeypatch.setattr(
        device, "bind_to_gpus", lambda *given, **more: affinity.append(set(range(14)))
    )
    monkeypatch.setattr(device.torch, "set_num_threads", asked.append)
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(device.torch.cuda, "set_device", lambda which: None)
    device.prepare(
        rank_config(
            "m", optimizer_cpu_offload=offloads, actor_num_gpus_per_node=4, num_gpus_per_node=8
        )
    )
    assert asked == [threads]


@pytest.mark.parametrize("binds", [True, False])
def test_a_rank_is_bound_unless_that_is_turned_off(monkeypatch, binds):
    calls = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    monkeypatch.setattr(
        device, "bind_to_gpus", lambda names, gpus_per_node: calls.append((names, gpus_per_node))
    )
    monkeypatch.setattr(device.torch, "set_num_threads", lambda count: None)
    device.prepare(rank_config("m", bind_cpus=binds, num_gpus_per_node=8))
    assert calls == ([("5", 8)] if binds else [])


BIND = """
import json, os, threading
from common import cpu_affinity
from common.local_gpus import LocalGpu
go, found = threading.Event(), []
def earlier():
    go.wait()
    found.append(sorted(os.sched_getaffinity(0)))
thread = threading.Thread(target=earlier)
thread.start()
first = min(os.sched_getaffinity(0))
cpu_affinity.read_local_gpus = lambda: (LocalGpu(0, "GPU-a", cpus=frozenset({first})),)
cpu_affinity.bind_to_gpus("0", gpus_per_node=len(os.sched_getaffinity(0)))
go.set()
thread.join()
found.append(sorted(os.sched_getaffinity(0)))
print(json.dumps([first, found]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one CPU only")
def test_binding_holds_for_threads_that_exist_already():
    """Ray runs the methods of an actor in another thread than its constructor."""
    done = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=True)
    first, found = json.loads(done.stdout)
    assert found == [[first], [first]]


def test_a_refusal_of_the_kernel_is_no_error_and_logged_once(monkeypatch, caplog):
    def refuse(pid, cpus):
        raise OSError(22, "Invalid argument")

    here = sorted(os.sched_getaffinity(0))
    gpus = (LocalGpu(0, "GPU-a", cpus=frozenset(here[:1])),)
    monkeypatch.setattr(cpu_affinity, "read_local_gpus", lambda: gpus)
    monkeypatch.setattr(cpu_affinity.os, "sched_getaffinity", lambda pid: {*here, 4097})
    monkeypatch.setattr(cpu_affinity.os, "sched_setaffinity", refuse)
    with caplog.at_level("INFO"):
        cpu_affinity.bind_to_gpus("0", gpus_per_node=64)
    (record,) = caplog.records
    assert "Invalid argument" in record.getMessage() and "not bound" in record.getMessage()


OPENMP = """
import os, threading
import torch
assert torch.get_num_threads() == 1, "what OMP_NUM_THREADS says"
torch.set_num_threads(2)
seen = []
def later():  # another thread, as the one that makes an actor's calls
    made = torch.rand(4_000_000)
    before = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        made.mul_(1.0001)
    seen.append((torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before))
thread = threading.Thread(target=later)
thread.start()
thread.join()
print(seen)
"""


def test_fact_set_num_threads_outranks_omp_num_threads_in_every_thread():
    """Ray sets OMP_NUM_THREADS to 1 for an actor without num_cpus
    (ray._private.utils.set_omp_num_threads_if_unset).
    """
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", OPENMP], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 0, done.stderr
    threads, started = json.loads(done.stdout.replace("(", "[").replace(")", "]"))[0]
    assert threads == 2 and started == 1, "the operator ran in this thread and one more"

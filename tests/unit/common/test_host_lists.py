"""Host lists; tests/cluster compares the same ones with Slurm."""

from __future__ import annotations

import tracemalloc

import pytest

from common.host_lists import HostListError, expand, failed_tasks

LISTS = {
    "n01": ("n01",),
    "n[01-03,07],gpu-a1": ("n01", "n02", "n03", "n07", "gpu-a1"),
    "n[8-11]": ("n8", "n9", "n10", "n11"),
    "n[098-101]": ("n098", "n099", "n100", "n101"),
    "r[1-2]n[1-2]": ("r1n1", "r1n2", "r2n1", "r2n2"),
    "a,b,a": ("a", "b", "a"),
    "gpu[1,3],x.site.org": ("gpu1", "gpu3", "x.site.org"),
}


@pytest.mark.parametrize("text", LISTS)
def test_a_host_list_is_expanded_in_order(text: str) -> None:
    assert expand(text) == LISTS[text]


def test_names_may_go_on_after_a_bracket() -> None:
    """Slurm 22.05 rejects these, later versions accept them."""
    assert expand("gpu[1,3]-ib") == ("gpu1-ib", "gpu3-ib")


def test_no_hosts_are_no_hosts() -> None:
    assert expand("") == ()


@pytest.mark.parametrize(
    "text", ["n[1-2", "n1-2]", "n[a-b]", "n[]", "n[3-1]", "a,,b", "a,", ",a", "a b", "n[0-99999]"]
)
def test_a_broken_host_list_is_shown(text: str) -> None:
    with pytest.raises(HostListError) as refusal:
        expand(text)
    assert repr(text) in str(refusal.value)


def test_a_list_with_too_many_hosts_is_refused_before_it_fills_the_memory() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(HostListError, match="more than 65536 hosts"):
            expand("r[0-999]n[0-999]")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_the_ends_of_tasks_are_read_from_what_srun_says() -> None:
    launch = """\
srun: error: gpu-a[1,3-4]: tasks 0,2-3: Exited with exit code 127
srun: error: gpu-a2: task 1: Out Of Memory
srun: error: Task launch for StepId=5.0 failed on node gpu-b1: Communication connection failure
srun: error: task 0 launch failed: Slurmd could not connect IO
srun: error: task 99 launch failed: Slurmd could not connect IO
srun: error: broken[: task 7: Exited with exit code 1
srun: Job step aborted: Waiting up to 32 seconds for job step to finish.
"""
    code = "Exited with exit code 127"
    assert failed_tasks(launch, ["gpu-c1", "gpu-c2"]) == {
        "gpu-c1": "Slurmd could not connect IO",
        "gpu-a1": code,
        "gpu-a3": code,
        "gpu-a4": code,
        "gpu-a2": "Out Of Memory",
        "gpu-b1": "Communication connection failure",
    }

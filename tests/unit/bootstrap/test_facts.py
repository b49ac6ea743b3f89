"""Invariant: every agent of a step derives the same list of hosts and its own place in it."""

import pytest

from bootstrap.agent.identity import FactsError, expand_hosts, read_facts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n01", ["n01"]),
        ("n[01-03,07],gpu-a1", ["n01", "n02", "n03", "n07", "gpu-a1"]),
        ("n[9-11]", ["n9", "n10", "n11"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[08-10]-ib,b", ["a08-ib", "a09-ib", "a10-ib", "b"]),
    ],
)
def test_a_host_list_is_expanded_as_slurm_writes_it(text: str, hosts: list[str]) -> None:
    assert list(expand_hosts(text)) == hosts


@pytest.mark.parametrize("text", ["n[1-", "n[a-b]", "n[]"])
def test_a_broken_host_list_is_refused(text: str) -> None:
    with pytest.raises(FactsError, match="host list"):
        expand_hosts(text)


def test_the_step_counts_and_not_the_job() -> None:
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "1",
        "SLURM_JOB_NODELIST": "n[01-04]",
        "SLURM_STEP_NODELIST": "n[02-03]",
        "SLURM_RESTART_COUNT": "2",
    }
    facts = read_facts(environ, "whatever")
    assert (facts.host, facts.head_host, facts.is_head, facts.restart_count) == ("n03", "n02", False, 2)


def test_outside_slurm_there_is_one_node() -> None:
    facts = read_facts({}, "laptop")
    assert facts.hosts == ("laptop",) and facts.is_head and not facts.in_slurm


def test_an_agent_started_by_hand_inside_a_job_is_told_to_use_srun() -> None:
    with pytest.raises(FactsError, match="srun"):
        read_facts({"SLURM_JOB_ID": "7"}, "n01")

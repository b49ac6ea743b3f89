"""Invariant: the cluster has exactly the requested number of nodes, or the next attempt excludes
the bad ones.
"""

import pytest

from bootstrap.agent.gathering import choose_hosts
from bootstrap.agent.rendezvous import BringupError
from bootstrap.check_result import Check
from bootstrap.preflight.table import Preflight

HOSTS = ("n1", "n2", "n3", "n4")


def checked(*unfit: str) -> Preflight:
    level = {True: "EXCLUDE_NODE", False: "OK"}
    return Preflight({host: (Check("shm", level[host in unfit], "too small"),) for host in HOSTS})


def choose(num_needed: int, *unfit: str, absent: dict[str, str] | None = None) -> tuple[str, ...]:
    return choose_hosts(HOSTS, num_needed, checked(*unfit), absent or {}, can_requeue=True)


def test_spares_are_left_over_in_order_and_take_the_place_of_the_unfit() -> None:
    assert choose(4) == HOSTS
    assert choose(3) == ("n1", "n2", "n3")
    assert choose(3, "n2") == ("n1", "n4", "n3")
    assert choose(2, "n2", absent={"n3": "it did not join"}) == ("n1", "n4")


def test_too_few_are_left_out_of_the_next_attempt() -> None:
    with pytest.raises(BringupError, match="2 of 4 nodes are fit, 3 are needed") as raised:
        choose(3, "n2", absent={"n4": "it did not join"})
    assert raised.value.verdict == "requeue"
    assert raised.value.exclude == ("n2", "n4")
    assert "n2: shm: too small" in str(raised.value) and "n4: it did not join" in str(raised.value)


def test_the_head_cannot_be_replaced() -> None:
    with pytest.raises(BringupError) as raised:
        choose(2, "n1")
    assert raised.value.exclude == ("n1",)


def test_outside_slurm_nobody_would_start_it_again() -> None:
    with pytest.raises(BringupError) as raised:
        choose_hosts(HOSTS, 4, checked("n3"), {}, can_requeue=False)
    assert raised.value.verdict == "failed"


def test_what_fits_no_host_is_a_matter_of_configuration() -> None:
    preflight = Preflight.of(checked(*HOSTS).checks, {})
    with pytest.raises(
        BringupError, match=r"on every host \(n1, n2, n3, n4\): shm: too small"
    ) as raised:
        choose_hosts(HOSTS, 4, preflight, {}, can_requeue=True)
    assert raised.value.verdict == "config" and raised.value.exclude == ()

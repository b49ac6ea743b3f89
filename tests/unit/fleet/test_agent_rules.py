"""Rules by which the agent of an engine waits, drains, restarts its server and leaves."""

from dataclasses import replace

import pytest

from common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from rlpost.extensions.fleet.agent_rules import (
    AgentObservations,
    AgentRules,
    EngineVerdict,
    Patience,
    ServerState,
    end_of_run,
)
from rlpost.extensions.fleet.records import EngineState, Lease, LeaseState, Orders

NO_ORDERS = Orders()
PATIENCE = Patience(lease_s=10, driver_s=100, drain_s=5, margin_s=2)


@pytest.fixture
def rules():
    return AgentRules("7_0", "a", "digest", PATIENCE, 0.0)


def lease(beat, **more):
    return Lease("1", beat, **({"settings": "digest"} | more))


def seen(beat, server=ServerState.READY, orders=NO_ORDERS, stop="", stop_in_s=None, **more):
    return AgentObservations(lease(beat, **more), orders, stop, stop_in_s, server)


def test_it_reports_its_server(rules):
    assert rules.step(seen(1, ServerState.STARTING), 0) == EngineVerdict(EngineState.STARTING)
    assert rules.step(seen(2), 1) == EngineVerdict(EngineState.READY)


def test_it_leaves_when_its_server_ends(rules):
    over = AgentObservations(lease(1), Orders(), server=ServerState.ENDED, end="exit code 9")
    assert rules.step(over, 1) == EngineVerdict(
        EngineState.GONE, "exit code 9", exit_code=EXIT_FAILED
    )


def test_it_leaves_when_the_run_has_ended(rules):
    verdict = rules.step(seen(1, state=LeaseState.ENDED), 1)
    assert verdict == EngineVerdict(EngineState.GONE, "the run has ended", exit_code=EXIT_DONE)


def test_without_a_driver_it_pauses_once_and_waits_for_the_next_attempt(rules):
    rules.step(seen(1), 0)
    rules.step(seen(2), 5)
    assert rules.step(seen(2), 15) == EngineVerdict(EngineState.READY)
    waits = rules.step(seen(2), 16)
    assert waits.pause and waits.reason == "waits for a driver after 1, 11 s so far"
    assert not rules.step(seen(2), 17).pause
    assert rules.step(
        AgentObservations(Lease("2", 0), Orders(), server=ServerState.READY), 90
    ) == EngineVerdict(EngineState.READY)
    again = rules.step(AgentObservations(Lease("2", 0), Orders(), server=ServerState.READY), 101)
    assert again.pause, "it served in between"


def test_the_wait_for_a_driver_ends(rules):
    rules.step(seen(1), 0)
    assert rules.step(seen(1), 100).exit_code is None
    left = rules.step(seen(1), 101)
    assert left.exit_code == EXIT_DONE and left.reason == "no driver for 101 s"


def test_before_the_first_driver_the_message_says_what_it_waits_for(rules):
    assert "the run's first start" in rules.step(AgentObservations(None, Orders()), 11).reason


def test_a_stop_drains_until_the_driver_has_dismissed_the_engine(rules):
    rules.step(seen(1), 0)
    drains = rules.step(seen(2, stop="TERM", in_use=("a",)), 1)
    assert drains == EngineVerdict(EngineState.DRAINING, "TERM")
    assert rules.step(seen(3, stop="TERM", in_use=("a",)), 2).exit_code is None
    assert rules.step(seen(4, stop="TERM"), 3).exit_code == EXIT_PREEMPTED


def test_draining_is_reported_at_least_once(rules):
    rules.step(seen(1), 0)
    assert rules.step(seen(2, stop="TERM"), 1).state is EngineState.DRAINING
    assert rules.step(seen(2, stop="TERM"), 2).exit_code == EXIT_PREEMPTED


@pytest.mark.parametrize(
    ("now", "stop_in_s", "leaves"), [(5, None, False), (7, None, True), (2, 3, False), (2, 2, True)]
)
def test_draining_ends_before_the_job_does(rules, now, stop_in_s, leaves):
    rules.step(seen(1), 0)
    rules.step(seen(2, stop="TERM", in_use=("a",)), 1)
    verdict = rules.step(seen(3, stop="TERM", in_use=("a",), stop_in_s=stop_in_s), now)
    assert (verdict.exit_code == EXIT_PREEMPTED) is leaves


def test_without_a_driver_a_stop_is_followed_at_once(rules):
    rules.step(seen(1), 0)
    assert rules.step(seen(1, stop="TERM", in_use=("a",)), 20).exit_code == EXIT_PREEMPTED


def test_an_order_to_leave_is_not_a_preemption(rules):
    rules.step(seen(1), 0)
    orders = Orders(drain=("7_0",))
    assert rules.step(seen(2, orders=orders, in_use=("a",)), 1).state is EngineState.DRAINING
    assert rules.step(seen(3, orders=orders), 2).exit_code == EXIT_DONE


def test_other_settings_of_the_run_restart_the_server(rules):
    rules.step(seen(1), 0)
    assert rules.step(seen(2, settings="other"), 1).restart
    assert not rules.step(seen(3, settings=""), 2).restart, "an older driver says nothing"


@pytest.mark.parametrize(
    ("entries", "end"),
    [
        ([], ""),
        ([("submitted", {}), ("attempt", {}), ("started", {})], ""),
        ([("attempt", {}), ("verdict", {"answer": "again"})], ""),
        ([("attempt", {}), ("verdict", {"answer": 1, "reason": "no budget"})], "no budget"),
        ([("attempt", {}), ("verdict", {"answer": 1}), ("submitted", {})], ""),
        ([("verdict", {"answer": 75, "verdict": "requeue"}), ("chained", {})], ""),
        ([("started", {}), ("done", {}), ("fleet", {})], "has ended"),
        ([("started", {}), ("cancelled", {})], "cancelled"),
    ],
)
def test_the_ledger_says_whether_a_run_continues(entries, end):
    found = end_of_run([{"event": event, **details} for event, details in entries])
    assert end in found and bool(found) == bool(end)


def test_an_engine_leaves_a_run_that_has_ended_unless_a_driver_is_alive(rules):
    rules.step(seen(1), 0)
    assert rules.step(replace(seen(2), run_end="failed"), 1).exit_code is None
    verdict = rules.step(replace(seen(2), run_end="failed"), 20)
    assert (verdict.state, verdict.exit_code) == (EngineState.GONE, EXIT_DONE)

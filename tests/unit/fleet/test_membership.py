"""Decisions which fleet engines serve, from their files, the version and results of actions."""

import pytest

from rlpost.extensions.fleet.membership import (
    NEW_WEIGHTS,
    Admit,
    Dismiss,
    EngineUsage,
    FleetLimits,
    Membership,
    Update,
)
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Orders

LIMITS = FleetLimits(lost_after_s=30, pulls_at_once=2, max_failures=3, retry_s=5)


def record(engine="7_0", beat=1, state=EngineState.READY, incarnation="a", **more):
    values = {"url": f"http://n1:{9000 + sum(map(ord, engine))}", "num_gpus": 2}
    return EngineRecord(engine, incarnation, state, beat, **values | more)


def words(actions):
    return [(type(one).__name__, one.record.engine) for one in actions]


@pytest.fixture
def fleet():
    made = Membership(LIMITS)
    made.set_version(3)
    return made


def serve(fleet, *records, now=0.0):
    """Bring these engines into service immediately."""
    todo = fleet.step(records, now)
    while todo:
        for action in todo:
            fleet.end_action(action, now)
        todo = fleet.step(records, now)
    assert {one.engine for one in fleet.serving()} == {one.engine for one in records}


def test_an_engine_is_updated_then_admitted(fleet):
    one = record()
    (update,) = fleet.step([one], 0)
    assert update == Update(one, 3)
    assert fleet.step([one], 1) == [] and fleet.serving() == []
    fleet.end_action(update, 2)
    (admit,) = fleet.step([one], 2)
    assert admit == Admit(one, 3) and fleet.serving() == []
    fleet.end_action(admit, 3)
    assert fleet.step([one], 3) == [] and fleet.serving() == [one]


def test_no_engine_is_updated_before_there_is_a_version_or_its_server_answers():
    fleet = Membership(LIMITS)
    assert fleet.step([record()], 0) == []
    fleet.set_version(0)
    starting = record("7_1", state=EngineState.STARTING, url="")
    assert words(fleet.step([record(beat=2), starting], 1)) == [("Update", "7_0")]


def test_an_update_to_a_version_that_was_replaced_before_it_ended_is_repeated(fleet):
    one = record()
    (update,) = fleet.step([one], 0)
    fleet.set_version(4)
    fleet.end_action(update, 1)
    assert fleet.step([one], 1) == [Update(one, 4)]


def test_an_admission_that_ends_after_a_new_version_is_taken_back(fleet):
    one = record()
    (update,) = fleet.step([one], 0)
    fleet.end_action(update, 0)
    (admit,) = fleet.step([one], 0)
    fleet.set_version(4)
    assert not fleet.is_settled
    fleet.end_action(admit, 1)
    (dismiss,) = fleet.step([one], 1)
    assert dismiss == Dismiss(one, NEW_WEIGHTS, answers=True) and not fleet.is_settled
    fleet.end_action(dismiss, 2)
    assert fleet.is_settled
    assert fleet.step([one], 2) == [Update(one, 4)]


def test_without_a_version_all_engines_leave_and_none_is_admitted(fleet):
    both = [record("7_0"), record("7_1")]
    serve(fleet, *both)
    fleet.withdraw_version()
    todo = fleet.step(both, 1)
    assert words(todo) == [("Dismiss", "7_0"), ("Dismiss", "7_1")]
    for action in todo:
        fleet.end_action(action, 1)
    assert fleet.is_settled and fleet.step(both, 2) == []
    fleet.set_version(4)
    assert words(fleet.step(both, 3)) == [("Update", "7_0"), ("Update", "7_1")]


def test_a_bounded_number_of_engines_reads_weights_at_once_in_order(fleet):
    four = [record(f"7_{index}") for index in range(4)]
    first = fleet.step(four, 0)
    assert words(first) == [("Update", "7_0"), ("Update", "7_1")]
    fleet.end_action(first[0], 1)
    second = fleet.step(four, 1)
    assert words(second) == [("Update", "7_2"), ("Admit", "7_0")]
    fleet.set_version(4)
    for action in (first[1], *second):
        fleet.end_action(action, 2)
    assert words(fleet.step(four, 2)) == [
        ("Dismiss", "7_0"),
        ("Update", "7_3"),  # its turn has not come yet
        ("Update", "7_1"),
    ]


@pytest.mark.parametrize(
    ("change", "reason", "answers"),
    [
        ({"state": EngineState.DRAINING, "reason": "TERM"}, "TERM", True),
        ({"state": EngineState.GONE, "reason": "exit code 1"}, "exit code 1", False),
        ({"state": EngineState.GONE}, "its server ended", False),
        ({"incarnation": "b"}, "its server ended", False),
    ],
)
def test_an_engine_leaves_when_its_record_says_so(fleet, change, reason, answers):
    serve(fleet, record())
    (dismiss,) = fleet.step([record(beat=2, **change)], 1)
    assert (dismiss.reason, dismiss.answers) == (reason, answers)
    assert dismiss.record.url == record().url


def test_a_draining_engine_stays_away(fleet):
    serve(fleet, record())
    draining = record(beat=2, state=EngineState.DRAINING)
    (dismiss,) = fleet.step([draining], 1)
    fleet.end_action(dismiss, 2)
    assert fleet.step([draining.next()], 3) == []


def test_an_engine_without_heartbeats_is_lost_and_forgotten(fleet):
    serve(fleet, record(beat=5))
    assert fleet.step([record(beat=5)], 30) == []
    (dismiss,) = fleet.step([record(beat=5)], 31)
    assert dismiss.reason == "lost: no sign of life for 31 s" and not dismiss.answers
    fleet.end_action(dismiss, 32)
    assert fleet.step([record(beat=5)], 33) == [] and not fleet.phases()


def test_a_lost_engine_whose_heartbeats_resume_joins_again_with_new_weights(fleet):
    serve(fleet, record(beat=5))
    (dismiss,) = fleet.step([], 31)
    fleet.end_action(dismiss, 31)
    fleet.step([], 31)
    assert fleet.step([record(beat=6)], 40) == [Update(record(beat=6), 3)]


def test_a_stale_record_changes_nothing(fleet):
    serve(fleet, record(beat=5))
    assert fleet.step([record(beat=4, state=EngineState.GONE)], 1) == []
    assert fleet.step([record(beat=4, incarnation="0")], 1) == []
    assert len(fleet.serving()) == 1


def test_the_server_of_a_requeued_job_is_another_engine(fleet):
    serve(fleet, record(beat=5))
    again = record(beat=9, incarnation="b", url="http://n2:1")
    (dismiss,) = fleet.step([again], 1)
    assert dismiss.record.incarnation == "a" and dismiss.record.url == record().url
    assert fleet.step([again], 1) == []  # the old one is not dismissed yet
    fleet.end_action(dismiss, 2)
    assert fleet.step([again], 2) == [Update(again, 3)]


def test_a_server_that_ends_during_its_update_is_forgotten(fleet):
    (update,) = fleet.step([record()], 0)
    again = record(beat=3, incarnation="b")
    assert fleet.step([again], 1) == []
    fleet.end_action(update, 2, "connection refused")
    assert fleet.step([again], 2) == [Update(again, 3)]  # without the wait of the old one


def test_an_engine_on_the_port_of_another_waits_until_that_one_is_dismissed(fleet):
    old, new = record("7_0", url="http://n1:1"), record("8_0", url="http://n1:1")
    serve(fleet, old)
    (dismiss,) = fleet.step([old, new], 1)
    assert dismiss.record == old and not dismiss.answers
    assert dismiss.reason == "its port belongs to another engine now"
    assert fleet.step([old, new], 1) == []
    fleet.end_action(dismiss, 2)
    assert fleet.step([old.next(), new], 2) == [Update(new, 3)]


def test_an_engine_with_other_settings_waits(fleet):
    one = record(settings="other")
    assert fleet.step([one], 0) == []
    assert fleet.descriptions(0) == {"7_0": "waits: its server has other settings"}


def test_engines_follow_orders_to_leave(fleet):
    both = [record("7_0"), record("7_1")]
    serve(fleet, *both)
    (dismiss,) = fleet.step(both, 1, Orders(drain=("7_1",)))
    assert dismiss.record.engine == "7_1"
    fleet.end_action(dismiss, 1)
    assert fleet.step(both, 2, Orders(drain=("7_1",))) == []
    assert words(fleet.step(both, 2, Orders(stop=True))) == [("Dismiss", "7_0")]


def test_an_incarnation_that_keeps_failing_is_refused_but_its_successor_is_not(fleet):
    one, now = record(), 0.0
    for wait in (5, 10, 20):
        (update,) = fleet.step([one], now)
        fleet.end_action(update, now, "refused")
        one = one.next()
        assert fleet.step([one], now + wait - 1) == []
        now += wait
    one = one.next()
    assert fleet.step([one], now + 1000) == []
    assert fleet.descriptions(now + 1000) == {"7_0": "refused after 3 failures: refused"}
    again = one.next(incarnation="b")
    assert fleet.step([again], now + 1001) == [Update(again, 3)]


def test_an_unhealthy_engine_is_dismissed_and_retried(fleet):
    serve(fleet, record())
    fleet.failed("7_0", "other", "no answer")
    assert fleet.step([record()], 1) == []
    fleet.failed("7_0", "a", "no answer")
    (dismiss,) = fleet.step([record()], 1)
    assert dismiss == Dismiss(record(), "no answer", answers=False)
    fleet.end_action(dismiss, 1)
    assert fleet.step([record()], 5) == []
    assert words(fleet.step([record()], 6)) == [("Update", "7_0")]


def test_an_admission_that_fails_is_undone_because_the_router_may_know_the_engine(fleet):
    (update,) = fleet.step([record()], 0)
    fleet.end_action(update, 0)
    (admit,) = fleet.step([record()], 0)
    fleet.end_action(admit, 1, "the router does not reach it")
    (dismiss,) = fleet.step([record()], 1)
    assert dismiss.reason == "the router does not reach it"


def test_a_dismissal_that_fails_is_repeated_until_the_router_has_done_it(fleet):
    serve(fleet, record())
    fleet.withdraw_version()
    (dismiss,) = fleet.step([record()], 1)
    fleet.end_action(dismiss, 2, "the router does not answer")
    assert not fleet.is_settled
    assert words(fleet.step([record()], 3)) == [("Dismiss", "7_0")]


def test_a_step_waits_for_enough_engines_with_a_message_that_counts_the_others(fleet):
    assert "no further engine has joined" in fleet.shortage(1)
    serve(fleet, record("7_0"))
    starting = record("7_1", state=EngineState.STARTING, url="")
    fleet.step([record("7_0"), starting], 1)
    assert fleet.shortage(1) is None and fleet.shortage(2, others=1) is None
    assert fleet.shortage(2) == (
        "1 engine serves, but --min-engines is 2: the step waits; of the fleet: 1 idle"
    )


def test_engines_are_charged_from_admission_to_dismissal(fleet):
    both = [record("7_0"), record("8_0", num_gpus=4)]
    serve(fleet, *both, now=10.0)
    assert fleet.usage(15.0) == {"7_0": EngineUsage(5.0, 10.0), "8_0": EngineUsage(5.0, 20.0)}
    (dismiss,) = fleet.step(both, 16, Orders(drain=("7_0",)))
    fleet.end_action(dismiss, 18)
    assert fleet.usage(20.0) == {"7_0": EngineUsage(8.0, 16.0), "8_0": EngineUsage(10.0, 40.0)}
    assert fleet.usage(21.0)["7_0"] == EngineUsage(8.0, 16.0)


def test_descriptions_for_the_user(fleet):
    starting = record("7_1", state=EngineState.STARTING, url="")
    serve(fleet, record())
    fleet.step([record(), starting], 4)
    assert fleet.descriptions(9) == {"7_0": "serves version 3 for 9 s", "7_1": "starts"}


def reads(fleet, records, *times):
    """Return how many engines start reading weights at each of these times."""
    found = []
    for now in times:
        records[:] = [one.next() for one in records]
        found.append(sum(isinstance(one, Update) for one in fleet.step(records, now)))
    return found


def test_the_total_rate_of_weight_reads_is_bounded():
    """Ten engines read 20 GB each at 10 GB/s in total: one every 2 s, however often steps run."""
    limits = FleetLimits(pulls_at_once=10, pull_bytes_per_s=10e9)
    fleet, small = Membership(limits), Membership(limits)
    records = [record(f"7_{number}") for number in range(10)]
    fleet.set_version(1, num_bytes=20 * 10**9)
    assert reads(fleet, records, 100, 100.5, 101, 102, 103, 104) == [1, 0, 1, 0, 1, 0]
    small.set_version(1, num_bytes=10**9)  # ten of them a second
    assert reads(small, records, 100) == [10]


def test_an_engine_that_fails_three_requests_leaves_and_counts_from_zero_when_readmitted():
    fleet, one = Membership(FleetLimits(retry_s=1)), record()
    fleet.set_version(1)
    serve(fleet, one)
    assert [fleet.request_failed(one.url) for _ in range(2)] == [one, one]  # checked each time
    assert fleet.request_failed("http://elsewhere:1") is None
    assert fleet.request_failed(one.url) is None
    (dismiss,) = fleet.step([], 1)
    assert isinstance(dismiss, Dismiss) and not dismiss.answers
    fleet.end_action(dismiss, 1)
    serve(fleet, one.next(), now=3)
    assert fleet.request_failed(one.url) == one.next()

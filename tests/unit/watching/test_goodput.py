"""Goodput of synthetic ledgers, with figures worked out on paper."""

import json
from datetime import UTC, datetime, timedelta

import pytest

from rlpost.config import extensions
from rlpost.config.load import dump, load
from rlpost.extensions.watching.goodput import goodput
from rlpost.extensions.watching.gpu_layout import GpuLayout
from rlpost.extensions.watching.joined_use import joined_use
from rlpost.extensions.watching.timeline import timeline, without_jumps_back

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
FOUR_COLOCATED = GpuLayout(gpus_per_node=4, num_nodes=1, trainer=4, engines=4, is_colocated=True)
"""One node of four GPUs, all with both roles: 900 s are one GPU hour."""


def ledger(*entries):
    return [
        {"time": (BEGIN + timedelta(seconds=at_s)).isoformat(), "event": event, **details}
        for at_s, event, details in entries
    ]


def steps(first, last, step_s, **more):
    return [{"step": step, "time/step_s": step_s, **more} for step in range(first, last + 1)]


def measured(events, lines, *, layout=FOUR_COLOCATED, until_s=99_999):
    return goodput(events, lines, layout, BEGIN + timedelta(seconds=until_s))


def attempt(begin_s, number, *, step, ready_s=None, started_s=None, **started):
    """An attempt that is up 30 s after its begin and ready at ``ready_s``."""
    made = [(begin_s, "attempt", {"attempt": number, "num_nodes": 1})]
    made.append(
        (started_s or begin_s + 30, "started", {"attempt": str(number), "step": step, **started})
    )
    return [
        *made,
        *([(ready_s, "ready", {"attempt": str(number), "step": step})] if ready_s else []),
    ]


def verdict(at_s, number, word, answer):
    return (at_s, "verdict", {"attempt": number, "verdict": word, "answer": answer})


def test_a_run_that_is_preempted_once():
    """Attempt 0: 90 s start-up, steps 1 to 7 of 100 s, a save of 20 s, 90 s to its end.

    Attempt 1, 300 s later: 60 s start-up, steps 8 to 10, saves of 10 s, 30 s of other work.
    """
    events = ledger(
        (0, "submitted", {"job_id": "1"}),
        *attempt(100, 0, step=0, ready_s=190),
        (910, "committed", {"step": 7, "blocking_s": 20.0}),
        (920, "preempted", {"saved": "checkpoint", "step": 7}),
        verdict(1000, 0, "requeue", "again"),
        *attempt(1300, 1, step=7, ready_s=1360, again={"steps": 0, "step_s": 0.0}),
        (1680, "committed", {"step": 10, "blocking_s": 10.0}),
        (1690, "done", {"step": 10}),
        verdict(1700, 1, "done", 0),
    )
    found = measured(events, steps(1, 10, 100.0))
    # 900 s and 400 s on four GPUs
    assert found.gpu_hours == pytest.approx(1300 / 900)
    by_use = {use: hours * 900 for use, hours in found.gpu_hours_by_use.items()}
    assert by_use == pytest.approx(
        {"trained": 1000, "start-up": 150, "saving": 30, "recovery": 90, "other": 30}
    )
    assert found.trained_frac == pytest.approx(10 / 13)
    assert found.queue_s == 100 + 300
    assert found.cost is None


@pytest.mark.parametrize("jumps_at", [150, 500, 950, 1320])
def test_a_clock_that_is_set_back_an_hour_loses_the_time_around_that_moment_alone(jumps_at):
    """At an entry of start-up, training, its end, or the second attempt."""
    entries = [
        (0, "submitted", {"job_id": "1"}),
        *attempt(100, 0, step=0, ready_s=190),
        (910, "committed", {"step": 7, "blocking_s": 20.0}),
        verdict(1000, 0, "requeue", "again"),
        *attempt(1300, 1, step=7, ready_s=1360),
        (1700, "done", {"step": 10}),
        verdict(1760, 1, "done", "done"),
    ]
    lines = steps(1, 10, 100.0)
    undisturbed = measured(ledger(*entries), lines)
    jumped = ledger(*(((at - 3600 if at > jumps_at else at), *more) for at, *more in entries))
    found = measured(jumped, lines)
    longest_gap_s = 720
    lost_gpu_hours = undisturbed.gpu_hours - found.gpu_hours
    assert 0 <= lost_gpu_hours <= 4 * longest_gap_s / 3600
    assert all(hours >= 0 for hours in found.gpu_hours_by_use.values())
    history = timeline(jumped, BEGIN)
    assert all(span.end_s >= span.begin_s for span in history.spans)
    marks = [mark.at_s for mark in history.marks]
    assert marks == sorted(marks)


def test_clocks_of_two_hosts_that_differ_by_seconds_add_no_time():
    entries = [
        (10 * number - 5 * (number % 2), "committed", {"step": number}) for number in range(99)
    ]
    until = BEGIN + timedelta(seconds=2000)
    found, end = without_jumps_back(ledger(*entries), until)
    assert (found[-1][0] - BEGIN).total_seconds() == 980 and end == until


def test_a_crash_charges_the_steps_that_are_trained_again_to_the_attempt_that_lost_them():
    """Attempt 0 saves step 2, finishes steps 3 to 5 (300 s) and dies in the sixth, 70 s later.

    Attempt 1 trains 3 to 6: from the journal 3 to 5 take 40 s each, step 6 takes 100 s.
    """
    events = ledger(
        (0, "submitted", {}),
        *attempt(0, 0, step=0, ready_s=100),
        (310, "committed", {"step": 2, "blocking_s": 10.0}),
        verdict(680, 0, "failed", "again"),
        *attempt(700, 1, step=2, ready_s=760, again={"steps": 3, "step_s": 300.0}),
        (980, "done", {"step": 6}),
        verdict(980, 1, "done", 0),
    )
    found = measured(events, [*steps(1, 2, 100.0), *steps(3, 5, 40.0), *steps(6, 6, 100.0)])
    by_use = {use: hours * 900 for use, hours in found.gpu_hours_by_use.items()}
    assert by_use == pytest.approx(
        {"trained": 420, "repeated": 300, "start-up": 160, "saving": 10, "recovery": 70}
    )
    assert found.gpu_hours == pytest.approx((680 + 280) / 900)
    assert found.queue_s == 20


@pytest.mark.parametrize(("tokens", "kept_s"), [(6_000, 30), (100_000, 90)])
def test_generation_that_the_next_attempt_goes_on_with_is_trained_time(tokens, kept_s):
    """90 s after its last step the attempt is killed; engines generate 200 tokens a second."""
    kept = {"attempt": "1", "incarnation": 0, "tokens": tokens, "answers": 3, "turns": 0}
    events = ledger(
        *attempt(100, 0, step=0, ready_s=190),
        verdict(980, 0, "requeue", "again"),
        *attempt(1300, 1, step=7, ready_s=1360),
        (1365, "kept", kept),
        (1660, "done", {"step": 10}),
        verdict(1660, 1, "done", "done"),
    )
    rates = {"time/tokens_per_s": 100.0, "time/generate_s": 50.0}
    found = measured(events, steps(1, 10, 100.0, **rates))
    by_use = {use: hours * 900 for use, hours in found.gpu_hours_by_use.items()}
    assert by_use == pytest.approx(
        {"trained": 1000 + kept_s, "start-up": 150}
        | ({"recovery": 90 - kept_s} if kept_s < 90 else {})
    )
    assert "3 answers and 0 turns kept" in [mark.text for mark in timeline(events, BEGIN).marks]


def test_chained_jobs_wait_in_the_queue_without_gpus():
    events = ledger(
        (0, "submitted", {"job_id": "1"}),
        *attempt(50, 0, step=0, ready_s=100),
        (300, "preempted", {}),
        verdict(300, 0, "requeue", "again"),
        (301, "chained", {"attempt": 0, "job_id": "2"}),
        *attempt(800, 1, step=2, ready_s=850),
        (1050, "done", {}),
        verdict(1050, 1, "done", 0),
    )
    found = measured(events, steps(1, 4, 100.0))
    assert found.gpu_hours == pytest.approx((250 + 250) / 900)
    assert found.trained_frac == pytest.approx(400 / 500)
    assert found.queue_s == 50 + 500


def test_an_attempt_that_is_never_ready_is_start_up():
    failed = ledger((0, "submitted", {}), *attempt(10, 0, step=0), verdict(460, 0, "config", 78))
    found = measured(failed, [])
    assert found.trained_frac == 0.0
    assert found.gpu_hours_by_use == pytest.approx({"start-up": 0.5})
    assert found.queue_s == 10, "nothing waits after an attempt that does not come back"


def test_what_still_runs_counts_until_now():
    running = ledger((0, "submitted", {}), *attempt(100, 0, step=0, ready_s=200))
    lines = [*steps(1, 2, 100.0), {"step": 3, "time/step_s": 100.0, "time/eval_s": 50.0}]
    found = measured(running, lines, until_s=600)
    by_use = {use: hours * 900 for use, hours in found.gpu_hours_by_use.items()}
    # the step in progress is not trained yet
    assert by_use == pytest.approx({"trained": 300, "start-up": 100, "evaluation": 50, "other": 50})
    waiting = measured(
        [*running, *ledger(verdict(600, 0, "requeue", "again"))], lines, until_s=1000
    )
    assert waiting.gpu_hours == found.gpu_hours and waiting.queue_s == 100 + 400
    cancelled = [*running, *ledger(verdict(600, 0, "requeue", "again"), (700, "cancelled", {}))]
    assert measured(cancelled, lines, until_s=1000).queue_s == 100 + 100


def test_halves_that_wait_for_each_other_and_spare_nodes_are_not_trained_time():
    """Two nodes of four GPUs and a spare: four train for 40 s of a step of 100 s, two generate for
    50 s of it, and a weight update stalls them for 6 s.
    """
    layout = GpuLayout(gpus_per_node=4, num_nodes=3, trainer=4, engines=2, gpu_hour_price=2.5)
    events = ledger(
        (0, "attempt", {"attempt": 0, "num_nodes": 3}),
        (0, "started", {"attempt": "0", "step": 0}),
        (0, "ready", {"attempt": "0", "step": 0}),
        (3600, "done", {}),
    )
    shares = {"time/trainer_waits_frac": 0.6, "time/generation_waited_frac": 0.5}
    update = {"time/sync_s": 10.0, "sync/update_s": 6.0}
    lines = steps(1, 36, 100.0, **shares, **update)
    found = measured(events, lines, layout=layout)
    # hours of an hour on 12 GPUs: waiting 4 x 0.6 + 2 x (0.5 - 0.06), 6 GPUs without a role
    assert found.gpu_hours_by_use == pytest.approx(
        {"trained": 2.6, "waiting": 3.28, "updating": 0.12, "unassigned": 6.0}
    )
    assert found.cost == pytest.approx(30.0)
    assert found.line == (
        "22% of 12.0 GPU h trained steps; unassigned 50% (6.0 GPU h), waiting 27% (3.3 GPU h), "
        "updating 1% (0.12 GPU h); cost 30.00, trained 6.50"
    )
    asynchronous = GpuLayout(
        gpus_per_node=4, num_nodes=3, trainer=4, engines=2, is_synchronous=False
    )
    found = measured(events, lines, layout=asynchronous)
    # their idle time is not measured, but the update is
    assert found.gpu_hours_by_use == pytest.approx(
        {"trained": 3.48, "waiting": 2.4, "updating": 0.12, "unassigned": 6.0}
    )
    longer = [line | {"sync/update_s": 99.0} for line in lines]  # another, while engines generate
    assert measured(events, longer, layout=asynchronous).gpu_hours_by_use[
        "updating"
    ] == pytest.approx(2 * 0.1)


def test_gpus_of_an_attempt_are_its_own_after_a_resume_with_other_nodes():
    events = ledger(
        (0, "attempt", {"attempt": 0, "num_nodes": 2}),
        (
            0,
            "started",
            {"attempt": "0", "step": 0, "gpus": {"per_node": 2, "trainer": 4, "engines": 4}},
        ),
        (0, "ready", {"attempt": "0"}),
        (900, "verdict", {"attempt": 0, "verdict": "requeue", "answer": 75}),
        (5000, "submitted", {}),
        *attempt(5100, 1, step=9, ready_s=5200),
        (6100, "done", {}),
    )
    found = measured(events, steps(1, 18, 100.0))
    assert found.gpu_hours == pytest.approx((900 + 1000) / 900)
    assert found.gpu_hours_by_use["trained"] == pytest.approx(900 * 4 / 3600 + 900 * 4 / 3600)
    assert found.queue_s == 100, "not the days until a person submits again"


def test_an_old_ledger_has_the_nodes_of_run_json_and_the_saves_of_the_metrics():
    config = load(
        [], {"cluster": {"nodes": 2, "num_gpus_per_node": 4, "spare_nodes": 1, "gpu_hour_price": 3}}
    ).config
    layout = GpuLayout.of_settings(json.loads(dump(config)))
    assert (layout.gpus_per_node, layout.num_nodes, layout.gpu_hour_price) == (4, 3, 3.0)
    events = ledger(
        (0, "attempt", {"attempt": 0, "nodes": "n[01-03]"}),
        (10, "started", {"attempt": "0", "step": 0, "nodes": ["n01", "n02"]}),
        (100, "ready", {"attempt": "0"}),
        (380, "committed", {"step": 2, "blocking_s": 30.0}),
        (600, "done", {}),
    )
    found = measured(events, steps(1, 3, 100.0), layout=layout)
    assert found.gpu_hours == pytest.approx(12 * 600 / 3600)
    assert found.gpu_hours_by_use["saving"] == pytest.approx(12 * 30 / 3600)


@pytest.mark.parametrize(
    "settings", [{}, {"cluster": {"nodes": "many"}}, {"cluster": {"no_such_setting": 1}}]
)
def test_without_settings_that_can_be_read_nothing_is_claimed(settings):
    assert GpuLayout.of_settings(settings) is None
    events = ledger(*attempt(0, 0, step=0, ready_s=50))
    assert goodput(events, [], None, BEGIN + timedelta(seconds=90)) is None


def test_a_batch_host_that_dies_leaves_its_attempt_with_its_last_entry():
    events = ledger(
        (0, "submitted", {}),
        *attempt(0, 0, step=0, ready_s=100),
        (300, "committed", {"step": 2, "blocking_s": 0.0}),
        *attempt(900, 1, step=2, ready_s=1000),
        (1200, "done", {}),
    )
    found = measured(events, steps(1, 4, 100.0))
    assert found.gpu_hours == pytest.approx((300 + 300) / 900)
    assert found.queue_s == 600


def fleet(at_s, attempt, served_s, **allocated):
    details = {"attempt": attempt, "used": {"7_0": served_s}, "served_gpu_s": 2 * served_s}
    return (at_s, "fleet", {**details, "allocated": allocated})


@pytest.mark.parametrize(("is_synchronous", "idle"), [(False, 0.0), (True, 0.25)])
def test_the_gpu_time_of_a_fleet_is_allocated_and_what_serves_counts_as_an_engine(
    is_synchronous, idle, monkeypatch
):
    """Ten steps of 90 s; two engines of two GPUs that had 1,000 s and 200 s, and served 500 s.

    The ledger says it, also where the extension that submitted the engines is not installed.
    """
    monkeypatch.setattr(extensions, "extensions", lambda: ())
    events = ledger(
        *attempt(0, 0, step=0, ready_s=100),
        fleet(400, "0", 100.0, **{"7_0": 500.0}),
        fleet(900, "0", 500.0, **{"7_0": 2000.0, "7_1": 400.0}),
        (1000, "done", {"step": 10}),
        verdict(1000, 0, "done", 0),
    )
    layout = GpuLayout(
        gpus_per_node=2, num_nodes=1, trainer=2, engines=0, is_synchronous=is_synchronous
    )
    lines = steps(1, 10, 90.0, **{"time/generation_waited_frac": 0.75})
    found = measured(events, lines, layout=layout)
    assert found.gpu_hours == pytest.approx((2 * 1000 + 2400) / 3600)
    by_use = {use: hours * 3600 for use, hours in found.gpu_hours_by_use.items()}
    assert by_use["trained"] == pytest.approx(2 * 900 + 1000 * (1 - idle))
    assert by_use.get("waiting", 0.0) == pytest.approx(1000 * idle)
    assert by_use["not serving"] == pytest.approx(2400 - 1000)
    assert "fleet 0.67 GPU h, 42% serving" in found.line


def test_the_meter_of_an_engine_may_begin_again_and_attempts_add_up():
    events = ledger(
        fleet(0, "0", 50.0, **{"7_0": 100.0}),
        fleet(1, "0", 80.0, **{"7_0": 300.0}),
        fleet(2, "1", 20.0, **{"7_0": 40.0}),
    )
    use = joined_use(events)["policy"]
    assert (use.allocated_gpu_s, use.served_gpu_s) == (340.0, 200.0)
    assert joined_use([]) == {}


def test_engines_of_groups_are_busy_or_wait_and_those_of_a_fleet_serve_or_not():
    """Ten steps of 90 s: a judge of 2 GPUs busy for a half, an evaluator of 1 for a tenth.

    Of a second judge's fleet, 2 GPUs had 400 s and served 300 s, busy for a third.
    """
    second = (
        *(900, "fleet"),
        {"attempt": "0", "group": "second", "used": {"8_0": 150.0}, "served_gpu_s": 300.0},
    )
    second[2]["allocated"] = {"8_0": 400.0}
    events = ledger(
        *attempt(0, 0, step=0, ready_s=100, gpus={"groups": {"judge": 2, "evaluator": 1}}),
        second,
        (1000, "done", {"step": 10}),
        verdict(1000, 0, "done", 0),
    )
    layout = GpuLayout(
        *(6, 1, 2, 1), is_synchronous=False, groups={"judge": 9}, evaluates="evaluator"
    )
    shares = {"judge": 0.5, "evaluator": 0.1, "second": 1 / 3}
    metrics = {f"engines/{name}/busy_frac": share for name, share in shares.items()}
    lines = steps(1, 10, 90.0, **metrics)
    found = measured(events, lines, layout=layout)
    by_use = {use: hours * 3600 for use, hours in found.gpu_hours_by_use.items()}
    judge, evaluator, own = 2 * 900, 900, 3 * 900
    assert by_use["trained"] == pytest.approx(own + judge * 0.5 + 300 / 3)
    assert by_use["evaluation"] == pytest.approx(evaluator * 0.1)
    assert by_use["waiting"] == pytest.approx(judge * 0.5 + evaluator * 0.9 + 300 * 2 / 3)
    assert by_use["not serving"] == pytest.approx(400 - 300) and "unassigned" not in by_use
    assert found.gpu_hours == pytest.approx((6 * 1000 + 400) / 3600)


def recovered(at_s, seconds, *, step, phase="train", role="trainer"):
    return (at_s, "recovered", {"role": role, "phase": phase, "step": step, "seconds": seconds})


def recovering(*entries, layout=FOUR_COLOCATED, **line):
    """GPU seconds / 4 of ten steps of 100 s, ready at 100, done at 1150, with these entries."""
    last = [(1150, "done", {"step": 10}), verdict(1150, 0, "done", 0)]
    events = ledger((0, "submitted", {}), *attempt(0, 0, step=0, ready_s=100), *entries, *last)
    found = measured(events, steps(1, 10, 100.0, **line), layout=layout)
    return {use: hours * 900 for use, hours in found.gpu_hours_by_use.items()}


def test_a_trainer_that_is_started_again_within_a_step_is_recovery_and_not_training():
    """30 s of step 5 and 20 s of the weight update of step 7; 10 s during a save between steps."""
    found = recovering(
        recovered(550, 30.0, step=4),
        recovered(790, 20.0, step=7, phase="sync"),
        recovered(900, 10.0, step=8, phase="save"),
    )
    assert found == pytest.approx({"trained": 950, "recovery": 60, "start-up": 100, "other": 40})


def test_engines_that_generate_during_a_recovery_are_not_idle_in_an_asynchronous_run():
    layout = GpuLayout(4, 1, trainer=3, engines=1, is_synchronous=False)
    found = recovering(recovered(550, 40.0, step=4), layout=layout)
    assert found["recovery"] == pytest.approx(40 * 3 / 4)
    assert found["trained"] == pytest.approx(960 + 40 * 1 / 4)


def test_a_trainer_that_is_started_again_beside_generation_costs_what_its_step_waits():
    layout = GpuLayout(4, 1, trainer=2, engines=2)
    waits = {"time/trainer_waits_frac": 0.5, "time/generation_waited_frac": 0.5}
    entry = recovered(550, 40.0, step=4, phase="generate")
    assert recovering(entry, layout=layout, **waits) == recovering(layout=layout, **waits)
    engine = recovered(550, 40.0, step=4, phase="sync", role="engine")
    assert recovering(engine, layout=layout, **waits) == recovering(layout=layout, **waits)


def test_steps_that_a_later_driver_of_the_attempt_trains_again_are_repeated_training():
    at, event, entry = recovered(600, 20.0, step=5, phase=None, role="driver")
    found = recovering((at, event, {**entry, "again": {"steps": 1, "step_s": 15.0}}))
    assert found == pytest.approx(
        {"trained": 1000, "recovery": 20, "repeated": 15, "start-up": 100, "other": 15}
    )


def test_a_recovery_without_a_phase_is_taken_from_the_time_between_steps_and_never_more():
    found = recovering(recovered(600, 500.0, step=5, phase=None, role="driver"))
    assert found == pytest.approx({"trained": 1000, "recovery": 50, "start-up": 100})

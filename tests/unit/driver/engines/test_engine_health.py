"""Failed engines are restarted, updated and then admitted; memory of shared GPUs is offloaded."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.config.load import load
from rlpost.driver.engines.engine_events import EngineEvents
from rlpost.driver.engines.engine_health import NO_ANSWER, EngineHealth
from rlpost.driver.offload import Offload
from rlpost.driver.preemption import StopRequest
from rlpost.driver.worker_groups import ActorGroup
from rlpost.engines.own_membership import MAX_RESTARTS, OwnMembership
from rlpost.errors import EngineDied, Preempted, RolloutError, SyncError
from tests.unit.driver.engines.engine_world import Stop, VirtualLoop

INTERVAL_S = 0.01


class FakeFleet:
    """A fleet of two engines that logs its calls."""

    pause_mode = "retract"

    num_engines = 2

    def __init__(self, sick=()):
        self.members = OwnMembership(self.num_engines)
        self.sick, self.log, self.released = set(sick), [], set()

    @property
    def addresses(self):
        return [str(index) for index in range(len(self.members))]

    def name(self, index):
        return f"engine-{index}"

    async def unhealthy(self, *, generating):
        return sorted(self.sick & {*self.members.checked})

    async def dismiss(self, index):
        self.log.append(f"dismiss {index}")
        self.members.stopped(index)

    async def restart(self, index):
        self.log.append(f"restart {index}")
        self.sick.discard(index)
        self.members.started(index)

    async def admit(self, indices):
        self.log += [f"admit {index}" for index in indices]
        self.members.admitted(indices)

    async def release_memory(self, *tags):
        self.released |= set(tags)
        self.log.append(f"release {' '.join(tags)}")

    async def restore_memory(self, *tags):
        self.released -= set(tags)
        self.log.append(f"restore {' '.join(tags)}")

    def is_released(self, tag):
        return tag in self.released

    async def resume(self):
        self.log.append("resume")


class FakeWeights:
    """Weight updates of which the first ``failures`` fail."""

    def __init__(self, fleet, failures=0, *, are_stuck=False):
        self.fleet, self.failures, self.engines_are_stuck = fleet, failures, are_stuck

    async def connect(self):
        self.fleet.log.append("connect")

    async def update(self, version, *, pause, ready):
        self.fleet.log.append(f"update {version} {pause}")
        if self.failures:
            self.failures -= 1
            raise SyncError("an engine did not take part")
        await ready()


def watch_over(
    fleet,
    *,
    failures=0,
    are_stuck=False,
    stop=None,
    check_others=lambda _: None,
    events=None,
    weights_onloaded=contextlib.nullcontext,
    interval_s=INTERVAL_S,
    **cluster,
):
    config = load(
        [], {"cluster": cluster, "sglang": {"rollout_health_check_interval": interval_s}}
    ).config
    weights = FakeWeights(fleet, failures, are_stuck=are_stuck)
    return EngineHealth(
        config,
        fleet,
        weights,
        stop=stop or StopRequest(Path("/nowhere")),
        check_others=check_others,
        events=events,
        weights_onloaded=weights_onloaded,
    )


async def nothing():
    pass


async def generation(fleet, *, sick=(), until):
    """Generate until the log has an entry; these engines fail meanwhile."""
    fleet.sick |= set(sick)
    while until not in fleet.log:
        await asyncio.sleep(INTERVAL_S)


async def updated(watch, version):
    await watch.update(version, pause="abort", before=nothing, ready=nothing)


REPAIR_OF_1 = ["dismiss 1", "restart 1", "connect"]


def test_an_engine_whose_restarts_do_not_help_ends_the_run_with_its_name_and_a_remedy():
    """Its answers would be generated again and again. A trained batch is progress."""
    fleet = FakeFleet()
    watch = watch_over(fleet)

    async def run(generate):
        await updated(watch, 4)
        await watch.over(generate())

    def num_restarts():
        return fleet.log.count("restart 1")

    async def hangs_forever():
        while True:
            fleet.sick = {1}
            await asyncio.sleep(INTERVAL_S)

    async def hangs_five_times():
        for number in range(5):
            fleet.sick = {1}
            while num_restarts() <= MAX_RESTARTS + number:
                await asyncio.sleep(INTERVAL_S)
            watch.note_version(4)

    with pytest.raises(EngineDied, match=r"engine-1 .* after 3 restarts.*engine-1-server.log"):
        asyncio.run(asyncio.wait_for(run(hangs_forever), timeout=20))
    assert num_restarts() == MAX_RESTARTS
    fleet.members = OwnMembership(2)
    watch = watch_over(fleet)
    asyncio.run(asyncio.wait_for(run(hangs_five_times), timeout=20))


@pytest.mark.parametrize("num_failures", range(1, MAX_RESTARTS + 1))
async def test_a_start_that_fails_is_tried_again_up_to_the_limit(num_failures):
    """An engine that served before fails for what the machine lacks at that moment."""

    class Failing(FakeFleet):
        async def restart(self, index):
            if self.log.count("restart 1") == num_failures:
                return await super().restart(index)
            self.log.append(f"restart {index}")
            self.sick.discard(index)
            raise EngineDied("engine-1 ended by itself (exit code 1)")

    fleet = Failing()
    watch = watch_over(fleet)
    await updated(watch, 4)
    serving = watch.over(generation(fleet, sick={1}, until="admit 1"))
    if num_failures < MAX_RESTARTS:
        await serving
        assert fleet.log.count("dismiss 1") == fleet.log.count("restart 1") == num_failures + 1
        return
    with pytest.raises(EngineDied, match="ended by itself"):
        await serving
    assert fleet.log.count("restart 1") == MAX_RESTARTS


async def test_the_trainers_weights_are_onloaded_for_a_repair_during_generation():
    """Updates onload the weights themselves, before they begin."""
    fleet = FakeFleet()

    @contextlib.asynccontextmanager
    async def weights_onloaded():
        fleet.log.append("onload")
        yield
        fleet.log.append("offload")

    watch = watch_over(fleet, weights_onloaded=weights_onloaded)
    await updated(watch, 4)
    await watch.over(generation(fleet, sick={1}, until="offload"))
    repair = [*REPAIR_OF_1, "update 4 retract", "admit 1"]
    assert fleet.log == ["update 4 abort", "onload", *repair, "offload"]


async def test_an_engine_that_dies_before_the_update_gets_the_trainers_newest_version():
    """In one-step-off mode, groups are still pending then and must report the newer weights."""
    fleet = FakeFleet()
    watch = watch_over(fleet)
    await updated(watch, 4)
    watch.note_version(5)

    async def generate():
        fleet.sick, fleet.pause_mode = {1}, "abort"
        while "admit 1" not in fleet.log:
            await asyncio.sleep(INTERVAL_S)

    await watch.over(generate())
    assert fleet.log == ["update 4 abort", *REPAIR_OF_1, "update 5 abort", "admit 1"]


class Ledger:
    """The entries of the ledger, with a clock that advances one second per reading."""

    def __init__(self):
        self.entries, self.now = [], 0.0

    def record(self, event, **details):
        self.entries.append({"event": event, **details})

    def clock(self):
        self.now += 1.0
        return self.now

    @property
    def events(self):
        return EngineEvents(self.record, clock=self.clock)


async def test_the_ledger_has_the_death_and_the_return_of_an_engine_once():
    fleet, ledger = FakeFleet(), Ledger()
    watch = watch_over(fleet, events=ledger.events)
    await updated(watch, 4)
    await watch.over(generation(fleet, sick={1}, until="admit 1"))
    why = {"engines": [1], "phase": "generate", "cause": NO_ANSWER}
    back = {"event": "recovered", "role": "engine", "seconds": 1.0, "version": 4}
    assert ledger.entries == [{"event": "engine_lost", **why}, back | why]


async def test_the_ledger_has_an_engine_that_a_weight_update_lost_with_the_error_of_the_update():
    fleet, ledger = FakeFleet(sick={1}), Ledger()
    watch = watch_over(fleet, failures=1, events=ledger.events)
    await updated(watch, 7)
    assert [(one["event"], one["phase"], one["cause"]) for one in ledger.entries] == [
        ("engine_lost", "sync", "an engine did not take part"),
        ("recovered", "sync", "an engine did not take part"),
    ]


def test_engines_that_recover_together_have_one_event_per_loss():
    ledger = Ledger()
    events = ledger.events
    events.lost([2], phase="generate", cause=NO_ANSWER)
    events.lost([0, 2], phase="sync", cause="x")
    events.back([0, 1, 2], version=3)
    assert [(one["event"], one["engines"]) for one in ledger.entries] == [
        ("engine_lost", [2]),
        ("engine_lost", [0]),
        ("recovered", [0]),
        ("recovered", [2]),
    ]


async def test_engines_that_die_together_are_dismissed_and_admitted_together():
    """One by one, dismissing the 64 engines of a rack without power would take minutes."""

    class Slow(FakeFleet):
        """A fleet in which a dismissal ends only after all dismissals have begun."""

        num_engines = 3

        def __init__(self):
            super().__init__(sick={0, 1, 2})
            self.begun, self.admissions = 0, []

        async def dismiss(self, index):
            self.begun += 1
            async with asyncio.timeout(5):
                while self.begun < 3:
                    await asyncio.sleep(0)
            await super().dismiss(index)

        async def admit(self, indices):
            self.admissions.append(sorted(indices))
            await super().admit(indices)

    fleet = Slow()
    watch = watch_over(fleet)

    async def generate():
        while not fleet.admissions:
            await asyncio.sleep(INTERVAL_S)

    await watch.over(generate())
    assert fleet.begun == 3
    assert fleet.admissions == [[0, 1, 2]]


async def test_an_update_that_fails_although_all_engines_answer_is_an_error():
    fleet = FakeFleet()
    with pytest.raises(SyncError):
        await updated(watch_over(fleet, failures=1), 7)
    assert fleet.log == ["update 7 abort"]


async def test_engines_that_answer_although_a_failed_update_blocks_them_are_restarted():
    fleet = FakeFleet()
    await updated(watch_over(fleet, failures=1, are_stuck=True), 7)
    assert {f"restart {number}" for number in range(fleet.num_engines)} <= {*fleet.log}
    assert fleet.log.count("update 7 abort") == 2


async def test_an_engine_on_shared_gpus_is_dismissed_at_once_and_restarted_with_the_next_update():
    fleet = FakeFleet()
    watch = watch_over(fleet, colocate=True)

    async def generate():
        fleet.sick = {0}
        while "dismiss 0" not in fleet.log:
            await asyncio.sleep(INTERVAL_S)
        await asyncio.sleep(5 * INTERVAL_S)

    await watch.over(generate())
    assert fleet.log == ["dismiss 0"], "once, and nothing else while the trainer is away"
    await updated(watch, 2)
    assert fleet.log[-4:] == ["restart 0", "connect", "update 2 abort", "admit 0"]


async def test_an_engine_that_was_dismissed_elsewhere_is_restarted_before_the_next_update():
    fleet, ledger = FakeFleet(), Ledger()
    fleet.members.stopped(1)
    watch = watch_over(fleet, colocate=True, events=ledger.events)
    await updated(watch, 3)
    assert fleet.log == ["restart 1", "connect", "update 3 abort", "admit 1"]
    assert [one["event"] for one in ledger.entries] == ["engine_lost", "recovered"]


async def test_an_engine_that_dies_after_the_transfer_is_restarted_and_the_trainer_onloaded_to_send_again():
    """On shared GPUs the trainer is already offloaded when the engine fails to onload."""
    fleet = FakeFleet()

    async def before():
        fleet.log.append("onload to send")

    async def ready():
        fleet.log.append("onload to generate")
        if fleet.log.count("onload to generate") == 1:
            await fleet.dismiss(1)
            raise SyncError("engine 1 does not flush its cache")

    await watch_over(fleet, colocate=True).update(3, pause="abort", before=before, ready=ready)
    first = ["onload to send", "update 3 abort", "onload to generate", "dismiss 1"]
    again = [
        "restart 1",
        "onload to send",
        "connect",
        "update 3 abort",
        "onload to generate",
        "admit 1",
    ]
    assert fleet.log == first + again


async def test_generation_fails_when_no_engine_can_be_restarted():
    fleet = FakeFleet(sick={0, 1})
    with pytest.raises(EngineDied, match="no engine is left"):
        await watch_over(fleet, colocate=True).over(asyncio.Event().wait())


async def test_engines_that_die_after_a_stop_request_do_not_fail_the_run(tmp_path):
    """A preemption may end engines first; generation then aborts and saves its requests."""
    fleet = FakeFleet(sick={0, 1})
    watch = watch_over(fleet, colocate=True, stop=StopRequest(tmp_path / "STOP"))
    with pytest.raises(Preempted):

        async def generate():
            (tmp_path / "STOP").write_text("now")
            await asyncio.sleep(10 * INTERVAL_S)
            raise Preempted("a stop was requested while generating")

        await watch.over(generate())


async def test_a_cancelled_block_stays_cancelled():
    block = asyncio.create_task(watch_over(FakeFleet()).over(asyncio.Event().wait()))
    await asyncio.sleep(INTERVAL_S)
    block.cancel()
    with pytest.raises(asyncio.CancelledError):
        await block


class FailingRestart(FakeFleet):
    """A fleet whose restarts hang until they are cancelled, and then raise."""

    async def restart(self, index):
        self.log.append(f"restart {index}")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise EngineDied(f"engine {index} does not come back") from None


class SlowRestart(FakeFleet):
    """A fleet whose restarts take several intervals."""

    fails = False

    async def restart(self, index):
        self.log.append(f"restart {index}")
        await asyncio.sleep(3 * INTERVAL_S)
        if self.fails:
            raise EngineDied(f"engine {index} does not come back")
        self.sick.discard(index)
        self.members.started(index)


async def test_a_repair_in_progress_is_finished_when_generation_ends():
    """A cancelled repair would leave an engine starting on the port of the next restart."""
    fleet = SlowRestart(sick={1})
    await watch_over(fleet).over(generation(fleet, until="restart 1"))
    assert fleet.log[-1] == "admit 1"


async def test_a_repair_that_fails_when_generation_ends_is_raised_and_cancels_nothing_else():
    fleet = SlowRestart(sick={1})
    fleet.fails = True
    block = asyncio.current_task()
    with pytest.raises(EngineDied, match="engine 1 does not come back"):
        await watch_over(fleet).over(generation(fleet, until="restart 1"))
    assert block.cancelling() == 0, "what follows the block is not cancelled"


async def test_a_cancelled_caller_stays_cancelled_although_a_repair_fails():
    fleet = FailingRestart(sick={1})

    block = asyncio.create_task(watch_over(fleet).over(asyncio.Event().wait()))
    while "restart 1" not in fleet.log:
        await asyncio.sleep(INTERVAL_S)
    block.cancel()
    with pytest.raises(asyncio.CancelledError):
        await block


class FakeActors:
    """Trainer ranks that track which parts of their memory are on the device."""

    def __init__(self, log):
        self.here, self.log = {"weights", "grads", "optimizer"}, log

    async def call(self, method, *parts):
        change = {"memory.offload": self.here.difference_update, "memory.restore": self.here.update}
        change.get(method, lambda parts: None)(parts)
        self.log.append(method)


@pytest.mark.parametrize("phase", ["train", "send", "generate"])
async def test_each_phase_onloads_only_what_it_needs(phase):
    trainer = {"train": {"weights", "grads", "optimizer"}, "send": {"weights"}, "generate": set()}
    engines_away = {
        "train": {"kv_cache", "cuda_graph", "weights"},
        "send": {"kv_cache", "cuda_graph"},
    }
    fleet = FakeFleet()
    actors = FakeActors(fleet.log)
    offload = Offload(load([], {"cluster": {"colocate": True}}).config, ActorGroup(actors), fleet)
    for each in ("generate", "train", "send", "generate", "train", "send")[
        : 4 if phase == "generate" else 6
    ]:
        await getattr(offload, each)()
        if each == phase:
            assert actors.here == trainer[each]
            assert phase == "generate" or fleet.released == engines_away[each]


async def test_a_save_onloads_the_trainer_and_restores_the_state_before_it():
    fleet = FakeFleet()
    actors = FakeActors(fleet.log)
    offload = Offload(load([], {"cluster": {"colocate": True}}).config, ActorGroup(actors), fleet)
    await offload.generate()
    async with offload.save():
        assert actors.here == {"weights", "optimizer"} and fleet.released == {
            "kv_cache",
            "cuda_graph",
        }
    assert actors.here == set() and fleet.released == set() and fleet.log[-1] == "resume"
    async with offload.save(is_last=True):
        pass
    assert actors.here == {"weights", "optimizer"}, (
        "a run that leaves has no time to bring the engines back"
    )


async def test_on_exclusive_gpus_nothing_is_offloaded():
    fleet = FakeFleet()
    offload = Offload(load([], {}).config, ActorGroup(FakeActors(fleet.log)), fleet)
    for turn in (offload.train, offload.send, offload.generate):
        await turn()
    async with offload.save():
        pass
    assert fleet.log == []


async def test_a_run_without_its_own_engines_checks_those_of_the_fleet():
    fleet, seen = FakeFleet(), []
    fleet.members = OwnMembership()
    watch = watch_over(fleet, check_others=seen.append)
    await updated(watch, 1)

    async def generate():
        while len(seen) < 2:
            await asyncio.sleep(INTERVAL_S)

    await watch.over(generate())
    assert set(seen) == {0} and fleet.log == ["update 1 abort"]


@given(
    batches=st.lists(st.integers(1, 3 * 120), min_size=1, max_size=20),  # quarters of a second
    idle=st.integers(0, 60),
)
@settings(deadline=None, max_examples=30, derandomize=True)
def test_engines_are_checked_once_per_interval_however_it_is_split_into_batches(batches, idle):
    """A check that is due between two batches is made as soon as the next one begins."""
    times, spans = [], []

    async def run():
        now = asyncio.get_running_loop().time
        health = watch_over(
            FakeFleet(),
            stop=Stop(),
            check_others=lambda _: times.append(now()),
            interval_s=30.0,
        )
        for quarters in batches:
            begin = now()
            await health.over(asyncio.sleep(quarters / 4 + 1e-3))  # not to end at a check
            spans.append((begin, now()))
            await asyncio.sleep(idle / 4)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    expected, due = [], 30.0
    for begin, end in spans:
        while max(begin, due) < end:
            expected.append(max(begin, due))
            due = expected[-1] + 30.0
    assert times == expected


async def test_a_wait_for_fleet_engines_that_takes_too_long_ends_generation():
    def refuse(number):
        raise RolloutError("no engine")

    watch = watch_over(FakeFleet(), check_others=refuse)
    with pytest.raises(RolloutError, match="no engine"):
        await watch.over(asyncio.sleep(10))


def reconnected(fleet, *, are_stuck=False):
    watch = watch_over(fleet, are_stuck=are_stuck)

    async def run():
        async with watch.paused():
            await watch.reconnect()

    asyncio.run(asyncio.wait_for(run(), timeout=20))


def test_new_ranks_are_connected_and_engines_keep_their_weights():
    fleet = FakeFleet()
    reconnected(fleet)
    assert fleet.log == ["connect"]


def test_engines_blocked_in_a_broadcast_of_dead_ranks_are_left_to_the_repeated_update():
    fleet = FakeFleet()
    reconnected(fleet, are_stuck=True)
    assert fleet.log == ["dismiss 0", "dismiss 1"], "the update restarts what is dismissed"


async def test_engines_are_not_repaired_while_ranks_are_restarted():
    fleet = FakeFleet(sick={1})
    watch = watch_over(fleet)

    async def generate():
        async with watch.paused():
            await asyncio.sleep(10 * INTERVAL_S)
            assert fleet.log == []
        while "admit 1" not in fleet.log:
            await asyncio.sleep(INTERVAL_S)

    await watch.over(generate())

"""Recovery of dead trainer ranks: real loop, collector, journal and checkpoints, fake ranks.

The weights of the ranks are a hash of all batches that they were trained on, and are lost with
them. A run whose ranks die anywhere must end with the weights, metrics and prompts of an
undisturbed one. Its engines are never restarted and get each version once.
"""

import asyncio
import hashlib
import json
import random
from collections import Counter
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from rlpost.config.load import load
from rlpost.driver import trainer_recovery
from rlpost.driver.checkpoints import Checkpoints
from rlpost.driver.decision import Death
from rlpost.driver.placement import Placement, Slot
from rlpost.driver.preemption import StopRequest
from rlpost.driver.trainer_recovery import TrainerRecovery
from rlpost.durable.commit import checkpoint_name
from rlpost.durable.state import RunState
from rlpost.durable.trained_batches import JournalBatches
from rlpost.errors import HalfTrained, Hang, RlpostError, TrainerDied, TrainingError, WorkerFailed
from rlpost.rollout.policy_versions import PolicyVersions
from tests.unit.driver.test_loop import FakeEngines, FakeStages, comparable, config, run

PLACES = ["train", "trained", "send", "save", "saved", "idle"]
HERE = Placement((Slot("n0", "10.0.0.1", 1), Slot("n0", "10.0.0.1", 1)), ())
ELSEWHERE = Placement((Slot("n1", "10.0.0.2", 1), Slot("n1", "10.0.0.2", 1)), ())
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:535] Connection closed by peer"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    monkeypatch.setattr(trainer_recovery, "WATCH_S", 0.005)
    monkeypatch.setattr(trainer_recovery, "NAMED_S", 0.2)
    monkeypatch.setattr(trainer_recovery, "POLL_S", 0.01)


class Ranks:
    """A fake of the group of ranks, of the code that starts them, and of their training."""

    names = ("actor-0 on 10.0.0.1", "actor-1 on 10.0.0.1")

    def __init__(self, deaths=()):
        self.deaths, self.passed = list(deaths), Counter()
        self.weights, self.dead_ranks, self.log = "", [], []
        self.create_fails = self.engines_hold = False

    def passes(self, place):
        """Count a pass; die if ``deaths`` has it, and raise as calls to dead ranks do."""
        self.passed[place] += 1
        if (place, self.passed[place]) in self.deaths:
            self.dead_ranks, self.weights = [1], "lost"
        if self.dead_ranks:
            raise TrainerDied("actor-1 on 10.0.0.1 died: killed\nend of its log", self.dead_ranks)

    # training
    async def train(self, groups, rollout, versions):
        self.passes("train")
        for _ in range(5):
            await asyncio.sleep(0)  # engines generate at this time in the asynchronous modes
        trained = json.dumps([[group.prompt_id, group.rewards] for group in groups])
        self.weights = hashlib.sha256((self.weights + trained).encode()).hexdigest()
        self.passes("trained")
        return {"train/loss": int(self.weights[:4], 16) / 1e4, "train/grad_norm": 1.0}

    # group of ranks
    @property
    def workers(self):
        return self

    async def dead(self, within_s):
        return self.dead_ranks

    async def processes(self):
        return [("n0", "process 7"), ("n0", "process 8")]

    async def kill(self, ranks=None):
        self.log.append("kill")

    async def until_ended(self, earlier, *, within_s):
        return []

    def replace(self, fresh):
        self.dead_ranks, self.weights = [], "new"

    async def answers(self, call, *, within_s):
        assert call.path == "position"
        return [object(), None]

    # startup of ranks
    def engines_hold_gpus(self):
        return self.engines_hold

    @asynccontextmanager
    async def paused(self):
        yield

    async def prepare(self):
        self.log.append("prepare")

    async def create(self, placement):
        if self.create_fails:
            raise RlpostError("no worker on n0")
        self.log.append(f"create on {placement.actors[0].node_id}")

    async def set_up(self, placement, checkpoint):
        await asyncio.sleep(0)
        self.weights = "" if checkpoint is None else (checkpoint / "weights").read_text()
        self.log.append(f"load {checkpoint and checkpoint.name}")
        return self

    async def note_gpus(self):
        pass

    def stand_by(self, placement):
        pass

    async def connect(self, placement):
        self.log.append("connect")


class Stages(FakeStages):
    """The stages of ``test_loop`` on ranks that die; ``weights`` are those of the engines."""

    def __init__(self, folder, ranks, settings=None, stop=None):
        super().__init__()
        self.folder, self.ranks, self.events = folder, ranks, []
        self.trained, self.sent = [], []
        self.settings = settings or config()
        self.stop = stop or StopRequest(folder / "STOP")
        self.checkpoints = Checkpoints(
            self.settings.checkpoint, folder / "checkpoints", committed=lambda step, path: None
        )
        self.recovery = TrainerRecovery(
            self.settings,
            ranks,
            ranks,
            placement=HERE,
            checkpoints=self.checkpoints,
            stop=self.stop,
            record=lambda event, **details: self.events.append((event, details)),
        )
        self.is_begun = False

    async def begin(self):
        if not self.is_begun:
            self.is_begun = True
            await self.recovery.begin(self.ranks)
            self.recovery.resume(0, PolicyVersions(), self.batches)

    async def batches(self, state, checkpoint, until):
        return JournalBatches.read(
            self.folder / "journal",
            state.journal,
            state.step,
            settings="",
            data=None,
            backlog=state.backlog.finished,
            until=until,
        )

    async def sync(self, policy_version):
        await self.begin()
        await self.recovery.over("sync", partial(self._send, policy_version))

    async def _send(self, policy_version):
        self.ranks.passes("send")
        self.weights = self.ranks.weights
        self.versions.append(policy_version)

    async def train(self, groups, rollout):
        train = partial(self.recovery.training.train, groups, rollout, PolicyVersions())
        metrics = await self.recovery.over("train", train)
        self.recovery.note_step(rollout)
        self.trained.append([[group.prompt_id, group.rewards] for group in groups])
        self.seen += [group.prompt_id for group in groups]
        return metrics

    async def measure(self, step, metrics):
        with suppress(TrainerDied):  # monitoring never fails a run
            self.ranks.passes("idle")
        return await super().measure(step, metrics)

    async def save(self, state, *, wait):
        async def write(folder):
            self.ranks.passes("save")
            (folder / "weights").write_text(self.ranks.weights)
            self.ranks.passes("saved")

        await self.recovery.over("save", partial(self.checkpoints.commit, state, write))


def whole(folder, deaths=(), **rollout):
    stages = Stages(folder, Ranks(deaths), config(**rollout))
    run(folder, stages, RunState(pending={}), **rollout)
    return stages


@pytest.fixture(scope="module")
def untouched(tmp_path_factory):
    found = {}
    for mode in ("sync", "one_step_off"):
        folder = tmp_path_factory.mktemp(mode)
        stages = whole(folder, rollout_mode=mode)
        found[mode] = (stages.ranks.weights, comparable(folder), stages.seen)
    return found


def expected(trained):
    weights = ""
    for batch in trained:
        weights = hashlib.sha256((weights + json.dumps(batch)).encode()).hexdigest()
    return weights


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
@pytest.mark.parametrize("count", range(1, 7))
@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_die_anywhere_change_neither_weights_nor_metrics_nor_prompts(
    tmp_path, untouched, place, count, mode
):
    stages = whole(tmp_path, [(place, count)], rollout_mode=mode)
    weights, lines, seen = untouched[mode]
    assert (stages.ranks.weights, comparable(tmp_path), stages.seen) == (weights, lines, seen)
    assert stages.versions == list(range(7)), "engines get each version once"
    assert len(stages.events) == (stages.ranks.passed[place] >= count)


def test_the_batches_since_the_newest_checkpoint_are_repeated_and_recorded(tmp_path):
    stages = whole(tmp_path, [("train", 6)])  # two steps after the checkpoint of step 3
    assert stages.ranks.log == [
        "kill",
        "prepare",
        "create on n0",
        f"load {checkpoint_name(3)}",
        "connect",
    ]
    ((event, details),) = stages.events
    assert event == "recovered"
    assert details.pop("seconds") >= 0
    assert details == {
        "role": "trainer",
        "ranks": [1],
        "cause": "actor-1 on 10.0.0.1 died: killed",
        "phase": "train",
        "step": 5,
        "steps_again": 2,
    }


def test_the_weights_of_an_asynchronous_run_follow_from_its_trained_batches(tmp_path):
    """The clock decides which weights generate a group there, but training is still exact."""
    deaths = [("train", 2), ("send", 4), ("trained", 9)]
    stages = whole(tmp_path, deaths, rollout_mode="fully_async", max_staleness=2)
    assert len(stages.events) == 3
    assert stages.ranks.weights == expected(stages.trained)
    assert sorted(stages.seen) == list(range(24))


def test_a_run_whose_ranks_die_again_and_again_ends_equal(tmp_path, untouched):
    deaths = [("train", 2), ("send", 5), ("idle", 5), ("save", 2)]
    stages = whole(tmp_path, deaths)
    assert [details["step"] for _, details in stages.events] == [1, 4, 5, 6]
    assert (stages.ranks.weights, comparable(tmp_path)) == untouched["sync"][:2]


def often(folder, deaths, num_steps):
    settings = config(num_rollout=num_steps)
    cluster = settings.cluster.model_copy(update={"max_trainer_recoveries": num_steps})
    stages = Stages(folder, Ranks(deaths), settings.model_copy(update={"cluster": cluster}))
    run(folder, stages, RunState(pending={}), num_rollout=num_steps)
    return stages


def test_a_run_whose_ranks_die_in_a_third_of_its_steps_ends_equal(tmp_path):
    """Each death is in a weight update at a random step, with up to three steps to repeat."""
    num_steps, rng = 30, random.Random(5)
    folders = [tmp_path / name for name in ("untouched", "killed")]
    for folder in folders:
        folder.mkdir()
    untouched = often(folders[0], [], num_steps)
    deaths = [("send", 3 * number + rng.randint(0, 1)) for number in range(1, num_steps // 3)]
    killed = often(folders[1], deaths, num_steps)
    assert len(killed.events) == len(deaths) > 8
    assert killed.ranks.weights == untouched.ranks.weights
    assert comparable(folders[1]) == comparable(folders[0])
    assert killed.seen == untouched.seen == list(range(4 * num_steps))


def test_a_second_death_at_the_same_step_ends_the_attempt(tmp_path):
    with pytest.raises(TrainerDied, match="died: killed"):
        whole(tmp_path, [("train", 2), ("train", 4)])  # the third call repeats step 1


def test_a_death_during_a_recovery_ends_the_attempt_with_both_causes(tmp_path):
    with pytest.raises(RlpostError, match=r"(?s)died: killed.*could not be started again.*killed"):
        whole(tmp_path, [("train", 3), ("train", 5)])


def test_ranks_that_cannot_be_created_end_the_attempt_with_both_causes(tmp_path):
    ranks = Ranks([("train", 1)])
    ranks.create_fails = True
    with pytest.raises(RlpostError, match=r"(?s)died: killed.*started again: no worker on n0"):
        run(tmp_path, Stages(tmp_path, ranks), RunState(pending={}))


def settings(**cluster):
    return load([], {"cluster": cluster}).config


def begun(tmp_path, ranks, **named):
    """Return stages with a running recovery, outside of a loop."""
    stages = Stages(tmp_path, ranks, **named)
    stages.recovery.resume(0, PolicyVersions(), stages.batches)
    stages.recovery.training = ranks
    return stages


def over(stages, error, phase="train"):
    """Run an operation that fails once with ``error``; return its final result."""
    failures = [error]

    async def operation():
        if failures:
            raise failures.pop()
        return "done"

    return asyncio.run(asyncio.wait_for(stages.recovery.over(phase, operation), timeout=20))


def test_an_error_of_a_living_rank_is_not_a_death(tmp_path):
    stages = begun(tmp_path, Ranks())
    with pytest.raises(TrainingError, match="nan"):
        over(stages, TrainingError("loss = nan"))
    assert stages.ranks.log == []
    stages = begun(tmp_path, Ranks())
    with pytest.raises(WorkerFailed, match="ValueError"):
        over(stages, WorkerFailed("actor-0 failed:\nValueError: a bug"))
    assert stages.ranks.log == []


def test_a_broken_connection_means_that_a_peer_died_even_before_ray_reports_it(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks)
    asked = []

    async def dead_at_the_third_look(within_s):
        asked.append(within_s)
        return [1] if len(asked) > 2 else []

    ranks.dead = dead_at_the_third_look
    assert over(stages, WorkerFailed(f"actor-0 on 10.0.0.1 failed:\n{GLOO}")) == "done"
    assert stages.events[0][1]["ranks"] == [1]


def test_a_rank_whose_gpu_failed_is_restarted_although_its_process_lives(tmp_path):
    stages = begun(tmp_path, Ranks())
    error = WorkerFailed("actor-0 on 10.0.0.1 failed:\nCUDA error: uncorrectable ECC error")
    assert over(stages, error) == "done"
    assert stages.events[0][1]["ranks"] == [], "nobody died, and all were started again"
    assert stages.ranks.log[0] == "kill"


def test_an_operation_that_failed_because_a_rank_died_is_repeated(tmp_path):
    """For instance, engines did not take a bucket because its sender was killed."""
    ranks = Ranks()
    ranks.dead_ranks = [0]
    stages = begun(tmp_path, ranks)
    assert over(stages, RlpostError("the engines could not all take 3 weights"), "sync") == "done"
    assert "actor-0 on 10.0.0.1 died; first error: the engines" in stages.events[0][1]["cause"]


def test_a_hang_is_recorded_and_its_ranks_are_restarted(tmp_path):
    stages = begun(tmp_path, Ranks())
    details = {"call": "train_step", "ranks": [1], "hosts": ["n01"], "why": "it skipped one"}
    assert over(stages, Hang("train_step hangs because of actor-1", details)) == "done"
    (hang, recorded), (event, recovered) = stages.events
    assert (hang, recorded) == ("hang", details)
    assert (event, recovered["ranks"]) == ("recovered", [1])
    assert stages.ranks.log[0] == "kill"


def test_with_recovery_off_the_original_error_is_raised(tmp_path):
    stages = begun(tmp_path, Ranks(), settings=settings(max_trainer_recoveries=0))
    with pytest.raises(TrainerDied, match="killed"):
        over(stages, TrainerDied("killed", [0]))
    assert stages.ranks.log == []


def test_new_slots_are_used_for_the_ranks_and_their_connections(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks)
    asked = []

    async def spare(death, placement):
        asked.append((death.ranks, placement))
        return ELSEWHERE

    stages.recovery._nodes.new_slots = spare
    assert over(stages, TrainerDied("the node is gone", [0, 1])) == "done"
    assert asked == [((0, 1), HERE)]
    assert ranks.log == ["kill", "prepare", "create on n1", "load None", "connect"]


def test_processes_that_do_not_end_are_named_and_end_the_attempt(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks)

    async def until_ended(earlier, *, within_s):
        return ["process 7 on 10.0.0.1"]

    ranks.until_ended = until_ended
    with pytest.raises(RlpostError, match=r"did not end within 60 s: process 7 on 10\.0\.0\.1"):
        over(stages, TrainerDied("killed", [0]))


def test_a_hanging_startup_ends_at_the_deadline_and_names_missing_ranks(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks, settings=settings(bringup_deadline_s=1))

    async def forever(placement, checkpoint):
        await asyncio.sleep(3600)

    ranks.set_up = forever
    with pytest.raises(RlpostError, match=r"bringup-deadline-s\); without an answer: actor-1 on"):
        over(stages, TrainerDied("killed", [0]))


def test_a_stop_request_ends_a_recovery_at_once_and_saves_nothing_of_the_trainer(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks)

    async def stopped(placement, checkpoint):
        (tmp_path / "STOP").write_text('{"reason": "test"}')
        await asyncio.sleep(3600)

    ranks.set_up = stopped
    with pytest.raises(HalfTrained):
        over(stages, TrainerDied("killed", [0]))


def test_ranks_that_die_during_generation_are_restarted_during_generation(tmp_path):
    ranks = Ranks()
    stages = begun(tmp_path, ranks)

    async def generate():
        async with stages.recovery.watch():
            ranks.dead_ranks = [1]
            while "connect" not in ranks.log:
                await asyncio.sleep(0.001)
        return await stages.recovery.over("train", partial(asyncio.sleep, 0, "trained"))

    assert asyncio.run(asyncio.wait_for(generate(), timeout=20)) == "trained"
    assert [details["phase"] for _, details in stages.events] == ["generate"]


async def test_a_failed_recovery_during_generation_is_raised_by_the_next_operation(tmp_path):
    ranks = Ranks()
    ranks.create_fails = True
    stages = begun(tmp_path, ranks)
    with pytest.raises(RlpostError, match="no worker on n0"):
        async with asyncio.timeout(20):
            async with stages.recovery.watch():
                ranks.dead_ranks = [1]
                while "prepare" not in ranks.log:
                    await asyncio.sleep(0.001)
            await stages.recovery.over("train", partial(asyncio.sleep, 0))


async def test_idle_ranks_are_not_watched_while_engines_use_their_gpus(tmp_path):
    ranks = Ranks()
    ranks.engines_hold = True
    stages = begun(tmp_path, ranks)
    async with stages.recovery.watch():
        ranks.dead_ranks = [1]
        await asyncio.sleep(0.05)
    assert ranks.log == []


def test_the_headline_of_a_death_is_its_first_line():
    assert Death((1,), "actor-1 died\nend of its log").headline == "actor-1 died"


def test_engines_generate_while_the_trainer_is_restarted(tmp_path, monkeypatch):
    """In fully asynchronous mode, groups are finished between the death and the recovery."""
    finished, at_death, at_end = [], [], []
    write = FakeEngines.write

    async def counted(self, entry):
        await asyncio.sleep(0.01 * entry.prompt.prompt_id)  # some answers take longer than a step
        made = await write(self, entry)
        finished.append(entry.prompt.prompt_id)
        return made

    monkeypatch.setattr(FakeEngines, "write", counted)
    ranks = Ranks([("train", 2)])
    connect = ranks.connect

    async def kill(ranks=None):
        at_death.append(len(finished))

    async def counted_connect(placement):
        await asyncio.sleep(0.2)  # a start takes longer than an answer
        at_end.append(len(finished))
        await connect(placement)

    ranks.kill, ranks.connect = kill, counted_connect
    rollout = {"rollout_mode": "fully_async", "max_staleness": 2}
    stages = Stages(Path(tmp_path), ranks, config(**rollout))
    run(tmp_path, stages, RunState(pending={}), **rollout)
    assert at_end[0] > at_death[0]

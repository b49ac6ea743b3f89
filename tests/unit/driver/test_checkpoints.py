"""Background saves become visible when complete, run one at a time, and log failures."""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import pytest

from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.driver.checkpoints import Checkpoints, wait_until_written
from rlpost.durable.commit import PREFIX, checkpoint_name, newest_committed
from rlpost.durable.state import RunState
from rlpost.errors import CheckpointError, ConfigError, Fenced


class Disk:
    """Storage that writes one file per checkpoint when it is released."""

    def __init__(self, fails=False):
        self.go_on, self.fails, self.folder = asyncio.Event(), fails, None

    async def write(self, folder):
        self.folder = folder

    async def finish(self):
        await self.go_on.wait()
        if self.fails:
            raise CheckpointError("disk full")
        (self.folder / "tensors").write_text(self.folder.name)


def checkpoints(folder, provenance=None, **settings):
    committed = []
    made = Checkpoints(
        CheckpointConfig(**settings),
        folder,
        committed=lambda step, path: committed.append(step),
        provenance=provenance,
    )
    return made, committed


async def fill(folder):
    (folder / "tensors").write_text(folder.name)


def save(made, *steps):
    async def run():
        for step in steps:
            await made.commit(RunState(step=step), fill)

    asyncio.run(run())


async def test_a_background_save_is_visible_only_when_complete(tmp_path):
    made, committed = checkpoints(tmp_path)
    disk = Disk()
    await made.start(RunState(step=4), disk.write, disk.finish)
    await asyncio.sleep(0.05)
    assert committed == [] and newest_committed(tmp_path).path is None
    disk.go_on.set()
    assert await made.wait_committed()
    assert committed == [4]
    path, state = made.newest()
    assert state.step == 4 and (path / "tensors").exists()


async def test_it_is_committed_as_soon_as_it_is_written_without_polling(tmp_path):
    made, committed = checkpoints(tmp_path)
    disk = Disk()
    disk.go_on.set()
    await made.start(RunState(step=4), disk.write, disk.finish)
    async with asyncio.timeout(20):
        while committed != [4]:
            await asyncio.sleep(0.01)


async def test_a_save_that_is_due_while_another_is_written_is_deferred_and_not_waited_for(
    tmp_path, caplog
):
    made, committed = checkpoints(tmp_path)
    first, second = Disk(), Disk()
    assert await made.start(RunState(step=1), first.write, first.finish)
    async with asyncio.timeout(20):
        assert not await made.start(RunState(step=2), second.write, second.finish)
    assert second.folder is None and "step 2 is deferred" in caplog.text
    first.go_on.set()
    assert not await made.wait_committed(), "step 1 is there, step 2 was due"
    assert committed == [1] and made.is_owed
    second.go_on.set()
    assert await made.start(RunState(step=3), second.write, second.finish)
    assert await made.wait_committed() and committed == [1, 3] and not made.is_owed


async def test_hanging_storage_is_waited_for_until_the_deadline_and_named(tmp_path):
    made, committed = checkpoints(tmp_path, save_deadline_s=0.4)
    never = Disk()
    await made.start(RunState(step=1), never.write, never.finish)
    async with asyncio.timeout(20):
        assert not await made.wait_committed()
        with pytest.raises(CheckpointError, match=r"still being written after 0 s .*hangs"):
            await made.commit(RunState(step=2), never.write)
    never.go_on.set()
    assert not await made.wait_committed() and committed == [1], "it was slow, and is kept"

    folders = []

    async def stuck(folder):
        folders.append(folder)
        await asyncio.sleep(3600)

    with pytest.raises(CheckpointError, match=r"step 3 was not written to .* within 0 s"):
        await made.commit(RunState(step=3), stuck)
    assert folders[0].exists(), "ranks may still write to it"
    with pytest.raises(CheckpointError, match=r"step 4 was not written to .* within 0 s"):
        await made.start(RunState(step=4), stuck, never.finish)


async def test_storage_that_hangs_in_a_flush_is_waited_for_until_the_same_deadline(
    tmp_path, monkeypatch
):
    from rlpost.driver import checkpoints as module

    answers = threading.Event()

    def hang(*given, **named):
        answers.wait(20)
        raise OSError(5, "Input/output error")

    try:
        async with asyncio.timeout(15):
            made, committed = checkpoints(tmp_path, save_deadline_s=1.0)
            with monkeypatch.context() as patched:
                patched.setattr(module, "commit", hang)
                with pytest.raises(
                    CheckpointError, match=r"step 1 was not written to .* within 1 s"
                ):
                    await made.commit(RunState(step=1), fill)
                assert made.is_owed and committed == []
            with monkeypatch.context() as patched:
                patched.setattr(module, "prune", hang)
                await made.commit(RunState(step=2), fill)
            assert committed == [2] and not made.is_owed
    finally:
        answers.set()


@pytest.mark.parametrize("in_background", [True, False])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), CheckpointError("cannot be looked for")]
)
async def test_a_commit_counts_even_if_the_ledger_cannot_be_written(
    tmp_path, caplog, in_background, error
):
    def full(step, path):
        raise error

    made, disk = Checkpoints(CheckpointConfig(keep_last=1), tmp_path, committed=full), Disk()
    await made.commit(RunState(step=1), fill)
    disk.go_on.set()
    if in_background:
        await made.start(RunState(step=2), disk.write, disk.finish)
        assert await made.wait_committed()
    else:
        await made.commit(RunState(step=2), fill)
    assert [path.name for path in tmp_path.glob(f"{PREFIX}*")] == [checkpoint_name(2)], (
        "older ones go"
    )
    assert (
        f"{checkpoint_name(2)} is committed, but" in caplog.text
        and "committing step" not in caplog.text
    )


async def test_a_failure_in_the_background_keeps_the_previous_commit_and_is_logged(
    tmp_path, caplog
):
    made, committed = checkpoints(tmp_path)
    good, bad, again = Disk(), Disk(fails=True), Disk()
    for disk in (good, bad, again):
        disk.go_on.set()
    await made.start(RunState(step=1), good.write, good.finish)
    assert await made.wait_committed()
    await made.start(RunState(step=2), bad.write, bad.finish)
    assert not await made.wait_committed() and made.is_owed
    assert (
        made.newest()[1].step == 1
        and "committing step 2 failed" in caplog.text
        and "disk full" in caplog.text
    )
    await made.start(RunState(step=3), again.write, again.finish)
    assert await made.wait_committed() and committed == [1, 3]
    assert await made.wait_committed(), "nothing is left to wait for"


async def test_a_save_that_is_waited_for_raises(tmp_path):
    made, _ = checkpoints(tmp_path)

    async def fail(folder):
        raise CheckpointError("read-only file system")

    with pytest.raises(CheckpointError, match="read-only"):
        await made.commit(RunState(step=1), fail)


@pytest.mark.parametrize("fails_in", ["write", "finish", "commit", "mark"])
async def test_a_save_that_fails_is_owed_and_leaves_no_files(tmp_path, monkeypatch, fails_in):
    """The run's last save must not be skipped, and a full disk must have room for the journal."""
    full = OSError(28, "No space left on device")

    def refuse(*given, **named):
        raise full

    made, _ = checkpoints(tmp_path)
    made.claim("0")
    await made.commit(RunState(step=1), fill)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}

    async def write(folder):
        await fill(folder)
        if fails_in == "write":
            raise full

    async def finish():
        if fails_in == "finish":
            raise full

    broken = {"commit": "sync", "mark": "write_within"}.get(fails_in)
    with monkeypatch.context() as patch:
        if broken:
            patch.setattr("rlpost.durable.commit." + broken, refuse)
        if fails_in == "finish":
            await made.start(RunState(step=2), write, finish)
            assert not await made.wait_committed()
        else:
            with pytest.raises(OSError, match="No space"):
                await made.commit(RunState(step=2), write)
    assert made.is_owed and not await made.wait_committed()
    left = {path for path in tmp_path.rglob("*") if path.is_file()}
    if fails_in == "commit":  # fsync fails here for the deletion too, which the next save does
        left = {path for path in left if ".deleting-" not in str(path)}
    assert left == before
    assert made.newest()[1].step == 1
    await made.commit(RunState(step=2), fill)
    assert not made.is_owed and await made.wait_committed()
    assert made.last.step == 2 and made.last.blocking_s == made.last.total_s


async def test_failed_saves_are_retried_after_growing_pauses(tmp_path, monkeypatch):
    """Each retry blocks training for as long as a save takes."""
    now = [1000.0]
    monkeypatch.setattr("rlpost.driver.checkpoints.time", SimpleNamespace(monotonic=lambda: now[0]))
    save_s, num_tries = 60.0, 0

    async def fail(folder):
        now[0] += save_s
        raise OSError(28, "No space left on device")

    made, _ = checkpoints(tmp_path)
    began = now[0]
    while now[0] < began + 6 * 3600:
        now[0] += 10.0  # a step
        if not made.is_paused:
            num_tries += 1
            with pytest.raises(OSError, match="No space"):
                await made.commit(RunState(step=num_tries), fail)
    assert 10 <= num_tries <= 20
    now[0] += 1800.0
    assert not made.is_paused
    await made.commit(RunState(step=num_tries + 1), fill)
    with pytest.raises(OSError, match="No space"):
        await made.commit(RunState(step=num_tries + 2), fail)
    now[0] += 2 * save_s
    assert not made.is_paused, "the pauses begin again after a commit"


def test_the_last_checkpoints_and_those_of_every_tenth_step_are_kept(tmp_path):
    made, committed = checkpoints(tmp_path, keep_last=2, keep_every=10)
    assert made.oldest_kept() is None and made.save_folder == tmp_path
    save(made, *range(4, 34, 3))
    kept = sorted(int(path.name[5:]) for path in tmp_path.glob(f"{PREFIX}*"))
    assert kept == [10, 28, 31] and committed[-1] == 31
    assert made.oldest_kept() == 28, "an archive is no place to fall back to"


def test_a_failed_deletion_does_not_undo_a_commit(tmp_path, caplog, monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    made, committed = checkpoints(tmp_path, keep_last=1)
    save(made, 1)
    monkeypatch.setattr("rlpost.durable.commit.shutil.rmtree", fail)
    save(made, 2)
    assert committed == [1, 2] and not made.is_owed and "could not be deleted" in caplog.text


def attempt(folder, number=0, **settings):
    """The checkpoints of an attempt that has claimed the folder."""
    made, _ = checkpoints(folder, **settings)
    made.claim(f"{number} of run")
    return made


def test_load_is_used_while_save_is_empty(tmp_path, caplog):
    own, other = tmp_path / "own", tmp_path / "other"
    save(checkpoints(other)[0], 7)
    made = attempt(own, load=str(other))
    path, state = made.newest()
    assert (path.parent, state.step) == (other, 7)
    assert made.journal_segment(path, state) == 0
    save(made, 8)
    assert made.newest()[0].parent == own


def test_a_run_goes_on_from_the_checkpoint_of_load_that_it_started_from(tmp_path, caplog):
    """The run that writes to --load goes on, and commits what this one has not trained."""
    own, other = tmp_path / "own", tmp_path / "other"
    first = attempt(own, load=str(other))
    assert first.newest() == (None, RunState(pending={})) and "--ref-load" in caplog.text
    writer, _ = checkpoints(other, keep_last=2)
    save(writer, 7)
    again = attempt(own, 1, load=str(other))
    assert again.newest() == (None, RunState(pending={})), "it started before there was one"
    assert again.origin.content is None
    (own / "ORIGIN").unlink()
    begun = attempt(own, 2, load=str(other))
    assert begun.newest()[1].step == 7
    save(writer, 8)
    again = attempt(own, 3, load=str(other))
    assert again.newest()[1].step == 7 and again.origin == begun.origin
    save(writer, 9)  # it deletes step 7
    with pytest.raises(
        ConfigError, match=rf"started from {checkpoint_name(7)}, .*no longer.*ORIGIN"
    ):
        attempt(own, 4, load=str(other)).newest()
    (tmp_path / "link").symlink_to(other)
    with pytest.raises(ConfigError, match=r"no longer"):
        attempt(own, 4, load=str(tmp_path / "link")).newest()
    (own / "ORIGIN").unlink()
    assert attempt(own, 5, load=str(other)).newest()[1].step == 9


def test_another_load_is_used_and_the_loss_is_named_unless_it_has_the_same_checkpoint(
    tmp_path, caplog
):
    own, one, copy, other = (tmp_path / name for name in ("own", "one", "copy", "other"))
    save(checkpoints(one)[0], 7)
    assert attempt(own, load=str(one)).newest()[1].step == 7
    shutil.copytree(one, copy)
    save(checkpoints(copy)[0], 8)
    assert attempt(own, 1, load=str(copy)).newest()[1].step == 7
    save(checkpoints(other)[0], 3)
    caplog.clear()
    assert attempt(own, 2, load=str(other)).newest()[1].step == 3
    assert f"--load was {one} and is {other}" in caplog.text and "is lost" in caplog.text
    assert attempt(own, 3, load=str(other)).newest()[1].step == 3


def test_another_model_is_refused_and_changed_hyperparameters_are_named(tmp_path, caplog):
    from rlpost.config.load import load
    from rlpost.durable.provenance import Provenance

    def of(model=None, **grpo):
        config = load([], {"grpo": grpo, "cluster": {"nodes": 2}}).config
        return Provenance.of(config, model or {"num_hidden_layers": 2}, wandb_run_id="abc")

    save(checkpoints(tmp_path, of(eps_clip=0.2))[0], 3)
    checkpoints(tmp_path, of(eps_clip=0.2, log_probs_chunk_size=64))[0].newest()
    assert not caplog.records
    checkpoints(tmp_path, of(eps_clip=0.3))[0].newest()
    assert "eps_clip: 0.2 -> 0.3" in caplog.text
    with pytest.raises(ConfigError, match=r"num_hidden_layers: 2 -> 4"):
        checkpoints(tmp_path, of({"num_hidden_layers": 4}))[0].newest()
    held = Provenance.from_json((tmp_path / checkpoint_name(3) / "provenance.json").read_text())
    assert (
        held.wandb_run_id == "abc" and held.hash == of(eps_clip=0.2).hash != of(eps_clip=0.3).hash
    )


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_from_scratch(tmp_path):
    made, _ = checkpoints(tmp_path)
    save(made, 1)
    (tmp_path / checkpoint_name(1) / "tensors").write_text("x")
    with pytest.raises(
        CheckpointError, match=rf"{checkpoint_name(1)}: tensors has 1 bytes.*choose another --save"
    ):
        made.newest()
    (tmp_path / checkpoint_name(1) / "COMMITTED").unlink()
    (tmp_path / "latest").unlink()
    assert made.newest()[0] is None, "what was never committed is nothing to lose"


async def test_a_newer_attempt_claims_the_folder_and_fences_the_older_one(tmp_path):
    old, _ = checkpoints(tmp_path)
    old.claim("0 of runs/a")
    await old.commit(RunState(step=1), fill)
    disk = Disk()
    await old.start(RunState(step=2), disk.write, disk.finish)
    new, _ = checkpoints(tmp_path)
    new.claim("1 of runs/a")
    assert new.newest()[1].step == 1
    disk.go_on.set()
    with pytest.raises(
        Fenced, match=r"belongs to attempt 1 of runs/a .*this is attempt 0 of runs/a"
    ):
        await old.wait_committed()
    with pytest.raises(Fenced):
        await old.commit(RunState(step=3), fill)
    await new.commit(RunState(step=2), fill)
    assert new.newest()[1].step == 2
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".deleting")]


def test_a_folder_that_cannot_be_written_to_is_named_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    made, _ = checkpoints(tmp_path / "file" / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"--save .*file/checkpoints: no checkpoint can be written"
    ):
        made.claim("0")


def test_ranks_are_polled_until_every_one_has_written(tmp_path):
    answers = [[True, False], [False, True], [True, True], [False, False]]

    async def ask():
        return answers.pop(0)

    asyncio.run(wait_until_written(ask))
    assert answers == [[False, False]]


async def test_a_save_whose_ranks_died_is_abandoned_and_never_counts(tmp_path, caplog):
    """New ranks have nothing to write, so a partial checkpoint would be committed immediately."""
    made, committed = checkpoints(tmp_path)
    disk = Disk()
    await made.start(RunState(step=4), disk.write, disk.finish)
    await asyncio.sleep(0.05)
    await made.abandon("a rank died")
    assert made.is_owed and committed == []
    assert newest_committed(tmp_path).path is None
    await made.commit(RunState(step=5), fill)
    assert not made.is_owed and committed == [5]
    assert "a rank died" in caplog.text


async def test_a_save_whose_files_are_complete_is_committed_before_the_ranks_are_replaced(tmp_path):
    made, committed = checkpoints(tmp_path)
    disk = Disk()
    disk.go_on.set()
    await made.start(RunState(step=4), disk.write, disk.finish)
    while made._finishing is None or not made._finishing.done():
        await asyncio.sleep(0)
    await made.abandon("a rank died")
    assert committed == [4] and not made.is_owed


def test_a_recovery_starts_from_a_commit_of_this_attempt_or_its_starting_point(tmp_path):
    made, _ = checkpoints(tmp_path)
    made.newest()
    assert made.of_attempt() == (None, RunState(pending={}))
    save(made, 3)
    path, state = made.of_attempt()
    assert (path.name, state.step) == (checkpoint_name(3), 3)
    resumed, _ = checkpoints(tmp_path)
    resumed.newest()
    save(made, 5)  # by another attempt, so a recovery of this one must not use it
    assert resumed.of_attempt()[0].name == checkpoint_name(3)

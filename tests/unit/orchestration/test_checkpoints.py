"""Commits in the background: seen only when every file is there, one at a time, a failure told and survived."""

import asyncio

import pytest

from rlpost.checkpoint.commit import newest_committed
from rlpost.checkpoint.state import RunState
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.errors import CheckpointError
from rlpost.orchestration.checkpoints import Checkpoints


class Disk:
    """Writes one file a checkpoint, when it is told to go on."""

    def __init__(self, fails=False):
        self.go_on, self.fails, self.folder = asyncio.Event(), fails, None

    async def write(self, folder):
        self.folder = folder

    async def finish(self):
        await self.go_on.wait()
        if self.fails:
            raise CheckpointError("disk full")
        (self.folder / "tensors").write_text(self.folder.name)


def checkpoints(folder):
    committed = []
    made = Checkpoints(CheckpointConfig(), folder, committed=lambda step, path: committed.append(step))
    return made, committed


def test_a_background_save_counts_when_it_is_whole_and_not_before(tmp_path):
    async def run():
        made, committed = checkpoints(tmp_path)
        disk = Disk()
        await made.start(RunState(step=4), disk.write, disk.finish)
        await asyncio.sleep(0.05)
        assert committed == [] and newest_committed(tmp_path).path is None
        disk.go_on.set()
        assert await made.settle()
        assert committed == [4]
        path, state = made.newest()
        assert state.step == 4 and (path / "tensors").exists()

    asyncio.run(run())


def test_it_is_committed_as_soon_as_it_is_written_without_being_asked(tmp_path):
    async def run():
        made, committed = checkpoints(tmp_path)
        disk = Disk()
        disk.go_on.set()
        await made.start(RunState(step=4), disk.write, disk.finish)
        async with asyncio.timeout(20):
            while committed != [4]:
                await asyncio.sleep(0.01)

    asyncio.run(run())


def test_two_saves_never_write_at_once(tmp_path):
    async def run():
        made, committed = checkpoints(tmp_path)
        first, second = Disk(), Disk()
        await made.start(RunState(step=1), first.write, first.finish)
        starting = asyncio.create_task(made.start(RunState(step=2), second.write, second.finish))
        await asyncio.sleep(0.05)
        assert second.folder is None
        first.go_on.set()
        await starting
        assert committed == [1]
        second.go_on.set()
        assert await made.settle() and committed == [1, 2]

    asyncio.run(run())


def test_a_failure_in_the_background_leaves_the_commit_before_it_and_is_told(tmp_path, caplog):
    async def run():
        made, committed = checkpoints(tmp_path)
        good, bad, again = Disk(), Disk(fails=True), Disk()
        for disk in (good, bad, again):
            disk.go_on.set()
        await made.start(RunState(step=1), good.write, good.finish)
        await made.start(RunState(step=2), bad.write, bad.finish)
        assert not await made.settle()
        assert made.newest()[1].step == 1 and "step 2 is not committed" in caplog.text and "disk full" in caplog.text
        await made.start(RunState(step=3), again.write, again.finish)
        assert await made.settle() and committed == [1, 3]
        assert await made.settle(), "nothing is left to settle"

    asyncio.run(run())


def test_a_save_that_is_waited_for_raises(tmp_path):
    async def run():
        made, _ = checkpoints(tmp_path)

        async def fail(folder):
            raise CheckpointError("read-only file system")

        with pytest.raises(CheckpointError, match="read-only"):
            await made.commit(RunState(step=1), fail)

    asyncio.run(run())

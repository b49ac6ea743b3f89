"""Sandbox servers of two nodes, here two processes, and the pool of a driver."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.driver.batches import rollout_advantages
from rlpost.extensions.agents.env_names import parse_envs
from rlpost.extensions.agents.env_table import EnvConfig
from rlpost.extensions.agents.environments.episodes import EnvironmentSet, Episodes
from rlpost.extensions.agents.environments.plain import PlainRunner
from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.sandbox import wire
from rlpost.extensions.agents.sandbox.protocol import (
    Ended,
    Limits,
    SandboxFileError,
    SandboxLost,
    SnapshotRefused,
    fresh,
    retry,
)
from rlpost.extensions.agents.sandbox.registry import Registry
from rlpost.extensions.agents.sandbox.remote import RemotePool
from rlpost.extensions.agents.sandbox.verify import CaseVerifier, verify
from rlpost.rollout.generate import GroupWriter
from rlpost.tasks.reward.given import GivenRewards
from rlpost.tasks.reward.grader import InlineGrader
from rlpost.types import Prompt, SampleGroup, Unfinished
from tests.contract.test_sandbox import WHY_NOT
from tests.unit.agents.test_environment_episodes import CODEC, SAMPLING, Script, connected, prompt

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(
    memory_mib=128, processes=20, disk_mib=16, files=200, wall_seconds=30, snapshot_mib=1
)


@contextlib.contextmanager
def servers(
    folder: Path, count: int, places: int = 2, more: Sequence[str] = ()
) -> Iterator[list[psutil.Process]]:
    Registry(folder).create()
    module = [
        sys.executable,
        "-m",
        "rlpost.extensions.agents.sandbox.server",
        "--host",
        "127.0.0.1",
    ]
    options = ["--run-folder", str(folder), "--places", str(places), *more]
    started = [
        subprocess.Popen([*module, *options, "--name", f"node{number}"], cwd=ROOT)
        for number in range(count)
    ]
    try:
        deadline = time.monotonic() + 60
        while len(Registry(folder).nodes()) < count and time.monotonic() < deadline:
            time.sleep(0.05)
        yield [psutil.Process(process.pid) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


async def test_a_remote_sandbox_behaves_like_a_local_one(tmp_path):
    with servers(tmp_path, 1):
        async with RemotePool(tmp_path, LIMITS) as pool:
            async with fresh(pool) as sandbox:
                await sandbox.write("/work/a", b"\0\xff")
                result = await sandbox.run("cat a -; echo err >&2; exit 4", stdin=b"in")
                assert (result.exit_code, result.ended) == (4, Ended.EXITED)
                assert (result.stdout, result.stderr) == (b"\0\xffin", b"err\n")
                with pytest.raises(SandboxFileError, match="/work/none"):
                    await sandbox.read("/work/none")
                assert await sandbox.read("/work/a") == b"\0\xff"
                slow = await sandbox.run("sleep 60", timeout=wire.BEAT_SECONDS + 1)
                assert slow.ended is Ended.TIMEOUT
                await sandbox.run("head -c 2M /dev/zero > big")
                with pytest.raises(SnapshotRefused):
                    await sandbox.snapshot()
            agent = await pool.acquire()
            await agent.write("/work/s.sh", b"read a; echo $((a * 2))")
            verifier = CaseVerifier("sh s.sh", [(b"4\n", b"8"), (b"5\n", b"10")])
            assert (await verify(agent, verifier, pool)).score == 1.0


def test_a_killed_node_loses_its_sandboxes_and_the_work_is_done_elsewhere(tmp_path):
    seen: list[str] = []

    async def whole(nodes: list[psutil.Process]) -> None:
        async with RemotePool(tmp_path, LIMITS) as pool:

            async def episode(sandbox) -> str:
                seen.append(sandbox.name)
                if len(seen) == 1:
                    victim = nodes[int(pool_node(sandbox)[-1])]
                    below = victim.children(recursive=True)
                    command = asyncio.ensure_future(sandbox.run("sleep 60"))
                    await asyncio.sleep(0.3)
                    victim.kill()
                    with pytest.raises(SandboxLost):
                        await command
                    # no process of the node survives
                    assert not psutil.wait_procs(below, timeout=10)[1]
                return (await sandbox.run("echo done")).text

            assert await retry(pool, episode) == "done\n"

    def pool_node(sandbox) -> str:
        return sandbox.node

    with servers(tmp_path, 2) as nodes:
        asyncio.run(whole(nodes))
    assert len(seen) == 2


class Doubled:
    """Rewards a turn with its doubled number; "kill" kills the node of its sandbox first."""

    def __init__(self, pool: RemotePool, nodes: list[psutil.Process]) -> None:
        self._pool, self._nodes = pool, nodes

    def reset(self, given: Prompt) -> None:
        del given

    async def step(self, turn: Turn) -> Step:
        async with fresh(self._pool) as sandbox:
            number = turn.text.removeprefix("kill")
            if number != turn.text:
                self._nodes[0].kill()
            return Step(
                reward=float((await sandbox.run(f"echo $(({number} * 2))")).text), done=True
            )


def played(folder: Path, turns: list[str]) -> tuple[SampleGroup, float]:
    """Write a group with the given turns as its answers, in order; count the masked episodes."""
    settings = EnvConfig(env=("pkg.mod:Doubled",), env_concurrency=1, env_retries=1)

    async def whole(nodes: list[psutil.Process]) -> tuple[SampleGroup, float]:
        pool = RemotePool(folder, LIMITS, wait_seconds=5)
        runner = PlainRunner("pkg.mod:Doubled", lambda: Doubled(pool, nodes), 1)
        every = EnvironmentSet(
            parse_envs(settings.env), {"Doubled": runner}, settings, sandboxes=pool
        )
        episodes = Episodes(every, seed=1, pause_s=0.001)
        grader = GivenRewards(InlineGrader(lambda *_: 0.0), RolloutConfig())
        # a lost episode asks for its turn again
        async with connected(Script(*turns, turns[-1])) as connection:
            writer = GroupWriter(
                connection, SAMPLING, n=len(turns), grader=grader, function=episodes, codec=CODEC
            )
            try:
                written = await writer.write(Unfinished(prompt()))
            finally:
                await every.close()
        assert isinstance(written, SampleGroup)
        return written, episodes.counters()["env/episodes_masked"]

    with servers(folder, 1) as nodes:
        return asyncio.run(whole(nodes))


def test_advantages_after_a_lost_node_equal_those_of_a_run_without_its_episode(tmp_path):
    with_loss, num_lost = played(tmp_path / "killed", ["1", "3", "9", "kill5"])
    without, none_lost = played(tmp_path / "undisturbed", ["1", "3", "9"])
    assert (num_lost, none_lost) == (1.0, 0.0)
    answers = [
        [(tuple(scored.sample.response_ids), scored.reward) for scored in group.samples]
        for group in (with_loss, without)
    ]
    assert answers[0] == answers[1] and [reward for _, reward in answers[0]] == [2.0, 6.0, 18.0]
    advantages = [rollout_advantages([group], GrpoConfig()) for group in (with_loss, without)]
    mean, std = statistics.fmean([2, 6, 18]), statistics.stdev([2, 6, 18])
    expected = [(reward - mean) / (std + 1e-6) for reward in (2, 6, 18)]
    assert advantages[0] == advantages[1] == [pytest.approx(expected)]


DRIVER = """
import asyncio
from pathlib import Path
from rlpost.extensions.agents.sandbox.protocol import Limits
from rlpost.extensions.agents.sandbox.remote import RemotePool

async def main():
    async with RemotePool(Path({folder!r}), Limits(memory_mib=128, disk_mib=16)) as pool:
        boxes = [await pool.acquire() for _ in range(2)]
        await boxes[0].run("setsid sleep 300 &")
        print("ready", flush=True)
        await boxes[1].run("sleep 300")

asyncio.run(main())
"""


def test_sandboxes_end_with_their_driver_and_servers_with_the_lease(tmp_path):
    with servers(tmp_path, 1) as (server,):
        command = [sys.executable, "-c", DRIVER.format(folder=str(tmp_path))]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as driver:
            assert driver.stdout is not None and driver.stdout.readline() == "ready\n"
            sleeping: list[psutil.Process] = []
            while len(sleeping) < 2:
                sleeping = [p for p in server.children(recursive=True) if p.name() == "sleep"]
            driver.kill()
        assert not psutil.wait_procs(sleeping, timeout=10)[1]

        async def close() -> None:
            # the server now serves another driver
            async with RemotePool(tmp_path, LIMITS) as pool, fresh(pool) as sandbox:
                assert (await sandbox.run("echo again")).text == "again\n"

        asyncio.run(close())
        server.wait(timeout=15)
        assert not Registry(tmp_path).nodes()


def test_clients_without_the_secret_get_no_sandbox_no_answer_and_no_memory(tmp_path):
    """Not even one that forwards what a driver says to another port, where a server has ended."""

    async def whole(server: psutil.Process) -> None:
        (node,) = Registry(tmp_path).nodes()
        secret, address = Registry(tmp_path).secret(), (node.host, node.port)
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises((wire.PeerRefused, EOFError, OSError)):
            await wire.greet(reader, writer, b"wrong", "driver", address)
        writer.close()
        for text in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"\xff" * 8):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(text)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(), 30) == b""
            writer.close()
        reader, writer = await asyncio.open_connection(*address)
        with pytest.raises((wire.PeerRefused, EOFError, OSError)):
            await wire.greet(reader, writer, secret, "driver", (node.host, node.port + 1))
        writer.close()
        before = server.memory_info().rss
        pairs = [await asyncio.open_connection(*address) for _ in range(100)]
        for _, writer in pairs:
            writer.write((1 << 30).to_bytes(4, "big") + bytes(1 << 20))
        await asyncio.wait([asyncio.ensure_future(reader.read()) for reader, _ in pairs[-30:]])
        assert server.memory_info().rss - before < 32 << 20
        for _, writer in pairs:
            writer.close()
        async with RemotePool(tmp_path, LIMITS) as pool, fresh(pool) as sandbox:
            assert (await sandbox.run("echo fine")).text == "fine\n"

    with servers(tmp_path, 1) as (server,):
        asyncio.run(whole(server))
    assert (tmp_path / "sandboxes/secret").stat().st_mode & 0o777 == 0o600

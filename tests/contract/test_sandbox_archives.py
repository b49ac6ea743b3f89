"""Files of real sandboxes, saved at the end of a turn and restored in another sandbox."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.extensions.agents.environments.protocol import Step, Turn
from rlpost.extensions.agents.examples.shell import Shell
from rlpost.extensions.agents.sandbox import archives as archives_module
from rlpost.extensions.agents.sandbox import wire
from rlpost.extensions.agents.sandbox.archives import Archives
from rlpost.extensions.agents.sandbox.local import LocalSandbox
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import ArchiveRefused
from rlpost.extensions.agents.sandbox.registry import NodeRecord
from rlpost.extensions.agents.sandbox.remote import RemoteSandbox
from rlpost.extensions.agents.sandbox.server import SandboxServer
from rlpost.types import Prompt
from tests.contract.test_sandbox import SMALL, WHY_NOT
from tests.unit.agents.test_environment_resumes import NUM_TURNS, TURNS, Killed, World, attempt

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
LARGE = replace(SMALL, memory_mib=512, disk_mib=256, files=5000, wall_seconds=60, cpu_seconds=60)
FILL = """
import os
for number in range(1000):
    os.makedirs(f"{number // 50}", exist_ok=True)
    with open(f"{number // 50}/{number}", "wb") as file:
        file.write(os.urandom(50_000))
"""
LIST = "cd /; find work tmp home/agent -mindepth 1 -printf '%p %y %m %T@ %l\\n' | sort"
SUM = "cd /; find work tmp home/agent -type f | sort | xargs -d '\\n' sha256sum"


async def test_files_and_modes_of_an_agent_without_privileges_are_restored(tmp_path: Path) -> None:
    archives = Archives(tmp_path / "store")
    async with await LocalSandbox.start(SMALL) as sandbox:
        made = await sandbox.run(
            "mkdir -p a/b sealed; echo x > a/b/c; chmod 751 a/b/c; ln -s /usr/bin l; mkfifo p;"
            "echo secret > sealed/s; touch -d 2001-01-01 a/b; echo config > ~/.config;"
            "echo note > /tmp/note; chmod 0 sealed/s; chmod 100 sealed"
        )
        assert made.ok, made
        manifest = await archives.save(sandbox)
        before = (await sandbox.run("chmod 500 sealed; " + LIST)).text
    async with await LocalSandbox.start(SMALL) as other:
        await other.run("mkdir -p gone/below; touch gone/below/file a; chmod 0 gone")
        await archives.restore(other, manifest)
        assert "sealed d 100 " in (await other.run(LIST)).text
        assert (await other.run("chmod 500 sealed; " + LIST)).text == before
        revealed = await other.run("chmod 700 sealed sealed/s; cat sealed/s; cat ~/.config")
        assert revealed.text == "secret\nconfig\n"


async def test_a_process_in_the_background_refuses_a_save_and_stays_alive(tmp_path: Path) -> None:
    archives = Archives(tmp_path / "store")
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.run("sleep 0.1 & echo short > file")
        assert await archives.save(sandbox), "it ended in time"
        await sandbox.run("sleep 30 & echo $! > pid")
        with pytest.raises(ArchiveRefused, match="1 processes of the agent run in the backgro"):
            await archives.save(sandbox)
        assert (await sandbox.run("kill $(cat pid)")).ok, "the save did not end it"
        assert await archives.save(sandbox)


async def test_ending_the_processes_of_a_sandbox_costs_no_descriptor() -> None:
    async with await LocalSandbox.start(SMALL) as sandbox:
        for _ in range(100):  # its first process has 64
            await sandbox.end_processes()
        assert (await sandbox.run("echo alive")).text == "alive\n"


async def test_a_turn_with_50_mb_costs_little_when_few_files_changed(tmp_path: Path) -> None:
    """Prints the figures of docs/agents.md (-s); the assertions only catch a full read."""
    archives = Archives(tmp_path / "store")
    async with await LocalSandbox.start(LARGE) as sandbox:
        assert (await sandbox.run(["python3", "-c", FILL])).ok
        began = time.perf_counter()
        await archives.save(sandbox)
        first = time.perf_counter() - began
        later = []
        for number in range(10):
            change = f"echo {number} > 3/150; echo {number} > new{number}; rm 5/{250 + number}"
            assert (await sandbox.run(change)).ok
            await asyncio.sleep(0.05)
            began = time.perf_counter()
            manifest = await archives.save(sandbox)
            later.append(time.perf_counter() - began)
        sums = (await sandbox.run(SUM)).text
    async with await LocalSandbox.start(LARGE) as other:
        began = time.perf_counter()
        await archives.restore(other, manifest)
        restore = time.perf_counter() - began
        assert (await other.run(SUM)).text == sums
    median = sorted(later)[len(later) // 2]
    print(
        f"\n1000 files, 50 MB: first save {first:.2f} s, each later turn {median * 1000:.0f} ms "
        f"(median of {len(later)}), restore {restore:.2f} s, manifest {len(manifest)} bytes"
    )
    # changed twice each: the new contents and one listing for a save
    assert len(list((tmp_path / "store").glob("??/*"))) < 1000 + 3 * 11


async def test_a_sandbox_of_another_node_is_saved_over_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file larger than a message may be is sent in parts."""
    monkeypatch.setattr(archives_module, "CONTENT_BYTES", 1 << 20)
    monkeypatch.setattr(wire, "MAX_BODY", 2 << 20)
    archives, secret = Archives(tmp_path / "store"), b"secret"
    async with LocalPool(SMALL, size=2, warm=0) as pool:
        server = SandboxServer(pool, secret, "127.0.0.1")
        listening = await asyncio.start_server(server.serve_connection, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        node = NodeRecord("node", "127.0.0.1", port, 2, 1)
        async with await RemoteSandbox.connect(node, secret, SMALL) as sandbox:
            await sandbox.run("head -c 3M /dev/urandom > data; sha256sum data > sum")
            manifest = await archives.save(sandbox)
        async with await RemoteSandbox.connect(node, secret, SMALL) as other:
            await archives.restore(other, manifest)
            assert (await other.run("sha256sum -c sum")).text == "data: OK\n"
        listening.close()
        await server.close()


async def test_an_episode_of_the_shell_example_continues_from_its_last_turn(tmp_path: Path) -> None:
    lines = ["$ echo 'import sys' > solution.py", "$ echo 'print(int(input()) + 1)' >> solution.py"]
    given = Prompt(3, "text", (1,), label=json.dumps([["1\n", "2"], ["5\n", "6"]]))

    def turn(number: int, text: str) -> Turn:
        return Turn(number, text, (), "stop", "\n")

    def made(pool: LocalPool) -> Any:
        shell = Shell()
        shell.sandboxes, shell.archives = pool, Archives(tmp_path / "store")
        return shell

    async with LocalPool(SMALL, size=2, warm=0) as pool:
        first = made(pool)
        await first.reset(given)
        await first.step(turn(0, lines[0]))
        data = await first.save()
        await first.close()  # the driver died
        second = made(pool)
        await second.restore(data)
        await second.step(turn(1, lines[1]))
        assert (await second.step(turn(2, "$ wc -l < solution.py"))).text == "2\n\n"
        assert await second.score() == 1.0
        await second.close()
        assert await second.archives.keep_only([data]) == 0, "a save names its manifest"


@pytest.mark.parametrize("dies_at", [0, 1, 3])
async def test_a_killed_conversation_goes_on_with_the_files_of_its_sandbox(
    tmp_path: Path, dies_at: int
) -> None:
    """The journal and the runner of a run; each turn counts the lines that all turns wrote."""
    async with LocalPool(SMALL, size=2, warm=0) as pool:
        world = World(tmp_path / "journal", dies_at=dies_at)

        class Lines:
            async def reset(self, given: Prompt) -> None:
                self.sandbox = await pool.acquire()

            async def step(self, turn: Turn) -> Step:
                if turn.number == world.dies_at:
                    raise Killed
                result = await self.sandbox.run(f"echo {turn.text} >> log; wc -l < log")
                return Step(f"={result.text.strip()}", done=turn.number + 1 == NUM_TURNS)

            async def save(self) -> bytes:
                return await Archives(tmp_path / "store").save(self.sandbox)

            async def restore(self, data: bytes) -> None:
                self.sandbox = await pool.acquire()
                await Archives(tmp_path / "store").restore(self.sandbox, data)

            async def score(self) -> float:
                return float((await self.sandbox.read("/work/log")).count(b"\n"))

            async def close(self) -> None:
                await self.sandbox.close()

        killed, _, _ = await attempt(world, Lines, TURNS)
        assert killed is None
        world.dies_at = None
        group, engine, kept = await attempt(world, Lines, TURNS[dies_at + 1 :])
        assert engine.turns == [] and kept.turns == dies_at + 1
        sample = group.samples[0].sample
        assert sample.extra["turn_rewards"][-1][2] == NUM_TURNS, "lines of the whole episode"
        text = sample.text
        assert [f"={number}" in text for number in range(1, NUM_TURNS)] == [True] * 3

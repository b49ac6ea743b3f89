"""A sandbox in a cgroup v2 of this kernel.

Memory and processes are limited where their controllers belong to cgroup v2; elsewhere the test
covers only membership and the end of a sandbox.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import psutil
import pytest

from rlpost.extensions.agents.sandbox import cgroup
from rlpost.extensions.agents.sandbox.local import LocalSandbox
from rlpost.extensions.agents.sandbox.protocol import Ended, Limits
from tests.contract.test_sandbox import SMALL, WHY_NOT


def _mount_point() -> Path | None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(folder, os.W_OK):
            return Path(folder)
    return None


CGROUPS = _mount_point()
pytestmark = [
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
    pytest.mark.skipif(CGROUPS is None, reason="no cgroup v2 that this user may write"),
]


def test_every_process_of_a_sandbox_is_in_its_cgroup_and_ends_with_it(monkeypatch):
    assert CGROUPS is not None
    folder = CGROUPS / f"rlpost-test-{os.getpid()}"
    folder.mkdir()
    has = set((folder / "cgroup.controllers").read_text().split())
    limited = {"memory", "pids"} <= has
    if limited:
        cgroup.divide(folder)
    else:
        monkeypatch.setattr(cgroup, "files_of", lambda limits: {"cgroup.max.descendants": "0"})

    async def whole(limits: Limits) -> None:
        async with await LocalSandbox.start(limits, cgroups=cgroup.Parent(folder)) as sandbox:
            assert sandbox._process is not None and sandbox._cgroup is not None
            launcher = psutil.Process(sandbox._process.pid)
            await sandbox.run("sleep 300 & sleep 300 &")
            every = {launcher.pid, *(child.pid for child in launcher.children(recursive=True))}
            inside = (sandbox._cgroup.folder / "cgroup.procs").read_text().split()
            assert {int(pid) for pid in inside} == every and len(every) >= 4
            assert (await sandbox.run("cat /proc/self/cgroup")).text.endswith("0::/\n")
            if limited:
                text = "import os; [os.pipe() for _ in range(20)]; bytearray(900 << 20)"
                ended = await sandbox.run(["python3", "-c", text])
                assert ended.ended is Ended.MEMORY or not ended.ok
        assert not list(folder.glob(f"{cgroup.PREFIX}*"))

    try:
        asyncio.run(whole(SMALL))
    finally:
        folder.rmdir()

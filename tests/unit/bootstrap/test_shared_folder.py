"""Features that a file system lacks are reported with the consequences; every wait is bounded."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from bootstrap.check_result import Check
from bootstrap.links.link import LinkLost
from bootstrap.preflight import shared_folder
from bootstrap.preflight.checks import check_host
from bootstrap.preflight.shared_folder import FolderTest, check_alone, lacks, take_part
from bootstrap.preflight.table import HostFacts, Requirements


def refuses(number: int) -> Any:
    def act(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return act


def refuses_folders(descriptor: int) -> None:
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize(
    ("module", "call", "act", "words", "level"),
    [
        (os, "link", refuses(errno.EPERM), "no hard links (Operation not permitted)", "WARN"),
        (fcntl, "flock", refuses(errno.ENOLCK), "no locks (No locks available)", "WARN"),
        (os, "fsync", refuses_folders, "no fsync of folders (Invalid argument)", "WARN"),
        (os, "replace", refuses(errno.EPERM), "no rename over a file", "EXCLUDE_NODE"),
        (
            os,
            "replace",
            lambda *_: None,
            "no rename over a file (the file was not replaced)",
            "EXCLUDE_NODE",
        ),
    ],
)
def test_what_is_refused_is_named_with_what_it_costs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    call: str,
    act: Any,
    words: str,
    level: str,
) -> None:
    assert lacks(tmp_path) == () and list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patched:
        patched.setattr(module, call, act)
        found = check_alone(lacks(tmp_path))
    assert found.level == level and words in found.found and ": " in found.found
    assert list(tmp_path.iterdir()) == []


def test_it_stands_in_the_table_of_the_host() -> None:
    checks = check_host(
        HostFacts(folder_lacks=("hard links (Operation not permitted)",)), Requirements(0)
    )
    assert [check.level for check in checks if check.name == "storage"] == ["WARN"]


class Node:
    """A node in this process that answers orders, with a file system that may be slow or lossy."""

    def __init__(
        self,
        folder: Path,
        host: str,
        test: FolderTest,
        *,
        sees_after_s: float = 0.0,
        is_lost: bool = False,
    ):
        self.folder, self.host, self.test = folder, host, test
        self.sees_after_s, self.is_lost = sees_after_s, is_lost
        self.work: asyncio.Task[None] | None = None

    async def send(self, order: dict[str, Any]) -> None:
        if self.is_lost:
            raise LinkLost("it does not acknowledge")
        self.work = asyncio.create_task(self.answer(order))

    async def answer(self, order: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        answer = await asyncio.to_thread(take_part, self.folder, order, self.host)
        if self.sees_after_s:
            answer["head_file_s"] = self.sees_after_s
        self.test.record_answer(self.host, answer)


def together(folder: Path, **nodes: dict[str, Any]) -> dict[str, Check]:
    async def run() -> dict[str, Check]:
        test = FolderTest()
        links: Any = {host: Node(folder, host, test, **given) for host, given in nodes.items()}
        return await test.run(folder, links, "n0")

    return asyncio.run(asyncio.wait_for(run(), 60))


def test_nodes_that_share_a_folder_see_each_others_files_and_lose_no_line(tmp_path: Path) -> None:
    found = together(tmp_path, n1={}, n2={}, n3={})
    assert [check.level for check in found.values()] == ["OK"] * 3, found
    assert re.search(r"are seen after \d+\.\d+ s", found["n1"].found)
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_file_that_is_seen_late_is_a_warning_with_what_to_do(tmp_path: Path) -> None:
    found = together(tmp_path, n1={"sees_after_s": 2.5}, n2={})
    assert found["n2"].level == "OK" and found["n1"].level == "WARN"
    assert (
        "the head's file here is seen after 2.5 s: mount with a lower actimeo" in found["n1"].found
    )


def test_a_node_with_a_folder_of_its_own_sees_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "LOOK_S", 0.2)
    (tmp_path / "shared").mkdir()

    async def run() -> dict[str, Check]:
        test = FolderTest()
        links: Any = {"n1": Node(tmp_path / "other", "n1", test)}
        return await test.run(tmp_path / "shared", links, "n0")

    found = asyncio.run(run())["n1"]
    assert found.level == "WARN" and "could not be tried with the others: [Errno 2]" in found.found


def test_lines_that_hosts_write_over_each_other_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two NFS clients do that both have a stale size of the file."""
    opened = os.open

    def without_append(path: Any, flags: int, *given: Any, **named: Any) -> int:
        return opened(path, flags & ~os.O_APPEND, *given, **named)

    monkeypatch.setattr(os, "open", without_append)
    found = together(tmp_path, n1={}, n2={})
    assert {check.level for check in found.values()} == {"WARN"}
    assert "of 8 lines that it appended beside other hosts are lost" in found["n1"].found


async def test_nodes_that_do_not_answer_and_a_folder_that_hangs_cost_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "ANSWER_S", 0.3)
    monkeypatch.setattr(shared_folder, "LOOK_S", 0.3)

    class Silent(Node):
        async def answer(self, order: dict[str, Any]) -> None:
            await asyncio.Event().wait()

    started = time.monotonic()
    test = FolderTest()
    links: Any = {
        "n1": Silent(tmp_path, "n1", test),
        "n2": Node(tmp_path, "n2", test, is_lost=True),
    }
    found = await test.run(tmp_path, links, "n0")
    assert time.monotonic() - started < 5
    assert (
        "no answer within 0 s" in found["n1"].found and "does not acknowledge" in found["n2"].found
    )

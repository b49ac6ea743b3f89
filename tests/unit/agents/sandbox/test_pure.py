"""Sandbox code that needs no namespaces: filter, snapshots, records, scheduling, settings."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from common.exit_codes import EXIT_PREEMPTED
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, GradingLost
from rlpost.extensions.agents.checks import sandbox_problems
from rlpost.extensions.agents.sandbox import images, local, snapshots
from rlpost.extensions.agents.sandbox.inner import kernel, seccomp
from rlpost.extensions.agents.sandbox.local import FIRST_USER, LocalSandbox, Root, host_user
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import (
    Limits,
    SandboxLost,
    SnapshotEntry,
    SnapshotRefused,
)
from rlpost.extensions.agents.sandbox.registry import (
    STALE_SECONDS,
    NodeRecord,
    Registry,
    SandboxLease,
)
from rlpost.extensions.agents.sandbox.remote import RemotePool
from rlpost.extensions.agents.sandbox.server import LEASE_SECONDS, LeaseWatch, serve
from rlpost.extensions.agents.sandbox.settings import limits_of, pool_of
from rlpost.extensions.agents.sandbox.verify import DROPPED, reported, selected

ALLOW, KILL = seccomp.ALLOW, seccomp.KILL


def judged(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Run the filter on one system call as the kernel does; return the action."""
    code = seccomp.program(machine)
    arch = seccomp.ARCHITECTURE[machine] if architecture is None else architecture
    values = {0: number, 4: arch} | {16 + 8 * i: value for i, value in enumerate(arguments)}
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = struct.unpack_from("HBBI", code, 8 * at)
        at += 1
        if kind == seccomp.RETURN:
            return value
        if kind == seccomp.LOAD:
            accumulator = values.get(value, 0) & 0xFFFFFFFF
        else:
            test = {
                seccomp.EQUAL: accumulator == value,
                seccomp.GREATER_EQUAL: accumulator >= value,
                seccomp.SET: bool(accumulator & value),
            }[kind]
            at += if_true if test else if_false


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_denies_what_reaches_the_host_and_allows_the_rest(machine):
    column = ("x86_64", "aarch64").index(machine)
    for name, numbers in seccomp.DENIED.items():
        if numbers[column] is not None:
            assert judged(machine, numbers[column]) == seccomp.denied(), name
    clone, socket, ioctl = (
        table[column] for table in (seccomp.CLONE, seccomp.SOCKET, seccomp.IOCTL)
    )
    assert judged(machine, clone, 0x01200011) == ALLOW  # fork
    assert judged(machine, clone, 0x10000000 | 17) == seccomp.denied()  # a user namespace
    allowed = [judged(machine, socket, family, 1, 0) == ALLOW for family in range(46)]
    assert [family for family, is_allowed in enumerate(allowed) if is_allowed] == [1, 2, 10, 16]
    assert judged(machine, socket, 16, 3, 9) != ALLOW  # audit
    assert judged(machine, ioctl, 0, 0x5401) == ALLOW
    assert judged(machine, ioctl, 0, 0x5412) == seccomp.denied()
    for option, verdict in ((7, seccomp.denied(0)), (8, seccomp.denied(0)), (2, ALLOW)):
        assert judged(machine, seccomp.SETSOCKOPT[column], 3, 1, option) == verdict
    assert judged(machine, seccomp.SETSOCKOPT[column], 3, 6, 7) == ALLOW  # of TCP
    assert judged(machine, seccomp.PRLIMIT[column], 1) == seccomp.denied()
    assert judged(machine, seccomp.PRLIMIT[column], 0) == ALLOW
    assert judged(machine, 63, architecture=0x40000003) == KILL  # i386
    reading = {"x86_64": 0, "aarch64": 63}[machine]
    assert judged(machine, reading) == ALLOW
    if machine == "x86_64":
        assert judged(machine, 0x40000000 | 165) != ALLOW


@pytest.mark.parametrize(
    "entry",
    [
        SnapshotEntry("../a", "file"),
        SnapshotEntry("/a", "file"),
        SnapshotEntry("a//b", "file"),
        SnapshotEntry("a/../../b", "file"),
        SnapshotEntry("", "folder"),
        SnapshotEntry("a\0b", "file"),
        SnapshotEntry("a", "link", b"/etc/passwd"),
        SnapshotEntry("a/b", "link", b"../../c"),
        SnapshotEntry("a", "device"),  # type: ignore[arg-type]
    ],
)
def test_an_entry_that_leads_outside_is_refused_on_encoding_and_decoding(entry):
    with pytest.raises(SnapshotRefused):
        snapshots.encode([entry])
    head = json.dumps({"path": entry.path, "kind": entry.kind, "size": len(entry.data)}).encode()
    stream = struct.pack(">I", len(head)) + head + entry.data + struct.pack(">I", 0)
    with pytest.raises(SnapshotRefused):
        snapshots.decode(stream)


def test_snapshots_survive_a_round_trip_and_truncated_ones_are_refused():
    entries = (
        SnapshotEntry("a", "folder"),
        SnapshotEntry("a/b", "file", b"\0x", True),
        SnapshotEntry("c", "link", b"a/b"),
    )
    stream = snapshots.encode(entries)
    assert snapshots.decode(stream).entries == entries
    for end in range(len(stream)):
        with pytest.raises(SnapshotRefused):
            snapshots.decode(stream[:end])


def test_only_lines_with_the_token_score():
    assert reported(b"tok 1.0\n", "tok") == 1.0
    assert reported(b"noise\ntok 0.25\ntok 0.5\nother 1.0", "tok") == 0.5
    for text in (b"", b"1.0", b"tok", b"tok nan", b"tok inf", b"tok x", b"kot 1.0", b"tok 1 1"):
        assert reported(text, "tok") == 0.0


def test_files_that_python_would_run_in_place_of_the_verifiers_are_dropped():
    names = ("a.py", "b/__pycache__/x", "b/c.pyc", "conftest.py", "x.pth", "b/d.py")
    entries = [SnapshotEntry(name, "file") for name in names]
    assert [e.path for e in selected(entries, ("*",), DROPPED)] == ["a.py", "b/d.py"]
    assert [e.path for e in selected(entries, ("b/*",), DROPPED)] == ["b/d.py"]


def record(name: str, number: int, places: int = 2) -> NodeRecord:
    return NodeRecord(name, "127.0.0.1", 1, places, number)


def test_sandboxes_of_processes_that_started_together_have_different_users():
    """Two test workers or servers of a host have process ids that lie close together."""
    own = {host_user(number, pid=40_000) for number in range(20_000)}
    assert len(own) == 20_000 and min(own) >= FIRST_USER and max(own) < 1 << 31
    for distance in range(1, 1_000):
        others = host_user(0, pid=40_000 + distance), host_user(19_999, pid=40_000 + distance)
        assert own.isdisjoint(others), distance
    assert own.isdisjoint({host_user(number, pid=40_001) for number in range(20_000)})


def test_a_launcher_that_ends_just_before_it_is_killed_is_not_an_error(monkeypatch):
    """On a busy node it may take more than its 5 s."""

    class Launcher:
        waits = 0

        async def wait(self) -> int:
            self.waits += 1
            if self.waits == 1:
                raise TimeoutError
            return 0

        def kill(self) -> None:
            raise ProcessLookupError

    launcher = Launcher()
    asyncio.run(local._wait_for_end(launcher))
    assert launcher.waits == 2


def test_sandboxes_with_an_image_run_as_its_owner_but_never_as_root(tmp_path, monkeypatch):
    for owner, expected in ((54321, (54321, 54321)), (0, (host_user(3), host_user(3)))):
        status = SimpleNamespace(st_uid=owner, st_gid=0)
        monkeypatch.setattr(local.os, "stat", lambda path, status=status: status)
        assert local.host_identity(Root(str(tmp_path)), 3) == expected
    assert local.host_identity(Root(), 3) == (host_user(3), host_user(3))


def test_a_node_that_no_longer_renews_its_record_gets_no_sandbox(tmp_path):
    pool = RemotePool(tmp_path, Limits())
    pool.store_records([record("a", 1, 1), record("b", 1, 3)], 0.0)
    chosen = pool.choose(0.0)
    assert chosen is not None and chosen.name == "b"  # most free places
    pool.store_records([record("a", 2, 1), record("b", 1, 3)], STALE_SECONDS + 1)
    chosen = pool.choose(0.0)
    assert chosen is not None and chosen.name == "a"
    pool.store_records([], 0.0)
    assert pool.choose(0.0) is None


async def test_waiting_callers_are_served_in_order_and_time_out_as_lost(tmp_path):
    pool = RemotePool(tmp_path, Limits(), wait_seconds=0.2)
    pool.store_records([record("a", 1, 1)], 0.0)
    order: list[int] = []

    async def wait(number: int) -> None:
        await pool._place()
        order.append(number)

    waiting = [asyncio.ensure_future(wait(number)) for number in range(3)]
    await asyncio.sleep(0)
    for _ in range(2):
        await asyncio.sleep(0.01)
        pool.release("a")
    await asyncio.gather(*waiting)
    assert order == [0, 1, 2]
    with pytest.raises(SandboxLost, match="no free sandbox"):
        await pool._place()


async def test_callers_that_wait_for_a_pool_are_told_when_it_closes(tmp_path):
    pool = RemotePool(tmp_path, Limits(), wait_seconds=600)
    waiting = [asyncio.ensure_future(pool.acquire()) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    await pool.close()
    lost, cancelled = await asyncio.wait_for(
        asyncio.gather(*waiting, return_exceptions=True), timeout=60
    )
    assert isinstance(lost, SandboxLost) and "closed" in str(lost)
    assert isinstance(cancelled, asyncio.CancelledError)
    with pytest.raises(SandboxLost, match="closed"):
        await pool.acquire()


def test_a_server_whose_record_cannot_be_written_still_serves(tmp_path, monkeypatch, caplog):
    registry = Registry(tmp_path)
    registry.create()
    registry.renew(SandboxLease(1))
    written: list[int] = []

    def write(record: NodeRecord) -> None:
        written.append(record.number)
        if record.number == 1:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(registry, "write", write)
    monkeypatch.setattr("rlpost.extensions.agents.sandbox.server.BEAT_SECONDS", 0.01)

    async def whole() -> int:
        pool = LocalPool(Limits(), size=1)
        return await serve(registry, "s", pool, "127.0.0.1", lambda: len(written) == 3)

    assert asyncio.run(whole()) == EXIT_PREEMPTED
    assert written == [1, 2, 3] and "No space left on device" in caplog.text


def test_a_server_answers_while_its_file_system_hangs(tmp_path, monkeypatch):
    registry = Registry(tmp_path)
    registry.create()
    registry.renew(SandboxLease(1))
    is_back, waited = threading.Event(), []
    monkeypatch.setattr(registry, "write", lambda _: waited.append(is_back.wait(60)))
    monkeypatch.setattr("rlpost.extensions.agents.sandbox.server.BEAT_SECONDS", 0.01)

    async def whole() -> int:
        pool = LocalPool(Limits(), size=1)
        serving = asyncio.ensure_future(
            serve(registry, "s", pool, "127.0.0.1", lambda: bool(waited))
        )
        await asyncio.sleep(0.05)
        is_back.set()  # only a loop that is not blocked comes here before the wait times out
        return await serving

    assert asyncio.run(whole()) == EXIT_PREEMPTED
    assert all(waited)


async def test_a_caller_cancelled_as_it_gets_a_place_returns_the_place(tmp_path):
    pool = RemotePool(tmp_path, Limits())
    caller = asyncio.ensure_future(pool._place())
    await asyncio.sleep(0)
    pool.store_records([record("a", 1, 1)], 0.0)
    pool._serve_waiting()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    chosen = pool.choose(0.0)
    assert chosen is not None and chosen.name == "a"


class FakeSandbox:
    """Counts the sandboxes that exist."""

    existing: ClassVar[set[FakeSandbox]] = set()
    alive = True
    on_close: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.existing.add(self)

    async def close(self) -> None:
        self.existing.discard(self)
        self.on_close()


async def test_a_node_is_avoided_after_a_failure_but_not_because_a_caller_gave_up(tmp_path):
    pool = RemotePool(tmp_path, Limits())
    connected = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool.store_records([NodeRecord("a", "127.0.0.1", port, 1, 1)], time.monotonic())
    caller = asyncio.ensure_future(pool.acquire())
    await connected.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert pool.choose(time.monotonic()) is not None
    server.close()
    await server.wait_closed()
    with pytest.raises(SandboxLost):
        await pool.acquire()
    assert pool.choose(time.monotonic()) is None


async def test_a_pool_has_at_most_its_size_while_a_caller_and_the_pool_start_sandboxes():
    may_start = asyncio.Event()

    async def start(limits: Limits) -> FakeSandbox:
        await may_start.wait()
        return FakeSandbox()

    may_start.set()
    async with LocalPool(Limits(), size=2, warm=1, start=start) as pool:
        await pool.acquire()  # the warm one; the pool begins to start another
        may_start.clear()
        await asyncio.sleep(0)
        second = asyncio.ensure_future(pool.acquire(Limits(memory_mib=64)))
        await asyncio.sleep(0)
        may_start.set()
        await second
        await asyncio.sleep(0)
        assert len(FakeSandbox.existing) == 2
    assert not FakeSandbox.existing


def test_a_server_ends_when_its_lease_is_closed_or_not_renewed(tmp_path, monkeypatch):
    registry, now = Registry(tmp_path), [0.0]
    registry.create()
    monkeypatch.setattr("rlpost.extensions.agents.sandbox.server.time.monotonic", lambda: now[0])
    watch = LeaseWatch(registry)
    assert watch.valid()  # before the driver has started
    registry.renew(SandboxLease(1))
    assert watch.valid()
    now[0] = LEASE_SECONDS - 1
    assert watch.valid()
    now[0] = LEASE_SECONDS + 1
    assert not watch.valid()
    registry.renew(SandboxLease(2))
    assert watch.valid()
    registry.renew(SandboxLease(0, closed=True))
    assert not watch.valid()


def test_damaged_records_are_left_out(tmp_path):
    registry = Registry(tmp_path)
    registry.create()
    secret = registry.secret()
    registry.create()
    assert registry.secret() == secret and len(secret) == 64
    registry.write(record("good", 1))
    for name, text in (("empty", ""), ("list", "[]"), ("other", '{"x": 1}')):
        (registry.folder / "nodes" / f"{name}.json").write_text(text)
    assert [node.name for node in registry.nodes()] == ["good"]
    (registry.folder / "lease.json").write_text("{")
    assert registry.lease() is None


def test_enroot_unpacks_an_image_for_the_server_alone(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "enroot").write_text(
        '#!/bin/sh\n[ "$1 $2 $3" = "create --name root" ] || exit 9\n'
        'grep -q good "$4" || { echo "[ERROR] Invalid image format: $4" >&2; exit 1; }\n'
        'mkdir "$ENROOT_DATA_PATH/root"; cp "$4" "$ENROOT_DATA_PATH/root/file"\n'
    )
    (programs / "enroot").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    image, broken = tmp_path / "a.sqsh", tmp_path / "b.sqsh"
    image.write_text("good")
    broken.write_text("bad")
    left = tmp_path / f"{images.PREFIX}12_0"
    left.mkdir()
    (left / "mine").write_text("of another program")
    with images.unpacked(str(image), "12_0") as folder:  # beside the name that another has taken
        assert folder is not None and (Path(folder) / "file").read_text() == "good"
        assert Path(folder).parent.name.startswith(f"{left.name}-")
    assert (left / "mine").exists(), "only what this server made is removed"
    (left / images.MARK).write_text("12_0")  # of a server that was killed
    with images.unpacked(str(image), "12_0") as folder:
        assert folder is not None and (Path(folder) / "file").read_text() == "good"
    assert not left.exists()
    with pytest.raises(ConfigError, match="Invalid image"), images.unpacked(str(broken), "12_0"):
        pass
    assert not left.exists()
    with pytest.raises(ConfigError, match="neither"), images.unpacked(str(tmp_path / "no"), "x"):
        pass
    with images.unpacked(str(programs), "x") as folder:
        assert folder == str(programs)


def test_a_lost_sandbox_counts_as_a_lost_grading():
    assert issubclass(SandboxLost, GradingLost)
    with pytest.raises(ConfigError, match="memory_mib = 0"):
        Limits(memory_mib=0)


async def test_a_node_without_namespaces_is_a_clear_error_at_startup():
    async def refused(limits: Limits) -> LocalSandbox:
        raise SandboxLost("unshare: Operation not permitted")

    with pytest.raises(ConfigError, match="user namespaces"):
        async with LocalPool(Limits(), size=1, start=refused):
            pass


def test_settings_become_limits_and_a_pool(tmp_path):
    settings = Config().sandbox
    assert limits_of(settings) == Limits()
    assert isinstance(pool_of(settings, tmp_path), LocalPool)
    other = settings.model_copy(update={"sandbox_backend": "slurm", "sandbox_memory_mib": 64})
    pool = pool_of(other, tmp_path)
    assert isinstance(pool, RemotePool) and pool.limits == replace(Limits(), memory_mib=64)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sandbox_warm": 9}, "--sandbox-warm 9 is more than"),
        ({"sandbox_image": "/no/such/image"}, "--sandbox-image /no/such/image: no such file"),
        ({"sandbox_image": "/etc/passwd"}, "is not a folder"),
        ({"sandbox_partition": "cpu"}, "--sandbox-partition cpu is not used"),
        ({"sandbox_processes": 2}, "at least 4"),
    ],
)
def test_settings_that_cannot_work_fail_on_the_login_node(given, message):
    config = Config()
    changed = config.model_copy(update={"sandbox": config.sandbox.model_copy(update=given)})
    (problem,) = sandbox_problems(changed)
    assert message in problem
    assert not sandbox_problems(config)


def test_a_submitted_run_gets_its_sandbox_servers(tmp_path):
    from common.run_folder import RunFolder
    from rlpost.extensions.agents.sandbox.jobs import sandbox_spec, wants_servers
    from slurm.render import render_sandbox

    config = Config()
    assert not wants_servers(config)
    given = {"sandbox_backend": "slurm", "sandbox_servers": 3, "sandbox_partition": "cpu"}
    config = config.model_copy(update={"sandbox": config.sandbox.model_copy(update=given)})
    assert wants_servers(config)
    script = render_sandbox(sandbox_spec(RunFolder(tmp_path), config, "12"))
    for text in ("--array=0-2", "--mem=14336M", "--cpus-per-task=8", "--partition=cpu"):
        assert text in script
    assert (
        "--dependency=after:12" in script and "gpu" not in script.lower().split("rlpost_home=")[0]
    )


def test_mount_points_are_found_whatever_their_names_contain() -> None:
    """proc_pid_mountinfo(5): blanks and backslashes are octal; other bytes are as in the name."""
    mountinfo = "\n".join(
        f"36 35 98:0 / {point} rw,noatime shared:1 - ext4 /dev/sda rw"
        for point in (
            "/",
            "/data",
            "/data/größe",
            "/data/two\\040words",
            "/data\\134x",
            "/database",
        )
    )
    found = kernel.mounts_below("/data", mountinfo.encode())
    assert found == ["/data", "/data/größe", "/data/two words"]

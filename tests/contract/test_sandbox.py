"""Sandboxes with the namespaces of this kernel: commands, limits, files, and their end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from rlpost.columns import IntColumn
from rlpost.extensions.agents.environments.protocol import Turn
from rlpost.extensions.agents.examples.shell import Shell
from rlpost.extensions.agents.sandbox.local import LocalSandbox, Root
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import (
    Ended,
    Limits,
    SandboxFileError,
    SandboxLost,
    SnapshotRefused,
    fresh,
    retry,
)
from rlpost.types import Prompt

ROOT = Path(__file__).resolve().parents[2]
SMALL = Limits(
    memory_mib=128,
    processes=24,
    disk_mib=32,
    files=500,
    wall_seconds=5,
    cpu_seconds=2,
    output_kib=8,
    open_files=64,
    file_mib=16,
    snapshot_mib=1,
    snapshot_files=50,
)


def possible() -> str:
    """Return why this machine cannot run sandboxes; empty if it can."""

    async def attempt() -> None:
        await (await LocalSandbox.start(SMALL)).close()

    try:
        asyncio.run(attempt())
    except SandboxLost as lost:
        return str(lost)
    return ""


WHY_NOT = possible()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


async def test_a_sandbox_keeps_files_between_commands_and_reports_how_each_ended():
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.run("echo one > file; exit 3")
        first = await sandbox.run("cat file; cat; echo err >&2; exit 3", stdin=b"two")
        assert (first.ended, first.exit_code) == (Ended.EXITED, 3)
        assert (first.stdout, first.stderr) == (b"one\ntwo", b"err\n")
        killed = await sandbox.run("kill -SEGV $$")
        assert (killed.ended, killed.exit_code) == (Ended.SIGNALLED, 139)
        missing = await sandbox.run(["/no/such/program"])
        assert (missing.ended, missing.exit_code) == (Ended.NOT_STARTED, 127)
        assert (await sandbox.run(["env"], env={"A": "b"})).text.count("A=b") == 1


async def test_a_command_sees_no_variable_folder_or_user_of_the_host(tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.write_text("token")
    monkeypatch.setenv("HF_TOKEN", "token-of-the-user")
    async with await LocalSandbox.start(SMALL) as sandbox:
        everything = await sandbox.run("env; cat /proc/*/environ; cat /proc/*/cmdline")
        assert b"token-of-the-user" not in everything.stdout
        for path in (secret, ROOT / "setup.cfg", "/etc/shadow", "/proc/1/environ"):
            assert not (await sandbox.run(["cat", str(path)])).ok, path
        assert not (await sandbox.run(f"ls {Path.home()} {ROOT} || false")).stdout
        assert (await sandbox.run("id -u; id -un")).text.split() == ["1000", "agent"]
        capabilities = (await sandbox.run("grep ^Cap /proc/self/status")).text.split()[1::2]
        assert set(capabilities) == {"0" * 16}


async def test_limits_end_a_command_and_are_reported():
    # much wall time: other work may share the machine
    quick = replace(SMALL, cpu_seconds=0.3, wall_seconds=60)
    async with await LocalSandbox.start(quick) as sandbox:
        slept = await sandbox.run("sleep 60", timeout=0.3)
        assert slept.ended is Ended.TIMEOUT and slept.seconds < 30
        spinning = await sandbox.run("while :; do :; done & while :; do :; done")
        assert spinning.ended is Ended.CPU_TIME
        one = await sandbox.run(["python3", "-c", "bytearray(300 << 20)"])
        assert one.exit_code == 1 and b"MemoryError" in one.stderr
        hold = "import time; x = bytearray(60 << 20); time.sleep(9)"
        many = await sandbox.run(f"for i in 1 2 3 4; do python3 -c '{hold}' & done; wait")
        assert many.ended is Ended.MEMORY
        loud = await sandbox.run("yes", timeout=0.5)
        assert loud.ended is Ended.TIMEOUT and loud.stdout_truncated and len(loud.stdout) == 8192
        assert (await sandbox.run("echo still here")).text == "still here\n"


SOCKETS = """
import socket, sys, time
held, total = [], 0
listener = socket.create_server(("127.0.0.1", 0)) if sys.argv[1] == "tcp" else None
for _ in range(28):
    if listener:
        pair = socket.create_connection(listener.getsockname()), listener.accept()[0]
    else:
        pair = socket.socketpair()
    held.append(pair)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 20)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        end.settimeout(0.05)
        try:
            while True:
                total += end.send(bytes(1 << 16))
        except TimeoutError:
            pass
print(total)
time.sleep(1)
"""


async def test_data_in_sockets_is_bounded_or_counts_as_memory():
    """It belongs to no process, and a user may make buffers as large as net.core.wmem_max."""
    default = int(Path("/proc/sys/net/core/wmem_default").read_text())
    async with await LocalSandbox.start(replace(SMALL, wall_seconds=60)) as sandbox:
        command = ["python3", "-c", SOCKETS]
        unix = await sandbox.run([*command, "unix"])
        assert unix.ok and int(unix.text) < 56 * 2 * default
        tcp = await sandbox.run([*command, "tcp"], timeout=30)
        assert tcp.ended is Ended.MEMORY or int(tcp.text) < SMALL.memory_mib << 20


PAGE_TABLES = """
import ctypes, mmap, time
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, *[ctypes.c_size_t] * 5]
pages = 80 << 8  # of 2 MiB each, which take 80 MiB of page tables
start = libc.mmap(None, pages << 21, mmap.PROT_READ, 0x4022, 2**64 - 1, 0)  # NORESERVE
libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(pages << 21), 15)  # NOHUGEPAGE
for page in range(pages):
    ctypes.c_char.from_address(start + (page << 21)).value
time.sleep(20)
"""
LOCKS = """
import fcntl, os, time
with open("/tmp/file", "w") as file:
    for n in range(8000, 0, -1):
        fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * n)
    time.sleep(20)
"""


@pytest.mark.parametrize("program", [PAGE_TABLES, LOCKS], ids=["page tables", "file locks"])
async def test_memory_of_the_kernel_that_a_process_takes_counts(program: str):
    limits = replace(SMALL, memory_mib=64, wall_seconds=60, cpu_seconds=60)
    async with await LocalSandbox.start(limits) as sandbox:
        result = await sandbox.run(["python3", "-c", program])
        assert result.ended is Ended.MEMORY, result


def test_commands_of_a_driver_with_low_priority_run_at_its_priority():
    source = """
import asyncio, os
from rlpost.extensions.agents.sandbox.local import LocalSandbox
from tests.contract.test_sandbox import SMALL
os.nice(19)
async def main():
    async with await LocalSandbox.start(SMALL) as sandbox:
        print((await sandbox.run("nice")).text)
asyncio.run(main())
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["19"], done.stderr


LOWER = """
for value in -1000 -1 0 500; do (echo $value > /proc/self/oom_score_adj) 2> /dev/null; done
for value in -1000 -1 0 500; do echo $value 2> /dev/null > /proc/$$/oom_score_adj && break; done
cat /proc/$$/oom_score_adj
"""
CAP_SYS_RESOURCE = 1 << 24


async def test_the_kernel_kills_commands_first_and_a_command_changes_that_only_where_it_may():
    """docs/agents.md, Limits. Compared with a process of this user without a sandbox."""
    reset = ["bash", "-c", f"echo 1000 > /proc/$$/oom_score_adj; {LOWER}"]
    lowered = subprocess.run(reset, capture_output=True, text=True, check=True).stdout
    (effective,) = re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())
    expected = "1000\n" if int(effective, 16) & CAP_SYS_RESOURCE else lowered
    async with await LocalSandbox.start(SMALL) as sandbox:
        assert (await sandbox.run("cat /proc/$$/oom_score_adj")).text == "1000\n"
        assert (await sandbox.run(LOWER)).text == expected
        first = await sandbox.run("echo 0 > /proc/1/oom_score_adj; cat /proc/1/oom_score_adj")
        assert first.text.splitlines()[-1] == "1000", "the first process is not the command's"
        assert (await sandbox.run("cat /proc/$$/oom_score_adj")).text == "1000\n", (
            "the next command"
        )


async def test_a_command_that_cannot_be_confined_is_a_lost_sandbox_not_a_result():
    """For example because the kernel refuses a resource limit."""
    async with await LocalSandbox.start(SMALL) as sandbox:
        sandbox.limits = replace(SMALL, cpu_seconds=1e30)  # too large for the kernel
        with pytest.raises(SandboxLost, match="cannot be confined"):
            await sandbox.run("true")


async def test_disk_files_and_processes_are_bounded():
    async with await LocalSandbox.start(SMALL) as sandbox:
        fill = "for i in 1 2 3; do head -c 15M /dev/zero > big$i; done; du -sm /work | cut -f1"
        assert int((await sandbox.run(fill)).text) <= 32
        assert not (await sandbox.run("head -c 20M /dev/zero > /tmp/one")).ok  # file_mib
        await sandbox.run("rm -f big*; i=0; while touch n$i; do i=$((i+1)); done")
        assert int((await sandbox.run("ls /work | wc -l")).text) < 500 + 64
        # The shell counts with built-ins: at the limit it cannot start a program.
        bomb = (
            "f() { f | f & }; f 2>/dev/null; i=0; most=0;"
            "while [ $i -lt 5000 ]; do set -- /proc/[0-9]*;"
            " [ $# -gt $most ] && most=$#; i=$((i+1)); done; echo $most"
        )
        assert int((await sandbox.run(bomb)).text) <= 24 + 1
        await sandbox.end_processes()
        assert (await sandbox.run("echo ok")).text == "ok\n"


async def test_the_network_is_a_separate_loopback():
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0rlpost-test-{os.getpid()}")
    abstract.listen()
    connect = "import socket; socket.create_connection(('{}', {}), 1)"
    unix = f"import socket; socket.socket(1).connect('\\0rlpost-test-{os.getpid()}')"
    async with await LocalSandbox.start(SMALL) as sandbox:
        for host in ("127.0.0.1", "169.254.169.254", socket.gethostname()):
            assert not (await sandbox.run(["python3", "-c", connect.format(host, port)])).ok
        assert not (await sandbox.run(["python3", "-c", unix])).ok
        assert not (await sandbox.run(["python3", "-c", "import socket; socket.socket(40)"])).ok
        own = (
            "import socket; s = socket.create_server(('127.0.0.1', 0));"
            "socket.create_connection(s.getsockname()); print('up')"
        )
        assert (await sandbox.run(["python3", "-c", own])).text == "up\n"
    async with await LocalSandbox.start(replace(SMALL, network=True)) as sandbox:
        assert (await sandbox.run(["python3", "-c", connect.format("127.0.0.1", port)])).ok
    listener.close()
    abstract.close()


async def test_files_are_read_and_written_as_the_agent():
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.write("/work/new/folder/tool", b"#!/bin/sh\necho ran\n", executable=True)
        assert (await sandbox.run("new/folder/tool")).text == "ran\n"
        assert await sandbox.read("/work/new/folder/tool") == b"#!/bin/sh\necho ran\n"
        await sandbox.run("mkfifo pipe; head -c 2000 /dev/zero > big")
        for path in ("/work/none", "/work/pipe", "/dev/zero", "/work", "/proc/1/mem"):
            with pytest.raises(SandboxFileError, match=path):
                await sandbox.read(path)
        with pytest.raises(SandboxFileError, match="larger than 1000 bytes"):
            await sandbox.read("/work/big", limit=1000)
        for path in ("/usr/bin/env", "/proc/sys/kernel/hostname", "/proc/sysrq-trigger"):
            with pytest.raises(SandboxFileError):
                await sandbox.write(path, b"x")


async def test_a_snapshot_holds_only_files_and_links_within_it():
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.run(
            "mkdir sub; echo a > sub/a; ln -s a sub/inner; ln -s ../a sub/up; ln sub/a hard;"
            "ln -s /etc/passwd abs; ln -s ../etc/passwd out; ln -s sub/../../etc out2; mkfifo pipe;"
            'chmod +x hard; touch "$(printf "\\377")"; echo secret > closed; chmod 0 closed'
        )
        await sandbox.run("(while :; do echo x > racing; ln -sf / racing; rm racing; done) &")
        taken = await sandbox.snapshot()
        kinds = {entry.path: entry.kind for entry in taken.entries if entry.path != "racing"}
        expected = {"hard": "file", "sub": "folder", "sub/a": "file"}
        assert kinds == expected | {"sub/inner": "link", "sub/up": "link"}
        names = ("abs", "closed", "out", "out2", "pipe", "'\\udcff'")
        assert sorted(
            text.split(":")[0] for text in taken.refused if "racing" not in text
        ) == sorted(names)
        assert (await sandbox.run("ps ax | grep -c '[w]hile'")).text == "0\n"


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("head -c 2M /dev/zero > big", "larger"),
        ("truncate -s 10M sparse", "larger"),
        ("for i in $(seq 60); do touch $i; done", "larger"),
        ("mv /work /old; ln -s /etc /work", "not a folder"),
        ("mv /work /old", "not a folder"),
        ("python3 -c \"import os\nfor i in range(99): os.mkdir('d'); os.chdir('d')\"", "larger"),
    ],
)
async def test_a_snapshot_beyond_its_limits_is_refused(command, reason):
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.run(command)
        with pytest.raises(SnapshotRefused, match=reason):
            await sandbox.snapshot()


async def test_restored_entries_replace_links_instead_of_following_them():
    async with await LocalSandbox.start(SMALL) as sandbox:
        await sandbox.run("mkdir tests; echo ours > tests/test; echo kept > tests/other")
        taken = await sandbox.snapshot()
        async with await LocalSandbox.start(SMALL) as other:
            await other.run("mkdir /elsewhere; ln -s /elsewhere tests")
            await other.restore(taken)
            assert (await other.run("cat tests/test; ls /elsewhere")).text == "ours\n"
            await other.run("rm tests/test; mkdir tests/test; ln -s /etc/passwd tests/test/x")
            await other.restore(taken)
            assert (await other.run("cat tests/test")).text == "ours\n"


async def test_a_killed_launcher_is_a_lost_sandbox_not_a_result():
    async with await LocalSandbox.start(SMALL) as sandbox:
        launcher = psutil.Process(sandbox._process.pid)
        below = launcher.children(recursive=True)
        command = asyncio.ensure_future(sandbox.run("sleep 60"))
        await asyncio.sleep(0.2)
        launcher.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await command
        assert not psutil.wait_procs(below, timeout=30)[1]


async def test_a_cancelled_command_ends_its_sandbox():
    async with await LocalSandbox.start(SMALL) as sandbox:
        command = asyncio.ensure_future(sandbox.run("sleep 60"))
        await asyncio.sleep(0.1)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        with pytest.raises(SandboxLost):
            await sandbox.run("true")


async def kill(sandbox):
    """Kill the process of a sandbox, and wait until it is dead: it could still answer before."""
    process = psutil.Process(sandbox._process.pid)
    process.kill()
    for _ in range(1000):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return
        await asyncio.sleep(0.01)


async def test_a_lost_sandbox_is_retried_in_another_and_finally_raised():
    seen = []
    async with LocalPool(SMALL, size=2, warm=1) as pool:

        async def flaky(sandbox):
            seen.append(sandbox.name)
            if len(seen) < 3:
                await kill(sandbox)
            return (await sandbox.run("echo done")).text

        assert await retry(pool, flaky) == "done\n"

        async def hopeless(sandbox):
            await kill(sandbox)
            await sandbox.run("true")

        with pytest.raises(SandboxLost, match="attempt 2 of 2"):
            await retry(pool, hopeless, attempts=2)
        assert pool.in_use == 0
    assert len(set(seen)) == 3


@pytest.mark.parametrize("size", [1, 2])
async def test_a_pool_is_bounded_and_serves_in_order(size):
    before = set(psutil.Process().children())  # those of other tests' fixtures
    async with LocalPool(SMALL, size=size, warm=size) as pool:
        order: list[int] = []
        most = 0
        is_full = asyncio.Event()

        async def episode(number: int) -> None:
            nonlocal most
            async with fresh(pool) as sandbox:
                order.append(number)
                most = max(most, pool.in_use)
                if most == size:
                    is_full.set()
                # on a busy machine the first would end before the second has started
                await asyncio.wait_for(is_full.wait(), 60)
                assert (await sandbox.run("ls")).text == ""
                await sandbox.run("touch used")

        await asyncio.gather(*(episode(number) for number in range(6)))
        assert most == size and sorted(order) == list(range(6))
        # with two places a later caller may run first: its sandbox may start faster
        assert size > 1 or order == sorted(order)
        children = set(psutil.Process().children()) - before
    assert not [child for child in children if child.is_running()]


DRIVER = """
import asyncio, sys
sys.path.insert(0, {root!r})
from rlpost.extensions.agents.sandbox.pool import LocalPool
from rlpost.extensions.agents.sandbox.protocol import Limits

async def main():
    async with LocalPool(Limits(memory_mib=128, processes=20, disk_mib=16), size=3, warm=1) as pool:
        boxes = [await pool.acquire() for _ in range(2)]
        await boxes[0].run("(setsid sleep 300 &) ; setsid setsid sleep 300 &")
        print("ready", (await boxes[1].run("id -u")).text, flush=True)
        await boxes[1].run("trap '' TERM HUP; sleep 300")

asyncio.run(main())
"""


OF_OTHER_TESTS = ("/dev/shm/sglang_", "/dev/shm/crash-", "/dev/shm/psm_", "/dev/shm/torch_")


def host_state() -> tuple[set[str], set[str]]:
    """Return the mounts, and the entries of shared folders except those of other tests."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    mounts = {line for line in lines if " /run/netns" not in line}  # labs of other tests
    folders = ("/dev/shm", "/run", "/sys/fs/cgroup")
    found = {f"{folder}/{name}" for folder in folders for name in os.listdir(folder)}
    return mounts, {path for path in found if not path.startswith(OF_OTHER_TESTS)}


@pytest.mark.parametrize("user", [None, 65534])
def test_nothing_is_left_after_kill_9_of_the_driver(user):
    """As the user of the tests and, if that is root, as a normal user."""
    command = [sys.executable, "-c", DRIVER.format(root=str(ROOT))]
    if user is not None:
        if os.geteuid() != 0 or not Path("/usr/bin/python3").exists():
            pytest.skip("needs root to become another user, and the system's Python")
        command[:1] = [
            *("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"),
            "/usr/bin/python3",
        ]
    before = host_state()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd="/", env={}) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline().strip() == "ready 1000"
        below = psutil.Process(driver.pid).children(recursive=True)
        assert len(below) >= 7  # three launchers, three first processes, commands
        driver.kill()
    assert not psutil.wait_procs(below, timeout=10)[1]
    assert host_state() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts sandboxes as another user")
async def test_an_image_that_belongs_to_root_names_the_command_that_changes_it(tmp_path):
    image = tmp_path / "image"
    (image / "home").mkdir(parents=True)
    with pytest.raises(SandboxLost, match=f"belongs to root.*chown -hR 12345:12345 {image}"):
        await LocalSandbox.start(SMALL, Root(image=str(image)))


async def test_an_image_folder_is_writable_inside_and_unchanged_outside(tmp_path):
    image = tmp_path / "image"
    for folder in ("bin", "etc", "lib64", "usr/lib", "dev"):
        (image / folder).mkdir(parents=True)
    (image / "etc/motd").write_text("of the image")
    for path in tmp_path.parents:
        if not os.access(path, os.R_OK | os.X_OK):
            pytest.skip(f"{path} is closed to the user of the sandbox")
    root = Root(image=str(image), read_only=("/usr", "/lib64", "/lib"))
    async with await LocalSandbox.start(SMALL, root) as sandbox:
        assert await sandbox.read("/etc/motd") == b"of the image"
        await sandbox.write("/motd2", b"new")
        assert (await sandbox.run(["/usr/bin/cat", "/motd2"])).stdout == b"new"
    assert sorted(path.name for path in image.iterdir()) == ["bin", "dev", "etc", "lib64", "usr"]


async def test_a_command_with_much_output_does_not_occupy_the_event_loop():
    async with await LocalSandbox.start(SMALL) as sandbox:
        before, num_threads = time.thread_time(), threading.active_count()
        await sandbox.run("yes", timeout=1.0)
        assert time.thread_time() - before < 0.5
        # threads of other tests in this process go on, such as those of wandb
        assert threading.active_count() - num_threads < 10


def test_an_environment_runs_commands_in_a_sandbox_and_hidden_cases_score_it() -> None:
    cases = json.dumps([["2 3\n", "5"], ["10 20\n", "30"]])
    program = "$ echo 'print(sum(map(int, input().split())))' > solution.py"
    turn = partial(Turn, token_ids=IntColumn(), finish_reason="stop", stopped_at="\n")

    async def episode(*commands: str) -> tuple[list[str], float]:
        async with LocalPool(SMALL, size=1) as pool:
            shell = Shell()
            shell.sandboxes = pool
            await shell.reset(Prompt(0, "add two numbers", [1], label=cases))
            try:
                steps = [await shell.step(turn(n, text)) for n, text in enumerate(commands)]
                return [step.text for step in steps], await shell.score()
            finally:
                await shell.close()
                assert pool.in_use == 0

    texts, score = asyncio.run(episode(program, "$ echo 1 1 | python3 solution.py", "done"))
    assert texts == ["\n", "2\n\n", ""] and score == 1.0
    forged = "$ echo 'print(5)' > solution.py"
    assert asyncio.run(episode(forged))[1] == 0.5

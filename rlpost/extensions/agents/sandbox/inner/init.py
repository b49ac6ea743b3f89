"""The first process of a sandbox: starts commands, watches their limits, reaps, and ends.

It holds no capability and no secret, cannot be traced or killed from inside, and is the parent of
every orphan. When it ends, the kernel kills every process of the sandbox; it ends when the other
side of its control socket is closed.

A request is one packet of JSON with three descriptors: standard input, output and error. ``op`` is
``run``, ``end``, or one of OPERATIONS. The answer is one packet of JSON.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import resource
import select
import signal
import socket
import time

from rlpost.extensions.agents.sandbox.inner import archive, files, kernel, seccomp, usage
from rlpost.extensions.agents.sandbox.inner.filesystem import HOME, LimitValues

TICK = 0.05  # s between two readings of the usage of running commands
PACKET = 1 << 18  # bytes of a request
IDLE_SECONDS = 0.5  # s in which processes that a command left may end before a ``save``
END_SECONDS = 10.0  # s until all killed processes must be gone
REFUSED = 2  # exit code of an operation that breaks a rule
MIB = 1 << 20
NICENESS = 10  # at least
UNCONFINED = b"the command cannot be confined: "
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": HOME,
    "USER": "agent",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "TMPDIR": "/tmp",
}


class Init:
    """Serves requests on the control socket, one at a time."""

    def __init__(self, control: socket.socket, limits: LimitValues) -> None:
        self.control, self.limits = control, limits
        self.filter = seccomp.program()
        self.reaped_cpu = 0.0

    def serve(self) -> None:
        """Answer requests until the control socket is closed."""
        waiting = select.poll()
        waiting.register(self.control, select.POLLIN)
        while True:
            busy = usage.measure().processes > 0
            ready = waiting.poll(TICK * 1000 if busy else None)
            self.reap()
            if not ready:
                if busy:
                    self.check_background()
                continue
            try:
                request, descriptors = self.receive()
            except (EOFError, OSError):
                return
            answer = self.perform(request, descriptors)
            try:
                self.control.send(json.dumps(answer).encode())
            except OSError:
                return

    def receive(self) -> tuple[files.Request, list[int]]:
        """Receive a request and its descriptors. Raises EOFError at the end."""
        handles = array.array("i")
        space = socket.CMSG_SPACE(3 * handles.itemsize)
        data, ancillary, _, _ = self.control.recvmsg(PACKET, space, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise EOFError
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                handles.frombytes(content)
        return json.loads(data), list(handles)

    def perform(self, request: files.Request, descriptors: list[int]) -> files.FileAnswer:
        """Perform one request; every descriptor is closed afterwards."""
        answer = self.answer_without_child(request)
        if answer is not None:
            for handle in descriptors:
                os.close(handle)
            return answer
        # Closed by a successful exec; a failure before that is written to it.
        status_read, status_write = os.pipe2(os.O_CLOEXEC)
        try:
            child = os.fork()
        except OSError:
            # The agent's background processes have used up the process limit, so they are killed.
            self.end_all()
            child = os.fork()
        if child == 0:
            self.become_command(request, descriptors, status_write)
        for handle in (*descriptors, status_write):
            os.close(handle)
        answer = self.wait(child, request)
        failure = os.read(status_read, 4096)
        os.close(status_read)
        if failure.startswith(UNCONFINED):
            return {"error": failure.decode("utf-8", "replace")}
        if failure:
            answer |= {"ended": "not started", "error_text": failure.decode("utf-8", "replace")}
        return answer

    def answer_without_child(self, request: files.Request) -> files.FileAnswer | None:
        """End processes where the request needs that; return its answer if that is all."""
        if request["op"] in ("end", "snapshot") and not self.end_all():
            return {"error": "processes of the agent cannot be killed"}
        if request["op"] == "end":
            return {"ended": "exited", "status": 0}
        if request["op"] == "save" and (count := self.background_processes()):
            text = f"{count} processes of the agent run in the background; an archive has none"
            return {"ended": "exited", "status": REFUSED << 8, "error_text": text}
        return None

    def become_command(self, request: files.Request, handles: list[int], status: int) -> None:
        """Turn this child into the command; never returns."""
        code, kind = 127, UNCONFINED
        try:
            for number, handle in enumerate(handles):
                os.dup2(handle, number)
            confine(self.limits, request, self.filter)
            kind = b""  # from here on, a failure is one of the agent's command
            if request["op"] == "run":
                os.chdir(request["cwd"])
                os.execvpe(request["argv"][0], request["argv"], ENVIRONMENT | request["env"])
            code = perform(request)
        except Exception as error:
            os.write(status, kind + str(error).encode("utf-8", "replace")[:4000])
        finally:
            os._exit(code)

    def wait(self, child: int, request: files.Request) -> files.FileAnswer:
        """Wait for a command, within its limits; describe how it ended."""
        deadline = time.monotonic() + request["wall_seconds"]
        start_cpu = self.reaped_cpu + usage.measure().cpu_seconds
        process = os.pidfd_open(child)
        waiting = select.poll()
        waiting.register(process, select.POLLIN)
        # Events 0: POLLHUP is always reported, so this wakes only when the driver is gone.
        waiting.register(self.control, 0)
        reason: str | None = None
        statuses: dict[int, int] = {}
        while child not in statuses:
            events = dict(waiting.poll(TICK * 1000))
            if self.control.fileno() in events:
                os._exit(0)
            statuses |= self.reap()
            if child in statuses:
                break
            reason = self.broken_limit(request, deadline, start_cpu)
            if reason:
                statuses |= self.kill_all()
        os.close(process)
        status = statuses[child]
        if reason is None and over_cpu_limit(status):
            reason = "cpu time"
        if reason is None:
            reason = "signalled" if os.WIFSIGNALED(status) else "exited"
        return {"ended": reason, "status": status}

    def broken_limit(self, request: files.Request, deadline: float, start_cpu: float) -> str | None:
        """Name the limit that the running command exceeds."""
        if time.monotonic() > deadline:
            return "timeout"
        now = usage.measure()
        if self.reaped_cpu + now.cpu_seconds - start_cpu > request["cpu_seconds"]:
            return "cpu time"
        limit = self.limits["memory_mib"] * MIB
        return "memory" if usage.memory(now, limit) > limit else None

    def check_background(self) -> None:
        """Kill processes that earlier commands left behind when they exceed the memory limit."""
        limit = self.limits["memory_mib"] * MIB
        if usage.memory(usage.measure(), limit) > limit:
            self.kill_all()

    def background_processes(self) -> int:
        """Return how many processes of the agent are left after ``IDLE_SECONDS``, 0 at once."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            self.reap()
            count = usage.measure().processes
            if not count or time.monotonic() > deadline:
                return count
            time.sleep(0.005)

    def reap(self) -> dict[int, int]:
        """Reap all ended children, orphans included; return their statuses."""
        statuses: dict[int, int] = {}
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return statuses
            if pid == 0:
                return statuses
            statuses[pid] = status
            self.reaped_cpu += used.ru_utime + used.ru_stime

    def kill_all(self) -> dict[int, int]:
        """Kill every process of the sandbox except this one; return the reaped statuses."""
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + END_SECONDS
        while usage.measure().processes and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            statuses |= self.reap()
            time.sleep(0.001)
        return statuses | self.reap()

    def end_all(self) -> bool:
        """Kill every process; return whether none is left."""
        self.kill_all()
        return usage.measure().processes == 0


def over_cpu_limit(status: int) -> bool:
    """Return whether the kernel ended a process for its RLIMIT_CPU."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU


def confine(limits: LimitValues, request: files.Request, code: bytes) -> None:
    """Apply everything that a command must not undo. The system-call filter comes last."""
    os.setsid()
    os.umask(0o022)
    for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    cpu = int(request["cpu_seconds"]) + 1
    values = {
        resource.RLIMIT_CPU: (cpu, cpu + 1),
        resource.RLIMIT_DATA: limits["memory_mib"] * MIB,
        resource.RLIMIT_FSIZE: limits["file_mib"] * MIB,
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 64 * 1024,
        resource.RLIMIT_STACK: min(8, limits["memory_mib"]) * MIB,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_SIGPENDING: 1024,
    }
    for name, value in values.items():
        lower(name, value if isinstance(value, tuple) else (value, value))
    # The driver's niceness may be higher already, and lowering it again needs privileges.
    os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(code)


def lower(name: int, wanted: tuple[int, int]) -> None:
    """Set a resource limit, but never above the present hard limit."""
    hard = resource.getrlimit(name)[1]
    if hard != resource.RLIM_INFINITY:
        wanted = (min(wanted[0], hard), min(wanted[1], hard))
    resource.setrlimit(name, wanted)


OPERATIONS = {
    "read": files.read,
    "write": files.write,
    "snapshot": files.snapshot,
    "restore": files.restore,
    "save": archive.save,
    "unpack": archive.unpack,
}


def perform(request: files.Request) -> int:
    """Perform ``request['op']`` on descriptors 0 and 1; return the exit code.

    It is called in a process with the agent's permissions. An error is text on standard error and
    exit code 1, a broken rule REFUSED.
    """
    try:
        OPERATIONS[request["op"]](request)
    except files.FileRefused as error:
        os.write(2, str(error).encode("utf-8", "replace")[:4096])
        return REFUSED
    except OSError as error:
        text = f"{request.get('path', '')}: {error.strerror}"
        os.write(2, text.encode("utf-8", "replace")[:4096])
        return 1
    return 0

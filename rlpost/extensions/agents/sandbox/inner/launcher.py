"""Starts one sandbox: namespaces, file system, then ``init`` as its first process.

Argument: descriptor of the control socket. The first packet on it is the specification as JSON:
limits, image, read-only folders, and the host user of commands if root starts the launcher. The
answer is ``{"ready": true}`` or ``{"failed": TEXT}``.

This process stays outside and waits. It ends the sandbox when its parent is gone, and the kernel
ends the sandbox when this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

from rlpost.extensions.agents.sandbox.inner import filesystem, kernel
from rlpost.extensions.agents.sandbox.inner.init import Init

NAMESPACES = kernel.NEW_PID | kernel.NEW_NS | kernel.NEW_IPC | kernel.NEW_UTS | kernel.NEW_CGROUP
PARENT_CHECK = 0.5  # s


def main(arguments: list[str]) -> int:
    """Run one sandbox until its control socket is closed."""
    control = socket.socket(fileno=int(arguments[0]))
    parent = os.getppid()
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when memory runs out, the kernel kills sandboxes before the run
    try:
        spec = json.loads(control.recv(1 << 16))
    except ValueError:
        return 1
    try:
        sources = isolate(spec)
    except OSError as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return 1
    # The first process sees the end of this pipe if the launcher dies before PR_SET_PDEATHSIG.
    alive_read, alive_write = os.pipe()
    # The fork is the first process in the new PID namespace; unshare does not move the launcher.
    init = os.fork()
    if init == 0:
        os.close(alive_write)
        first_process(control, spec, sources, alive_read)
    control.close()
    os.close(alive_read)
    for handle in sources.values():
        os.close(handle)
    return watch(init, parent)


def watch(init: int, parent: int) -> int:
    """Wait for the first process; kill it, and so the sandbox, when the parent is gone."""
    process = os.pidfd_open(init)
    waiting = select.poll()
    waiting.register(process, select.POLLIN)
    while not waiting.poll(PARENT_CHECK * 1000):
        if os.getppid() != parent:
            os.kill(init, signal.SIGKILL)
            break
    os.waitpid(init, 0)
    return 0


def isolate(spec: filesystem.Spec) -> dict[str, int]:
    """Enter new namespaces as an unprivileged user; return the opened folders of the root."""
    user = spec["user"] if os.geteuid() == 0 else os.geteuid()
    group = spec["group"] if os.geteuid() == 0 else os.getegid()
    flags = NAMESPACES if spec["limits"]["network"] else NAMESPACES | kernel.NEW_NET
    target = os.getpid()
    ready_read, ready_write = os.pipe()
    # A child outside the new user namespace, because only such a process may map other users of
    # root.
    helper = os.fork()
    if helper == 0:
        os.close(ready_write)
        os.read(ready_read, 1)
        os._exit(map_users(target, user, group))
    os.close(ready_read)
    if os.geteuid() == 0:
        os.setgroups([])  # before the map, which denies setgroups
    try:
        kernel.unshare(kernel.NEW_USER)
    finally:
        os.close(ready_write)
        status = os.waitpid(helper, 0)[1]
    if status != 0:
        raise OSError(os.waitstatus_to_exitcode(status), "cannot map users of a user namespace")
    kernel.unshare(flags)
    sources = filesystem.open_sources(spec)
    identity = filesystem.UID
    os.setresgid(identity, identity, identity)
    os.setresuid(identity, identity, identity)
    return sources


def map_users(process: int, user: int, group: int) -> int:
    """Map the agent's user to one of the host, from outside of the new namespace."""
    texts = {
        "setgroups": "deny",
        "uid_map": f"{filesystem.UID} {user} 1",
        "gid_map": f"{filesystem.UID} {group} 1",
    }
    try:
        for name, text in texts.items():
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return error.errno or 1
    return 0


def first_process(
    control: socket.socket, spec: filesystem.Spec, sources: dict[str, int], alive: int
) -> None:
    """Prepare and serve as the first process of the sandbox; never returns."""
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        # If the launcher died before the previous line, its end of this pipe is closed.
        launcher = select.poll()
        launcher.register(alive, select.POLLIN)
        if launcher.poll(0):
            os._exit(1)
        os.close(alive)
        os.setsid()
        detach_streams()
        if not spec["limits"]["network"]:
            kernel.bring_loopback_up()
        socket.sethostname("sandbox")
        choose_cores(spec["limits"]["cores"], spec["slot"])
        filesystem.enter(spec, sources)
        filesystem.seal_proc()
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # no process of the agent can trace or read it
        for number in (signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_IGN)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) != control.fileno():
                with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
                    os.close(int(name))
        os.set_inheritable(control.fileno(), False)
        init = Init(control, spec["limits"])
        control.send(b'{"ready": true}')
        init.serve()
    except Exception as error:
        control.send(json.dumps({"failed": str(error)}).encode())
    finally:
        os._exit(0)


def detach_streams() -> None:
    """Point the standard streams to /dev/null."""
    null = os.open("/dev/null", os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)


def choose_cores(count: int, slot: int) -> None:
    """Bind to ``count`` of the allowed CPUs; neighbouring slots get different ones."""
    allowed = sorted(os.sched_getaffinity(0))
    chosen = {allowed[(slot * count + index) % len(allowed)] for index in range(count)}
    os.sched_setaffinity(0, chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

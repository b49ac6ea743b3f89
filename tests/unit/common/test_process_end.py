"""Waiting for the end of killed processes."""

import socket
import subprocess
import sys
import time

from common.process_end import ProcessId, has_ended, this_process, wait_for_end

IDENTITY = (
    "from common.process_end import this_process; p = this_process(); print(p.pid, p.started)"
)
FOREVER = f"{IDENTITY}; import sys, time; sys.stdout.flush(); time.sleep(60)"


def started():
    process = subprocess.Popen([sys.executable, "-c", FOREVER], stdout=subprocess.PIPE, text=True)
    return process, ProcessId(*map(int, process.stdout.readline().split()))


def test_a_killed_process_has_ended_before_its_parent_waits_for_it():
    process, identity = started()
    try:
        assert not has_ended(identity)
        assert wait_for_end([identity], 0.1) == [identity]
        process.kill()
        assert wait_for_end([identity], 20.0) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


LISTENS = f"""
import socket, threading, time
service = socket.create_server(("127.0.0.1", 0))
memory = bytearray(b"1") * (300 << 20)  # takes time to release
for _ in range(50):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print(service.getsockname()[1])
{FOREVER}
"""


def test_a_process_has_not_ended_before_its_last_thread_has_closed_its_port():
    """The first thread of a killed process is a zombie while the others still hold its sockets."""
    for _ in range(5):  # which thread ends last varies
        process = subprocess.Popen(
            [sys.executable, "-c", LISTENS], stdout=subprocess.PIPE, text=True
        )
        try:
            port = int(process.stdout.readline())
            identity = ProcessId(*map(int, process.stdout.readline().split()))
            process.kill()
            while not has_ended(identity):
                pass
            with socket.create_server(("127.0.0.1", port)):
                pass
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def test_another_process_with_the_same_number_is_not_waited_for():
    own = this_process()
    began = time.monotonic()
    assert wait_for_end([ProcessId(own.pid, own.started - 1)], 30.0) == []
    assert time.monotonic() - began < 20.0
    assert not has_ended(own)

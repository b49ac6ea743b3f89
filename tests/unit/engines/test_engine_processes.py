"""Processes of an engine reach each other, and no process without the engine's key reaches them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import zmq
from torch.distributed import rendezvous

from rlpost.engines.engine_processes import Guarded, authenticate_links

SECRET = "k" * 64
WAIT_MS = 60_000  # on a machine that is busy with other work

# Other processes of the engine, as SGLang spawns them: each unpickles its function, then opens
# sockets. They are forks of one process, which imports SGLang once.
# A line of stdin: a pickled function or "-", address, "sends" or "receives"
OTHERS = """
import os, pickle, sys, zmq, sglang.srt.managers.load_snapshot
for line in sys.stdin:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    pickled, address, role = line.split()
    function = print if pickled == "-" else pickle.loads(bytes.fromhex(pickled))
    context = zmq.Context()
    if role == "sends":
        socket = context.socket(zmq.PUSH)
        socket.connect(address)
        socket.send(b"from the other process")
        context.destroy(linger=1000)
        print("sent")
    else:
        socket = context.socket(zmq.SUB)
        socket.subscribe(b"")
        socket.connect(address)
        print(socket.recv() if socket.poll(1500) else "nothing")
    function("end", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def others() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", OTHERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    plain = {name: getattr(zmq.Socket, name) for name in ("bind", "connect")}
    handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
    before = dict(handlers)
    authenticate_links("another engine")
    authenticate_links(SECRET)  # replaces, and does not stack
    context = zmq.Context()
    yield context
    context.destroy(linger=0)
    for name, function in plain.items():
        setattr(zmq.Socket, name, function)
    handlers.update(before)


def start_other(
    others: subprocess.Popen[str], *, guard: str | None, address: str, role: str
) -> Callable[[], str]:
    """Return a function that waits for the process to end and returns what it printed."""
    pickled = "-" if guard is None else pickle.dumps(Guarded(print, guard)).hex()
    assert others.stdin and others.stdout
    others.stdin.write(f"{pickled} {address} {role}\n")
    others.stdin.flush()
    lines = others.stdout

    def printed() -> str:
        line, end = lines.readline(), lines.readline()
        assert end == "end\n"
        return line.strip()

    return printed


def test_only_processes_with_the_key_send_messages(
    context: zmq.Context[Any], others: subprocess.Popen[str]
) -> None:
    socket = context.socket(zmq.PULL)
    address = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
    for stranger in (None, "another engine"):
        assert start_other(others, guard=stranger, address=address, role="sends")() == "sent"
        assert not socket.poll(300)
    assert start_other(others, guard=SECRET, address=address, role="sends")() == "sent"
    assert socket.poll(WAIT_MS) and socket.recv() == b"from the other process"


def test_only_processes_with_the_key_receive_messages(
    context: zmq.Context[Any], others: subprocess.Popen[str]
) -> None:
    publisher = context.socket(zmq.XPUB)
    address = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
    assert start_other(others, guard=None, address=address, role="receives")() == "nothing"
    assert not publisher.poll(0), "nobody has subscribed"
    printed = start_other(others, guard=SECRET, address=address, role="receives")
    assert publisher.poll(WAIT_MS)
    publisher.send(b"weights")
    assert printed() == "b'weights'"


def test_files_as_sockets_need_no_keys(context: zmq.Context[Any], tmp_path: Any) -> None:
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.bind(f"ipc://{tmp_path}/s")
    push.connect(f"ipc://{tmp_path}/s")
    push.send(b"x")
    assert pull.poll(WAIT_MS) and pull.recv() == b"x"


def test_groups_of_sglang_need_the_key(context: zmq.Context[Any]) -> None:
    """A rendezvous that SGLang makes opens torch's own store no more."""
    store, rank, size = next(rendezvous("tcp://127.0.0.1:1", 0, 1))
    assert (type(store).__name__, rank, size) == ("HashStore", 0, 1)
    with pytest.raises(Exception, match=r"cannot connect|did not answer"):
        next(rendezvous("tcp://127.0.0.1:1", 1, 2, timeout=timedelta(0)))

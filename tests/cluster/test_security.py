"""A stranger on the network of a running attempt gets nothing and breaks nothing; the secret shows up nowhere."""

from __future__ import annotations

import sys
import time

from bootstrap.ports import candidate_blocks, ephemeral_floor
from tests.cluster.attempts import Attempt, on_node
from tests.cluster.lab import REPOSITORY, Lab

SECRET = "5" * 64

# Runs on another node, without the secret: noise, a length that never ends, half a frame that is never finished,
# a frame under another secret, and a good frame that is sent again (the recording is made with the real secret here).
STRANGER = """
import socket, sys
from bootstrap.messages import Codec, hello_key
host, port, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
hello = Codec(hello_key(secret), "node").pack({"kind": "hello", "nonce": "recorded"})
forged = Codec(hello_key(b"f" * 64), "node").pack({"kind": "hello", "nonce": "n"})
for what, data in [("noise", b"GET / HTTP/1.1" + bytes(200)), ("oversize", b"\\xff" * 100_000), ("forged", forged)]:
    with socket.create_connection((host, port), timeout=30) as connection:
        try:
            connection.sendall(data)
            got = connection.recv(1)
        except ConnectionResetError:
            got = b""
        print(what, len(got))
with socket.create_connection((host, port), timeout=30) as connection:
    connection.sendall(hello + hello)  # the second one should have been under the session's key
    got = b""
    try:
        while data := connection.recv(4096):
            got += data
    except ConnectionResetError:
        pass
    print("replay", b"start_ray" in got or b"joined" in got)
idle = [socket.create_connection((host, port), timeout=30) for _ in range(200)]
print("idle", len(idle))
"""

# Every command line and environment of the node, and every file of the attempt but the secret itself.
SEARCH = """
import pathlib, sys
needle = ("5" * 64).encode()
for path in [*pathlib.Path("/proc").glob("[0-9]*/cmdline"), *pathlib.Path("/proc").glob("[0-9]*/environ")]:
    try:
        found = needle in path.read_bytes()
    except OSError:
        continue
    if found:
        print(path, (path.parent / "comm").read_text())
for path in pathlib.Path(sys.argv[1]).rglob("*"):
    if path.is_file() and path.name != "secret" and needle in path.read_bytes():
        print(path)
"""


def test_strangers_at_the_door_while_the_nodes_gather(lab: Lab) -> None:
    """The second node comes late; until then strangers have the head's port for themselves."""
    gate = lab.shared / "gate"
    attempt = Attempt(lab, "strangers", run_if=on_node(1, f"while [ ! -e {gate} ]; do sleep 0.1; done"), stub_ray=True)
    port = next(candidate_blocks(attempt.job, ephemeral_floor())).rendezvous
    script = lab.shared / "stranger.py"
    script.write_text(STRANGER)
    until_listening = f"until (echo > /dev/tcp/{lab.ip('n01')}/{port}) 2>/dev/null; do sleep 0.1; done"
    lab.run("n03", ["bash", "-c", until_listening])
    command = [sys.executable, str(script), lab.ip("n01"), str(port), SECRET]
    said = lab.run("n03", command, env={"PYTHONPATH": str(REPOSITORY)}).stdout
    assert said.split("\n")[:5] == ["noise 0", "oversize 0", "forged 0", "replay False", "idle 200"]
    gate.touch()
    opened_at = time.monotonic()
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n02"]
    assert time.monotonic() - opened_at < 20
    assert "turned away a connection from 10.77.0.13" in attempt.log("agent-n01.log")
    (attempt.folder / "STOP").write_text('{"reason": "enough"}')
    attempt.wait()
    attempt.end()


def test_the_secret_is_in_no_command_line_no_environment_and_no_log(lab: Lab) -> None:
    """With real Ray, whose processes get the secret as their token."""
    attempt = Attempt(lab, "secret", nodes="n01")
    attempt.wait_until_it_works()
    assert lab.run("n01", [sys.executable, "-c", SEARCH, str(attempt.folder)]).stdout == ""
    (attempt.folder / "STOP").write_text('{"reason": "enough"}')
    assert attempt.wait()[0] == "requeue"
    assert lab.run("n01", [sys.executable, "-c", SEARCH, str(attempt.folder)]).stdout == ""
    attempt.end()

"""A stranger on the network of a running attempt gets nothing and breaks nothing; the secret shows
up nowhere.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bootstrap.agent.ports import candidate_blocks, ephemeral_floor
from tests.cluster.attempts import Attempt, on_node
from tests.cluster.lab import REPOSITORY, Lab

SECRET = "5" * 64

# Runs on another node, without the secret: noise, a length that never ends, half a frame that is
# never finished, a frame under another secret, and a good frame that is sent again (the recording
# is made with the real secret here).
STRANGER = """
import socket, sys
from bootstrap.agent.messages import Codec, hello_key
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

# Every command line and environment of the node, and every file of the attempt but the secret
# itself.
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
    attempt = Attempt(
        lab,
        "strangers",
        run_if=on_node(1, f"while [ ! -e {gate} ]; do sleep 0.1; done"),
        stub_ray=True,
    )
    port = next(candidate_blocks(attempt.job, ephemeral_floor())).rendezvous
    script = lab.shared / "stranger.py"
    script.write_text(STRANGER)
    until_listening = (
        f"until (echo > /dev/tcp/{lab.ip('n01')}/{port}) 2>/dev/null; do sleep 0.1; done"
    )
    lab.run("n03", ["bash", "-c", until_listening])
    command = [sys.executable, str(script), lab.ip("n01"), str(port), SECRET]
    said = lab.run("n03", command, env={"PYTHONPATH": str(REPOSITORY)}).stdout
    assert said.split("\n")[:5] == ["noise 0", "oversize 0", "forged 0", "replay False", "idle 200"]
    gate.touch()
    opened_at = time.monotonic()
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n02"]
    assert time.monotonic() - opened_at < 20
    assert "rejected a connection from 10.77.0.13" in attempt.log("agent-n01.log")
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


# One more user of this machine, who may read the interpreter: it can lie below somebody's home.
OPEN_INTERPRETER = """
set -e
mkdir /tmp/base && mount --bind {base} /tmp/base
for folder in {closed}; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -p {base} && mount --bind /tmp/base {base}
"""


def let_everybody_read_the_interpreter(lab: Lab, node: str) -> None:
    base = Path(sys.base_prefix).resolve()
    closed = [str(folder) for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001]
    if closed:
        script = OPEN_INTERPRETER.format(base=base, closed=closed[0])
        lab.run(node, ["sh", "-c", script])


def test_two_jobs_of_two_users_on_one_node_do_not_meet(lab: Lab) -> None:
    """Real Ray for both at once, which by default would share ports and /tmp/ray."""
    let_everybody_read_the_interpreter(lab, "n04")
    theirs = Attempt(lab, "theirs", nodes="n04", user="nobody")
    mine = Attempt(lab, "mine", nodes="n04")
    clusters = {attempt: attempt.wait_until_it_works() for attempt in (mine, theirs)}
    blocks = [range(it.port_base, it.port_base + it.port_count) for it in clusters.values()]
    assert not set(blocks[0]) & set(blocks[1])
    listed = lab.run(
        "n04", ["stat", "-c", "%U %a", f"/tmp/r{mine.job}.0", f"/tmp/r{theirs.job}.0"]
    ).stdout
    assert listed.split() == ["root", "700", "nobody", "700"]

    connect = f"import ray; ray.init(address={clusters[mine].ray_address!r}); print('INSIDE')"
    environ = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(theirs.folder / "secret"),
        "HOME": "/tmp",
    }
    environ["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # once a second; Ray asks 20 times unless told
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    stranger = lab.run(
        "n04", ["timeout", "20", *become, sys.executable, "-c", connect], env=environ, check=False
    )
    assert stranger.returncode != 0 and "INSIDE" not in stranger.stdout
    assert "InvalidAuthToken" in stranger.stdout + stranger.stderr

    (mine.folder / "STOP").write_text('{"reason": "enough"}')
    assert mine.wait()[0] == "requeue"
    (theirs.folder / "STOP").write_text('{"reason": "enough"}')
    assert (
        theirs.wait()[0] == "requeue"
    )  # its driver has worked on the cluster once more, after the other's end
    assert "after STOP n04" in theirs.log("driver.log")
    mine.end()
    theirs.end()

"""A stranger on the network of a running attempt learns nothing and breaks nothing, two users of one
node do not meet, and the secret stays in its file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from common.port_blocks import candidate_blocks, ephemeral_floor
from tests.cluster.attempts import Attempt, on_node
from tests.cluster.lab import REPOSITORY, Lab

SECRET = "5" * 64

# Runs on another node: bytes that are no frame, a frame length beyond the limit, a frame under
# another secret, a valid frame sent twice (a replay; it is made with the real secret here), and
# connections that send nothing.
STRANGER = """
import socket, sys
from common.message_codec import MessageCodec, hello_key
host, port, secret = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
hello = MessageCodec(hello_key(secret), "node").pack({"kind": "hello", "nonce": "recorded"})
forged = MessageCodec(hello_key(b"f" * 64), "node").pack({"kind": "hello", "nonce": "n"})
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

# Prints every command line and environment on the node, and every file of the attempt except
# ``secret``, that contains the secret.
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


def test_connections_without_the_secret_are_rejected_during_the_rendezvous(lab: Lab) -> None:
    """The second node is late, so that only the stranger connects to the head until then."""
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
    output = lab.run("n03", command, env={"PYTHONPATH": str(REPOSITORY)}).stdout
    assert output.split("\n")[:5] == [
        "noise 0",
        "oversize 0",
        "forged 0",
        "replay False",
        "idle 200",
    ]
    gate.touch()
    opened_at = time.monotonic()
    assert [node.host for node in attempt.wait_until_it_works().nodes] == ["n01", "n02"]
    assert time.monotonic() - opened_at < 20
    assert "rejected a connection from 10.77.0.13" in attempt.log("agent-n01.log")
    attempt.stop()
    attempt.wait()
    attempt.end()


# Lets other users run the interpreter where it lies below a folder that is closed to them, such as
# a home: empty file systems, open to all, cover the closed folders, with the interpreter inside.
OPEN_INTERPRETER = """
set -e
mkdir /tmp/base && mount --bind {base} /tmp/base
for folder in {closed}; do mount -t tmpfs -o mode=755 tmpfs $folder; done
mkdir -p {base} && mount --bind /tmp/base {base}
"""


def open_interpreter_to_all_users(lab: Lab, node: str) -> None:
    base = Path(sys.base_prefix).resolve()
    closed = [str(folder) for folder in reversed(base.parents) if not folder.stat().st_mode & 0o001]
    if closed:
        script = OPEN_INTERPRETER.format(base=base, closed=closed[0])
        lab.run(node, ["sh", "-c", script])


def places_of_secret(attempt: Attempt, node: str) -> str:
    """Where the secret shows on the node, beside its file; empty when nowhere."""
    command = [sys.executable, "-c", SEARCH, str(attempt.folder)]
    return attempt.lab.run(node, command).stdout


def test_two_users_of_one_node_do_not_meet_and_the_secret_stays_in_its_file(lab: Lab) -> None:
    """Real Ray for both at once: by default it would share ports and /tmp/ray, and its processes
    receive the secret as their token. The death of one GCS is found in seconds, and the other
    user's Ray works on.
    """
    open_interpreter_to_all_users(lab, "n04")
    theirs = Attempt(lab, "theirs", nodes="n04", user="nobody")
    mine = Attempt(lab, "mine", nodes="n04", options="--loss-grace-s 2")
    clusters = {attempt: attempt.wait_until_it_works() for attempt in (mine, theirs)}
    assert places_of_secret(mine, "n04") == ""
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
    environ["RAY_NUM_REDIS_GET_RETRIES"] = "2"  # one try a second; by default Ray tries 20 times
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"]
    stranger = lab.run(
        "n04", ["timeout", "20", *become, sys.executable, "-c", connect], env=environ, check=False
    )
    assert stranger.returncode != 0 and "INSIDE" not in stranger.stdout
    assert "InvalidAuthToken" in stranger.stdout + stranger.stderr

    mine.kill("n04", f"gcs_server .*/r{mine.job}[.]0/")
    assert mine.seconds_to_verdict() < 15
    word, cause = mine.wait()
    ended = "n04: Ray ended by itself"
    assert word == "failed" and cause.startswith(ended)
    assert mine.excluded == []  # the machine is not at fault
    assert ended in mine.log("STOP")  # the driver was given time to stop
    assert places_of_secret(mine, "n04") == ""
    theirs.stop()
    assert theirs.wait()[0] == "requeue"
    # its driver used the cluster once more, after the other attempt had ended
    assert "after STOP n04" in theirs.log("driver.log")
    mine.end()
    theirs.end()

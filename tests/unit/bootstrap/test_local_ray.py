"""Invariant: Ray is imported before its order arrives, and waiters are notified at once of
registered nodes and of Ray's end. The real process runs the stub of Ray under a real keeper.
"""

import asyncio
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.agent import local_ray, ray_process
from bootstrap.agent.local_ray import LocalRay, RayError
from bootstrap.agent.ray_command import RayNode, ray_temp_dir
from bootstrap.agent.ray_process import parse_registered, registered_line
from bootstrap.links.session_folder import make_session_folder
from common.files import is_private
from common.port_blocks import PortBlock, claim_block, ephemeral_floor

REPOSITORY = Path(__file__).parents[3]
HEAD, OTHER = "127.0.0.1", "127.0.0.3"


@pytest.fixture
def ports() -> Iterator[PortBlock]:
    """A block of ports that is reserved while the test runs."""
    block, claim = claim_block(f"test{os.getpid()}", ephemeral_floor(), HEAD)
    with claim:
        yield block


def head_at(ip: str, ports: PortBlock) -> RayNode:
    return RayNode(ip, ip, ports, "unused", num_cpus=1, num_gpus=2)


def run(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await scene()

    asyncio.run(bounded())


async def prepared(folder: Path) -> LocalRay:
    environ = {
        **os.environ,
        "PYTHONPATH": f"{REPOSITORY}/tests/fakes/ray_stub:{REPOSITORY}",
    }
    session = make_session_folder(str(folder / "session"), {})
    return await LocalRay.prepare(session, environ, folder / "ray.log")


def test_a_line_about_a_node_reads_back_as_it_was_written() -> None:
    assert parse_registered(registered_line("fd00::1", 8).strip("\n")) == ("fd00::1", 8)
    assert parse_registered("Ray runtime started.") is None


@pytest.mark.parametrize(
    ("is_alive", "asked", "limit_s"), [(True, 3, 60.0), (False, 1, 60.0), (True, 1, 0.0)]
)
def test_ray_waits_for_its_raylet_while_it_lives(
    is_alive: bool, asked: int, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself gives up after 30 s, which a busy machine exceeds."""
    answers = iter([RuntimeError("not yet"), RuntimeError("not yet"), "node"])
    calls: list[str] = []

    def get_node(address: str) -> str:
        calls.append(address)
        answer = next(answers)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    services = SimpleNamespace(get_node=get_node)
    monkeypatch.setattr(ray_process, "_has_raylet", lambda: is_alive)
    ray_process.wait_longer_for_raylet(services, limit_s)
    if asked == 3:
        assert services.get_node("gcs") == "node"
    else:
        with pytest.raises(RuntimeError, match="not yet"):
            services.get_node("gcs")
    assert calls == ["gcs"] * asked


@pytest.mark.parametrize(("is_served", "port"), [(False, -1), (True, 8014)])
def test_a_raylet_finds_the_port_of_its_agent_before_it_starts(is_served: bool, port: int) -> None:
    """Otherwise it waits 15 s for the agent to state it, and then ends."""
    done: list[object] = []

    def start_raylet(
        node_id: str, session_dir: str, dashboard_agent_listen_port: int | None = None
    ) -> str:
        done.append("start")
        return "process"

    services = SimpleNamespace(start_raylet=start_raylet)
    ray_process.write_agent_port(services, lambda *said: done.append(said), is_served=is_served)
    assert services.start_raylet("ab", "/s", dashboard_agent_listen_port=8014) == "process"
    assert done == [("/s", "ab", ray_process.AGENT_PORT_NAME, port), "start"]


def test_rays_own_agent_states_its_port_under_that_name() -> None:
    """Read from Ray's sources: the raylet is not given the port, and the agent writes the file."""
    ray = importlib.metadata.distribution("ray")
    agent = Path(str(ray.locate_file("ray/dashboard/agent.py"))).read_text()
    assert re.search(
        r"persist_port\(\s+self.session_dir,\s+self.node_id,\s+DASHBOARD_AGENT_LISTEN", agent
    )
    services = Path(str(ray.locate_file("ray/_private/services.py"))).read_text()
    assert "--listen-port={dashboard_agent_listen_port}" in services, "the agent's own argument"
    parameters = services.partition("def start_raylet(")[2].partition(")")[0]
    assert {"node_id: str", "session_dir: str"} <= {one.strip() for one in parameters.split(",")}
    assert "dashboard_agent_listen_port" in parameters


def test_a_raylet_is_known_by_its_process(tmp_path: Path) -> None:
    assert not ray_process._has_raylet()
    shutil.copy(shutil.which("sleep") or "", tmp_path / "raylet")
    raylet = subprocess.Popen([tmp_path / "raylet", "60"])
    try:
        assert ray_process._has_raylet()
    finally:
        raylet.kill()
        os.waitid(os.P_PID, raylet.pid, os.WEXITED | os.WNOWAIT)
    assert not ray_process._has_raylet(), "it has ended, nobody has waited for it"
    raylet.wait()


def test_rays_own_node_asks_through_the_function_that_waits() -> None:
    """Read from Ray's source, whose import takes seconds."""
    source = Path(str(importlib.metadata.distribution("ray").locate_file("ray/_private/node.py")))
    text = source.read_text()
    assert "node_info = ray._private.services.get_node(" in text
    assert "raylet_start_wait_time_s = 30" in text and "except RuntimeError as e" in text


async def test_the_head_learns_of_every_node_that_is_registered(
    tmp_path: Path, ports: PortBlock
) -> None:
    head = await prepared(tmp_path)
    head.start(head_at(HEAD, ports), {})
    await head.wait_registered({HEAD: 2})
    waiting = asyncio.create_task(head.wait_registered({HEAD: 2, OTHER: 4}))
    await asyncio.sleep(0)
    assert not waiting.done()
    with socket.create_connection((HEAD, ports.gcs)) as other:
        other.sendall(f"{OTHER} 4\n".encode())
    await waiting
    assert head.registered == {HEAD: 2, OTHER: 4}
    await head.end(None)


async def test_a_log_that_cannot_be_written_does_not_hide_the_nodes(
    tmp_path: Path, ports: PortBlock
) -> None:
    """As on a full disk; a pipe without a reader must not block Ray either."""
    (tmp_path / "ray.log").mkdir()
    head = await prepared(tmp_path)
    head.start(head_at(HEAD, ports), {})
    await head.wait_registered({HEAD: 2})
    with socket.create_connection((HEAD, ports.gcs)) as other:
        other.sendall(f"{OTHER} 4\n".encode())
    await asyncio.wait_for(head.wait_registered({OTHER: 4}), 10)
    await head.end(None)


async def test_a_node_with_other_gpus_than_it_should_have_is_an_error(
    tmp_path: Path, ports: PortBlock
) -> None:
    head = await prepared(tmp_path)
    head.start(head_at(HEAD, ports), {})
    with pytest.raises(RayError, match=r"Ray has 2 GPUs on 127\.0\.0\.1; 8 are needed"):
        await head.wait_registered({HEAD: 8})
    await head.end(None)


async def test_what_ray_said_is_in_the_error_when_it_ends_instead(
    tmp_path: Path, ports: PortBlock
) -> None:
    head = await prepared(tmp_path)
    head.start(head_at("192.0.2.1", ports), {})  # an address that this machine does not have
    with pytest.raises(
        RayError,
        match=r"(?s)Ray ended by itself \(exit code 1\).*Cannot assign.*not registered",
    ):
        await head.wait_registered({"192.0.2.1": 2})
    await head.end(None)


async def test_what_ray_said_last_is_waited_for_when_its_end_is_known_before(
    tmp_path: Path, ports: PortBlock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and exit arrive over different channels; here the log's storage is slow."""
    append = local_ray._append

    def slowly(log: Path, data: bytes) -> None:
        time.sleep(0.3)
        append(log, data)

    monkeypatch.setattr(local_ray, "_append", slowly)
    await test_what_ray_said_is_in_the_error_when_it_ends_instead(tmp_path, ports)


async def test_a_taken_port_is_found_before_the_order_is_given(
    tmp_path: Path, ports: PortBlock
) -> None:
    head = await prepared(tmp_path)
    with (
        socket.create_server(("", ports.base + 4)),
        pytest.raises(RayError, match=f"{ports.base + 4}"),
    ):
        head.start(head_at(HEAD, ports), {})
    await head.end(None)


async def test_a_process_that_gets_no_order_leaves_nothing_behind(tmp_path: Path) -> None:
    ray = await prepared(tmp_path)
    session = tmp_path / "session"
    assert session.stat().st_mode & 0o777 == 0o700
    ray.stop_watching()
    assert await ray.kept.exited == 0
    await ray.end(None)
    while session.exists():  # the keeper removes it after it has let go of the agent
        await asyncio.sleep(0.02)


async def test_a_session_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    missing = make_session_folder(str(tmp_path / "missing" / "session"), {})
    with pytest.raises(RayError, match="cannot be made: No such file"):
        await LocalRay.prepare(missing, {}, tmp_path / "ray.log")
    assert missing.environment == {}


def test_temporary_files_of_an_attempt_are_private_wherever_the_user_wants_them(
    tmp_path: Path,
) -> None:
    nominal = tmp_path / "r1.0"
    scratch = Path(tempfile.mkdtemp(dir="/tmp"))  # its path is short, as sockets need it
    long = scratch / ("x" * 80)  # of a site that puts user, job and node into it
    long.mkdir()
    places = ((None, nominal), (scratch, scratch), (tmp_path / "none", nominal), (long, nominal))
    for given, parent in places:
        (nominal / "left by a killed agent").mkdir(parents=True, exist_ok=True)
        environ = {} if given is None else {"TMPDIR": str(given)}
        session = make_session_folder(str(nominal), environ)
        assert session.path == nominal and session.temp is not None
        assert session.temp.parent == parent and is_private(session.temp)
        assert session.environment == {"TMPDIR": str(session.temp)}
        session.remove()
        assert not nominal.exists() and list(scratch.iterdir()) == [long]
    nominal.symlink_to("/tmp")  # as another user can take the name
    session = make_session_folder(str(nominal), {})
    assert session.path != nominal and is_private(session.path) and nominal.is_symlink()
    assert len(ray_temp_dir(f"/tmp/{session.path.name}")) <= 40
    session.remove()
    long.rmdir()
    scratch.rmdir()

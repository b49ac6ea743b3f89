"""The agent of an engine, with a fake server and the files that a driver would write."""

import os
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from common.addresses import ANYWHERE
from common.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED
from common.port_blocks import claim_block, ephemeral_floor
from common.run_folder import RunFolder
from rlpost.config.engine_args import FEATURE_CACHE
from rlpost.config.engine_groups import group_config
from rlpost.config.load import dump, load
from rlpost.config.tree import Config
from rlpost.errors import EngineDied
from rlpost.extensions.fleet import agent as agent_module
from rlpost.extensions.fleet.agent import (
    NOT_ADMITTED,
    Agent,
    EngineJobOptions,
    Ports,
    driver_address,
    server_args,
)
from rlpost.extensions.fleet.agent_rules import AgentRules, Patience
from rlpost.extensions.fleet.fleet_folder import FleetError, FleetFolder, settings_digest
from rlpost.extensions.fleet.records import EngineRecord, EngineState, Lease, LeaseState
from rlpost.types import EngineAddress

PATIENCE = Patience(lease_s=5, driver_s=5, drain_s=2)


class Talker(BaseHTTPRequestHandler):
    """Answers control requests."""

    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.log.append((self.path, self.headers["Authorization"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


class FakeEngine:
    """A fake of ``rlpost.engines.engine.Engine``; ``made`` lists all instances."""

    made: ClassVar[list] = []
    problem = ""

    def __init__(self, **arguments):
        self.arguments, self.url, self.is_alive, self.stopped = arguments, "", False, False
        FakeEngine.made.append(self)

    def start(self, host, port, *, deadline_s):
        if FakeEngine.problem:
            raise EngineDied(FakeEngine.problem)
        self.server = ThreadingHTTPServer((host, port), Talker)
        self.server.log = []
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url, self.is_alive = f"http://{host}:{port}", True
        return EngineAddress(url=self.url, num_gpus=1)

    def alive(self):
        return self.is_alive

    def check_alive(self):
        if not self.is_alive:
            raise EngineDied("exit code 9\n  more of its log")

    def stop(self):
        self.stopped = True
        if self.url:
            self.server.shutdown()
            self.server.server_close()


class Notice:
    reason = ""

    def read(self):
        return self.reason, None


class World:
    """The run folder from the driver's and the user's side, and the agent in a thread."""

    def __init__(self, root):
        (root / "run.json").write_text(dump(Config()))
        self.folder, self.notice, self.lease = FleetFolder(root), Notice(), None
        self.folder.create()
        self.options = EngineJobOptions(root, "7_0", root / "none", 1)
        self.digest = settings_digest(Config().model_dump(mode="json"))
        self.pool = ThreadPoolExecutor(1)

    def renew(self, **changed):
        there = self.lease or Lease("0", 0, settings=self.digest, address="127.0.0.1")
        self.lease = replace(there, beat=there.beat + 1, **changed)
        self.folder.write_lease(self.lease)

    def start(self):
        agent = Agent(
            self.options,
            self.folder,
            self.notice,
            make_engine=FakeEngine,
            patience=PATIENCE,
            poll_s=0.02,
        )
        return self.pool.submit(agent.run)

    def until(self, condition):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            record = self.folder.engine("7_0")
            if record is not None and condition(record):
                return record
            time.sleep(0.01)
        pytest.fail(f"still {record}")


@pytest.fixture
def world(tmp_path):
    FakeEngine.made, FakeEngine.problem = [], ""
    made = World(tmp_path)
    yield made
    made.notice.reason = "the test ends"
    made.pool.shutdown()


def test_it_waits_for_a_lease_then_starts_a_paused_server_with_the_fleets_secret(world):
    running = world.start()
    world.until(lambda one: one.state is EngineState.STARTING)
    assert not FakeEngine.made
    world.renew()
    ready = world.until(lambda one: one.state is EngineState.READY)
    (engine,) = FakeEngine.made
    secret = world.folder.secret()
    assert ready.url == engine.url and ready.settings == world.digest
    assert engine.arguments["api_key"] == secret
    assert engine.server.log == [("/pause_generation", f"Bearer {secret}")]
    world.renew(state=LeaseState.ENDED)
    assert running.result(10) == EXIT_DONE and engine.stopped
    assert world.folder.engine("7_0").state is EngineState.GONE


def test_the_beat_of_its_record_increases_across_restarts_of_the_job(world):
    world.renew()
    running = world.start()
    first = world.until(lambda one: one.state is EngineState.READY)
    world.notice.reason = "TERM"
    assert running.result(10) == EXIT_PREEMPTED
    gone = world.folder.engine("7_0")
    assert (gone.state, gone.reason, gone.incarnation) == (
        EngineState.GONE,
        "TERM",
        first.incarnation,
    )
    world.notice.reason = ""
    world.renew()
    world.start()
    again = world.until(lambda one: one.state is EngineState.READY)
    assert again.beat > gone.beat and again.incarnation != first.incarnation


def test_it_drains_until_the_driver_has_dismissed_it(world):
    world.renew()
    running = world.start()
    ready = world.until(lambda one: one.state is EngineState.READY)
    world.renew(in_use=(ready.incarnation,))
    time.sleep(0.1)
    world.folder.order(drain=["7_0"])
    world.until(lambda one: one.state is EngineState.DRAINING)
    time.sleep(0.1)
    assert not running.done() and not FakeEngine.made[0].stopped
    world.renew(in_use=())
    assert running.result(10) == EXIT_DONE


def test_it_reports_how_its_server_ended(world):
    world.renew()
    running = world.start()
    world.until(lambda one: one.state is EngineState.READY)
    FakeEngine.made[0].is_alive = False
    assert running.result(10) == EXIT_FAILED
    assert world.folder.engine("7_0").reason == "exit code 9"


def test_a_server_that_does_not_start_is_reported(world):
    FakeEngine.problem = "no memory"
    world.renew()
    assert world.start().result(10) == EXIT_FAILED
    assert world.folder.engine("7_0").reason == "no memory"


def test_new_settings_of_the_run_start_another_server(world):
    world.renew()
    world.start()
    first = world.until(lambda one: one.state is EngineState.READY)
    changed = Config.model_validate({"checkpoint": {"hf_checkpoint": "/other"}})
    (world.options.run_folder / "run.json").write_text(dump(changed))
    digest = settings_digest(changed.model_dump(mode="json"))
    world.renew(settings=digest)
    second = world.until(
        lambda one: one.state is EngineState.READY and one.incarnation != first.incarnation
    )
    assert second.settings == digest and FakeEngine.made[0].stopped
    assert FakeEngine.made[1].arguments["model_path"] == "/other"


def test_the_server_inherits_the_variables_that_the_run_decides(world, monkeypatch):
    monkeypatch.setenv(FEATURE_CACHE, "4096")
    images = {"multimodal_keys": {"image": "images"}, "apply_chat_template": True}
    trained = load([], {"rollout": images, "optimizer": {"vision_tower": "merger"}}).config
    (world.options.run_folder / "run.json").write_text(dump(trained))
    world.renew(settings=settings_digest(trained.model_dump(mode="json")))
    world.start()
    world.until(lambda one: one.state is EngineState.READY)
    assert os.environ[FEATURE_CACHE] == "0"


def test_an_engine_of_a_group_has_the_model_of_the_group(tmp_path):
    FakeEngine.made, FakeEngine.problem = [], ""
    config = load(
        [], {"engines": {"judge": {"model": "/judge", "fleet": True, "sglang_tp_size": 2}}}
    )
    (tmp_path / "run.json").write_text(dump(config.config))
    folder = FleetFolder(tmp_path, "judge")
    folder.create()
    own = group_config(config.config, "judge").model_dump(mode="json")
    lease = Lease("0", 1, settings=settings_digest(own), address="127.0.0.1")
    folder.write_lease(lease)
    options = EngineJobOptions(tmp_path, "7_0", tmp_path / "none", 2, "judge")
    notice = Notice()
    agent = Agent(options, folder, notice, make_engine=FakeEngine, patience=PATIENCE, poll_s=0.02)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(agent.run)
        while not (record := folder.engine("7_0")) or record.state is not EngineState.READY:
            time.sleep(0.01)
        folder.write_lease(replace(lease, beat=2, state=LeaseState.ENDED))
        assert running.result(10) == EXIT_DONE
    (engine,) = FakeEngine.made
    assert engine.arguments["model_path"] == "/judge" and record.settings == lease.settings
    assert engine.arguments["server_args"]["tp_size"] == 2


def test_without_a_driver_it_pauses_its_server_and_finally_leaves(world):
    world.pool.shutdown()
    world.pool = ThreadPoolExecutor(1)
    patience = Patience(lease_s=0.3, driver_s=1.0)
    world.renew()
    agent = Agent(
        world.options,
        world.folder,
        world.notice,
        make_engine=FakeEngine,
        patience=patience,
        poll_s=0.02,
    )
    running = world.pool.submit(agent.run)
    world.until(lambda one: one.state is EngineState.READY)
    assert running.result(10) == EXIT_DONE
    assert [path for path, _ in FakeEngine.made[0].server.log] == ["/pause_generation"] * 2


def test_an_answer_of_a_server_that_was_not_admitted_is_an_error():
    assert server_args(Config(), 5)["weight_version"] == NOT_ADMITTED
    fraction = {"sglang": {"sglang_mem_fraction_static": 0.7}}
    beside, alone = (
        server_args(load([], fraction | {"cluster": {"colocate": colocate}}).config, 5)
        for colocate in (True, False)
    )
    assert "mem_fraction_static" not in beside, "that of engines which share GPUs with the trainer"
    assert alone["mem_fraction_static"] == 0.7
    assert not NOT_ADMITTED.isdecimal()  # rollout.answer refuses it


def test_ports_of_two_agents_and_of_a_run_on_one_node_differ():
    """Also if both agents have the engine's name of another array; an agent draws none twice."""
    floor = ephemeral_floor()
    one, other = Ports("7_0"), Ports("7_0")
    run, claim = claim_block(str(zlib.crc32(b"7_0")), floor, "127.0.0.1")
    drawn = [[ports.draw() for _ in range(50)] for ports in (one, other)]
    assert len({*drawn[0], *drawn[1]}) == 100
    assert drawn[0] != sorted(drawn[0])
    assert not {*drawn[0], *drawn[1]} & {*run.job_ports, *run.service_ports}
    assert max(map(max, drawn)) < floor
    claim.close()


def test_a_port_on_which_something_listens_is_not_drawn():
    ports = Ports("7_1")
    taken = ports._ports[-1]
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.draw() != taken


def test_the_time_of_all_incarnations_of_a_job_is_counted(world):
    there = EngineRecord("7_0", "before", EngineState.GONE, 40, alive_s=100.0)
    world.folder.write_engine(there)
    running = world.start()
    record = world.until(lambda one: one.beat > 40)
    assert 100.0 <= record.alive_s < 110.0
    world.notice.reason = "preempted"
    assert running.result(10) == EXIT_PREEMPTED
    assert 100.0 <= world.folder.engine("7_0").alive_s < 120.0


def test_an_engine_is_not_paused_if_a_driver_appears_at_that_moment(world, monkeypatch):
    """The driver may have admitted the engine since the lease was read."""
    running = world.start()
    world.renew()
    world.until(lambda one: one.state is EngineState.READY)
    step, come = AgentRules.step, threading.Event()

    def finds_no_driver(rules, seen, now):
        verdict = step(rules, seen, now)
        if come.is_set():
            return verdict
        come.set()
        world.renew(attempt="1")
        return replace(verdict, pause=True)

    before = list(FakeEngine.made[0].server.log)
    monkeypatch.setattr(AgentRules, "step", finds_no_driver)
    assert come.wait(10)
    world.renew(state=LeaseState.ENDED)
    assert running.result(10) == EXIT_DONE
    assert FakeEngine.made[0].server.log == before


def test_an_engine_leaves_after_a_final_failure_of_the_run(world, monkeypatch):
    monkeypatch.setattr(agent_module, "LEDGER_S", 0.05)
    ledger = RunFolder(world.options.run_folder).ledger
    ledger.append("attempt", attempt=0)
    running = world.start()
    world.until(lambda one: "waits" in one.reason)
    time.sleep(0.2)
    assert not running.done()
    ledger.append("verdict", attempt=0, answer=1, reason="not requeued: 4 failures")
    assert running.result(10) == EXIT_DONE
    assert "4 failures" in world.folder.engine("7_0").reason


def test_the_loopback_address_of_a_single_node_run_means_its_host(monkeypatch):
    """A run on one node has the address 127.0.0.2, which is another host for an engine elsewhere.

    An engine on the same node needs the host's address too: the next driver may run elsewhere.
    """
    monkeypatch.setenv("SLURMD_NODENAME", "n02")
    table = {"n01": "10.77.0.11", "n02": "10.77.0.12", "n03": "127.0.1.1"}

    def getaddrinfo(host, *_args, **_options):
        if host not in table:
            raise OSError("Name or service not known")
        return [(0, 0, 0, "", (table[host], 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    assert driver_address(Lease("0", 1, host="n01", address="127.0.0.2")) == "10.77.0.11"
    assert driver_address(Lease("0", 1, host="n02", address="127.0.0.2")) == "10.77.0.12"
    assert driver_address(Lease("0", 1, host="n03", address="127.0.0.2")) == ANYWHERE
    assert driver_address(Lease("0", 1, host="n01", address="10.0.0.9")) == "10.0.0.9"
    with pytest.raises(FleetError, match=r"host n07 has no address here.*--socket-ifname"):
        driver_address(Lease("0", 1, host="n07", address="127.0.0.2"))
    monkeypatch.delenv("SLURMD_NODENAME")
    assert driver_address(Lease("0", 1, host="", address="127.0.0.1")) == "127.0.0.1"

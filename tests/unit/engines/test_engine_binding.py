"""An engine's server binds itself to the CPUs of its GPUs before SGLang starts, if enabled."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from rlpost.config.load import load
from rlpost.driver.engines.own_engines import OwnEngines
from rlpost.driver.placement import Offer, place, service_ports
from rlpost.engines import engine, server
from rlpost.engines.own_membership import OwnMembership


@pytest.mark.parametrize(("gpus_per_node", "bound"), [(8, 1), (None, 0)])
def test_a_server_binds_itself_first(gpus_per_node, bound, monkeypatch):
    calls = []
    document = {"arguments": {}, "ready_fd": 7, "gpus_per_node": gpus_per_node}
    monkeypatch.setattr(server, "read_line", lambda fd: json.dumps(document))
    for name in ("not_in_children", "end_with_parent", "redact"):
        monkeypatch.setattr(server, name, lambda *given: None)
    monkeypatch.setattr(server, "run_engine", lambda *given: calls.append("run"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    monkeypatch.setattr(
        server, "bind_to_gpus", lambda names, gpus_per_node: calls.append((names, gpus_per_node))
    )
    assert server.main([]) == 0
    assert calls == [("4,5", 8)] * bound + ["run"]


def test_the_server_gets_gpus_per_node_over_its_standard_input(monkeypatch, tmp_path):
    told = {}

    class Server:
        def __init__(self, *given):
            pass

        def spawn(self, arguments, *, gpus_per_node, ignores_term):
            told.update(arguments=arguments, gpus_per_node=gpus_per_node)

    monkeypatch.setattr(engine, "ServerProcess", Server)
    made = engine.Engine(
        model_path="m", api_key="k", server_args={}, log_path=tmp_path / "log", node_rank=1
    )
    made.start("h", 1, deadline_s=1, gpus_per_node=4)
    assert told["gpus_per_node"] == 4 and "gpus_per_node" not in told["arguments"], (
        "no field of SGLang's"
    )


@pytest.mark.parametrize(("binds", "told"), [(True, 4), (False, None)])
def test_the_switch_reaches_the_engine(binds, told, tmp_path):
    config = load(
        [], {"cluster": {"num_gpus_per_node": 4, "actor_num_gpus_per_node": 3, "bind_cpus": binds}}
    ).config
    placement = place([Offer("id", "10.0.0.1", 4)], config)
    ports = service_ports(20000, 100, engines=placement.engines, num_stages=1)
    fleet = OwnEngines(
        config, SimpleNamespace(attempt_dir=str(tmp_path), secret="s"), placement, ports
    )
    seen = []

    class Workers:
        async def start(self, places, *, deadline_s, gpus_per_node):
            seen.append(gpus_per_node)

    fleet._workers, fleet.members = [Workers()], OwnMembership(1)
    asyncio.run(fleet.restart(0))
    assert seen == [told]

"""No two engines of a node, and no service of the run, use the same port.

SGLang's own derivation of ports runs for each engine.
"""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from common.addresses import host_port
from rlpost.driver.placement import Ports, Slot, service_ports
from tests.contract.cuda.library_source import Source

SERVER_ARGS = "sglang/srt/server_args.py"
CONTROLLER = "sglang/srt/managers/data_parallel_controller.py"
HANDSHAKE, ZMQ = "DP_ATTENTION_HANDSHAKE_PORT_DELTA", "ZMQ_TCP_PORT_DELTA"
IP = "10.0.0.1"


class Address(SimpleNamespace):
    """What ``init_new`` uses of SGLang's NetworkAddress."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host=host, port=port)

    @classmethod
    def parse(cls, text: str) -> Address:
        host, _, port = text.rpartition(":")
        return cls(host, int(port))

    def to_tcp(self) -> str:
        return f"tcp://{self.host}:{self.port}"


def ports_of_engine(source: Source, ports: Ports, index: int, *, nnodes: int) -> set[int]:
    """Return all ports that SGLang uses for one engine with data-parallel attention."""
    meeting, used = ports.engine_groups[index], {ports.engines[index]}
    given = SimpleNamespace(
        port=ports.engines[index],
        nccl_port=meeting,
        dist_init_addr=host_port(IP, meeting),
        nnodes=nnodes,
        tokenizer_worker_num=1,
        decoupled_spec_role="null",
        enable_dp_attention=True,
        dp_size=4,
    )
    unset = SimpleNamespace(get=lambda: None)
    init_new = source.run(
        SERVER_ARGS,
        "PortArgs.init_new",
        PortArgs=SimpleNamespace,
        NetworkAddress=Address,
        resolving_view=lambda one: one,
        uuid=SimpleNamespace(uuid4=lambda: SimpleNamespace(hex="0" * 32)),
        envs=SimpleNamespace(
            SGLANG_RUST_SERVER=unset, SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE=unset
        ),
        ep_scale_joiner_of=lambda one: False,
        ep_joiner_of=lambda one: False,
        wait_port_available=lambda port, name: used.add(port),
        **{ZMQ: source.value(SERVER_ARGS, ZMQ)},
    )
    made = vars(init_new(given))
    addresses = [value for value in made.values() if str(value).startswith("tcp://")]
    used |= {Address.parse(address).port for address in addresses}
    return used | {meeting + source.value(SERVER_ARGS, HANDSHAKE)}


@pytest.mark.parametrize(("num_engines", "nnodes"), [(1, 1), (2, 1), (8, 1), (1, 4)])
def test_the_ports_of_all_engines_of_a_node_and_of_the_services_are_disjoint(num_engines, nnodes):
    nodes = [Slot(f"node-{number}", f"10.0.0.{number + 1}", 8) for number in range(nnodes)]
    ports = service_ports(10600, 400, engines=[nodes] * num_engines, num_stages=4, over_tcp=True)
    of_run = [ports.actor_group]
    used: list[int] = [*of_run, *ports.sync_groups]
    for index in range(num_engines):
        used += ports_of_engine(Source(), ports, index, nnodes=nnodes)
    assert len(used) == len(set(used))
    assert min(used) >= 10600 and max(used) < 11000


def test_sglang_derives_ports_by_these_offsets_only():
    """A new ``*_PORT_DELTA`` or another use of one may need more ports of the job's block."""
    source = Source()
    names = {
        node.id
        for node in ast.walk(ast.parse(source.text(SERVER_ARGS)))
        if isinstance(node, ast.Name) and node.id.endswith("_PORT_DELTA")
    }
    assert names == {HANDSHAKE, ZMQ}
    uses: Any = ast.unparse(source.definition(CONTROLLER, "DataParallelController"))
    assert uses.count(HANDSHAKE) == 3 and ZMQ not in uses

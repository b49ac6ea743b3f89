"""The address by which other nodes reach this one."""

from __future__ import annotations

import socket

import pytest

from common import addresses
from common.addresses import ANYWHERE, ANYWHERE_6, local_address, node_address


def test_the_address_on_a_route_is_the_one_that_a_connection_uses():
    with socket.create_server(("127.0.0.1", 0)) as server:
        peer = server.getsockname()
        with socket.create_connection(peer) as connection:
            assert local_address("127.0.0.1") == connection.getsockname()[0]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch):
    """Set the addresses of the node's name, and of the default routes."""

    def set_up(answers: list[str] | None, routes: dict[str, str]) -> None:
        def getaddrinfo(name: str, *_: object, **__: object) -> list[tuple]:
            assert name == "n07"
            if answers is None:
                raise socket.gaierror("Name or service not known")
            return [(0, 0, 0, "", (address, 0)) for address in answers]

        def routed(peer: str) -> str:
            if peer not in routes:
                raise OSError("Network is unreachable")
            return routes[peer]

        monkeypatch.setenv("SLURMD_NODENAME", "n07")
        monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
        monkeypatch.setattr(addresses, "local_address", routed)

    return set_up


ROUTES = {ANYWHERE: "10.9.0.7", ANYWHERE_6: "fd00::7"}


@pytest.mark.parametrize(
    ("answers", "routes", "chosen"),
    [
        (["10.1.0.7"], ROUTES, "10.1.0.7"),
        (["fe80::1%eth0", "fd00:1::7", "10.1.0.7"], {}, "fd00:1::7"),
        (["127.0.1.1"], ROUTES, "10.9.0.7"),  # Debian's /etc/hosts
        (["::1"], {ANYWHERE_6: "fd00::7"}, "fd00::7"),
        (None, ROUTES, "10.9.0.7"),
    ],
)
def test_a_name_with_a_loopback_address_alone_leads_to_the_default_route(
    node, answers, routes, chosen
):
    node(answers, routes)
    assert node_address() == chosen


def test_a_node_without_name_and_route_has_no_address(node):
    node(None, {})
    with pytest.raises(OSError, match="unreachable"):
        node_address()

"""Asks the stub's head which nodes there are, as Ray's client of the GCS does."""

import socket
from types import SimpleNamespace


class GcsClient:
    """Asks for the list of nodes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._stream = socket.create_connection((host.strip("[]"), int(port))).makefile("rw")

    def get_all_node_info(self, timeout: float, state_filter: int) -> dict[str, SimpleNamespace]:
        self._stream.write("\n")
        self._stream.flush()
        found = {}
        while words := self._stream.readline().split():
            found[words[0]] = SimpleNamespace(
                node_manager_address=words[0], resources_total={"GPU": float(words[1])}
            )
        return found

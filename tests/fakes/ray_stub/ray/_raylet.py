"""Query the stub's head for its nodes with the interface of Ray's GCS client."""

import socket
from types import SimpleNamespace


class GcsClient:
    """Connection to the stub's head."""

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

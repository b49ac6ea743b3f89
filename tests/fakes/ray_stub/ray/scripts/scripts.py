"""Stub of ``ray start --block``: the head keeps a list in which the nodes register.

A node registers with the line ``IP GPUS``; an empty line asks for the list, one line per node.
"""

from __future__ import annotations

import argparse
import signal
import socket
import socketserver
import sys
import threading


def main() -> None:
    """Serve the list, or register in it; then wait for a signal."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--head", action="store_true")
    for option in ("--port", "--address", "--node-ip-address", "--num-gpus"):
        parser.add_argument(option)
    options, _ = parser.parse_known_args(sys.argv[2:])
    nodes: list[str] = []
    own = f"{options.node_ip_address} {options.num_gpus}"
    if options.head:

        class Visitor(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                for line in self.rfile:
                    if line.split():
                        nodes.append(line.decode().strip())
                    else:
                        self.wfile.write("\n".join([*nodes, "", ""]).encode())

        socketserver.ThreadingTCPServer.address_family = (
            socket.AF_INET6 if ":" in options.node_ip_address else socket.AF_INET
        )
        socketserver.ThreadingTCPServer.request_queue_size = 2048
        server = socketserver.ThreadingTCPServer(
            (options.node_ip_address, int(options.port)), Visitor
        )
        server.daemon_threads = True
        nodes.append(own)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    else:
        host, _, port = options.address.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port))) as connection:
            connection.sendall(f"{own}\n".encode())
    print("Ray runtime started", flush=True)
    signal.pause()

"""A block of TCP ports reserved for one job on all its nodes.

Input: the job id and the lower bound of the kernel's ephemeral range. Output: ``PortBlock``. Blocks
lie below that bound, because an outgoing connection may take a port above it between the check and
the use.

    base + 0            the agents' rendezvous; bound for the whole job, which reserves the block
                        on the head
    base + 1 ... 15     Ray's own services
    base + 16 ... 599   Ray's workers
    base + 600 ... 999  the job's own services (engines, torch stores)
"""

from __future__ import annotations

import errno
import secrets
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

BLOCK_SIZE = 1000
NUM_SERVICE_PORTS = 16
_FIRST_JOB_PORT = 600
_NUM_RANDOM = 200
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortError(Exception):
    """No block of ports is available."""


@dataclass(frozen=True, slots=True)
class PortBlock:
    """The TCP ports of one job."""

    base: int

    @property
    def rendezvous(self) -> int:
        return self.base

    @property
    def gcs(self) -> int:
        return self.base + 1

    @property
    def service_ports(self) -> range:
        """Ports that must be free before Ray starts."""
        return range(self.base + 1, self.base + NUM_SERVICE_PORTS)

    @property
    def worker_ports(self) -> range:
        return range(self.base + NUM_SERVICE_PORTS, self.base + _FIRST_JOB_PORT)

    @property
    def job_ports(self) -> range:
        return range(self.base + _FIRST_JOB_PORT, self.base + BLOCK_SIZE)


def ephemeral_floor(path: Path = _EPHEMERAL_RANGE) -> int:
    """First port of the kernel's range for outgoing connections; 32768 if it cannot be read."""
    try:
        return int(path.read_text().split()[0])
    except OSError:
        return 32768


def candidate_blocks(job_id: str, floor: int) -> Iterator[PortBlock]:
    """All blocks below ``floor``, starting with the one that the job id selects.

    Consecutive job ids start with different blocks, so that jobs on a shared node rarely collide.

    Raises:
        PortError: no block fits below ``floor``.
    """
    lowest = _lowest_port(floor)
    num_blocks = (floor - lowest) // BLOCK_SIZE
    if num_blocks < 1:
        raise PortError(
            f"ephemeral ports start at {floor}; {BLOCK_SIZE} ports from {lowest} on are needed below that: "
            "raise the first number of net.ipv4.ip_local_port_range (sysctl) on the nodes"
        )
    first = int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())
    for offset in range(num_blocks):
        yield PortBlock(lowest + (first + offset) % num_blocks * BLOCK_SIZE)


def _random_blocks(floor: int) -> Iterator[PortBlock]:
    """Blocks that begin anywhere below ``floor``, so that no user can occupy all with few sockets.

    Other nodes find such a block in the head's file. It may overlap one of another job, which is
    rare, and is detected as ports in use.
    """
    lowest = _lowest_port(floor)
    for _ in range(_NUM_RANDOM):
        yield PortBlock(lowest + secrets.randbelow(floor - BLOCK_SIZE - lowest + 1))


def _lowest_port(floor: int) -> int:
    return 10_000 if floor >= 20_000 else 1_200  # some sites start the ephemeral range at 9000


def busy_ports(ports: range) -> list[int]:
    """The ports on which a process listens."""
    return [port for port in ports if not _is_free(port)]


def claim_block(job_id: str, floor: int, bind_ip: str) -> tuple[PortBlock, socket.socket]:
    """The first free block and its listening rendezvous socket, which reserves it while open.

    If all blocks that follow from job ids are in use, a block with a random start.

    Connections of an earlier attempt in TIME_WAIT do not count as busy: the kernel keeps them for a
    minute, and a requeued job must get the same block, which the nodes try first.

    Raises:
        PortError: every block is in use, or ``bind_ip`` is not an address of this host.
    """
    for block in chain(candidate_blocks(job_id, floor), _random_blocks(floor)):
        claim = _socket_for(bind_ip)
        claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            claim.bind((bind_ip, block.rendezvous))
            claim.listen()  # SO_REUSEADDR lets several sockets bind, but only one can listen
        except OSError as error:
            claim.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise PortError(
                    f"{bind_ip} is no address of this host to listen at: {error.strerror}"
                ) from error
            continue
        if not busy_ports(block.service_ports):
            return block, claim
        claim.close()
    raise PortError(
        f"every block of {BLOCK_SIZE} ports below {floor} is in use; another node or fewer jobs are needed"
    )


def _socket_for(bind_ip: str) -> socket.socket:
    """A socket of the address's family; for all addresses, one that accepts IPv4 and IPv6."""
    if ":" not in bind_ip and (bind_ip or not socket.has_dualstack_ipv6()):
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    both = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
    both.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(bool(bind_ip)))
    return both


def _is_free(port: int) -> bool:
    with _socket_for("") as probe:
        # ignore connections in TIME_WAIT
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True

"""Find the interface to the other nodes from the rendezvous connection, not by name.

Input: the local address of an accepted connection. Output: the interface that owns it, and the
environment that makes Gloo, NCCL, TensorPipe and NVSHMEM use that interface. Names may differ
between nodes.

``python -m bootstrap.network`` prints the settings for this host, or for the host described by a
file of facts.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import netifaces
import psutil

from bootstrap.links.link import plain_ip
from bootstrap.network.detect import Detection, detect, socket_settings
from bootstrap.network.host import addresses_of, read_document, read_host
from bootstrap.network.network_facts import FactsFileError, NetworkFacts, load_facts, parse_facts
from bootstrap.network.sockets import Address
from common.files import write_atomic

logger = logging.getLogger(__name__)

# Ray replaces 127.0.0.1 and localhost with the address of an interface
# (ray.util.get_node_ip_address), but no other address of 127/8. With 127.0.0.2 a one-node cluster
# stays off the network.
LOOPBACK_IP = "127.0.0.2"
LOOPBACK_IFNAME = "lo"


class NetworkError(Exception):
    """An address or an interface is missing or unusable."""


def local_addresses() -> tuple[Address, ...]:
    """Addresses of all interfaces that are up, IPv4 first because it is preferred.

    An address with a label (``eth0:1``) is listed under the label, as in Gloo and NCCL.
    """
    up = {ifname for ifname, stats in psutil.net_if_stats().items() if stats.isup}
    labels = [label for label in netifaces.interfaces() if label.partition(":")[0] in up]
    found: list[Address] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for label in labels:
            texts = addresses_of(label, family)
            found += [Address(label, plain_ip(text.partition("/")[0])) for text in texts]
    return tuple(found)


def ifname_of(ip: str, addresses: Sequence[Address]) -> str:
    """The interface that owns ``ip``.

    Raises:
        NetworkError: no interface does, e.g. behind address translation; lists the known addresses.
    """
    if ipaddress.ip_address(ip).is_loopback:
        return LOOPBACK_IFNAME
    for address in addresses:
        if address.ip == ip:
            return address.ifname
    listed = ", ".join(f"{address.ifname}={address.ip}" for address in addresses)
    raise NetworkError(
        f"no interface owns {ip} (there are: {listed}); name the right one with --socket-ifname"
    )


def ip_of(ifname: str, addresses: Sequence[Address]) -> str:
    """The first address of the interface in --socket-ifname.

    Raises:
        NetworkError: no such interface has an address; lists the interfaces that have one.
    """
    for address in addresses:
        # An IPv6 link-local address is meaningless to other hosts.
        zoned = ":" in address.ip and ipaddress.ip_address(address.ip).is_link_local
        if address.ifname == ifname and not zoned:
            return address.ip
    listed = ", ".join(sorted({address.ifname for address in addresses}))
    raise NetworkError(
        f"--socket-ifname {ifname}: this host has no such interface with an address ({listed})"
    )


def socket_environment(ifname: str, environ: Mapping[str, str], ip: str) -> dict[str, str]:
    """Variables that make collectives use ``ip``, except those in ``environ``."""
    wanted = socket_settings(ifname, ip)
    return {key: setting.value for key, setting in wanted.items() if not environ.get(key)}


def network_here(ifname: str, ip: str) -> tuple[NetworkFacts, Detection]:
    """This host's network facts and settings, once nodes connected through ``ip``."""
    facts = read_host()
    # The interface list has no owner for most of 127/8, or if an address is not known.
    evidence = {"connection_ip": ip} if facts.owner(ip) else {"override": ifname}
    return facts, detect(facts, **evidence, environ=os.environ)


def log_network_here(ifname: str, ip: str) -> tuple[NetworkFacts, Detection]:
    """``network_here``, which also logs the settings and a warning for each conflict."""
    facts, found = network_here(ifname, ip)
    logger.info("network of this node\n%s", found.describe())
    for conflict in found.conflicts:
        logger.warning("network of this node: %s", conflict)
    return facts, found


def main(argv: list[str] | None = None) -> int:
    """Print the settings; exit with 2 if the facts cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m bootstrap.network", description="Network settings of one host."
    )
    parser.add_argument(
        "--facts", type=Path, help="facts of another host (YAML or JSON); default: this host"
    )
    parser.add_argument(
        "--save", type=Path, help="write this host's facts to a file, for a bug report"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--socket-ifname", help="interface for sockets; overrides detection")
    parser.add_argument(
        "--connection-ip",
        type=ipaddress.ip_address,
        metavar="IP",
        help="local address of a connection to the head",
    )
    options = parser.parse_args(argv)
    if options.facts and options.save:
        parser.error("--save writes the facts of this host; omit --facts")
    try:
        document = None if options.facts else read_document()
        facts = parse_facts(document) if document is not None else load_facts(options.facts)
    except FactsFileError as error:
        parser.error(str(error))
    if options.save:
        write_atomic(options.save, json.dumps(document, indent=2) + "\n")
    # this shell's variables do not apply to another host
    environ = {} if options.facts else os.environ
    ip = None if options.connection_ip is None else str(options.connection_ip)
    detection = detect(facts, override=options.socket_ifname, connection_ip=ip, environ=environ)
    if options.json:
        print(json.dumps(detection.to_document()))
    else:
        print(
            "\n".join(
                [detection.describe(), *(f"{'conflict':<16}{one}" for one in detection.conflicts)]
            )
        )
    return 0

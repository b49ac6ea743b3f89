"""Accuracy of network detection on a folder of layouts, compared with simple methods: netlayouts.py
DIR [-v]

Scored: socket interface, kind of RDMA, set of HCAs, GID index; layouts without the expected value
are not counted. If a layout lacks a fact that a simple method needs, the method counts as
undecided, not as wrong. The exit code is 1 if detection is wrong for any layout.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bootstrap.network.detect import detect
from bootstrap.network.network_facts import (
    Interface,
    NetworkFacts,
    address_of,
    load_document,
    network_of,
    parse_facts,
)

RIGHT, WRONG, UNDECIDABLE = "right", "wrong", "n/a"
SCORED = ("socket_ifname", "rdma", "ib_hca", "gid_index")


class MissingFact(Exception):
    """The layout lacks a fact that a method needs."""


T = TypeVar("T")


def main() -> int:
    """Print the tables; 1 when detection was wrong anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "-v", action="store_true", dest="verbose", help="also say why, for each layout"
    )
    options = parser.parse_args()
    paths = sorted(options.folder.glob("*.yaml"))
    if not paths:
        parser.error(f"{options.folder} holds no *.yaml")
    documents = {path.stem: load_document(path) for path in paths}
    wrong = print_detection(documents, verbose=options.verbose)
    print_simple_methods(documents)
    return 1 if wrong else 0


def score(document: Mapping[str, Any]) -> dict[str, tuple[str, object, object]]:
    """Of each scored key that the layout speaks of: verdict, what was found, what is right."""
    found, right = detect(parse_facts(document)).to_document(), document.get("expected") or {}
    scores: dict[str, tuple[str, object, object]] = {}
    for key in SCORED:
        got, wanted = found[key], right.get(key)
        if key == "ib_hca":
            got, wanted = (
                set(got),
                set(wanted) if wanted is not None and right.get("rdma") in ("ib", "roce") else None,
            )
        per_hca = right.get("gid_index_per_hca") if key == "gid_index" else None
        if per_hca:
            got, wanted = found["gid_index_per_hca"], per_hca
        if wanted is None:
            continue
        accepted = [wanted, *(right.get(f"{key}_ok") or ())]
        scores[key] = (RIGHT if got in accepted else WRONG, got, wanted)
    return scores


def print_detection(documents: Mapping[str, Mapping[str, Any]], *, verbose: bool) -> int:
    """Right of scored for each key; returns how many were wrong."""
    totals = {key: [0, 0] for key in SCORED}
    for name, document in documents.items():
        for key, (verdict, got, wanted) in score(document).items():
            totals[key][0] += verdict == RIGHT
            totals[key][1] += 1
            if verdict == WRONG:
                print(f"WRONG {name}: {key} is {got}, right is {wanted}")
        if verbose:
            answer = detect(parse_facts(document)).to_document()
            print(
                f"{name}\n    why: {answer['why']}\n    warnings: {answer['warnings']}\n    env: {answer['env']}"
            )
    print(f"\n{len(documents)} layouts\n{'detection':<24}{'right':>6}{'of':>6}")
    for key, (right, scored) in totals.items():
        print(f"{key:<24}{right:>6}{scored:>6}")
    return sum(scored - right for right, scored in totals.values())


def print_simple_methods(documents: Mapping[str, Mapping[str, Any]]) -> None:
    """The same keys, as simple rules answer them."""
    methods: list[tuple[str, str, Callable[[NetworkFacts, bool], object]]] = [
        ("first listed", "socket_ifname", first_listed),
        ("first up, no docker", "socket_ifname", first_up),
        ("hostname -I", "socket_ifname", first_address),
        ("default route", "socket_ifname", lambda facts, ordered: needed(facts.default_route)),
        ("first address in 10/8", "socket_ifname", first_in_ten),
        ("NCCL's default", "socket_ifname", nccl_default),
        ("every device", "ib_hca", lambda facts, ordered: {port.name for port in facts.rdma_ports}),
        (
            "mlx5_0 to mlx5_7",
            "ib_hca",
            lambda facts, ordered: {f"mlx5_{index}" for index in range(8)},
        ),
        ("every active port", "ib_hca", lambda facts, ordered: active(facts)),
        (
            "active, InfiniBand if any",
            "ib_hca",
            lambda facts, ordered: active(facts, "InfiniBand") or active(facts),
        ),
        ("3", "gid_index", lambda facts, ordered: 3),
    ]
    print(f"\n{'simple method':<28}{'key':<16}{'right':>6}{'wrong':>6}{'n/a':>6}")
    for title, key, method in methods:
        counts = {RIGHT: 0, WRONG: 0, UNDECIDABLE: 0}
        for document in documents.values():
            wanted = score(document).get(key)
            if wanted is None:
                continue
            ordered = document.get("listing_order") in ("ifindex", "sorted")
            try:
                got = method(parse_facts(document), ordered)
            except MissingFact:
                counts[UNDECIDABLE] += 1
                continue
            accepted = [wanted[2], *(document["expected"].get(f"{key}_ok") or ())]
            counts[RIGHT if got in accepted else WRONG] += 1
        print(f"{title:<28}{key:<16}{counts[RIGHT]:>6}{counts[WRONG]:>6}{counts[UNDECIDABLE]:>6}")


def needed(value: T | None) -> T:
    """The value, when it is known."""
    if value is None:
        raise MissingFact
    return value


def listed(facts: NetworkFacts, ordered: bool) -> list[Interface]:
    """Interfaces but loopback, where their order means something."""
    if not ordered:
        raise MissingFact
    return [one for one in facts.interfaces if one.type != "loopback"]


def first_listed(facts: NetworkFacts, ordered: bool) -> str | None:
    """The first interface that is not loopback."""
    return next((one.name for one in listed(facts, ordered)), None)


def first_up(facts: NetworkFacts, ordered: bool) -> str | None:
    """The first that is up and not called like a container's bridge."""
    for one in listed(facts, ordered):
        if not one.name.startswith(("docker", "veth", "br-", "virbr", "cni", "flannel")):
            if one.state == "unknown":
                raise MissingFact
            if one.state == "up":
                return one.name
    return None


def first_address(facts: NetworkFacts, ordered: bool) -> str | None:
    """The interface of the first IPv4 address."""
    for one in listed(facts, ordered):
        if one.ipv4 or (one.ipv4 is None and one.master is None and needed(one.ipv4)):
            return one.name
    return None


def first_in_ten(facts: NetworkFacts, ordered: bool) -> str | None:
    """The interface of the first address in 10.0.0.0/8."""
    ten = network_of("10.0.0.0/8")
    for one in facts.interfaces:
        if one.type != "loopback" and any(address_of(text) in ten for text in one.ipv4 or ()):
            return one.name
    if any(one.ipv4 is None for one in facts.interfaces):
        raise MissingFact
    return None


def nccl_default(facts: NetworkFacts, ordered: bool) -> str | None:
    """ib*, then all but docker*, virbr* and lo: the first with an address (NCCL,
    src/misc/socket.cc).
    """
    names = listed(facts, ordered)
    for group in (
        [one for one in names if one.name.startswith("ib")],
        [one for one in names if not one.name.startswith(("docker", "virbr"))],
    ):
        for one in group:
            if one.addresses or (
                one.is_unlisted and one.master is None and one.state != "down" and needed(None)
            ):
                return one.name
    return None


def active(facts: NetworkFacts, link_layer: str | None = None) -> set[str]:
    """Active ports, perhaps of one link layer only."""
    return {
        port.name
        for port in facts.rdma_ports
        if port.state == "ACTIVE" and (link_layer is None or port.link_layer == link_layer)
    }


if __name__ == "__main__":
    sys.exit(main())

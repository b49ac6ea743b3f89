"""Invariant: detection is right on the layouts of tests/data/netlayouts, whatever the names and the
order.
"""

from __future__ import annotations

import copy
import json
import random
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bootstrap.network.detect import detect
from bootstrap.network.network_facts import load_document, parse_facts

ROOT = Path(__file__).parents[3]
LAYOUTS = sorted((ROOT / "tests/data/netlayouts").glob("*.yaml"))

each_layout = pytest.mark.parametrize("name", [path.stem for path in LAYOUTS])


@cache
def layout(name: str) -> Mapping[str, Any]:
    return load_document(LAYOUTS[0].with_stem(name))


def answer(document: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the answer in a job, where the connection of the nodes is over the right interface.

    ``names``: the new names of interfaces.
    """
    expected, facts = document["expected"], parse_facts(document)
    ifname = expected["socket_ifname"]
    ifname = ifname if names is None or ifname is None else names[ifname]
    one = facts.interface(ifname)
    known = [text.partition("/")[0] for text in (one.routable if one else ())]
    ip = expected.get("node_ip") or next(iter(known), None)
    evidence = {"connection_ip": ip} if ip and facts.owner(ip) else {"override": ifname}
    return detect(facts, **evidence).to_document()


def essence(found: Mapping[str, Any]) -> tuple[object, ...]:
    """The part of a result that does not depend on the order of a listing."""
    return (
        found["socket_ifname"],
        found["node_ip"],
        found["rdma"],
        frozenset(found["ib_hca"]),
        frozenset(found["ib_hca_exclude"]),
        found["gid_index"],
        frozenset(found["data_ifaces"]),
    )


SCORED = ("rdma", "ib_hca", "gid_index")


def score(document: Mapping[str, Any]) -> dict[str, bool]:
    """Return, for each scored key whose value the layout knows, whether detection finds it."""
    found, expected = answer(document), document["expected"]
    scores: dict[str, bool] = {}
    for key in SCORED:
        got, right = found[key], expected.get(key)
        if key == "ib_hca" and right is not None:
            got, right = set(got), set(right) if expected["rdma"] in ("ib", "roce") else None
        per_hca = expected.get("gid_index_per_hca") if key == "gid_index" else None
        if per_hca:
            got, right = found["gid_index_per_hca"], per_hca
        if right is not None:
            scores[key] = got in [right, *(expected.get(f"{key}_ok") or ())]
    return scores


# Reports that list no RDMA device although their hosts have some: the kernel would list them.
NOT_REPORTED = {"aws-eks-p6-b200-hostnet": {"rdma"}, "gke-a4-pod-dranet": {"rdma", "gid_index"}}


@each_layout
def test_every_layout_is_read_right(name: str) -> None:
    wrong = {key for key, is_right in score(layout(name)).items() if not is_right}
    assert wrong == NOT_REPORTED.get(name, set())


@each_layout
def test_the_right_address_is_among_those_to_which_nodes_try_to_connect(name: str) -> None:
    facts, ip = parse_facts(layout(name)), layout(name)["expected"].get("node_ip")
    if ip and facts.owner(ip):
        assert f"={ip}" in detect(facts).to_document()["why"]


@each_layout
def test_the_environment_is_exact_and_of_one_link_layer(name: str) -> None:
    document = layout(name)
    found = answer(document)
    env, layers = (
        found["env"],
        {row["name"]: row.get("link_layer") for row in document.get("rdma_devices") or ()},
    )
    active = {
        row["name"] for row in document.get("rdma_devices") or () if row.get("state") == "ACTIVE"
    }
    assert set(found["env_why"]) == set(env)
    if found["socket_ifname"]:
        assert env["GLOO_SOCKET_IFNAME"] == found["socket_ifname"]
        assert env["NCCL_SOCKET_IFNAME"] == "=" + found["socket_ifname"]
    if "NCCL_IB_HCA" in env:
        assert env["NCCL_IB_HCA"].startswith("=")
        named = [entry.split(":")[0] for entry in env["NCCL_IB_HCA"][1:].split(",")]
        assert named == found["ib_hca"]
        assert len({layers[hca] for hca in named}) == 1
    else:
        assert found["rdma"] not in ("ib", "roce") or set(found["ib_hca"]) in (active, set())
    assert not set(found["ib_hca"]) & set(found["ib_hca_exclude"])


@each_layout
def test_the_order_of_the_listing_means_nothing(name: str) -> None:
    dice = random.Random(name)
    for _ in range(3):
        document = copy.deepcopy(dict(layout(name)))
        dice.shuffle(document["interfaces"])
        dice.shuffle(document["rdma_devices"] or [])
        assert essence(answer(document)) == essence(answer(layout(name)))


def renamed(
    document: Mapping[str, Any], interfaces: Mapping[str, str], hcas: Mapping[str, str]
) -> dict[str, Any]:
    """The same host with other names of its devices."""
    made = copy.deepcopy(dict(document))
    for row in made["interfaces"]:
        row["name"], row["master"] = interfaces[row["name"]], interfaces.get(row.get("master"))
    for row in made["rdma_devices"] or ():
        row["name"], row["netdev"] = hcas[row["name"]], interfaces.get(row.get("netdev"))
    made["default_route"]["iface"] = interfaces.get(made["default_route"]["iface"])
    return made


@each_layout
@pytest.mark.parametrize("how", ["anonymous", "swapped"])
def test_names_mean_nothing(name: str, how: str) -> None:
    """Every device gets an arbitrary name, or devices exchange their names."""
    document, dice = layout(name), random.Random(name)
    names = []
    for rows in (document["interfaces"], document["rdma_devices"] or ()):
        old = [row["name"] for row in rows]
        new = (
            dice.sample(old, len(old))
            if how == "swapped"
            else dice.sample([f"q{i}" for i in range(99)], len(old))
        )
        names.append(dict(zip(old, new, strict=True)))
    before, after = answer(document), answer(renamed(document, *names), names[0])
    if document["expected"]["socket_ifname"]:
        assert after["socket_ifname"] == names[0][before["socket_ifname"]]
        assert after["node_ip"] == before["node_ip"]
    assert set(after["ib_hca"]) == {names[1][hca] for hca in before["ib_hca"]}
    assert (after["rdma"], after["gid_index"]) == (before["rdma"], before["gid_index"])


@each_layout
def test_what_a_layout_says_of_itself_is_not_read(name: str) -> None:
    document = {
        key: layout(name).get(key)
        for key in ("interfaces", "rdma_devices", "default_route", "gpus")
    }
    document["provider_hints"] = layout(name)["provider_hints"]
    expected = layout(name)["expected"]
    document["expected"] = {key: expected.get(key) for key in ("socket_ifname", "node_ip")}
    assert answer(document) == answer(layout(name))


def test_the_command_line_prints_one_object_for_a_file() -> None:
    layout = ROOT / "tests/data/netlayouts/oci-bm-gpu-h200-8.yaml"
    command = [sys.executable, "-m", "bootstrap.network", "--facts", str(layout), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found == detect(parse_facts(load_document(layout))).to_document()
    public = "socket_ifname node_ip rdma ib_hca ib_hca_exclude gid_index env warnings why"
    assert set(public.split()) <= set(found)


def test_the_page_shows_how_often_each_key_is_right() -> None:
    scores = [score(layout(path.stem)) for path in LAYOUTS]
    page = (ROOT / "docs/bringup.md").read_text()
    assert f"    {len(LAYOUTS)} layouts\n" in page
    for key in SCORED:
        known = [found[key] for found in scores if key in found]
        assert f"    {key:<24}{sum(known):>6}{len(known):>6}\n" in page


def test_the_index_of_published_recipes_is_named_where_it_is_wrong():
    """GID index 3 is right on most RoCE hosts, and on this one it is not."""
    facts = parse_facts(layout("am4-h100-roce-ipv6-linklocal"))
    found = detect(facts, environ={"NCCL_IB_GID_INDEX": "3", "NCCL_IB_TC": "160"})
    (line,) = found.conflict_lines
    assert (
        "NCCL_IB_GID_INDEX=3 is set" in line and "this host shows 1 " in line and "Unset it" in line
    )


def test_no_recipe_and_no_example_pins_what_a_node_shows_by_itself():
    """Traffic classes cannot be detected; the GID index can, also by NCCL 2.21."""
    pinned = [
        (path.name, name)
        for path in (ROOT / "jobs").glob("*/*.toml")
        for name in tomllib.loads(path.read_text()).get("cluster", {}).get("environment", {})
        if name.endswith("_GID_INDEX")
    ]
    assert pinned == []

"""Invariant: every node is measured with each of its neighbours in as few rounds as possible, and
all answers arrive.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bootstrap.preflight import bandwidth
from bootstrap.preflight.bandwidth import Survey, measure_here, rounds_of


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5, 8, 33])
def test_every_node_meets_both_neighbours_and_nobody_twice_in_a_round(num_nodes: int) -> None:
    rounds = rounds_of(num_nodes)
    assert len(rounds) == {1: 0, 2: 1}.get(num_nodes, 3 if num_nodes % 2 else 2)
    pairs = {frozenset(pair) for pairs in rounds for pair in pairs}
    assert pairs == {frozenset({node, (node + 1) % num_nodes}) for node in range(num_nodes)} - {
        frozenset({0})
    }
    for pairs_of_round in rounds:
        nodes = [node for pair in pairs_of_round for node in pair]
        assert len(nodes) == len(set(nodes))


class FakeLink:
    """The head's end of a connection to a node that answers at once or never."""

    local_ip, local_port = "127.0.0.1", 20_000

    def __init__(self, survey: Survey, host: str, answer: dict[str, object] | None) -> None:
        self.survey, self.host, self.answer = survey, host, answer
        self.orders: list[dict[str, object]] = []

    async def send(self, order: dict[str, object]) -> None:
        self.orders.append(order)
        if self.answer is not None:
            self.survey.record_answer(self.host, self.answer)


async def test_figures_and_errors_are_collected_and_who_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def here(order: dict[str, object], *_: object) -> dict[str, object]:
        assert order["rank"] == 0 and order["num_nodes"] == 4
        return {"gbps": 7.0}

    monkeypatch.setattr(bandwidth, "measure_here", here)
    monkeypatch.setattr(bandwidth, "_ANSWER_S", 0.05)
    survey = Survey()
    links = {
        "n2": FakeLink(survey, "n2", {"gbps": 3.0}),
        "n3": FakeLink(survey, "n3", {"error": "no route to host"}),
        "n4": FakeLink(survey, "n4", None),
    }
    found = await survey.run(["n1", "n2", "n3", "n4"], links, 0, tmp_path / "log")
    assert [links[host].orders[0]["rank"] for host in ("n2", "n3", "n4")] == [1, 2, 3]
    assert found == {"n1": 7.0, "n2": 3.0, "n3": "no route to host", "n4": "no answer in time"}


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ('print("noise"); print(\'{"gbps": 1.5}\')', {"gbps": 1.5}),
        ('raise SystemExit("no torch here")', {"error": "no torch here"}),
        ("import time; time.sleep(60)", {"error": "the probe did not end within 0.1 s; see log"}),
    ],
)
def test_what_the_probe_says_last_is_the_answer_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, answer: dict[str, object]
) -> None:
    stand_in = tmp_path / "bootstrap_probe.py"
    stand_in.write_text(body)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(bandwidth.__file__).parents[1]}")
    monkeypatch.setattr(bandwidth, "_PROBE", "bootstrap_probe")
    monkeypatch.setattr(bandwidth, "DEADLINE_S", 5.0 if "sleep" not in body else 0.1)
    order = {"rank": 0, "num_nodes": 2, "head_ip": "127.0.0.1", "port_base": 20_000}
    said = asyncio.run(measure_here(order, "127.0.0.1", 0, tmp_path / "log"))
    assert said == {"kind": "measured", **answer}

"""Engines that follow a trace of spot instances, with the real membership and placement code."""

import pytest

from tests.unit.fleet.spot_trace import Server, Simulation, run_virtually, simulate, trace


def test_each_prompt_is_answered_once_while_the_fleet_follows_the_trace():
    one = simulate(1, 120, trace())
    totals = one.totals
    assert totals.started >= 120 and min(totals.with_notice, totals.killed) > 30
    assert len(one.answered) > 5000 and set(one.answered.values()) == {1}
    assert totals.resumed_after_leaving > 50 and totals.sent_again > 50
    assert totals.lost_tokens < 0.02 * totals.written_tokens
    # A dead engine does not attract the requests of all others.
    assert totals.sent_again < 5 * totals.killed
    assert totals.longest_hold_s < 12  # an engine that died delays an update by one deadline


def test_the_trace_is_that_of_two_zones_of_sixteen_instances():
    zones = trace()
    assert {zone: (len(steps), max(steps)) for zone, steps in zones.items()} == {
        "us-east-2b": (3247, 16),
        "us-west-2a": (3247, 16),
    }
    gained = {
        zone: sum(max(0, new - old) for old, new in zip([0, *steps], steps, strict=False))
        for zone, steps in zones.items()
    }
    assert gained == {"us-east-2b": 910, "us-west-2a": 868}


def test_the_simulation_detects_an_engine_that_serves_with_other_weights(monkeypatch):
    """The simulation fails when weights change during a request."""
    generate = Server.generate

    async def with_other_weights(server, prompt, now):
        if prompt.number == 50:
            server.version += 1
        await generate(server, prompt, now)

    monkeypatch.setattr(Server, "generate", with_other_weights)
    one = Simulation(1, 5, {"zone": [2] * 40})
    with pytest.raises(AssertionError):
        run_virtually(one.run())

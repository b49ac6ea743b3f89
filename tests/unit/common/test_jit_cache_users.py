"""What the agents start has the caches of compiled kernels that the node needs."""

from __future__ import annotations

import os
import sys

from bootstrap.agent import __main__ as agent
from rlpost.extensions.fleet import agent as engine_agent

DISK = "/disk/triton"


def node_with_remote_home(monkeypatch, module) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "restored after the test")
    monkeypatch.setattr(module, "jit_cache_environment", lambda _: {"TRITON_CACHE_DIR": DISK})
    monkeypatch.setattr(module, "configure_logging", lambda *_, **__: None)


def test_ray_and_the_driver_have_them(monkeypatch, tmp_path):
    seen: list[str] = []

    async def run(facts, options, secret):
        seen.append(os.environ["TRITON_CACHE_DIR"])

    node_with_remote_home(monkeypatch, agent)
    monkeypatch.setattr(agent, "_run", run)
    monkeypatch.setattr(agent, "raise_limits", lambda: None)
    monkeypatch.setattr(os, "umask", lambda mask: 0)
    for name in ("SLURM_JOB_ID", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    words = ["--attempt-dir", str(tmp_path / "0"), "--num-gpus", "1", "--", "true"]
    monkeypatch.setattr(sys, "argv", ["agent", *words])
    assert agent.main() == 0 and seen == [DISK]


def test_an_engine_of_a_fleet_has_them(monkeypatch, tmp_path):
    class Agent:
        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> int:
            return 0 if os.environ["TRITON_CACHE_DIR"] == DISK else 1

    node_with_remote_home(monkeypatch, engine_agent)
    monkeypatch.setattr(engine_agent, "StopNotice", lambda _: None)
    monkeypatch.setattr(engine_agent, "Agent", Agent)
    monkeypatch.setattr(engine_agent, "preflight", lambda _: None)
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet/secret").write_text("5" * 64)
    (tmp_path / "fleet/secret").chmod(0o600)
    words = ["--run-folder", str(tmp_path), "--engine", "1", "--stop-file", str(tmp_path / "STOP")]
    assert engine_agent.main(words) == 0

"""An environment with ``uses_engines`` finds the clients of the run's groups by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlpost.config.load import load
from rlpost.engines.group_client import EngineClients
from rlpost.extensions.agents.environments import make
from rlpost.extensions.agents.environments.make import make_environments

GAME = """
class Game:
    uses_engines = {uses}

    def reset(self, prompt):
        pass

    def step(self, turn):
        pass
"""


def made(folder: Path, *, uses: bool, monkeypatch: Any) -> tuple[Any, EngineClients]:
    """Return an environment of a run with a judge, and the run's clients."""
    (folder / "game.py").write_text(GAME.format(uses=uses))
    env = {"env": [f"{folder}/game.py:Game"]}
    config = load([], {"env": env, "engines": {"judge": {"model": "/m"}}}).config
    clients, created = EngineClients.of(config), []

    class Runner:
        def __init__(self, word: str, create: Any, *_: Any) -> None:
            created.append(create())

    monkeypatch.setattr(make, "PlainRunner", Runner)
    make_environments(config, folder, clients)
    return created[0], clients


def test_an_environment_that_uses_engines_gets_the_clients_of_the_run(
    tmp_path: Path, monkeypatch: Any
) -> None:
    environment, clients = made(tmp_path, uses=True, monkeypatch=monkeypatch)
    assert environment.engines is clients
    assert environment.engines["judge"].name == "judge"


def test_another_one_gets_none(tmp_path: Path, monkeypatch: Any) -> None:
    environment, _ = made(tmp_path, uses=False, monkeypatch=monkeypatch)
    assert not hasattr(environment, "engines")

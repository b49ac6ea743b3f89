"""Mirrors of metrics from extensions: who gets a line, and settings that no extension answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.cluster import Cluster
from rlpost.config import extensions
from rlpost.config.checks.observe import observe_problems
from rlpost.config.extensions import Extension, Mirror
from rlpost.config.tree import Config
from rlpost.observe.mirrors import Write, mirrors

EVENTS: list[object] = []


@contextmanager
def open_first(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """A mirror that is on."""
    try:
        yield lambda step, metrics: EVENTS.append((step, dict(metrics)))
    finally:
        EVENTS.append("closed")


@contextmanager
def open_second(config: Config, run_folder: Path, cluster: Cluster) -> Iterator[Write | None]:
    """A mirror that the settings switch off."""
    yield None


def cluster(folder: Path) -> Cluster:
    return Cluster("127.0.0.1:1", str(folder), (), port_base=1, port_count=1)


def rows(*names: str) -> tuple[Extension, ...]:
    opened = {name: Mirror(f"{__name__}:open_{name}") for name in names}
    return (Extension(name="theirs", mirrors=opened),)


def test_a_mirror_gets_the_numbers_of_each_line_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EVENTS.clear()
    monkeypatch.setattr(extensions, "extensions", lambda: rows("first", "second"))
    with pytest.raises(KeyError), mirrors(Config(), tmp_path, cluster(tmp_path)) as write:
        assert write is not None
        write(3, {"a": 1, "b": "1"})
        raise KeyError
    assert EVENTS == [(3, {"a": 1.0}), "closed"]


@pytest.mark.parametrize("names", [(), ("second",)])
def test_without_an_enabled_mirror_there_is_nothing_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(extensions, "extensions", lambda: rows(*names))
    with mirrors(Config(), tmp_path, cluster(tmp_path)) as write:
        assert write is None


@pytest.mark.parametrize(
    ("table", "key"),
    [("observe", "use_tensorboard"), ("observe", "use_prometheus"), ("wandb", "use_wandb")],
)
def test_a_mirror_that_no_extension_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, table: str, key: str
) -> None:
    config = Config.model_validate({table: {key: True}})
    assert observe_problems(config) == []
    monkeypatch.setattr(extensions, "extensions", lambda: rows("first"))
    flag = f"--{key.replace('_', '-')}"
    assert observe_problems(config) == [
        f"{flag} true: this installation has no extension for it; use {flag} false"
    ]

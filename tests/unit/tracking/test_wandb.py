"""Weights & Biases: whatever it does, the training neither waits nor ends."""

import importlib.machinery
import logging
import sys
import threading
import types

import pytest
from pydantic import BaseModel, ValidationError

from rlpost.config.groups.wandb import WandbConfig
from rlpost.errors import ConfigError, Preempted
from rlpost.extensions.tracking import wandb as module
from rlpost.extensions.tracking.wandb import mirrored

OFFLINE = WandbConfig(use_wandb=True, wandb_mode="offline", wandb_project="p", wandb_group="g")


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "tiny run"
    made.mkdir()
    (made / "run.json").write_text("{}")
    return made


@pytest.mark.parametrize(
    "settings", [WandbConfig(), WandbConfig(use_wandb=True, wandb_mode="disabled")]
)
def test_where_it_is_off_the_package_is_not_touched(folder, monkeypatch, settings):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an error
    with mirrored(settings, folder, {}) as also:
        assert also is None


def test_a_missing_package_is_named_with_its_setting(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with (
        pytest.raises(ConfigError, match=r"--use-wandb.*pip install wandb"),
        mirrored(OFFLINE, folder, {}),
    ):
        pass


class FakeRun:
    """The part of W&B's run that is used; ``lines`` are those that it got."""

    id, offline, url = "a-1", True, ""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.exit_code: int | None = None

    def define_metric(self, *_, **__):
        pass

    def mark_preempting(self):
        pass

    def log(self, line):
        self.lines.append(line)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch):
    """A package wandb whose ``init`` tests replace."""
    package = types.ModuleType("wandb")
    package.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="a stand-in")
    package.Settings, package.teardown = dict, lambda: None
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return package


def validation_error():
    class Settings(BaseModel):
        init_timeout: float

    try:
        Settings(init_timeout="abc")
    except ValidationError as error:
        return error


class AuthenticationError(Exception):
    """As that of W&B."""


ERRORS = [
    validation_error(),
    ConnectionResetError("Connection lost"),
    FileExistsError("RUN/wandb"),
    AuthenticationError("invalid key"),
    RuntimeError("Failed to read port info of http://user:secret@host"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_whatever_wandb_raises_the_attempt_is_written_offline(folder, fake, caplog, error):
    run, modes = FakeRun(), []

    def init(*, mode, **_):
        modes.append(mode)
        if mode == "online":
            raise error
        return run

    fake.init = init
    with mirrored(WandbConfig(use_wandb=True), folder, {}) as also:
        also(1, {"a": 0.5})
    assert modes == ["online", "offline"] and run.exit_code == 0
    assert run.lines == [{"step": 1, "a": 0.5}]
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "wandb sync" in warning and "secret" not in warning
    assert ("--wandb-key" in warning) == isinstance(error, AuthenticationError)


def test_where_nothing_starts_the_metrics_are_in_their_file_alone(folder, fake, caplog):
    fake.init = lambda **_: 1 / 0
    with mirrored(OFFLINE, folder, {}) as also:
        also(1, {"a": 0.5})
    assert "the metrics are in metrics.jsonl alone" in caplog.text


def test_lines_wait_for_a_slow_start_and_keep_their_order(folder, fake, caplog):
    run, may_start = FakeRun(), threading.Event()
    fake.init = lambda **_: may_start.wait() and run
    with mirrored(OFFLINE, folder, {}) as also:
        for step in range(3):
            also(step, {})
        assert run.lines == [], "entering and writing did not wait for the start"
        may_start.set()
    assert [line["step"] for line in run.lines] == [0, 1, 2]


@pytest.mark.parametrize("error", [None, Preempted("stop")])
def test_a_start_that_never_returns_is_left_at_the_end(folder, fake, monkeypatch, caplog, error):
    may_end = threading.Event()
    fake.init = lambda **_: may_end.wait()
    monkeypatch.setattr(module, "PREEMPTED_S", 0.0)
    monkeypatch.setattr(module, "END_S", 0.0)
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    writer = module.WandbWriter(OFFLINE, folder, {}, "offline")
    for step in range(4):
        writer.write(step, {})
    writer.finish(error)
    messages = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    may_end.set()
    writer._thread.join()  # what it still logs belongs to this test, not to the next one
    assert messages[0] == "wandb: it does not accept lines; those from step 2 are lost"
    assert "not finished within 0 s" in messages[1]


@pytest.mark.parametrize(
    ("setting", "variable", "mode"),
    [
        ("online", "", "online"),
        ("online", "disabled", "disabled"),
        ("online", "dryrun", "offline"),
        ("online", "Offline", "offline"),
        ("online", "online", "online"),
        ("offline", "online", "offline"),
        ("offline", "disabled", "offline"),
        ("disabled", "online", "disabled"),
    ],
)
def test_the_environment_can_only_turn_online_off(setting, variable, mode):
    settings = WandbConfig(use_wandb=True, wandb_mode=setting)
    assert settings.mode_in({"WANDB_MODE": variable}) == mode


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("wandb_project", "a/b", "contains '/'"),
        ("wandb_project", "a" * 129, "has 129 characters"),
        ("wandb_group", "g" * 200, "has 200 characters"),
        ("wandb_project", "", "has 0 characters"),
        ("wandb_host", "wandb.site.org", "write https://wandb.site.org"),
    ],
)
def test_what_wandb_would_refuse_is_refused_with_the_settings(key, value, words):
    with pytest.raises(ValidationError, match=words):
        WandbConfig(**{key: value})

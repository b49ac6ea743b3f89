"""A resume says before its submission what it changes, and what that costs."""

from __future__ import annotations

import json

import pytest

from rlpost.cli.resume_changes import GENERATED, TRAINED, change_notes
from rlpost.config.load import dump
from rlpost.config.tree import Config


def settings(**tables: dict[str, object]) -> Config:
    return Config.model_validate(tables)


BEFORE = dump(settings())


def test_an_unchanged_run_has_no_note() -> None:
    assert change_notes(BEFORE, settings()) == []


@pytest.mark.parametrize(
    ("tables", "line", "cost"),
    [
        ({"optimizer": {"lr": 0.5}}, "--lr 1e-06 -> 0.5", TRAINED),
        ({"rollout": {"rollout_temperature": 0.5}}, "--rollout-temperature 1 -> 0.5", GENERATED),
        ({"eval": {"eval_interval": 7}}, "--eval-interval none -> 7", ""),
    ],
)
def test_a_change_is_named_with_its_cost(
    tables: dict[str, dict[str, object]], line: str, cost: str
) -> None:
    first, *rest = change_notes(BEFORE, settings(**tables))
    assert first == f"--resume changes {line}"
    assert [note for note in rest if cost and cost in note] == rest
    assert len(rest) == bool(cost)


def test_a_secret_is_not_shown_and_a_damaged_record_is_no_error() -> None:
    notes = change_notes(BEFORE, settings(rollout={"rm_url": "http://me:hush-hush@h/"}))
    assert "--rm-url" in notes[0] and "hush" not in " ".join(notes)
    assert change_notes("", settings()) == change_notes("[1]", settings()) == []
    older = json.loads(BEFORE)
    del older["eval"]
    assert isinstance(change_notes(json.dumps(older), settings()), list)

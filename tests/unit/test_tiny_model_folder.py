"""rlpost/cli/tiny_model.py writes into its own folder only, never into one with another model."""

import pytest

from rlpost.cli.tiny_model import is_complete, produce, publish

SETTINGS = {"seed": 1}


def make(text):
    def fill(built):
        (built / "config.json").write_text(text)
        return 0.5

    return fill


def test_a_folder_with_another_model_is_not_changed(tmp_path):
    (tmp_path / "config.json").write_text("of a model of 400 GB")
    with pytest.raises(SystemExit, match=r"holds config\.json and no tiny_model\.json"):
        produce(tmp_path, SETTINGS, make("tiny"))
    assert (tmp_path / "config.json").read_text() == "of a model of 400 GB"


def test_the_tiny_model_is_made_again_with_other_settings_and_after_a_crash(tmp_path, monkeypatch):
    produce(tmp_path, SETTINGS, make("first"))
    built = tmp_path / ".building"
    built.mkdir()
    (built / "config.json").write_text("half")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("builtins.sorted", interrupted)
        publish(built, tmp_path, {"settings": {"seed": 2}})
    assert not is_complete(tmp_path, SETTINGS)
    produce(tmp_path, {"seed": 3}, make("third"))
    assert (tmp_path / "config.json").read_text() == "third" and is_complete(tmp_path, {"seed": 3})


def interrupted(*_):
    raise KeyboardInterrupt

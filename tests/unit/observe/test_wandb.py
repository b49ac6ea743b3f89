"""Weights & Biases: without the package everything else goes on."""

import sys

import pytest

from rlpost.config.groups.wandb import WandbConfig
from rlpost.errors import ConfigError
from rlpost.observe.wandb import mirrored

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

"""The key for Weights & Biases, before a run is submitted."""

from pathlib import Path

import pytest

from common.run_folder import RunFolder, create_run_folder
from rlpost.cli.secret_file import store_keys
from rlpost.extensions.tracking.wandb import has_wandb_key


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run_folder(tmp_path / "a", "{}")


def test_a_key_for_wandb_is_known_from_the_environment_the_run_or_the_home_folder(tmp_path, run):
    home = {"HOME": str(tmp_path)}
    assert not has_wandb_key(run, home)
    assert has_wandb_key(run, {**home, "WANDB_API_KEY": "k"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password k\n")
    assert has_wandb_key(run, home)
    (tmp_path / ".netrc").unlink()
    store_keys(run, {"WANDB_API_KEY": "k"})  # submitted before, with one
    assert has_wandb_key(run, home)

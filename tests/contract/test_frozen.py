"""Parameters that are frozen by name, with real Megatron over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.config.tree import Config
from tests.contract.actor_ranks import Files, run_ranks, train
from tests.contract.families import load_folder, make_family
from tests.contract.layouts import FULL, pp
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    make_family(folder, "qwen3-tied")
    return folder


def settings(model: Path, **more: Any) -> Config:
    return rank_config(str(model), lr=1e-3, adam_eps=1e-4, distributed_timeout_minutes=2, **more)


def test_only_parameters_that_match_are_trained_and_resumed_bit_for_bit(model, tmp_path):
    """Layers 1 and 3 of four are trained, one in each pipeline stage.

    They follow a frozen embedding, with full recomputation.
    """
    given = settings(model, only_train_params_name_list=(r"layers\.[13]\.",), **pp(2), **FULL)
    saved, trained = str(tmp_path / "saved"), str(tmp_path / "trained")
    whole = run_ranks(train, 2, given, steps=STEPS, files=Files(save=saved, export=trained))
    before, after = load_folder(model), load_folder(Path(trained))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".layers.1." in name or ".layers.3." in name}
    resumed = run_ranks(train, 2, given, steps=STEPS, files=Files(load=saved))
    assert resumed[0]["hash"] == whole[0]["hash"]
    assert resumed[0]["metrics"] == whole[0]["metrics"][2:]


def test_frozen_parameters_keep_their_bits(model, tmp_path):
    given = settings(model, freeze_params_name_list=("embedding", "linear_fc1"))
    run_ranks(train, 1, given, steps=STEPS[:1], files=Files(export=str(tmp_path)))
    before, after = load_folder(model), load_folder(tmp_path)
    kept = {name for name in before if torch.equal(before[name], after[name])}
    frozen = ("embed_tokens", "gate_proj", "up_proj")
    assert kept == {name for name in before if any(part in name for part in frozen)}


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (("linear_fc9",), r"--only-train-params-name-list linear_fc9: matches no parameter"),
        ((r"layers\.0\.",), r"pipeline stages \[1\] have no parameter to train"),
    ],
)
def test_patterns_that_train_nothing_are_refused_on_every_rank(model, pattern, message):
    given = settings(model, only_train_params_name_list=pattern, **pp(2))
    with pytest.raises(AssertionError, match=message):
        run_ranks(train, 2, given, steps=STEPS[:1])

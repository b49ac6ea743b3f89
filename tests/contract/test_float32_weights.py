"""Weights that are float32 in a model of bfloat16: Qwen3.5's decay and norm of linear attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import layout_of, rank_parameters
from rlpost.config.tree import Config
from rlpost.extensions.planning.counts import stored_bytes
from rlpost.extensions.planning.rank_memory import held_memory
from rlpost.extensions.planning.update_weights import weights_of
from tests.contract.actor_ranks import Files, run_ranks
from tests.contract.families import VOCAB_SIZE, load_folder
from tests.contract.float32_ranks import (
    FLOAT32,
    gradients,
    look,
    make_published,
    round_all,
    train_and_hold,
)
from tests.contract.layouts import FULL, GATHER, PLAIN, pp, tp
from tests.contract.samples import STEPS
from tests.settings import rank_config
from tests.weights_hash import hash_of

pytestmark = pytest.mark.timeout(300)
SAMPLES = STEPS[0]
NAME = "qwen3.5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("float32") / "model"
    make_published(folder, NAME)
    return folder


def settings(folder: Path, **more: Any) -> Config:
    values = {"bf16": True, "lr": 1e-3, "adam_eps": 1e-4, "distributed_timeout_minutes": 2} | more
    return rank_config(str(folder), **values)


def their_model(folder: Path, ends: tuple[str, ...]) -> torch.nn.Module:
    """Return transformers' model in bfloat16, with tensors of these ends as they are stored.

    It has no rule for float32 weights and rounds them (``from_pretrained`` of 5.12).
    """
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    stored = load_folder(folder)
    for name, parameter in model.named_parameters():
        if name.endswith(ends):
            parameter.data = stored[name].clone()
    return model.eval()


@torch.no_grad()
def their_logits(model: torch.nn.Module) -> np.ndarray:
    rows = [model(torch.tensor([s.token_ids])).logits[0].float() for s in SAMPLES]
    return torch.cat(rows).numpy()


@pytest.mark.parametrize(
    "layout", [(1, {}), (2, tp(2)), (2, pp(2) | FULL)], ids=["1", "tp2", "pp2"]
)
def test_logits_are_those_of_a_float32_decay_and_the_export_is_the_folder(folder, tmp_path, layout):
    """A rounded decay is three times as far from the logits as the rounding errors of bfloat16."""
    num_ranks, more = layout
    ranks = run_ranks(
        look, num_ranks, settings(folder, **more), samples=SAMPLES, export=str(tmp_path / "export")
    )
    exact, rounded = (
        their_logits(their_model(folder, ends)) for ends in (FLOAT32, ("none of them",))
    )
    given = settings(folder, actor_num_gpus_per_node=num_ranks, **more)
    shape, layout = hf_shape(json.loads((folder / "config.json").read_text())), layout_of(given)
    for rank in ranks:
        planned = rank_parameters(shape, layout, rank["stage"])
        assert rank["held"] == held_memory(given, layout, planned)[0].weights
        sent = (one.num_bytes(width=2, in_fp8=False) for one in weights_of(shape, layout))
        assert rank["sent"] == sum(sent) == stored_bytes(shape, 2)
        for name, dtype in rank["types"].items():
            assert dtype == (torch.float32 if name.endswith(FLOAT32) else torch.bfloat16), name
        wide = torch.float32
        assert rank["sums"] == {(torch.bfloat16, wide), (wide, wide)}
    ours = ranks[-1]["logits"][: len(exact)]
    assert np.abs(ours - exact).mean() * 2 < np.abs(ours - rounded).mean()
    stored, exported = load_folder(folder), load_folder(tmp_path / "export")
    assert {name: one.dtype for name, one in exported.items()} == {
        name: one.dtype for name, one in stored.items()
    }
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    assert ranks[0]["hash"] == hash_of(stored)


@pytest.mark.parametrize("reduced", [True, False], ids=["fp32 sums", "bf16 sums"])
def test_gradients_are_float32_and_those_of_transformers(folder, reduced):
    """Also where those of other weights are summed in bfloat16, on two tensor-parallel ranks."""
    num_rows, source = sum(len(s.token_ids) for s in SAMPLES), torch.Generator().manual_seed(5)
    factors = torch.randn(num_rows, VOCAB_SIZE, generator=source)
    given = settings(folder, **tp(2), accumulate_allreduce_grads_in_fp32=reduced)
    ranks = run_ranks(gradients, 2, given, samples=SAMPLES, factors=factors)
    exact, rounded = (
        their_gradients(their_model(folder, ends), factors) for ends in (FLOAT32, ("none of them",))
    )
    for found in ranks:
        assert found.keys() == exact.keys()
        for name, gradient in found.items():
            assert gradient.dtype == torch.float32
            nearer, farther = (distance(gradient, theirs[name]) for theirs in (exact, rounded))
            assert nearer * 1.5 < farther, name


def their_gradients(model: torch.nn.Module, factors: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = [model(torch.tensor([s.token_ids])).logits[0].float() for s in SAMPLES]
    (torch.cat(rows) * factors).sum().backward()
    return {
        key: one.grad.float()
        for key, one in model.named_parameters()
        if key.endswith(FLOAT32) and one.grad is not None
    }


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, tp(2)),
    "dp2": (2, {}),
    "dp2, overlapped": (2, GATHER),
    "dp2, one optimizer a rank": (2, PLAIN),
    "muon": (1, PLAIN | {"optimizer": "muon"}),
    "frozen": (2, {"freeze_params_name_list": ["A_log"]}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_resumes_bit_for_bit(folder, tmp_path, name):
    """The weights hold values that bfloat16 does not have, on every rank."""
    num_ranks, more = LAYOUTS[name]
    given = settings(folder, **more)
    saved = str(tmp_path / "saved")
    whole = run_ranks(train_and_hold, num_ranks, given, steps=STEPS, files=Files(save=saved))
    resumed = run_ranks(train_and_hold, num_ranks, given, steps=STEPS, files=Files(load=saved))
    for one, other in zip(whole, resumed, strict=True):
        assert (other["metrics"], other["hash"]) == (one["metrics"][2:], one["hash"])
        for key, value in one["after"].items():
            assert np.array_equal(other["after"][key], value), key
            assert not np.array_equal(value, np_rounded(value)), key


@pytest.mark.parametrize("name", ["dp2", "dp2, one optimizer a rank", "tp2"])
def test_a_checkpoint_in_bfloat16_continues_from_the_main_weights_of_its_optimizer(
    folder, tmp_path, name
):
    """Each rank of the old run has the main weights of a part, and each of the new one all."""
    num_ranks, more = LAYOUTS[name]
    given = settings(folder, **more)
    saved, steps = str(tmp_path / "saved"), STEPS[:2]
    old = run_ranks(
        train_and_hold, num_ranks, given, steps=steps, files=Files(save=saved), before=round_all
    )
    new = run_ranks(train_and_hold, num_ranks, given, steps=steps, files=Files(load=saved))
    for rank, one in enumerate(new):
        for key, value in one["before"].items():
            # the parts of all data-parallel ranks
            holders = [old[rank]] if name == "tp2" else old
            flat = value.reshape(-1)
            for (weight, start), main in ((k, v) for o in holders for k, v in o["mains"].items()):
                if weight == key:
                    assert np.array_equal(flat[start : start + main.size], main), key
            assert np.array_equal(np_rounded(value), old[rank]["after"][key]), key
            assert not np.array_equal(value, old[rank]["after"][key]), key


def test_without_the_state_of_the_optimizer_such_a_checkpoint_gives_the_rounded_weights(
    folder, tmp_path
):
    given = settings(folder, no_save_optim=True)
    files = Files(save=str(tmp_path / "saved"))
    (old,) = run_ranks(train_and_hold, 1, given, steps=STEPS[:2], files=files, before=round_all)
    files = Files(load=str(tmp_path / "saved"))
    (new,) = run_ranks(train_and_hold, 1, given, steps=STEPS[:2], files=files)
    for key, value in new["before"].items():
        assert np.array_equal(value, old["after"][key]), key


@pytest.mark.parametrize("name", ["qwen3-next-moe", "qwen3.5-moe-published"])
def test_a_folder_in_bfloat16_is_trained_and_exported_in_float32(tmp_path, name):
    """As Qwen3.6 and Qwen3-Next are published."""
    make_published(tmp_path / "model", name, dtype=torch.bfloat16)
    given = settings(tmp_path / "model")
    run_ranks(look, 1, given, samples=SAMPLES, export=str(tmp_path / "export"))
    stored, exported = load_folder(tmp_path / "model"), load_folder(tmp_path / "export")
    assert exported.keys() == stored.keys()
    for key, value in exported.items():
        assert value.dtype == (torch.float32 if key.endswith(FLOAT32) else torch.bfloat16), key
        assert torch.equal(value, stored[key].to(value.dtype)), key


def np_rounded(value: np.ndarray) -> np.ndarray:
    return torch.from_numpy(value).bfloat16().float().numpy()

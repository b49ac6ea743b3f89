"""Multi-token prediction: its loss equals that of transformers' modules.

The policy is unaffected by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from rlpost.config.tree import Config
from rlpost.errors import TrainingError
from rlpost.types import TrainSample
from tests.contract.actor_ranks import (
    Files,
    load,
    look,
    my_batch,
    plan_sync,
    run_ranks,
    train,
    train_and_compare,
)
from tests.contract.families import COMMON, MTP, load_folder, make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

LAYER = f"model.layers.{COMMON['num_hidden_layers']}."
SHARED = (f"{LAYER}embed_tokens.weight", f"{LAYER}shared_head.head.weight")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mtp") / "model"
    make_family(made, MTP)
    return made


def settings(folder: Path, *, mtp: bool = True, **changes: Any) -> Config:
    options = dict(
        lr=1e-3, adam_eps=1e-4, distributed_timeout_minutes=2, update_weight_buffer_size=40_000
    )
    return rank_config(str(folder), **(options | {"enable_mtp_training": mtp} | changes))


@pytest.fixture(scope="module")
def with_and_without(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    def run(**how: Any) -> list[Any]:
        actor = settings(folder, **how)
        return run_ranks(train_and_compare, 1, actor, steps=STEPS, two_passes=False)

    return run(clip_grad=0.05)[0], run(clip_grad=0.05, mtp=False)[0]


def test_the_policy_is_the_same_bit_for_bit(with_and_without):
    """Gradients, their norm, by which they are clipped, losses and weights, over three steps."""
    with_mtp, without = with_and_without
    assert [
        {k: v for k, v in m.items() if k != "train/mtp_loss"} for m in with_mtp["metrics"]
    ] == without["metrics"]
    assert without["metrics"][0]["train/grad_norm"] > 0.05, "nothing is clipped"
    for kind in ("gradients", "weights"):
        assert without[kind].keys() == {
            name for name in with_mtp[kind] if not name.startswith(LAYER)
        }
        assert all(
            np.array_equal(with_mtp[kind][name], tensor) for name, tensor in without[kind].items()
        )


def test_the_policy_is_the_same_in_bfloat16(folder):
    """In bfloat16 the gradient norm is that of the float32 main weights."""
    with_mtp, without = (
        run_ranks(train, 1, settings(folder, mtp=mtp, bf16=True, clip_grad=0.05), steps=STEPS)[0][
            "metrics"
        ]
        for mtp in (True, False)
    )
    assert all("train/mtp_loss" in metrics for metrics in with_mtp)
    assert [metrics | {"train/mtp_loss": 0.0} for metrics in without] == [
        metrics | {"train/mtp_loss": 0.0} for metrics in with_mtp
    ]


def step_beyond_float32(actor: Any) -> tuple[str, bool]:
    """Train a step; return its error, and whether weights have changed."""
    actor.import_weights()
    before = actor.weights_hash()
    try:
        actor.train_step(my_batch(actor, STEPS[0], 64))
    except TrainingError as error:
        return str(error), actor.weights_hash() != before
    return "", True


def test_a_gradient_of_the_layer_that_is_not_finite_is_an_error_before_the_step(folder):
    """Its loss, without the factor, and the gradient norm of the policy are finite."""
    ((error, is_changed),) = run_ranks(
        step_beyond_float32, 1, settings(folder, mtp_loss_scaling_factor=1e39)
    )
    assert "gradient of --enable-mtp-training = " in error and not is_changed


def test_every_weight_of_the_layer_is_trained(with_and_without, folder):
    """All weights change except the router's bias, which is not trained."""
    with_mtp, _ = with_and_without
    before = load_folder(folder)
    moved = {
        name
        for name, now in with_mtp["weights"].items()
        if not np.array_equal(now, before[name].numpy())
    }
    of_layer = {name for name in before if name.startswith(LAYER) and name not in SHARED}
    assert of_layer - moved == {f"{LAYER}mlp.gate.e_score_correction_bias"}
    losses = [metrics["train/mtp_loss"] for metrics in with_mtp["metrics"]]
    assert all(loss > 0 for loss in losses)


def test_the_loss_is_that_of_transformers_modules(with_and_without, folder):
    """The loss of the token after the next one.

    It is averaged over each sample's loss-masked tokens, then over the samples of the batch.
    """
    with_mtp, _ = with_and_without
    expected = np.mean([reference_loss(folder, sample) for sample in STEPS[0]])
    assert with_mtp["metrics"][0]["train/mtp_loss"] == pytest.approx(expected, rel=1e-5)


def test_an_export_has_every_tensor_bit_for_bit(folder, tmp_path):
    run_ranks(look, 1, settings(folder), samples=STEPS[0], export=str(tmp_path / "out"))
    found, expected = load_folder(tmp_path / "out"), load_folder(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_trained_export_repeats_its_own_embedding_and_output_layer(folder, tmp_path):
    """Embedding and output layer are shared with the layer.

    So its copies in the export must be the trained ones. A copy that differed in the checkpoint is
    kept.
    """
    run_ranks(
        train, 1, settings(folder), steps=STEPS[:1], files=Files(export=str(tmp_path / "trained"))
    )
    found, before = load_folder(tmp_path / "trained"), load_folder(folder)
    assert not torch.equal(found["lm_head.weight"], before["lm_head.weight"])
    assert torch.equal(found[SHARED[0]], found["model.embed_tokens.weight"])
    assert torch.equal(found[SHARED[1]], found["lm_head.weight"])
    other = tmp_path / "other"
    make_family(other, MTP)
    different = load_file(other / "model.safetensors")
    different[SHARED[1]] += 1
    save_file(different, other / "model.safetensors", metadata={"format": "pt"})
    run_ranks(
        train, 1, settings(other), steps=STEPS[:1], files=Files(export=str(tmp_path / "again"))
    )
    assert torch.equal(load_folder(tmp_path / "again")[SHARED[1]], different[SHARED[1]])


def test_an_update_of_the_engines_contains_the_layer(folder):
    """It does not contain the tensors that a draft model takes from the policy."""

    def names(**how: Any) -> set[str]:
        (plan,) = run_ranks(plan_sync, 1, settings(folder, **how))
        return {name for bucket in plan for name in bucket.names}

    of_layer = {name for name in load_folder(folder) if name.startswith(LAYER)} - set(SHARED)
    assert names() - names(mtp=False) == of_layer


def test_weights_without_the_layer_are_refused_on_every_rank(folder, tmp_path):
    """This holds for torch_dist and for Hugging Face weights.

    No rank waits for another, and without the flag the same checkpoint loads.
    """
    saved = str(tmp_path / "saved")
    run_ranks(train, 1, settings(folder, mtp=False), steps=STEPS[:2], files=Files(save=saved))
    two = {"pipeline_model_parallel_size": 2}
    for said in run_ranks(load, 2, settings(folder, **two), folder=saved):
        assert (
            "no layer for multi-token prediction" in said and "--enable-mtp-training false" in said
        )
    assert run_ranks(load, 2, settings(folder, mtp=False, **two), folder=saved) == ["loaded"] * 2
    bare = tmp_path / "bare"
    make_family(bare, MTP)
    kept = {
        name: one
        for name, one in load_file(bare / "model.safetensors").items()
        if not name.startswith(LAYER)
    }
    save_file(kept, bare / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        AssertionError, match=r"model\.layers\.4\.eh_proj\.weight.*use a checkpoint that"
    ):
        run_ranks(train, 1, settings(bare), steps=STEPS[:1])


@torch.no_grad()
def reference_loss(folder: Path, sample: TrainSample) -> float:
    """Return the loss of one sequence; 0 if no token counts."""
    import transformers
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, tensors = model.config, load_folder(folder)
    own = {
        name.removeprefix(LAYER): tensor
        for name, tensor in tensors.items()
        if name.startswith(LAYER)
    }

    def norm(name: str, hidden: torch.Tensor) -> torch.Tensor:
        made = Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        made.weight.copy_(own[name])
        return made(hidden)

    # Row t joins the hidden state of token t and the embedding of t + 1, and predicts t + 2.
    ids = torch.tensor([sample.token_ids])
    hidden = model.model(ids).last_hidden_state[:, :-1]
    following = model.model.embed_tokens(ids[:, 1:])
    joined = torch.cat([norm("enorm.weight", following), norm("hnorm.weight", hidden)], dim=-1)
    layer = Glm4MoeDecoderLayer(config, config.num_hidden_layers - 1).eval()
    fill(layer, own)
    positions = torch.arange(joined.size(1))[None]
    causal = torch.full((joined.size(1),) * 2, -torch.inf).triu(1)[None, None]
    output = layer(
        F.linear(joined, own["eh_proj.weight"]),
        attention_mask=causal,
        position_ids=positions,
        position_embeddings=model.model.rotary_emb(joined, positions),
    )
    logits = model.lm_head(norm("shared_head.norm.weight", output))[0, :-1]
    mask = torch.tensor([0] * sample.prompt_length + list(sample.loss_mask))[2:]
    losses = F.cross_entropy(logits, ids[0, 2:], reduction="none") * mask
    return float(losses.sum() / mask.sum()) if mask.sum() else 0.0


def fill(layer: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copy the tensors of a checkpoint into a layer of transformers.

    transformers fuses the experts of a layer into one tensor; checkpoints have them separately.
    """
    for name, value in (*layer.named_parameters(), *layer.named_buffers()):
        if name in tensors:
            value.copy_(tensors[name])
            continue
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        experts = [
            torch.cat([tensors[f"mlp.experts.{number}.{part}.weight"] for part in parts])
            for number in range(value.size(0))
        ]
        value.copy_(torch.stack(experts))

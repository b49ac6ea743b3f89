"""The critic on real ranks.

Values and gradients are compared with transformers, layouts with one process. Checkpoints and
exports are covered too.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Layout
from rlpost.config.tree import Config
from rlpost.durable import commit as protocol
from rlpost.durable.commit import begin, commit
from rlpost.errors import CheckpointError
from rlpost.extensions.planning.counts import critic_parameters
from tests.contract.actor_ranks import run_ranks
from tests.contract.critic_ranks import (
    learn,
    leave_and_come_back,
    returns_of,
    train_critic,
    values_of,
)
from tests.contract.families import make_family
from tests.contract.layouts import CP2, LIMIT, MOE, _difference, ep, pp, tp
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

VPP = {"num_layers_per_virtual_pipeline_stage": 1}
LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {  # model, ranks, settings
    "tp2-sp-dp2": ("qwen3", 4, tp(2)),
    "pp2-tied": ("qwen3-tied", 2, pp(2)),
    "cp2-pp2-vpp2": ("qwen3", 4, CP2 | pp(2, **VPP)),
    "moe-tp2-sp-ep2": (MOE, 2, tp(2) | ep(2, 1)),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3-tied", MOE):
        make_family(folder / name, name)
    return folder


def settings(models: Path, model: str, **changes: Any) -> Config:
    defaults = dict(
        advantage_estimator="ppo",
        lr=1e-3,
        critic_lr=2e-3,
        adam_eps=1e-4,
        value_clip=0.05,
        distributed_timeout_minutes=2,
        update_weight_buffer_size=40_000,
    )
    return rank_config(str(models / model), **(defaults | changes))


@pytest.fixture(scope="module")
def alone(models: Path, tmp_path_factory: pytest.TempPathFactory):
    """``alone(model)``: three steps of one process, and the folder of its checkpoint and export."""
    known: dict[str, tuple[dict[str, Any], Path]] = {}

    def get(model: str) -> tuple[dict[str, Any], Path]:
        if model not in known:
            folder = tmp_path_factory.mktemp(model)
            paths = {"save": str(folder / "saved"), "export": str(folder / "hf")}
            (found,) = run_ranks(train_critic, 1, settings(models, model), steps=STEPS, **paths)
            known[model] = found, folder
        return known[model]

    return get


def with_whole_head(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Join weight and bias of the head into one tensor.

    The bias is the weight of a constant feature. Its gradient is a sum of errors that nearly
    cancel, so rounding is large relative to the bias alone.
    """
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("score.")}
    head = np.append(tensors["score.weight"], tensors["score.bias"])
    return rest | {"score": head}


def difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return _difference(with_whole_head(ours), with_whole_head(theirs))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_the_critic_as_one_process_does(models, alone, name):
    """Values, loss, norm, gradients of the first step and weights after three, in float32."""
    model, num_ranks, layout = LAYOUTS[name]
    expected, _ = alone(model)
    ranks = run_ranks(train_critic, num_ranks, settings(models, model, **layout), steps=STEPS)
    assert len({rank["hash"] for rank in ranks}) == 1
    sizes = Layout(
        world=num_ranks,
        tensor=layout.get("tensor_model_parallel_size", 1),
        pipeline=layout.get("pipeline_model_parallel_size", 1),
        expert=layout.get("expert_model_parallel_size", 1),
        expert_tensor=1,
        chunk=layout.get("num_layers_per_virtual_pipeline_stage"),
    )
    shape = hf_shape(json.loads((models / model / "config.json").read_text()))
    planned = {critic_parameters(shape, sizes, stage).total for stage in range(sizes.pipeline)}
    assert {rank["num_parameters"] for rank in ranks} == planned
    assert difference(ranks[0]["gradients"], expected["gradients"]) < LIMIT
    assert difference(ranks[0]["weights"], expected["weights"]) < LIMIT
    for rank in ranks:
        for ours, theirs in zip(rank["metrics"], expected["metrics"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    for number, theirs in enumerate(expected["values"]):
        ours = {key: value for rank in ranks for key, value in rank["values"][number].items()}
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            np.testing.assert_allclose(value, theirs[key], atol=3e-5)


def test_a_second_step_against_the_same_values_is_clipped_and_the_policy_is_unaffected(
    models, alone
):
    found, _ = alone("qwen3")
    first, second = found["metrics"][:2]
    assert first["train/value_clip_frac"] == 0.0 < second["train/value_clip_frac"]
    assert second["train/value_loss"] < first["train/value_loss"]
    assert first["train/critic_lr"] == 2e-3
    assert found["policy"][0]["train/lr"] == 1e-3
    assert found["num_steps"] == 2 * len(STEPS)
    without = settings(models, "qwen3", advantage_estimator="grpo")
    (policy,) = run_ranks(train_policy, 1, without, steps=STEPS)
    assert policy == (found["policy"], found["policy_hash"])


def train_policy(actor: Any, steps: Any) -> tuple[list[dict[str, float]], str]:
    from tests.contract.actor_ranks import my_batch

    actor.import_weights()
    metrics = [dict(actor.train_step(my_batch(actor, samples, 64)).metrics) for samples in steps]
    return metrics, actor.weights_hash()


def test_values_and_gradients_are_those_of_transformers_with_the_exported_head(
    models, alone, tmp_path
):
    """The exported folder opens as a model for token classification.

    A critic that loads it has transformers' values, and transformers' gradient of the value loss.
    """
    from transformers import AutoModelForTokenClassification

    _, folder = alone("qwen3")
    exported = folder / "hf" / "critic"
    config = json.loads((exported / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    with_head = settings(models, "qwen3", critic_load=str(exported), value_clip=None)
    (found,) = run_ranks(train_critic, 1, with_head, steps=STEPS[:1])
    model = AutoModelForTokenClassification.from_pretrained(exported).eval()
    loss = torch.zeros(())
    for sample in STEPS[0]:
        rows = model(torch.tensor([list(sample.token_ids)])).logits[0, :, 0]
        values = rows[sample.prompt_length - 1 : -1]
        np.testing.assert_allclose(
            found["values"][0][tuple(sample.token_ids)], values.detach(), atol=2e-5
        )
        mask = torch.tensor(list(sample.loss_mask), dtype=torch.float32)
        error = (values - torch.tensor(list(returns_of(sample)))).square()
        loss = loss + 0.5 * (error * mask).sum() / mask.sum() / len(STEPS[0])
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert found["gradients"].keys() == gradients.keys()
    for name, ours in found["gradients"].items():
        np.testing.assert_allclose(ours, gradients[name], rtol=1e-4, atol=1e-5, err_msg=name)


CONTINUED = {"same": {}, "tp2-sp": tp(2), "pp2": pp(2)}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_checkpoint_holds_critic_and_optimizer(models, alone, name):
    """The third step from the checkpoint of the second equals that of the uninterrupted run.

    At the same layout it is equal bit for bit.
    """
    expected, folder = alone("qwen3")
    layout = CONTINUED[name]
    ranks = run_ranks(
        train_critic,
        2 if layout else 1,
        settings(models, "qwen3", **layout),
        steps=STEPS,
        load=str(folder / "saved"),
    )
    assert ranks[0]["num_steps"] == expected["num_steps"]
    assert difference(ranks[0]["weights"], expected["weights"]) < LIMIT
    if not layout:
        assert ranks[0]["hash"] == expected["hash"]
        assert ranks[0]["policy_hash"] == expected["policy_hash"]
        assert ranks[0]["metrics"] == expected["metrics"][4:]


def test_a_critic_starts_from_the_policy_a_checkpoint_or_a_reward_model(models, alone, tmp_path):
    """The trunk and the new head are the same from a Hugging Face folder and from torch_dist.

    They are compared at two layouts. A head in the folder is kept; a missing bias is zero.
    """
    trained, folder = alone("qwen3")
    saved = folder / "saved"
    (of_policy,) = run_ranks(values_of, 1, settings(models, "qwen3"), samples=STEPS[0])
    sharded = run_ranks(values_of, 2, settings(models, "qwen3", **tp(2)), samples=STEPS[0])
    assert {rank["hash"] for rank in sharded} == {of_policy["hash"]}
    exported = settings(models, "qwen3", critic_load=str(folder / "hf"))
    (from_hf,) = run_ranks(values_of, 1, exported, samples=STEPS[0])
    # the exported policy is one step ahead of the saved one
    stored = settings(models, "qwen3", critic_load=str(saved))
    (from_policy,) = run_ranks(values_of, 1, stored, samples=STEPS[0])
    assert len({of_policy["hash"], from_hf["hash"], from_policy["hash"]}) == 3
    stored = settings(models, "qwen3", critic_load=str(saved / "critic"))
    (from_critic,) = run_ranks(values_of, 1, stored, samples=STEPS[2])
    assert from_critic["values"] == trained["values"][2]
    reward_model = tmp_path / "reward"
    reward_model.mkdir()
    tensors = load_file(folder / "hf" / "critic" / "model.safetensors")
    del tensors["score.bias"]
    save_file(tensors, reward_model / "model.safetensors")
    config = (folder / "hf" / "critic" / "config.json").read_text()
    (reward_model / "config.json").write_text(config)
    scored = settings(models, "qwen3", critic_load=str(reward_model))
    (found,) = run_ranks(values_of, 1, scored, samples=STEPS[0])
    assert found["hash"] not in {of_policy["hash"], from_hf["hash"]}


def test_the_critic_is_offloaded_with_the_trainer_and_saved_while_offloaded(models, tmp_path):
    """Two ranks, each of which saves in the background."""
    ranks = run_ranks(
        leave_and_come_back,
        2,
        settings(models, "qwen3", **tp(2)),
        steps=STEPS,
        folder=str(tmp_path / "saved"),
    )
    assert len({hashes for rank in ranks for hashes in rank}) == 1


def test_the_reward_of_drawn_answers_rises(models):
    """It starts at the share of wanted tokens of a random policy; values approach the returns."""
    alone = settings(models, "qwen3", critic_lr=3e-3, value_clip=0.2)
    (seen,) = run_ranks(learn, 1, alone, num_rollouts=20)
    assert sum(seen["reward"][-3:]) / 3 > sum(seen["reward"][:3]) / 3 + 0.2
    assert sum(seen["error"][-3:]) < sum(seen["error"][:3]) / 2


def read_again(actor: Any, *, folder: Path) -> list[list[str]]:
    """Commit a checkpoint; return what each way to read it hashes."""
    actor.import_weights()
    writing = begin(folder, 1)
    actor.save(str(writing), 1)
    checkpoint, hashed, digest = commit(writing), list[Path](), protocol._file_digest
    found = []
    from rlpost.trainer import megatron_checkpoint

    with patch.object(protocol, "_file_digest", lambda one: hashed.append(one) or digest(one)):
        for read in (
            partial(actor.load, checkpoint, is_compared=True),
            partial(actor.load, checkpoint),
            partial(megatron_checkpoint.load_weights, checkpoint, chunks=actor.chunks),
        ):
            read()
            found.append(sorted(str(one.relative_to(checkpoint)) for one in hashed))
            hashed.clear()
    manifest = json.loads((checkpoint / protocol.MANIFEST).read_text())
    return [*found, sorted(manifest["files"])]


def test_each_byte_of_a_checkpoint_is_compared_once_and_none_that_the_driver_has_compared(
    models, tmp_path
):
    ((resumed, recovered, weights, every),) = run_ranks(
        read_again, 1, settings(models, "qwen3"), folder=tmp_path / "saves"
    )
    assert resumed == [] and recovered == every and any("critic/" in one for one in every)
    small = {".metadata", "common.pt", "metadata.json"}
    of_policy = {one for one in every if one.endswith(".distcp") and "critic/" not in one}
    assert small < set(weights) <= small | of_policy, "a file without weights may be left out"


def load_without_critic(actor: Any, *, folder: str) -> str:
    actor.critic = actor.saves.critic = None
    actor.import_weights()
    actor.save(folder, 1)
    from rlpost.trainer.critic import Critic

    actor.critic = Critic(
        actor.config,
        actor.description,
        row_layout=actor.row_layout,
        stop_points=actor.stop_points,
    )
    with pytest.raises(CheckpointError) as said:
        actor.load(folder)
    return str(said.value)


def test_loading_a_checkpoint_without_a_critic_names_the_remedy(models, tmp_path):
    (said,) = run_ranks(
        load_without_critic, 1, settings(models, "qwen3"), folder=str(tmp_path / "saved")
    )
    assert "has no critic" in said and "--ref-load" in said

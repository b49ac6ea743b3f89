"""Losses in the real actor.

The supervised loss is compared with Hugging Face; one custom loss works, others return NaN or have
a gradient of NaN.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import TrainingError
from rlpost.types import TrainBatch
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

PLUGIN = """
import math

def reinforce(tokens, settings):
    logprobs = tokens.logprobs.detach()
    return -tokens.advantages * tokens.logprobs, {"mine": logprobs, "mine_max": -logprobs}

def broken(tokens, settings):
    return tokens.logprobs * math.nan, {}

def steep(tokens, settings):
    zero = tokens.logprobs - tokens.logprobs.detach()
    return zero.square().sqrt(), {}

def nan_outside(tokens, settings):
    loss = -tokens.advantages * tokens.logprobs / tokens.loss_mask
    return loss, {"odd": loss.detach(), "odd_max": loss.detach()}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    make_model(folder / "model", tied=False)
    (folder / "mine.py").write_text(PLUGIN)
    return folder


def settings(model: Path, **changes: Any) -> Config:
    return rank_config(str(model / "model"), lr=1e-3, distributed_timeout_minutes=2, **changes)


def one_step(actor: Any) -> dict[str, Any]:
    """Train one step.

    Returns its metrics or its error, log-probs of policy and reference from before the step, and
    whether the weights changed.
    """
    actor.import_weights()
    batch = my_batch(actor, STEPS[0], max_tokens=64)
    before, logprobs = actor.weights_hash(), actor.compute_logprobs(batch)
    reference = actor.compute_ref_logprobs(batch) if actor.config.grpo.needs_reference else None
    try:
        metrics, error = dict(actor.train_step(batch).metrics), ""
    except TrainingError as raised:
        metrics, error = {}, str(raised)
    trained = actor.weights_hash() != before
    return {"metrics": metrics, "error": error, "trained": trained, "logprobs": logprobs, "reference": reference,
            "batch": batch}  # fmt: skip


def test_supervised_loss_and_gradient_norm_equal_those_of_hugging_face(model):
    """The mean over samples of the mean over a sample's trained tokens, as in transformers."""
    from transformers import AutoModelForCausalLM

    (found,) = run_ranks(one_step, 1, settings(model, loss_type="sft_loss", kl_coef=0.1))
    theirs = AutoModelForCausalLM.from_pretrained(model / "model", dtype=torch.float32)
    losses = []
    for sample in STEPS[0]:
        ids = torch.tensor([sample.token_ids])
        mask = torch.tensor([[*[0] * sample.prompt_length, *sample.loss_mask]])
        losses.append(theirs(ids, labels=ids.masked_fill(mask == 0, -100)).loss)
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in theirs.parameters()])
    assert found["metrics"]["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["metrics"]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    assert found["metrics"]["train/entropy"] > 0
    assert found["reference"] == found["logprobs"], "before any update the policy is the reference"


def in_answers(actor: Any, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Train a step on answers made of several samples; return its metrics and earlier log-probs.

    Each entry of ``sizes`` is the number of consecutive samples of STEPS[0] that form one answer.
    """
    actor.import_weights()
    taken, batches = iter(STEPS[0]), []
    for size in sizes:
        own = [next(taken) for _ in range(size)]
        total = sum(sum(sample.loss_mask) for sample in own)
        weights = [sum(sample.loss_mask) / total for sample in own]
        batches += [
            replace(one, weight=w, count=int(at == 0))
            for at, (one, w) in enumerate(zip(own, weights, strict=True))
        ]
    num_tokens = sum(sum(sample.loss_mask) for sample in batches)
    batch = TrainBatch((tuple(batches),), num_samples=len(sizes), num_tokens=num_tokens)
    return {
        "logprobs": actor.compute_logprobs(batch)[0],
        "metrics": dict(actor.train_step(batch).metrics),
    }


@pytest.mark.parametrize("per_token", [False, True])
def test_samples_of_one_answer_weigh_as_one_sample_of_all_their_tokens(model, per_token):
    """The mean over answers of the mean over the tokens of all samples of an answer."""
    sizes = (1, 3, 2)
    own = settings(model, loss_type="sft_loss", calculate_per_token_loss=per_token)
    (found,) = run_ranks(partial(in_answers, sizes=sizes), 1, own)
    taken, means, tokens = iter(zip(STEPS[0], found["logprobs"], strict=False)), [], []
    for size in sizes:
        pairs = [
            pair
            for sample, values in itertools.islice(taken, size)
            for pair in zip(values, sample.loss_mask, strict=True)
        ]
        of_answer = [-value for value, mask in pairs if mask]
        means.append(sum(of_answer) / len(of_answer))
        tokens += of_answer
    expected = sum(tokens) / len(tokens) if per_token else sum(means) / len(means)
    assert found["metrics"]["train/loss"] == pytest.approx(expected, rel=1e-5)


def test_a_custom_loss_trains_and_its_statistics_are_on_every_rank(model):
    own = settings(
        model,
        loss_type="custom_loss",
        custom_loss_function_path=f"{model}/mine.py:reinforce",
        pipeline_model_parallel_size=2,
    )
    first, last = run_ranks(one_step, 2, own)
    assert first["trained"] and first["metrics"] == last["metrics"]
    pairs = [
        (value, mask)
        for micro, found in zip(last["batch"].micro_batches, last["logprobs"], strict=True)
        for sample, values in zip(micro, found, strict=True)
        for value, mask in zip(values, sample.loss_mask, strict=True)
    ]
    mean = sum(value * mask for value, mask in pairs) / sum(mask for _, mask in pairs)
    assert first["metrics"]["train/mine"] == pytest.approx(mean, rel=1e-5)
    assert first["metrics"]["train/mine_max"] == pytest.approx(
        max(-value * mask for value, mask in pairs), rel=1e-5
    )


def with_advantages_apart(actor: Any, apart: bool) -> dict[str, float]:
    """Return the metrics of a step whose advantages are in the batch, or separate from it.

    With --kl-coef they are separate.
    """
    actor.import_weights()
    batch = my_batch(actor, STEPS[0], max_tokens=64)
    if not apart:
        return dict(actor.train_step(batch).metrics)
    zeros = batch.with_advantages([0.0] * len(batch.samples))
    per_token = [sample.advantages for sample in batch.samples]
    return dict(actor.train_step(zeros, None, per_token).metrics)


def test_separate_advantages_replace_those_in_the_batch(model):
    (together,), (apart,) = (
        run_ranks(partial(with_advantages_apart, apart=apart), 1, settings(model))
        for apart in (False, True)
    )
    assert together == apart
    assert together["train/loss"] != 0.0


def try_each(actor: Any, functions: Sequence[str]) -> dict[str, Any]:
    """Train a step with each custom loss, with the same weights before.

    Returns by function its error, and whether weights or optimizer state differ afterwards.
    """
    actor.import_weights()
    batch = my_batch(actor, STEPS[0], max_tokens=64)
    healthy = actor.config
    actor.train_step(batch)  # so that the optimizer has a state
    results = {}
    for function in functions:
        custom = {"loss_type": "custom_loss", "custom_loss_function_path": function}
        actor.passes._config = actor.config = with_values(healthy, **custom)
        before, error = state_of(actor), ""
        try:
            actor.train_step(batch)
        except TrainingError as raised:
            error = str(raised)
        results[function] = {"error": error, "changed": state_of(actor) != before}
    return results


def state_of(actor: Any) -> tuple[object, ...]:
    """Weights, state of the optimizer and number of steps."""
    kept = []
    for part in actor.optimizer.chained_optimizers:
        for parameter, state in part.optimizer.state.items():
            kept += [parameter.detach(), *(state[key] for key in sorted(state))]
    hashes = [hashlib.sha256(torch.as_tensor(each).numpy().tobytes()).hexdigest() for each in kept]
    assert hashes
    return (actor.weights_hash(), actor.num_optimizer_steps, *hashes)


MUON = {"optimizer": "muon", "use_distributed_optimizer": False}


@pytest.mark.parametrize(
    "kind",
    [{}, MUON, {"use_distributed_optimizer": False, "clip_grad": 0.0}, {"lora_rank": 2}],
    ids=["distributed", "muon", "unclipped", "lora"],
)
def test_a_loss_or_gradient_of_nan_is_an_error_before_it_reaches_weights_and_optimizer(model, kind):
    """On both ranks alike, with step and loss in the message; NaN outside the mask has no effect."""
    broken, steep, outside = (
        f"{model}/mine.py:{name}" for name in ("broken", "steep", "nan_outside")
    )
    ranks = run_ranks(
        partial(try_each, functions=(broken, steep, outside)),
        2,
        settings(model, tensor_model_parallel_size=2, **kind),
    )
    first = ranks[0]
    assert [rank[one]["error"] for rank in ranks for one in rank] == [
        one["error"] for one in first.values()
    ] * 2
    assert first[broken]["error"].startswith(
        f"optimizer step 2, --custom-loss-function-path {broken}: train/loss = nan, "
        "train/grad_norm = nan: not a number of a healthy step"
    )
    assert first[steep]["error"].startswith(
        f"optimizer step 2, --custom-loss-function-path {steep}: train/grad_norm = nan: not a"
    )
    assert not any(rank[one]["changed"] for rank in ranks for one in (broken, steep))
    assert first[outside] == {"error": "", "changed": True}

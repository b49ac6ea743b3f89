"""Distillation in the real actor, compared with loops over transformers at several layouts.

The teacher's log-probs are columns of the samples, as its engines give them. Its size and depth
differ from the student's.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.columns import FloatColumn
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.tree import Config
from rlpost.driver.distillation import rank_distances, with_teacher
from rlpost.types import Sample, SampleGroup, ScoredSample, TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

COEF = 0.3


def make_teacher(folder: Path) -> None:
    """Make a Llama that shares nothing with the student but the vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distillation")
    make_model(folder / "student", tied=False)
    make_teacher(folder / "teacher")
    return folder


def settings(models: Path, **changes: Any) -> Config:
    given = dict(
        lr=1e-3,
        distributed_timeout_minutes=2,
        use_opd=True,
        opd_kl_coef=COEF,
        opd_teacher_url="http://teacher",
    )
    return rank_config(str(models / "student"), **(given | changes))


def of_hugging_face(folder: Path, sample: TrainSample) -> list[float]:
    """Return log-probs of the response tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(list(sample.token_ids))
    with torch.no_grad():
        logprobs = model(ids[None]).logits[0].log_softmax(-1)
    picked = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    return picked[sample.prompt_length - 1 :].tolist()


@pytest.fixture(scope="module")
def taught(models: Path) -> list[TrainSample]:
    """The samples with the teacher's log-probs."""
    return [
        replace(sample, teacher_logprobs=of_hugging_face(models / "teacher", sample))
        for sample in STEPS[0]
    ]


def step_of_loss(actor: Any, *, samples: list[TrainSample]) -> dict[str, Any]:
    """Train a step with advantages of 0; return its metrics and the policy's log-probs."""
    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=64)
    batch = batch.with_advantages([0.0] * len(batch.samples))
    own = [list(column) for micro in actor.compute_logprobs(batch) for column in micro]
    return {"own": own, "samples": batch.samples, "metrics": dict(actor.train_step(batch).metrics)}


@pytest.fixture(scope="module")
def alone(models: Path, taught: list[TrainSample]) -> dict[str, Any]:
    (found,) = run_ranks(step_of_loss, 1, settings(models, opd_form="loss"), samples=taught)
    return found


def test_the_loss_is_half_the_squared_distance_and_the_metric_its_mean(alone):
    losses, distances = [], []
    for own, sample in zip(alone["own"], alone["samples"], strict=True):
        rows = zip(own, sample.teacher_logprobs, sample.loss_mask, strict=True)
        difference = [p - q for p, q, is_trained in rows if is_trained]
        losses.append(sum(d * d / 2 for d in difference) / len(difference))
        distances += difference
    metrics = alone["metrics"]
    assert metrics["train/opd_reverse_kl"] == pytest.approx(
        sum(distances) / len(distances), rel=1e-4
    )
    assert metrics["train/loss"] == pytest.approx(COEF * sum(losses) / len(losses), rel=1e-4)
    assert metrics["train/pg_loss"] == 0.0


def test_splitting_the_tokens_does_not_change_the_step(models, taught, alone):
    """The step over the teacher's top tokens, below, is computed at more layouts."""
    given = settings(models, opd_form="loss", context_parallel_size=2)
    *_, last = run_ranks(step_of_loss, 2, given, samples=taught)
    for name in ("train/loss", "train/opd_reverse_kl", "train/grad_norm"):
        assert last["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-3), name


TOP_K = 9


@pytest.fixture(scope="module")
def top_k_of_hugging_face(models: Path) -> dict[str, Any]:
    """Return the step with --opd-top-k in plain torch: one sample at a time, over full logits."""
    student, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        for name in ("student", "teacher")
    )
    loss, total, num_tokens, columns = torch.zeros(()), 0.0, 0, {}
    for sample in STEPS[0]:
        ids = torch.tensor([list(sample.token_ids)])
        part = slice(sample.prompt_length - 1, -1)
        p = student(ids).logits[0, part].log_softmax(-1)
        with torch.no_grad():
            q = teacher(ids).logits[0, part].log_softmax(-1)
        distances = []
        for row, of_teacher in zip(p, q, strict=True):
            chosen = of_teacher.topk(TOP_K).indices
            others = torch.ones(len(row), dtype=torch.bool).index_fill(0, chosen, value=False)
            rest, rest_of_teacher = row[others].exp().sum(), of_teacher[others].exp().sum()
            distance = rest * (rest / rest_of_teacher).log()
            for token in chosen:
                distance = distance + row[token].exp() * (row[token] - of_teacher[token])
            distances.append(distance)
        top = q.topk(TOP_K, dim=1)
        columns[tuple(sample.token_ids)] = (top.indices.flatten(), top.values.flatten())
        mask = torch.tensor(list(sample.loss_mask))
        masked = torch.stack(distances) * mask
        loss = loss + COEF * masked.sum() / mask.sum() / len(STEPS[0])
        total, num_tokens = total + masked.sum().item(), num_tokens + int(mask.sum())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    return {
        "train/loss": loss.item(),
        "train/opd_reverse_kl": total / num_tokens,
        "train/grad_norm": norm.item(),
        "columns": {key: (ids.tolist(), values.tolist()) for key, (ids, values) in columns.items()},
    }


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["tp1", "tp2_sp", "pp2", "cp2"],
)
def test_the_step_over_the_teachers_top_tokens_equals_a_loop_over_full_logits(
    models, top_k_of_hugging_face, layout
):
    columns = top_k_of_hugging_face["columns"]
    samples = [
        replace(sample, teacher_top_ids=ids, teacher_top_logprobs=values)
        for sample in STEPS[0]
        for ids, values in [columns[tuple(sample.token_ids)]]
    ]
    given = settings(models, opd_form="loss", opd_top_k=TOP_K, **layout)
    *_, found = run_ranks(step_of_loss, 2 if layout else 1, given, samples=samples)
    for name in ("train/loss", "train/opd_reverse_kl", "train/grad_norm"):
        expected = top_k_of_hugging_face[name]
        assert found["metrics"][name] == pytest.approx(expected, rel=1e-3), name


NUM_STEPS = 12


def distil(actor: Any, *, student: str, form: str) -> list[float]:
    """Train on answers that the student generated; return the mean divergence before each step."""
    import itertools
    import random

    from rlpost.algorithm.distillation import distances
    from rlpost.types import TrainBatch

    actor.import_weights()
    source, found = random.Random(5), []
    torch.manual_seed(5)
    for _ in range(NUM_STEPS):
        actor.export(student)
        model = AutoModelForCausalLM.from_pretrained(student, dtype=torch.float32)
        prompts = torch.tensor([[source.randrange(96) for _ in range(4)] for _ in range(64)])
        made = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            min_new_tokens=6,
            max_new_tokens=6,
        )
        uniform = FloatColumn([-math.log(96)] * 6)
        samples = tuple(
            TrainSample(tuple(ids), 4, (1,) * 6, (0.0,) * 6, 0.0, teacher_logprobs=uniform)
            for ids in made.tolist()
        )
        batch = TrainBatch((samples,), num_samples=64, num_tokens=64 * 6)
        own = itertools.chain.from_iterable(actor.compute_logprobs(batch))
        of_samples = [
            distances(p, uniform, sample.loss_mask) for p, sample in zip(own, samples, strict=True)
        ]
        found.append(sum(map(sum, of_samples)) / batch.num_tokens)
        if form == "advantage":
            advantages = [FloatColumn(-d for d in column) for column in of_samples]
            batch = batch.with_advantages(advantages)
        actor.train_step(batch)
    return found


@pytest.mark.parametrize("form", ["advantage", "loss"])
def test_the_divergence_falls_while_the_student_learns_from_its_own_answers(models, tmp_path, form):
    """Transformers samples from the weights that the actor exports after each step.

    The teacher prefers no token, so the divergence is log 96 less the entropy of the student.
    """
    given = settings(models, opd_form=form, opd_kl_coef=1.0, lr=1e-2)
    (found,) = run_ranks(distil, 1, given, student=str(tmp_path / "student"), form=form)
    first, last = sum(found[:2]) / 2, sum(found[-2:]) / 2
    print(form, [round(value, 2) for value in found])
    assert last < 0.8 * first


GAMMA, LAMBDA = 0.95, 0.9


def beside_critic(
    actor: Any, *, critic: str, samples: list[TrainSample], teaches: bool = True
) -> dict[str, Any]:
    """Take a step of critic and policy as ``Training`` does.

    The reward of a sample, here its ``advantage``, goes through GAE, and the teacher is added to
    the advantages.
    """
    actor.import_weights()
    actor.export_critic(critic)
    batch = my_batch(actor, samples, max_tokens=64)
    own, values = actor.compute_logprobs(batch), actor.compute_values(batch)
    groups = [_scored(number, sample) for number, sample in enumerate(batch.samples)]
    by_group = [[column] for micro in values for column in micro]
    found = estimate_with_values(
        groups, by_group, None, Discounts(GAMMA, LAMBDA), normalize_advantages=False
    )
    advantages = found.advantages
    if teaches:
        policy = [column for micro in own for column in micro]
        distances = dict(enumerate(rank_distances(batch.samples, policy)))
        given = DistillationConfig(use_opd=True, opd_kl_coef=COEF)
        advantages = with_teacher(advantages, groups, GrpoConfig(), given, distances)
    metrics = dict(actor.train_critic(batch, values, [one for (one,) in found.returns]).metrics)
    metrics |= actor.train_step(batch, None, [one for (one,) in advantages]).metrics
    return metrics | {"critic": actor.critic.weights_hash(max_bytes=10_000)}


def _scored(number: int, sample: TrainSample) -> SampleGroup:
    prompt, answer = (
        tuple(sample.token_ids[: sample.prompt_length]),
        tuple(sample.token_ids[sample.prompt_length :]),
    )
    zeros = (0.0,) * len(answer)
    mask = tuple(sample.loss_mask)
    made = Sample(number, 0, prompt, answer, zeros, "", "stop", 0, loss_mask=mask)
    return SampleGroup(number, (ScoredSample(made, float(sample.advantage)),))


def loop_of_hugging_face(models: Path, critic: Path) -> dict[str, float]:
    """Return the same step in plain torch: one sample and one token at a time."""
    from transformers import AutoModelForTokenClassification

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        for name in ("student", "teacher")
    )
    valued = AutoModelForTokenClassification.from_pretrained(critic, dtype=torch.float32)
    loss, squares, num_actions = torch.zeros(()), 0.0, 0
    for sample in STEPS[0]:
        ids = torch.tensor([list(sample.token_ids)])
        part = slice(sample.prompt_length - 1, -1)
        tokens = ids[0, sample.prompt_length :, None]
        p = student(ids).logits[0, part].log_softmax(-1).gather(1, tokens)[:, 0]
        with torch.no_grad():
            q = teacher(ids).logits[0, part].log_softmax(-1).gather(1, tokens)[:, 0]
            values = valued(ids).logits[0, part, 0]
        actions = [place for place, kept in enumerate(sample.loss_mask) if kept]
        follows, advantage, own = 0.0, 0.0, torch.zeros(())
        for place in reversed(actions):
            reward = sample.advantage if place == actions[-1] else 0.0
            delta = reward + GAMMA * follows - values[place].item()
            advantage, follows = delta + GAMMA * LAMBDA * advantage, values[place].item()
            taught = advantage - COEF * (p[place] - q[place]).item()
            own = own - taught * (p[place] - p[place].detach()).exp()
            squares += advantage * advantage / 2
        loss = loss + own / len(actions) / len(STEPS[0])
        num_actions += len(actions)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
    return {
        "train/loss": loss.item(),
        "train/grad_norm": norm.item(),
        "train/value_loss": squares / num_actions,  # a mean over trained tokens, as all metrics
    }


@pytest.mark.parametrize("layout", [{}, {"tensor_model_parallel_size": 2}], ids=["tp1", "tp2_sp"])
def test_a_step_with_critic_and_teacher_equals_a_loop_over_transformers(
    models, taught, tmp_path, layout
):
    """The policy gets both signals; the critic learns only the rewards."""
    if layout:
        layout = {**layout, "sequence_parallel": True}
    given = settings(
        models, advantage_estimator="ppo", critic_lr=1e-3, opd_form="advantage", **layout
    )
    ranks = 2 if layout else 1
    *_, found = run_ranks(
        beside_critic, ranks, given, critic=str(tmp_path / "critic"), samples=taught
    )
    expected = loop_of_hugging_face(models, tmp_path / "critic")
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    folder = str(tmp_path / "again")
    *_, without = run_ranks(
        beside_critic, ranks, given, critic=folder, samples=taught, teaches=False
    )
    assert without["critic"] == found["critic"]
    assert abs(without["train/grad_norm"] - found["train/grad_norm"]) > 1e-2

"""A teacher in the real actor, compared with Hugging Face at several layouts.

Its size and depth differ from the student's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.columns import FloatColumn
from rlpost.config.groups.distillation import DistillationConfig
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.config.tree import Config
from rlpost.driver.distillation import rank_distances, with_teacher
from rlpost.errors import ConfigError
from rlpost.types import Sample, SampleGroup, ScoredSample, TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.samples import STEPS
from tests.contract.test_actor import make_model
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)

TEMPERATURE, COEF = 0.8, 0.3


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
        rollout_temperature=TEMPERATURE,
        distributed_timeout_minutes=2,
        use_opd=True,
        opd_type="megatron",
        opd_kl_coef=COEF,
        opd_teacher_load=str(models / "teacher"),
    )
    return rank_config(str(models / "student"), **(given | changes))


def seen(actor: Any, *, with_server: bool = False) -> dict[str, Any]:
    """Train a step with advantages of 0; return its metrics and log-probs under both models.

    The teacher's log-probs are computed before and after the step.
    """
    actor.import_weights()
    batch = my_batch(actor, STEPS[0], max_tokens=64)
    batch = batch.with_advantages([0.0] * len(batch.samples))
    before, own = actor.weights_hash(), actor.compute_logprobs(batch)
    teacher = None if with_server else actor.compute_teacher_logprobs(batch)
    assert actor.weights_hash() == before, "the teacher's pass leaves the policy as it is"
    freed = []
    if actor._teacher is not None:
        freed = [storage.nbytes() for storage, _, _ in actor._teacher._weights._copies]
    metrics = dict(actor.train_step(batch).metrics)
    again = None if with_server else actor.compute_teacher_logprobs(batch)
    return {"samples": batch.samples, "own": own, "teacher": teacher, "again": again,
            "metrics": metrics, "freed": freed, "hash": actor.weights_hash()}  # fmt: skip


def by_sample(found: dict[str, Any], what: str) -> dict[tuple[int, ...], list[float]]:
    flat = [column for micro in found[what] for column in micro]
    pairs = zip(found["samples"], flat, strict=True)
    return {tuple(sample.token_ids): list(column) for sample, column in pairs}


def of_hugging_face(folder: Path, sample: TrainSample) -> torch.Tensor:
    """Return log-probs of the response tokens at the temperature of the settings."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor(list(sample.token_ids))
    with torch.no_grad():
        logprobs = (model(ids[None]).logits[0] / TEMPERATURE).log_softmax(-1)
    picked = logprobs[:-1].gather(1, ids[1:, None])[:, 0]
    return picked[sample.prompt_length - 1 :]


@pytest.fixture(scope="module")
def alone(models: Path) -> dict[str, Any]:
    (found,) = run_ranks(seen, 1, settings(models, opd_form="loss"))
    return found


def test_log_probs_of_a_teacher_of_another_family_and_size_are_those_of_hugging_face(models, alone):
    found = by_sample(alone, "teacher")
    for sample in STEPS[0][:3]:
        expected = of_hugging_face(models / "teacher", sample)
        assert found[tuple(sample.token_ids)] == pytest.approx(expected.tolist(), abs=2e-4)


def test_a_step_of_the_student_leaves_the_teacher_unchanged_and_its_memory_is_freed_between_passes(
    alone,
):
    assert alone["teacher"] == alone["again"]
    assert alone["freed"] and set(alone["freed"]) == {0}


def test_the_loss_is_half_the_squared_distance_and_the_metric_its_mean(alone):
    own, teacher = by_sample(alone, "own"), by_sample(alone, "teacher")
    losses, distances = [], []
    for sample in STEPS[0]:
        key = tuple(sample.token_ids)
        difference = [
            p - q
            for p, q, kept in zip(own[key], teacher[key], sample.loss_mask, strict=True)
            if kept
        ]
        losses.append(sum(d * d / 2 for d in difference) / len(difference))
        distances += difference
    metrics = alone["metrics"]
    assert metrics["train/opd_reverse_kl"] == pytest.approx(
        sum(distances) / len(distances), rel=1e-4
    )
    assert metrics["train/loss"] == pytest.approx(COEF * sum(losses) / len(losses), rel=1e-4)
    assert metrics["train/pg_loss"] == 0.0


def test_log_probs_from_a_server_train_as_those_from_the_trainer_do(models, alone, monkeypatch):
    """The same log-probs as columns of the samples give the same step, to the last bit."""
    scores = by_sample(alone, "teacher")
    (found,) = run_ranks(
        _with_columns,
        1,
        settings(models, opd_form="loss", opd_type="sglang", opd_teacher_load=None),
        scores=scores,
    )
    assert found["metrics"] == alone["metrics"]
    assert found["hash"] == alone["hash"]


def _with_columns(actor: Any, *, scores: dict[tuple[int, ...], list[float]]) -> dict[str, Any]:
    from dataclasses import replace

    for position, sample in enumerate(STEPS[0]):
        column = FloatColumn(scores[tuple(sample.token_ids)])
        STEPS[0][position] = replace(sample, teacher_logprobs=column)
    return seen(actor, with_server=True)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
    ],
    ids=["tp2_sp", "pp2", "cp2"],
)
def test_the_layout_does_not_change_the_teacher_or_the_step(models, alone, layout):
    *_, last = run_ranks(seen, 2, settings(models, opd_form="loss", **layout))
    found, expected = by_sample(last, "teacher"), by_sample(alone, "teacher")
    for key, values in found.items():
        assert values == pytest.approx(expected[key], abs=2e-4)
    for name in ("train/loss", "train/opd_reverse_kl", "train/grad_norm"):
        assert last["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-3), name


TOP_K = 9


@pytest.fixture(scope="module")
def top_k_of_hugging_face(models: Path) -> dict[str, Any]:
    """Return the step with --opd-top-k in plain torch: one sample at a time, over full logits."""
    from transformers import AutoModelForCausalLM

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        for name in ("student", "teacher")
    )
    loss, total, num_tokens, columns = torch.zeros(()), 0.0, 0, {}
    for sample in STEPS[0]:
        ids = torch.tensor([list(sample.token_ids)])
        part = slice(sample.prompt_length - 1, -1)
        p = (student(ids).logits[0, part] / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            q = (teacher(ids).logits[0, part] / TEMPERATURE).log_softmax(-1)
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
    ("kind", "layout"),
    [
        ("megatron", {}),
        ("megatron", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        ("megatron", {"pipeline_model_parallel_size": 2}),
        ("megatron", {"context_parallel_size": 2}),
        ("sglang", {"context_parallel_size": 2}),
    ],
    ids=["tp1", "tp2_sp", "pp2", "cp2", "server_cp2"],
)
def test_the_step_over_the_teachers_top_tokens_equals_a_loop_over_full_logits(
    models, top_k_of_hugging_face, kind, layout
):
    given = settings(
        models,
        opd_form="loss",
        opd_top_k=TOP_K,
        opd_type=kind,
        opd_teacher_load=str(models / "teacher") if kind == "megatron" else None,
        **layout,
    )
    columns = None if kind == "megatron" else top_k_of_hugging_face["columns"]
    *_, found = run_ranks(top_k_step, 2 if layout else 1, given, columns=columns)
    for name in ("train/loss", "train/opd_reverse_kl", "train/grad_norm"):
        assert found[name] == pytest.approx(top_k_of_hugging_face[name], rel=1e-3), name


def top_k_step(actor: Any, *, columns: dict[tuple[int, ...], Any] | None) -> dict[str, float]:
    """Return the metrics of one step with advantages of 0; ``columns`` are those of a server."""
    from dataclasses import replace

    actor.import_weights()
    samples = list(STEPS[0])
    for position, sample in enumerate(samples if columns else ()):
        ids, values = columns[tuple(sample.token_ids)]
        samples[position] = replace(sample, teacher_top_ids=ids, teacher_top_logprobs=values)
    batch = my_batch(actor, samples, max_tokens=64)
    batch = batch.with_advantages([0.0] * len(batch.samples))
    return dict(actor.train_step(batch).metrics)


def test_a_teacher_that_cannot_be_sharded_like_the_policy_is_refused_before_it_is_built(models):
    from rlpost.trainer.actor import Actor

    with pytest.raises(ConfigError, match=r"--opd-teacher-load .*--pipeline-model-parallel-size 2"):
        make_odd(models / "odd")
        Actor(
            settings(models, opd_teacher_load=str(models / "odd"), pipeline_model_parallel_size=2)
        )


def make_odd(folder: Path) -> None:
    """Write the configuration of a teacher with three layers."""
    import json

    folder.mkdir()
    config = json.loads((folder.parent / "teacher/config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))


NUM_STEPS = 12


def distil(actor: Any, *, student: str, form: str) -> list[float]:
    """Train on answers that the student generated; return the mean divergence before each step."""
    import itertools
    import random

    from transformers import AutoModelForCausalLM

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
        samples = tuple(
            TrainSample(tuple(ids), 4, (1,) * 6, (0.0,) * 6, 0.0) for ids in made.tolist()
        )
        batch = TrainBatch((samples,), num_samples=64, num_tokens=64 * 6)
        own, theirs = actor.compute_logprobs(batch), actor.compute_teacher_logprobs(batch)
        chain = itertools.chain.from_iterable
        of_samples = [
            distances(p, q, sample.loss_mask)
            for p, q, sample in zip(chain(own), chain(theirs), samples, strict=True)
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
    from safetensors.torch import load_file, save_file

    teacher = tmp_path / "teacher"
    shutil.copytree(models / "teacher", teacher)
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"].zero_()
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    given = settings(
        models,
        opd_form=form,
        opd_kl_coef=1.0,
        opd_teacher_load=str(teacher),
        lr=1e-2,
        rollout_temperature=1.0,
    )
    (found,) = run_ranks(distil, 1, given, student=str(tmp_path / "student"), form=form)
    first, last = sum(found[:2]) / 2, sum(found[-2:]) / 2
    print(form, [round(value, 2) for value in found])
    assert last < 0.8 * first


GAMMA, LAMBDA = 0.95, 0.9


def beside_critic(actor: Any, *, critic: str, teaches: bool = True) -> dict[str, Any]:
    """Take a step of critic and policy as ``Training`` does.

    The reward of a sample, here its ``advantage``, goes through GAE, and the teacher is added to
    the advantages.
    """
    actor.import_weights()
    actor.export_critic(critic)
    batch = my_batch(actor, STEPS[0], max_tokens=64)
    own, values = actor.compute_logprobs(batch), actor.compute_values(batch)
    groups = [_scored(number, sample) for number, sample in enumerate(batch.samples)]
    by_group = [[column] for micro in values for column in micro]
    found = estimate_with_values(
        groups, by_group, None, Discounts(GAMMA, LAMBDA), normalize_advantages=False
    )
    advantages = found.advantages
    if teaches:
        teacher = actor.compute_teacher_logprobs(batch)
        flat = ([column for micro in one for column in micro] for one in (own, teacher))
        distances = dict(enumerate(rank_distances(batch.samples, *flat)))
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
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

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
        p = (student(ids).logits[0, part] / TEMPERATURE).log_softmax(-1).gather(1, tokens)[:, 0]
        with torch.no_grad():
            q = (teacher(ids).logits[0, part] / TEMPERATURE).log_softmax(-1).gather(1, tokens)[:, 0]
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
def test_a_step_with_critic_and_teacher_equals_a_loop_over_transformers(models, tmp_path, layout):
    """The policy gets both signals; the critic learns only the rewards."""
    if layout:
        layout = {**layout, "sequence_parallel": True}
    given = settings(
        models, advantage_estimator="ppo", critic_lr=1e-3, opd_form="advantage", **layout
    )
    ranks = 2 if layout else 1
    *_, found = run_ranks(beside_critic, ranks, given, critic=str(tmp_path / "critic"))
    expected = loop_of_hugging_face(models, tmp_path / "critic")
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    folder = str(tmp_path / "again")
    *_, without = run_ranks(beside_critic, ranks, given, critic=folder, teaches=False)
    assert without["critic"] == found["critic"]
    assert abs(without["train/grad_norm"] - found["train/grad_norm"]) > 1e-2

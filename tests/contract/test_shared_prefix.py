"""Samples that share their beginning are trained as separate ones are (--share-prefix)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlpost.algorithm.shared_prefix import shared_lengths
from rlpost.columns import RouteColumn
from rlpost.config.flags import fields
from rlpost.config.wording import with_values
from rlpost.rollout.policy_versions import PolicyVersions
from rlpost.trainer.packing import RowLayout, pack
from rlpost.types import TrainSample
from tests.contract.actor_ranks import my_batch, run_ranks
from tests.contract.critic_ranks import by_sample, train_critic
from tests.contract.layouts import (
    DENSE,
    FULL,
    GEMMA,
    LIMIT,
    LONG,
    MOE,
    TIED,
    Comparison,
    Layout,
    ep,
    pp,
    tp,
)
from tests.contract.lora_ranks import train_adapters
from tests.contract.replay_ranks import replay
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
SHARED: dict[str, Any] = {"share_prefix": True}
KINDS = (
    Layout("one rank, recomputed", DENSE, 1, FULL),
    Layout("tp2-sp-pp2", TIED, 4, tp(2) | pp(2)),
    Layout("tp2", DENSE, 2, tp(2, sp=False)),
    Layout("gspo and KL", DENSE, 2, tp(2), "gspo-kl"),
    Layout("entropy and importance", DENSE, 2, tp(2) | {"log_probs_chunk_size": 7}, "entropy-tis"),
    Layout("cispo", DENSE, 2, pp(2), "cispo"),
    Layout("experts", MOE, 4, tp(2) | ep(2, 1) | pp(2)),
    Layout("windows and two rotations", GEMMA, 2, tp(2)),
    Layout("rotation over longer contexts", LONG, 2, pp(2)),
)


def random_group(source: random.Random, beginning: list[int]) -> list[TrainSample]:
    """Return answers of one prompt; the last two are a conversation whose second turn goes on."""
    prompt = beginning + [source.randrange(96) for _ in range(source.randint(4, 12))]
    answers = [[source.randrange(96) for _ in range(source.randint(1, 9))] for _ in range(3)]
    answers.append(answers[-1] + [source.randrange(96) for _ in range(5)])
    return [
        TrainSample(
            token_ids=prompt + answer,
            prompt_length=len(prompt),
            loss_mask=[1, *(int(source.random() < 0.8) for _ in answer[1:])],
            rollout_logprobs=[-4 * source.random() for _ in answer],
            advantage=source.uniform(-2, 2),
        )
        for answer in answers
    ]


def steps_of(num_steps: int) -> list[list[TrainSample]]:
    source = random.Random(11)
    system = [source.randrange(96) for _ in range(9)]  # begins every prompt
    return [
        [sample for _ in range(2) for sample in random_group(source, system)]
        for _ in range(num_steps)
    ]


STEPS = steps_of(2)


@pytest.fixture(scope="module")
def compare(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return Comparison(tmp_path_factory.mktemp("shared"), steps=STEPS)


@pytest.mark.parametrize("layout", KINDS, ids=lambda layout: layout.name)
def test_loss_gradients_and_weights_are_those_of_separate_samples(compare, layout):
    """Relative to one process without sharing, in float32."""
    shared = Layout(
        layout.name, layout.model, layout.num_ranks, SHARED | layout.settings, layout.algorithm
    )
    assert compare(shared).largest < LIMIT


Both = Callable[..., tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def both(compare: Comparison) -> Both:
    """Return a function that runs ranks with and without sharing: what rank 0 returns."""

    def run(
        function: Callable[..., Any], model: str, *, num_ranks: int = 1, **given: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        of_settings = {"megatron", *fields()}
        changes: dict[str, Any] = {"lr": 1e-3, "adam_eps": 1e-4, "distributed_timeout_minutes": 2}
        changes |= {name: given.pop(name) for name in list(given) if name in of_settings}
        settings = rank_config(str(compare.model(model)), **changes)
        shared, separate = (
            run_ranks(function, num_ranks, with_values(settings, share_prefix=shares), **given)[0]
            for shares in (True, False)
        )
        return shared, separate

    return run


def assert_same_metrics(shared: dict[str, float], separate: dict[str, float]) -> None:
    """Metrics of routing count a shared row once."""
    of_routing = ("train/routing_", "train/expert_load_")
    names = [name for name in separate if not name.startswith(of_routing)]
    assert [shared[name] for name in names] == pytest.approx(
        [separate[name] for name in names], rel=LIMIT, abs=LIMIT
    )


def test_a_critic_is_trained_as_on_separate_samples(both):
    shared, separate = both(train_critic, DENSE, advantage_estimator="ppo", steps=STEPS)
    for ours, theirs in zip(shared["metrics"], separate["metrics"], strict=True):
        assert_same_metrics(ours, theirs)
    for ours, theirs in zip(shared["values"], separate["values"], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(ours[key] == pytest.approx(theirs[key], abs=LIMIT) for key in ours)


@pytest.mark.parametrize(("model", "num_ranks", "layout"), [(DENSE, 1, {}), (MOE, 2, tp(2))])
def test_adapters_are_trained_as_on_separate_samples(both, model, num_ranks, layout):
    targets = (*rank_config("").lora.lora_targets, *(["experts"] if model == MOE else []))
    # Adam divides small gradients by their own size, which would magnify rounding
    given = {"lora_rank": 4, "lora_targets": targets, "adam_eps": 0.1, **layout}
    shared, separate = both(train_adapters, model, num_ranks=num_ranks, **given, steps=STEPS)
    for ours, theirs in zip(shared["metrics"], separate["metrics"], strict=True):
        assert_same_metrics(ours, theirs)
    assert shared["adapters"].keys() == separate["adapters"].keys()
    for name, factor in separate["adapters"].items():
        assert shared["adapters"][name] == pytest.approx(
            factor, abs=LIMIT * float(abs(factor).max())
        )


@pytest.mark.parametrize("top_k", [None, 3])
def test_log_probs_and_distillation_are_those_of_separate_samples(both, top_k):
    """Log-probs of policy, reference and old policy; the loss has a server's scores."""
    shared, separate = both(
        score, DENSE, samples=[with_scores(sample, top_k) for sample in STEPS[0]], use_kl_loss=True,
        keep_old_actor=True, use_opd=True, opd_type="sglang", opd_form="loss", opd_top_k=top_k,
    )  # fmt: skip
    assert_same_metrics(shared["metrics"], separate["metrics"])
    assert abs(separate["metrics"]["train/opd_reverse_kl"]) > 0.01
    for kind in ("old", "policy", "reference"):
        ours, theirs = shared[kind], separate[kind]
        assert ours.keys() == theirs.keys() and len(ours) == len(STEPS[0])
        assert all(ours[key] == pytest.approx(theirs[key], abs=LIMIT) for key in theirs)
    assert separate["policy"] != separate["old"]


def with_scores(sample: TrainSample, top_k: int | None) -> TrainSample:
    """Return the sample as a server scores it."""
    tokens = sample.token_ids[sample.prompt_length :]
    if top_k is None:
        return replace(sample, teacher_logprobs=[-1 - token / 32 for token in tokens])
    ids = [(token + place) % 96 for token in tokens for place in range(top_k)]
    values = [-1.0 - place for _ in tokens for place in range(top_k)]
    return replace(sample, teacher_top_ids=ids, teacher_top_logprobs=values)


def score(actor: Any, samples: Sequence[TrainSample]) -> dict[str, Any]:
    """Train a step; return its metrics, and log-probs by the tokens of a sample."""
    actor.import_weights()
    batch = my_batch(actor, samples, max_tokens=64)
    old = actor.compute_logprobs(batch)
    metrics = dict(actor.train_step(batch, old, place=PolicyVersions(2).place(1, 1, 1)).metrics)
    found = {
        "old": actor.compute_old_logprobs(batch, 0),
        "policy": actor.compute_logprobs(batch),
        "reference": actor.compute_ref_logprobs(batch),
    }
    return {"metrics": metrics} | {kind: by_sample(batch, values) for kind, values in found.items()}


def test_routes_are_replayed_as_on_separate_samples(both):
    """Engines give routes of all tokens but the last, and others for one prompt of a group."""
    samples = list(map(with_routes, STEPS[0]))
    routes = samples[2].routes.array.copy()
    routes[10:12] = (routes[10:12] + 1) % 8
    samples[2] = replace(samples[2], routes=RouteColumn(routes))
    assert 0 < shared_lengths(samples)[2] < shared_lengths(STEPS[0])[2]
    flags = {"use_rollout_routing_replay": True, "use_routing_replay": True}
    shared, separate = both(replay, MOE, num_ranks=2, **tp(2), **ep(2, 1), **flags, samples=samples)
    assert_same_metrics(shared["metrics"], separate["metrics"])
    assert separate["metrics"]["train/routing_replayed_frac"] == 1.0
    assert separate["metrics"]["train/routing_diff_frac"] > 0.1
    for ours, theirs in zip(shared["logprobs"], separate["logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=LIMIT)
    for name, theirs in separate["gradients"].items():
        assert shared["gradients"][name] == pytest.approx(
            theirs, abs=LIMIT * float(abs(theirs).max())
        )


def with_routes(sample: TrainSample) -> TrainSample:
    """Return the sample with routes that depend on the tokens before each, for three layers."""
    routes = [
        np.random.default_rng(list(sample.token_ids[: end + 1])).random((3, 8)).argsort(1)[:, :2]
        for end in range(len(sample.token_ids) - 1)
    ]
    return replace(sample, routes=RouteColumn(np.array(routes, dtype=np.uint8)))


def test_rows_are_those_of_different_beginnings():
    whole = pack(tuple(STEPS[0]), RowLayout())
    shared = pack(tuple(STEPS[0]), RowLayout(share_prefix=True))
    prefixes = {
        tuple(sample.token_ids)[:end]
        for sample in STEPS[0]
        for end in range(1, len(sample.token_ids) + 1)
    }
    # one row for each different beginning of a sample, and one for each chance repetition
    assert len(prefixes) <= shared.input_ids.size(1) <= len(prefixes) + len(STEPS[0])
    assert shared.input_ids.size(1) < 0.6 * whole.input_ids.size(1)

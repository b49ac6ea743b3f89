"""Routing replay compared with transformers under forced routes: one layout of each kind.

``python -m tests.contract.replayed`` runs all of them.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.contract import forced_routes
from tests.contract.families import MTP, make_family
from tests.contract.layouts import FULL, UNEVEN_MOE, Layout, pp
from tests.contract.replayed import (
    BY_NAME,
    LIMIT,
    SAMPLES,
    TEMPERATURE,
    compare,
    largest_difference,
    loaded,
    make_models,
    run,
)

pytestmark = pytest.mark.timeout(300)
KINDS = (
    "moe-alone",
    "moe-tp2-sp-ep2-pp2",
    "moe-pp2-uneven-recompute",
    "moe-pp2-vpp2-recompute-experts",
    "moe-cp2-pp2-recompute",
    "moe-tp2-sp-cp2",
    "moe-tp2-sp-ep2-etp2",
    "moe-pp4",
    "qwen3-moe-pp2",
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return cache(lambda name: make_models(tmp_path_factory.mktemp(name), name))


@pytest.mark.parametrize("name", KINDS)
def test_log_probs_and_gradients_are_those_of_transformers_with_the_engines_routes(models, name):
    """Some tokens have no routes: the trainer's own router chooses their experts."""
    layout = BY_NAME[name]
    found, wanted, samples = compare(layout, models(layout.model))
    assert max(largest_difference(found, wanted, samples)) < LIMIT
    for metrics in (rank["metrics"] for rank in found):
        assert metrics["train/routing_replayed_frac"] == pytest.approx(wanted.known / wanted.tokens)
        assert metrics["train/routing_diff_frac"] == pytest.approx(wanted.differing / wanted.known)
    assert wanted.differing > 0.1 * wanted.known, "the routers differ, so that replay is seen"


@pytest.mark.parametrize("name", ["moe-tp2-sp-cp2", "moe-pp2-vpp2-recompute-experts"])
def test_the_train_pass_uses_the_experts_that_the_trainer_chose_in_its_first_pass(models, name):
    """Weights and micro-batches differ between the passes."""
    of_model = models(BY_NAME[name].model)
    # the first pass uses the engines' weights
    first = forced_routes.without_gaps(SAMPLES, of_model.routes)
    wanted = forced_routes.expected(of_model.of_trainer(), first, temperature=TEMPERATURE)
    found = run(
        BY_NAME[name], of_model.engines, SAMPLES, then=of_model.trainer, use_routing_replay=True
    )
    _, of_gradients = largest_difference(found, wanted, SAMPLES)
    assert of_gradients < LIMIT
    for metrics in (rank["metrics"] for rank in found):
        assert metrics["train/routing_replayed_frac"] == 1.0
        assert metrics["train/routing_diff_frac"] == pytest.approx(wanted.differing / wanted.known)


def test_with_both_flags_tokens_without_the_engines_routes_keep_those_of_the_first_pass(models):
    layout = BY_NAME["moe-tp2-sp-ep2-pp2"]
    of_model = models(layout.model)
    samples = forced_routes.with_gaps(SAMPLES, of_model.routes)
    first = forced_routes.completed(of_model.of_trainer(), samples)
    wanted = forced_routes.expected(of_model.of_engines(), first, temperature=TEMPERATURE)
    flags = {"use_rollout_routing_replay": True, "use_routing_replay": True}
    found = run(layout, of_model.trainer, samples, then=of_model.engines, **flags)
    _, of_gradients = largest_difference(found, wanted, samples)
    assert of_gradients < LIMIT
    assert found[0]["metrics"]["train/routing_replayed_frac"] == 1.0


def test_the_layer_for_multi_token_prediction_uses_its_own_router(tmp_path):
    """With the given routes the policy computes and trains as it does without that layer."""
    make_family(tmp_path, MTP)
    dice = np.random.default_rng(5)
    shapes = [(len(sample.token_ids), 3) for sample in SAMPLES]
    routes = [dice.random((*shape, 8)).argsort(2)[..., :2].astype(np.uint8) for shape in shapes]
    samples = forced_routes.without_gaps(SAMPLES, routes)
    wanted = forced_routes.expected(loaded(tmp_path), samples, temperature=TEMPERATURE)
    layout = Layout("mtp-pp2-uneven-recompute", MTP, 2, pp(2, **UNEVEN_MOE) | FULL)
    found = run(
        layout, tmp_path, samples, use_rollout_routing_replay=True, enable_mtp_training=True
    )
    assert max(largest_difference(found, wanted, samples)) < LIMIT
    assert found[0]["metrics"]["train/routing_replayed_frac"] == 1.0
    assert found[0]["metrics"]["train/mtp_loss"] > 0

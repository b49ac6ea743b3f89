"""One layer's router with given experts, by Megatron's own arithmetic."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rlpost.trainer  # noqa: F401  (before Megatron: on a CPU it installs the stand-ins)
from rlpost.trainer.routes import UNKNOWN
from rlpost.trainer.routing_replay import LayerRouting, ReplayPass, routing_metrics

megatron = pytest.importorskip("megatron.core.transformer.moe.moe_utils")

EXPERTS, TOPK, SCALE = 8, 2, 1.5
ROUTES = torch.tensor([[5, 1], [0, 7], [UNKNOWN, UNKNOWN], [3, 3], [6, 2]], dtype=torch.int16)
KNOWN = [0, 1, 4]  # the third is not known, the fourth names an expert twice
ROUTERS = {
    "softmax-before": {"use_pre_softmax": True},
    "softmax-after": {},
    "sigmoid": {"score_function": "sigmoid", "scaling_factor": SCALE},
    "sigmoid-bias-groups": {
        "score_function": "sigmoid",
        "expert_bias": torch.linspace(-1, 1, EXPERTS),
        "num_groups": 4,
        "group_topk": 2,
        "scaling_factor": SCALE,
    },
}


def expected_probabilities(name: str, logits: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """Of given experts, written down apart from Megatron."""
    if name == "softmax-before":
        return logits.softmax(1).gather(1, experts)
    if name == "softmax-after":
        return logits.gather(1, experts).softmax(1)
    scores = logits.sigmoid().gather(1, experts)
    return scores / scores.sum(1, keepdim=True) * SCALE


def replaying(routes: torch.Tensor | None, **options: bool) -> tuple[LayerRouting, Any]:
    """A layer in the forward pass of a micro-batch, and what it reports to."""
    current = ReplayPass(
        is_training=True,
        records=False,
        index=0,
        micro_batch=SimpleNamespace(routes=routes),
        **options,
    )
    replay = SimpleNamespace(current=current, counts=torch.zeros(1, 2 + EXPERTS, dtype=torch.int64))
    return LayerRouting(replay, 0), replay


def route(
    logits: torch.Tensor, name: str, layer: LayerRouting | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and map, [tokens, experts]."""
    return megatron.topk_routing_with_score_function(
        logits, TOPK, router_replay=layer, **ROUTERS[name]
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_known_tokens_go_to_the_given_experts_with_the_routers_own_probabilities(name):
    torch.manual_seed(0)
    logits = torch.randn(len(ROUTES), EXPERTS, requires_grad=True)
    layer, replay = replaying(ROUTES[:, None])
    probabilities, goes_to = route(logits, name, layer)
    own_probabilities, own_goes_to = route(logits, name, None)

    given = ROUTES[KNOWN].long()
    assert torch.equal(
        goes_to[KNOWN], torch.zeros(len(KNOWN), EXPERTS).scatter(1, given, 1.0).bool()
    )
    wanted = expected_probabilities(name, logits[KNOWN], given)
    torch.testing.assert_close(probabilities[KNOWN].gather(1, given), wanted)
    unknown = [2, 3]
    assert torch.equal(goes_to[unknown], own_goes_to[unknown])
    assert torch.equal(probabilities[unknown], own_probabilities[unknown])

    weights = torch.randn(len(KNOWN), TOPK)
    (ours,) = torch.autograd.grad(
        (probabilities[KNOWN].gather(1, given) * weights).sum(), logits, retain_graph=True
    )
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), logits)
    torch.testing.assert_close(ours, theirs)

    differing = (goes_to[KNOWN] != own_goes_to[KNOWN]).any(1).sum()
    assert replay.counts[0, :2].tolist() == [len(KNOWN), int(differing)]


def test_backward_repeats_each_forward_pass_with_its_own_experts_in_their_order():
    """Two micro-batches are computed before the first is repeated, with weights that have
    changed.
    """
    layer, replay = replaying(ROUTES[:, None])
    first, second = torch.randn(2, len(ROUTES), EXPERTS)
    with torch.no_grad():  # so Megatron computes what it will compute again
        _, of_first = route(first, "softmax-after", layer)
        replay.current.micro_batch = SimpleNamespace(routes=None)
        _, of_second = route(second, "softmax-after", layer)
    replay.current.micro_batch = None
    assert torch.equal(route(torch.randn(first.shape), "softmax-after", layer)[1], of_first)
    assert torch.equal(route(torch.randn(first.shape), "softmax-after", layer)[1], of_second)
    with pytest.raises(RuntimeError, match="another order"):
        route(first, "softmax-after", layer)


def test_outside_the_actors_passes_the_router_decides():
    layer, replay = replaying(ROUTES[:, None])
    replay.current = None
    logits = torch.randn(len(ROUTES), EXPERTS)
    assert torch.equal(route(logits, "sigmoid", layer)[1], route(logits, "sigmoid", None)[1])


COUNTS = np.array(
    [
        [8.0, 2.0, 10.0, 4.0, 3.0, 3.0],  # known and differing tokens, then those of four experts
        [8.0, 0.0, 5.0, 5.0, 5.0, 5.0],
    ]
)


def test_the_share_of_differing_tokens_is_reported_in_all_and_by_layer():
    metrics = routing_metrics(COUNTS, [1, 3], topk=2, with_replay=True)
    assert metrics["train/routing_replayed_frac"] == pytest.approx(16 / 20)
    assert metrics["train/routing_diff_frac"] == pytest.approx(2 / 16)
    assert metrics["train/routing_diff_frac@1"] == pytest.approx(2 / 8)
    assert metrics["train/routing_diff_frac@3"] == 0


def test_the_load_is_that_of_the_busiest_expert_over_the_mean():
    metrics = routing_metrics(COUNTS, [1, 3], topk=2, with_replay=False)
    assert metrics == {
        "train/expert_load_max": pytest.approx(2.0),
        "train/expert_load_mean": pytest.approx(1.5),
    }


def test_nothing_differs_where_no_routes_are_known():
    counts = COUNTS.copy()
    counts[:, :2] = 0
    metrics = routing_metrics(counts, [0, 1], topk=2, with_replay=True)
    assert metrics["train/routing_replayed_frac"] == metrics["train/routing_diff_frac"] == 0

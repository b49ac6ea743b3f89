"""Tokens outside the loss mask change neither loss nor gradient nor metrics, whatever they hold."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rlpost.algorithm.objective import POLICY_LOSSES
from rlpost.trainer import parallel
from rlpost.trainer.logprobs import HeldScores
from rlpost.trainer.packing import pack
from rlpost.trainer.step import MicroBatchLoss, Weighting
from rlpost.types import TrainSample
from tests.settings import rank_config

MASKS = ((1, 0, 1), (1, 1, 0, 0))
NUM_TOKENS, TOP = 7, 2
INPUTS = ("logprobs", "entropy", "old", "rollout", "ref", "advantages", "teacher", "top", "teacher_top")  # fmt: skip
ALL = dict(
    use_kl_loss=True, kl_loss_coef=0.3, use_unbiased_kl=True, entropy_coef=0.1, use_opsm=True,
    opsm_delta=0.01, use_tis=True, tis_level="sequence", use_opd=True, opd_form="loss",
)  # fmt: skip
"""Settings with which a loss uses every input."""


def packed_samples():
    samples = tuple(
        TrainSample((9, *mask), 1, mask, (-0.5,) * len(mask), (0.25,) * len(mask)) for mask in MASKS
    )
    return pack(samples)


def values(broken: str = "", number: float = math.nan) -> dict[str, torch.Tensor]:
    """Random inputs by name; ``broken`` has ``number`` where the mask is 0."""
    source = torch.Generator().manual_seed(0)
    made = {}
    for name in INPUTS:
        shape = (NUM_TOKENS, TOP) if name.endswith("top") else (NUM_TOKENS,)
        made[name] = -1.5 - torch.rand(shape, generator=source)
    made["advantages"] = torch.randn(NUM_TOKENS, generator=source)
    if broken:
        made[broken][packed_samples().loss_mask == 0] = number
    return made


def losses(settings, given):
    """The loss, its metrics, and its gradients by the inputs that have one."""
    of_loss = MicroBatchLoss(settings, num_valid=4, num_samples=2, num_tokens=4)
    trained = {
        name: given[name].clone().requires_grad_() for name in ("logprobs", "entropy", "top")
    }
    of_loss._logprobs_with_top = lambda *_: tuple(trained.values())
    packed = replace(
        packed_samples(), rollout_logprobs=given["rollout"], advantages=given["advantages"]
    )
    teacher = HeldScores(logprobs=given["teacher"], top_ids=None, top_logprobs=given["teacher_top"])
    loss, _, terms = of_loss.loss(packed, given["old"], given["ref"], torch.empty(0), teacher)
    loss.backward()
    gradients = [each.grad for each in trained.values()]
    return [loss.detach(), *terms.values(), *gradients]


@pytest.mark.parametrize("broken", INPUTS)
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_nan_and_infinity_outside_the_mask_change_nothing(monkeypatch, name, broken):
    alone = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(parallel, "context_parallel_group", lambda: alone)
    for level in ("token", "sequence", "geometric"):
        settings = rank_config("", **(ALL | {"policy_loss": name, "tis_level": level}))
        expected = losses(settings, values())
        assert all(each.isfinite().all() for each in expected)
        assert all(each.any() for each in expected[-3:]), "every trained input has a gradient"
        for number in (math.nan, math.inf, -math.inf):
            found = losses(settings, values(broken, number))
            assert all(map(torch.equal, found, expected)), (level, number)


def test_metrics_and_losses_of_any_kind_ignore_what_is_outside_the_mask():
    """Also those of the critic and of custom losses, whose values come from elsewhere."""
    packed = packed_samples()
    outside = packed.loss_mask == 0
    clean = torch.arange(1.0, NUM_TOKENS + 1)
    broken = clean.masked_fill(outside, math.nan)
    weighting = Weighting(num_samples=2, num_tokens=4, per_token=False)
    reduced = [
        weighting.reduced(each, {"mean": each, "largest_max": each}, packed)
        for each in (clean, broken)
    ]
    assert reduced[0][0] == reduced[1][0] and reduced[0][2] == reduced[1][2]

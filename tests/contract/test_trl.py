"""The policy losses compared with TRL's.

TRL's own GRPOTrainer computes loss and gradient from the same log-probs.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlpost.algorithm.loss import token_weights
from rlpost.algorithm.objective import Tokens, policy_objective
from tests.settings import loss_settings

trl = pytest.importorskip("trl.trainer.grpo_trainer", reason="the dev extra has it")

pytestmark = pytest.mark.timeout(300)

LENGTHS, WIDTH = (7, 3, 9, 1, 5, 6), 9
LIMIT = 1e-6
EPS, EPS_HIGH = 0.2, 0.28
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name: (rlpost's settings, TRL's)
    "grpo": ({}, {}),
    "grpo-kl": ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3"}, {"beta": 0.1}),
    "dual-clip": ({"eps_clip_c": 1.5}, {"delta": 1.5}),
    "per-token": ({"calculate_per_token_loss": True}, {"loss_type": "bnpo"}),
    "per-token-entropy": (
        {"calculate_per_token_loss": True, "entropy_coef": 0.3},
        {"loss_type": "bnpo", "entropy_coef": 0.3},
    ),
    "gspo": ({"policy_loss": "gspo"}, {"importance_sampling_level": "sequence"}),
    "cispo": (  # TRL has no lower bound and gives the upper one as a ratio
        {"policy_loss": "cispo", "calculate_per_token_loss": True, "eps_clip": 1.0},
        {"loss_type": "cispo", "epsilon_high": 1 + EPS_HIGH},
    ),
    "tis": ({"use_tis": True, "tis_clip": 1.2}, {"use_vllm": True}),
    "tis-kl": (
        {
            "use_tis": True,
            "tis_clip": 1.2,
            "use_kl_loss": True,
            "kl_loss_coef": 0.1,
            "kl_loss_type": "k3",
        },
        {"use_vllm": True, "beta": 0.1},
    ),
    "unbiased-kl": (
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
        {"beta": 0.1, "use_bias_correction_kl": True},
    ),
    "opsm": ({"use_opsm": True, "opsm_delta": 0.05}, {"off_policy_mask_threshold": 0.05}),
    "rollout-logprobs": ({"use_rollout_logprobs": True}, {"old": "rollout"}),
}


def batch() -> dict[str, torch.Tensor]:
    """Return padded tensors [samples, width], in float64.

    The log-probs differ enough that every bound applies somewhere.
    """
    source = torch.Generator().manual_seed(11)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(len(LENGTHS), WIDTH, generator=source, dtype=torch.float64)

    logprobs = -2 + noise(0.5)
    return {
        "logprobs": logprobs,
        "old": logprobs + noise(0.4),
        "rollout": logprobs + noise(0.6),
        "ref": logprobs + noise(0.5),
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0)[:, 0],
        "mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double(),
    }


def theirs(given: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    """Return loss and gradient from GRPOTrainer's own method.

    Only its forward pass is replaced, by the given log-probs.
    """
    logprobs = given["logprobs"].clone().requires_grad_()
    defaults = dict(
        loss_type="grpo", importance_sampling_level="token", beta=0.0, epsilon_low=EPS, epsilon_high=EPS_HIGH,
        use_vllm=False, vllm_importance_sampling_correction=True, entropy_coef=0.0, delta=None,
        off_policy_mask_threshold=None, use_bias_correction_kl=False, old="old",
    )  # fmt: skip
    chosen = defaults | options
    delta, is_unbiased = chosen.pop("delta"), chosen.pop("use_bias_correction_kl")
    old = given[chosen.pop("old")]
    trainer = SimpleNamespace(
        **chosen,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, given["entropy"], None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        get_off_policy_mask=trl.GRPOTrainer.get_off_policy_mask,
        args=SimpleNamespace(
            use_bias_correction_kl=is_unbiased, delta=delta, steps_per_generation=1
        ),
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda value: value,
            reduce=lambda value, reduction: value,
        ),
        _entropy_bonus_enabled=chosen["entropy_coef"] > 0,
        use_adaptive_entropy=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.ones_like(given["mask"]).long()
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": given["mask"],
        "advantages": given["advantages"],
        "old_per_token_logps": old,
        "ref_per_token_logps": given["ref"],
        "num_items_in_batch": given["mask"].sum(),
        "importance_sampling_ratio": (given["old"] - given["rollout"]).exp().clamp(max=1.2),
    }
    loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logprobs.grad


def ours(given: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[float, torch.Tensor]:
    logprobs = given["logprobs"].clone().requires_grad_()
    chosen = given["mask"].bool()
    sample = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    lengths = torch.tensor(LENGTHS)[sample]
    settings = loss_settings(**({"eps_clip": EPS, "eps_clip_high": EPS_HIGH} | options))
    tokens = Tokens(
        logprobs=logprobs[chosen],
        entropy=given["entropy"][chosen],
        old_logprobs=given["old"][chosen],
        rollout_logprobs=given["rollout"][chosen],
        ref_logprobs=given["ref"][chosen] if settings.use_kl_loss else None,
        advantages=given["advantages"][sample],
        loss_mask=torch.ones(len(sample)),
        sample_lengths=lengths,
        sample_sums=lambda values: values.new_zeros(len(LENGTHS)).index_add(0, sample, values)[
            sample
        ],
    )
    weights = token_weights(
        lengths,
        num_samples=len(LENGTHS),
        num_tokens=sum(LENGTHS),
        per_token=settings.calculate_per_token_loss,
    )
    loss = (policy_objective(tokens, settings)[0] * weights).sum()
    loss.backward()
    return loss.item(), logprobs.grad


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_equal_those_of_trl(name):
    our_options, their_options = CASES[name]
    loss, gradient = ours(batch(), our_options)
    expected, their_gradient = theirs(batch(), their_options)
    assert loss == pytest.approx(expected, abs=LIMIT)
    assert (gradient - their_gradient).abs().max() < LIMIT
    assert gradient.abs().max() > 1e-3, "the comparison is not one of zeros"

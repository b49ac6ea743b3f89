"""The rows of docs/migrating.md: flags of rlpost against the peers' formulas, in float64.

The formulas are those of verl (``verl/trainer/ppo/core_algos.py``), of NeMo-RL
(``nemo_rl/algorithms``), at the commits that the page names, and of slime
(``slime/utils/ppo_utils.py``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rlpost.algorithm.advantage import AnswerGroup, estimate
from rlpost.algorithm.gae import Discounts, estimate_with_values
from rlpost.algorithm.kl import unbiased_kl
from rlpost.algorithm.loss import token_weights
from rlpost.algorithm.loss_settings import LossSettings
from rlpost.algorithm.objective import Tokens, policy_objective
from rlpost.columns import FloatColumn, RunColumn
from rlpost.config.load import load
from rlpost.extensions.importing.imported import imported
from rlpost.extensions.importing.peers import row as peer_row
from rlpost.extensions.importing.peers.nemo_rl import NEMO_RL
from rlpost.extensions.importing.peers.row import Entry
from rlpost.extensions.importing.peers.verl import VERL
from rlpost.types import Sample, SampleGroup, ScoredSample
from tests.settings import loss_settings

LENGTHS, WIDTH = (6, 2, 9, 4), 9
LIMIT = 1e-6
REWARDS = (1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def batch(*, is_first_step: bool) -> dict[str, torch.Tensor]:
    """Return padded tensors [samples, width]; at the first step policy and old policy are equal."""
    source = torch.Generator().manual_seed(7)

    def noise(size: float) -> torch.Tensor:
        return size * torch.randn(len(LENGTHS), WIDTH, generator=source, dtype=torch.float64)

    new = -2 + noise(0.5)
    old = new + noise(1.2)
    return {
        "new": new.requires_grad_(),
        "old": new.detach().clone() if is_first_step else old,
        "ref": new.detach() + noise(1.0),
        "entropy": noise(1.0).abs(),
        "advantages": noise(1.0)[:, :1].expand(-1, WIDTH),
        "mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double(),
    }


def ours(given: dict[str, torch.Tensor], settings: LossSettings) -> torch.Tensor:
    chosen = given["mask"].bool()
    index = torch.arange(len(LENGTHS))[:, None].expand(-1, WIDTH)[chosen]

    def sums(values: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(LENGTHS), dtype=torch.float64).index_add(0, index, values)[index]

    of = {name: values[chosen] for name, values in given.items()}
    lengths = torch.tensor(LENGTHS)[index]
    tokens = Tokens(
        logprobs=of["new"],
        entropy=of["entropy"],
        old_logprobs=of["old"],
        rollout_logprobs=of["old"],
        ref_logprobs=of["ref"] if settings.use_kl_loss else None,
        advantages=of["advantages"],
        loss_mask=of["mask"],
        sample_lengths=lengths,
        sample_sums=sums,
    )
    loss, _ = policy_objective(tokens, settings)
    weights = token_weights(
        lengths,
        num_samples=len(LENGTHS),
        num_tokens=sum(LENGTHS),
        per_token=settings.calculate_per_token_loss,
    )
    return (loss * weights.double()).sum()


def aggregated(values: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """verl's ``agg_loss``; NeMo-RL's ``token_level_loss`` chooses between the same two means."""
    if mode == "token-mean":
        return (values * mask).sum() / mask.sum()
    return ((values * mask).sum(-1) / mask.sum(-1)).mean()


def verl(
    given: dict[str, torch.Tensor],
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
    entropy_coeff: float = 0.0,
    kl_loss_coef: float = 0.0,
    kl_loss_type: str = "low_var_kl",
) -> torch.Tensor:
    """``compute_policy_loss_vanilla``, ``kl_penalty`` and the sum in ``dp_actor.py``.

    Defaults are those of ``verl/trainer/config/actor/actor.yaml``.
    """
    advantages = given["advantages"]
    ratio = torch.exp((given["new"] - given["old"]).clamp(-20.0, 20.0))
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_ratio_low, 1 + clip_ratio_high)
    upper = torch.maximum(plain, clipped)
    bounded = torch.minimum(-advantages * clip_ratio_c, upper)
    loss = aggregated(torch.where(advantages < 0, bounded, upper), given["mask"], loss_agg_mode)
    loss = loss - entropy_coeff * aggregated(given["entropy"], given["mask"], loss_agg_mode)
    difference = given["new"] - given["ref"]
    if kl_loss_type in ("low_var_kl", "k3"):
        log_ratio = (-difference).clamp(-20, 20)
        kl = (log_ratio.exp() - log_ratio - 1).clamp(-10, 10)
    else:
        kl = {"kl": difference, "mse": 0.5 * difference.square()}[kl_loss_type]
    return loss + kl_loss_coef * aggregated(kl, given["mask"], loss_agg_mode)


def nemo(
    given: dict[str, torch.Tensor],
    *,
    reference_policy_kl_penalty: float = 0.01,
    ratio_clip_min: float = 0.2,
    ratio_clip_max: float = 0.2,
    token_level_loss: bool = True,
) -> torch.Tensor:
    """``ClippedPGLossFn`` and ``calculate_kl``; defaults of ``examples/configs/grpo_math_1B.yaml``.

    The KL divergence has the weight exp(x - sg(x)), which is 1 and whose gradient is that of the
    probability of the sampled token.
    """
    mode = "token-mean" if token_level_loss else "seq-mean-token-mean"
    ratio = torch.exp(given["new"] - given["old"])
    clipped = ratio.clamp(1 - ratio_clip_min, 1 + ratio_clip_max)
    loss = torch.maximum(-given["advantages"] * ratio, -given["advantages"] * clipped)
    log_ratio = given["ref"] - given["new"]
    weight = torch.exp(given["new"] - given["new"].detach())
    kl = reference_policy_kl_penalty * weight * (log_ratio.exp() - 1 - log_ratio)
    return aggregated(loss, given["mask"], mode) + aggregated(kl, given["mask"], mode)


VERL_DEFAULTS = {"calculate_per_token_loss": True, "eps_clip_c": 3.0}
NEMO_DEFAULTS = {
    "calculate_per_token_loss": True,
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "kl_loss_type": "k3",
    "use_unbiased_kl": True,
}
NO_KL = {"calculate_per_token_loss": True}
ROWS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    # the peer, its keys that differ from its defaults, rlpost's settings
    "verl's defaults": (verl, {}, VERL_DEFAULTS),
    "verl: clip_ratio_low, clip_ratio_high, clip_ratio_c": (
        verl,
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5},
        {**VERL_DEFAULTS, "eps_clip": 0.1, "eps_clip_high": 0.28, "eps_clip_c": 1.5},
    ),
    "verl: loss_agg_mode": (
        verl,
        {"loss_agg_mode": "seq-mean-token-mean"},
        {**VERL_DEFAULTS, "calculate_per_token_loss": False},
    ),
    "verl: entropy_coeff": (
        verl, {"entropy_coeff": 0.3}, {**VERL_DEFAULTS, "entropy_coef": 0.3}
    ),
    **{
        f"verl: kl_loss_type={theirs}": (
            verl,
            {"kl_loss_coef": 0.2, "kl_loss_type": theirs},
            {**VERL_DEFAULTS, "use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": own},
        )
        for theirs, own in {
            "kl": "k1", "mse": "k2", "low_var_kl": "low_var_kl", "k3": "low_var_kl"
        }.items()
    },
    "NeMo-RL's defaults, at the first step of a rollout": (nemo, {}, NEMO_DEFAULTS),
    "NeMo-RL: token_level_loss": (
        nemo, {"token_level_loss": False}, {**NEMO_DEFAULTS, "calculate_per_token_loss": False}
    ),
    "NeMo-RL: ratio_clip_min, ratio_clip_max, no KL": (
        nemo,
        {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.1, "ratio_clip_max": 0.28},
        {**NO_KL, "eps_clip": 0.1, "eps_clip_high": 0.28},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_the_flags_of_a_row_give_the_peers_loss_and_gradient(row):
    peer, theirs, own = ROWS[row]
    found = []
    settings = loss_settings(**{"eps_clip_high": 0.2, **own})
    has_kl_of_nemo = peer is nemo and settings.use_kl_loss
    for compute in (lambda given: peer(given, **theirs), lambda given: ours(given, settings)):
        given = batch(is_first_step=has_kl_of_nemo)
        loss = compute(given)
        (gradient,) = torch.autograd.grad(loss, given["new"])
        found.append((loss.item(), gradient))
    (expected, gradient), (loss, own_gradient) = found
    assert loss == pytest.approx(expected, abs=LIMIT)
    assert (gradient - own_gradient).abs().max() < LIMIT
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("row", "own"),
    [
        ("verl's defaults", {"eps_clip_c": None}),
        ("verl's defaults", {"calculate_per_token_loss": False}),
        ("NeMo-RL's defaults, at the first step of a rollout", {"use_unbiased_kl": False}),
    ],
)
def test_without_the_flag_for_a_default_of_the_peer_the_gradient_is_another(row, own):
    peer, theirs, settings = ROWS[row]
    gradients = []
    without = loss_settings(**{"eps_clip_high": 0.2, **settings, **own})
    for compute in (lambda given: peer(given, **theirs), lambda given: ours(given, without)):
        given = batch(is_first_step=peer is nemo)
        gradients += torch.autograd.grad(compute(given), given["new"])
    assert (gradients[0] - gradients[1]).abs().max() > 100 * LIMIT


def nemo_advantages(*, leave_one_out: bool, normalize: bool) -> list[float]:
    """``calculate_baseline_and_std_per_prompt`` and ``GRPOAdvantageEstimator``, for one prompt."""
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    count = len(rewards)
    others = torch.ones(count, count, dtype=torch.float64)
    if leave_one_out:
        others -= torch.eye(count)
    num_valid = count - int(leave_one_out)
    mean, square = others @ rewards / num_valid, others @ rewards.square() / num_valid
    std = ((square - mean.square()) * num_valid / (num_valid - 1)).sqrt()
    advantages = rewards - mean
    return (advantages / (std + 1e-6) if normalize else advantages).tolist()


def own_advantages(estimator: str, *, normalize_std: bool) -> list[float]:
    group = AnswerGroup(REWARDS, [RunColumn([(1, 3)])] * len(REWARDS), [3] * len(REWARDS))
    (found,) = estimate(estimator, [group], normalize_std=normalize_std, gamma=1.0)
    return list(found)


@pytest.mark.parametrize(
    ("theirs", "estimator", "normalize_std"),
    [
        ({"leave_one_out": False, "normalize": True}, "grpo", True),
        ({"leave_one_out": False, "normalize": False}, "grpo", False),
        ({"leave_one_out": True, "normalize": False}, "rloo", True),
    ],
)
def test_advantages_of_nemo_rl_are_those_of_the_estimator_in_its_row(
    theirs, estimator, normalize_std
):
    expected = nemo_advantages(**theirs)
    assert own_advantages(estimator, normalize_std=normalize_std) == pytest.approx(expected)


def test_no_estimator_has_the_advantages_of_nemo_rls_default():
    """Each is divided by the standard deviation of the others, so the page says so."""
    expected = nemo_advantages(leave_one_out=True, normalize=True)
    assert expected[:2] == pytest.approx([2.268, -0.586], abs=1e-3)
    for estimator in ("grpo", "rloo"):
        found = own_advantages(estimator, normalize_std=True)
        ratios = {round(one / other, 3) for one, other in zip(found, expected, strict=True)}
        assert len(ratios) > 1, "they are not even proportional"


def verl_gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``compute_gae_advantage_return``: advantages, always whitened, and returns; [samples, width]."""
    following, last, found = torch.zeros(len(mask)), torch.zeros(len(mask)), []
    for t in reversed(range(mask.shape[1])):
        delta = rewards[:, t] + gamma * following - values[:, t]
        following = torch.where(mask[:, t] > 0, values[:, t], following)
        last = torch.where(mask[:, t] > 0, delta + gamma * lam * last, last)
        found.append(last)
    advantages = torch.stack(found[::-1], dim=1)
    trained = advantages[mask > 0]
    white = (advantages - trained.mean()) * torch.rsqrt(trained.var(correction=1) + 1e-8)
    return white, advantages + values


def test_the_advantages_of_an_import_with_gae_are_verls():
    """Whitened over the tokens of the batch; verl's variance divides by one token fewer."""
    source = torch.Generator().manual_seed(3)
    mask = (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double()
    mask[2, 3:5] = 0  # the output of a tool
    values, scores = torch.randn(2, *mask.shape, generator=source, dtype=torch.float64)
    rewards = torch.zeros_like(mask)
    for row, length in enumerate(LENGTHS):
        rewards[row, length - 1] = scores[row, 0]
    keys = {"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.9, "algorithm.lam": 0.8}
    given = {key: Entry(value) for key, value in keys.items()}
    config = load([], imported([peer_row.answer(VERL, key, given) for key in given], ()).settings)
    grpo = config.config.grpo
    samples = tuple(
        ScoredSample(
            Sample(0, row, (1,), range(length), (0.0,) * length, "", "stop", 0,
                   loss_mask=mask[row, :length].int().tolist()),
            float(scores[row, 0]),
        )
        for row, length in enumerate(LENGTHS)
    )  # fmt: skip
    columns = [FloatColumn(values[row, :length].tolist()) for row, length in enumerate(LENGTHS)]
    found = estimate_with_values(
        [SampleGroup(0, samples)],
        [columns],
        None,
        Discounts(grpo.gamma, grpo.lambd),
        normalize_advantages=grpo.normalize_advantages,
    )
    white, returns = verl_gae(rewards, values, mask, 0.9, 0.8)
    count = mask.sum()
    for row, length in enumerate(LENGTHS):
        trained = mask[row, :length] > 0
        own = torch.tensor(list(found.advantages[0][row]))[trained] * ((count - 1) / count).sqrt()
        torch.testing.assert_close(
            own, white[row, :length][trained], atol=1e-5, rtol=0, check_dtype=False
        )
        own = torch.tensor(list(found.returns[0][row]))[trained]
        torch.testing.assert_close(
            own, returns[row, :length][trained], atol=1e-5, rtol=0, check_dtype=False
        )


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_unbiased_divergence_is_slimes(kind):
    """``compute_approx_kl`` with ``importance_ratio``: low_var_kl is clamped after the ratio."""
    new, ref = torch.tensor([[-1.0, 4.0], [-2.0, -1.5], [-0.5, -3.0]], dtype=torch.float64).T
    old = torch.tensor([-4.0, -2.2, -0.4], dtype=torch.float64)
    log_ratio = new - ref
    kl = {"k1": log_ratio, "k2": log_ratio**2 / 2}.get(kind, (-log_ratio).exp() - 1 + log_ratio)
    expected = (new - old).exp() * kl
    if kind == "low_var_kl":
        expected = expected.clamp(-10, 10)
    assert unbiased_kl(new, ref, old, kind).tolist() == pytest.approx(expected.tolist())


@pytest.mark.parametrize("row", ROWS)
def test_an_import_sets_the_flags_that_give_the_peers_loss(row):
    """The rows of ``rlpost import`` lead to the settings that are compared above."""
    peer, theirs, own = ROWS[row]
    stack, prefix = (VERL, "actor_rollout_ref.actor.") if peer is verl else (NEMO_RL, "loss_fn.")
    given = {prefix + key: Entry(value) for key, value in theirs.items()}
    if "kl_loss_coef" in theirs:
        given[prefix + "use_kl_loss"] = Entry(True)
    answers = [peer_row.answer(stack, key, given) for key in given]
    refused = [one.key for one in answers if not (one.settings or one.is_needless)]
    if theirs.get("kl_loss_type") == "kl":
        assert refused == [prefix + "kl_loss_type"]  # it has no gradient of the divergence
        return
    assert not refused
    tables = imported(answers, peer_row.defaults(stack, given)).settings
    config = load([], tables).config
    expected = loss_settings(**{"eps_clip_high": 0.2, **own})
    assert config.loss_settings == replace(
        expected, **{name: getattr(config.loss_settings, name) for name in IGNORED}
    )


IGNORED = ("policy_loss", "opd_kl_coef")
"""Fields that no row of these tables sets."""

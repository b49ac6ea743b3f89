"""Advantages per answer or per token from the rewards of groups. Pure Python.

Input: the answers of each group with their rewards, turns and KL penalties. Output: advantages in the
same order. Groups are formed by prompt id upstream, never by reshaping a flat list.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlpost.algorithm.partition import partition
from rlpost.algorithm.plugin import blamed_on, load_function
from rlpost.algorithm.turns import TurnReward, turn_advantages
from rlpost.columns import FloatColumn, RunColumn
from rlpost.errors import ConfigError
from rlpost.types import SampleGroup, is_finite_float32

STD_EPSILON = 1e-6
WHITEN_EPSILON = 1e-8

Advantage = float | FloatColumn
"""Advantage of a sample: one for the whole response, or one for each of its tokens."""
Masks = Sequence[Sequence[RunColumn]]
"""Loss mask of the response, by group and sample."""
Penalties = Sequence[Sequence[Sequence[float]]]
"""Penalty of each response token, by group and sample: kl_coef x KL; 0 where the mask is 0."""


def grpo_advantages(rewards: Sequence[float], *, normalize_std: bool = True) -> tuple[float, ...]:
    """Group-relative advantages: (r_i - mean) / (std + 1e-6), with the unbiased standard deviation.

    Without ``normalize_std`` only the mean is subtracted (Dr. GRPO, arXiv 2503.20783). A group of
    one, or one whose rewards are all equal, has advantages of zero. Source: DeepSeekMath, arXiv
    2402.03300, equation 4.1.2.
    """
    count = len(rewards)
    mean = math.fsum(rewards) / count
    centred = [reward - mean for reward in rewards]
    if not normalize_std or count == 1:
        return tuple(centred)
    std = math.sqrt(math.fsum(value * value for value in centred) / (count - 1))
    return tuple(value / (std + STD_EPSILON) for value in centred)


def rloo_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """Leave one out: r_i - mean of the others; 0 in a group of one.

    Source: RLOO, arXiv 2402.14740, eq. 8.
    """
    count = len(rewards)
    if count == 1:
        return (0.0,)
    total = math.fsum(rewards)
    return tuple(reward - (total - reward) / (count - 1) for reward in rewards)


def opo_advantages(rewards: Sequence[float], lengths: Sequence[int]) -> tuple[float, ...]:
    """r_i - mean of the group weighted by the lengths of the answers in tokens.

    Answers that are masked out of the loss keep their length, so that the baseline counts them.
    The baseline of least variance if the squared gradient of an answer grows with its length.
    Source: OPO, arXiv 2505.23585, section 3.
    """
    weighted = math.fsum(reward * n for reward, n in zip(rewards, lengths, strict=True))
    baseline = weighted / max(sum(lengths), 1)
    return tuple(reward - baseline for reward in rewards)


def returns_to_go(
    reward: float, penalties: Sequence[float], mask: Sequence[int], *, gamma: float
) -> tuple[float, ...]:
    """Return at each token t: the sum of gamma^(s - t) r_s over the trained tokens s from t on.

    r_s is - penalty, and at the last trained token also the reward. Powers of gamma count trained
    tokens alone, those with ``mask`` 1. Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    returns, later = [], 0.0
    for penalty, is_trained in zip(reversed(penalties), reversed(list(mask)), strict=True):
        if is_trained:
            later = reward - penalty + gamma * later
            reward = 0.0  # of the tokens before the last one
        returns.append(later)
    return tuple(reversed(returns))


def whiten(advantages: Sequence[float], weights: Sequence[int]) -> tuple[float, ...]:
    """(a - mean) / sqrt(var + 1e-8), with mean and variance over the tokens of the batch.

    ``weights`` are the numbers of tokens. Source: REINFORCE++, arXiv 2501.03262, section 3.
    """
    weighted = list(zip(advantages, weights, strict=True))
    num_tokens = max(sum(weights), 1)
    mean = math.fsum(a * n for a, n in weighted) / num_tokens
    variance = math.fsum((a - mean) ** 2 * n for a, n in weighted) / num_tokens
    scale = math.sqrt(variance + WHITEN_EPSILON)
    return tuple((a - mean) / scale for a in advantages)


OfGroup = Callable[[Sequence[float], Sequence[int], bool], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator of advantages: all that the settings, their checks and the driver know about it.

    Attributes:
        about: what it does, for the help of --advantage-estimator.
        of_group: (rewards of one group, lengths of its answers in generated tokens, whether to
            divide by the standard deviation of the rewards) -> advantages. None: they come from the values
            of a critic (``rlpost.algorithm.gae``).
        whitens: the advantages of all groups are then whitened together.
        charges_tokens: KL penalties give an advantage per token (``returns_to_go``); otherwise the
            sum of an answer's penalties is subtracted from its reward.
        compares: a single answer to a prompt has no advantage.
        has_raw_rewards: without its baseline the rewards are the advantages
            (--disable-rewards-normalization, --custom-reward-post-process-path).
        has_turns: it also gives an advantage per turn (--env-reward turn).
        divides_by_std: by the standard deviation of the group (--disable-grpo-std-normalization).
        loss: the --policy-loss that goes with it.
    """

    about: str
    of_group: OfGroup | None
    whitens: bool = False
    charges_tokens: bool = False
    compares: bool = True
    has_raw_rewards: bool = False
    has_turns: bool = False
    divides_by_std: bool = False
    loss: str = "ppo"

    @property
    def has_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.of_group is None

    @property
    def discounts(self) -> bool:
        """Whether --gamma has an effect."""
        return self.charges_tokens or self.has_critic


_GRPO = Estimator(
    "subtracts the group's mean reward and divides by the group's standard deviation",
    lambda rewards, _, normalize_std: grpo_advantages(rewards, normalize_std=normalize_std),
    has_raw_rewards=True,
    has_turns=True,
    divides_by_std=True,
)
ESTIMATORS = {
    "grpo": _GRPO,
    "gspo": replace(_GRPO, about="is grpo with the loss of that name", loss="gspo"),
    "cispo": replace(_GRPO, about="is grpo with the loss of that name", loss="cispo"),
    "rloo": Estimator(
        "subtracts the mean of the other responses", lambda rewards, *_: rloo_advantages(rewards)
    ),
    "opo": Estimator(
        "subtracts the mean weighted by the lengths of the responses",
        lambda rewards, lengths, _: opo_advantages(rewards, lengths),
    ),
    "ppo": Estimator(
        "trains a critic and estimates with GAE (docs/ppo.md)",
        of_group=None,
        compares=False,
        has_turns=True,
    ),
    "reinforce_plus_plus": Estimator(
        "whitens over the batch",
        lambda rewards, *_: tuple(rewards),
        whitens=True,
        charges_tokens=True,
        compares=False,
    ),
    "reinforce_plus_plus_baseline": Estimator(
        "subtracts the group's mean and whitens over the batch",
        lambda rewards, *_: grpo_advantages(rewards, normalize_std=False),
        whitens=True,
        has_raw_rewards=True,
    ),
}
"""By the value of --advantage-estimator. To add one: a function above, a line here, and a line of
the table in docs/actor.md.
"""


@dataclass(frozen=True, slots=True)
class AnswerGroup:
    """The answers to one prompt as estimators read them; each list has one entry per answer.

    Attributes:
        rewards: as shaped.
        masks: 1 for each response token that enters the loss.
        lengths: tokens that the policy generated, also of answers that are masked out of the loss.
        penalties: of each response token, kl_coef x KL; None without.
        turns: in the order of play, where all answers have rewards of turns.
    """

    rewards: Sequence[float]
    masks: Sequence[RunColumn]
    lengths: Sequence[int]
    penalties: Sequence[Sequence[float]] | None = None
    turns: Sequence[Sequence[TurnReward]] | None = None

    def __post_init__(self) -> None:
        columns = (self.masks, self.lengths, self.penalties, self.turns)
        counts = [len(self.rewards), *(len(one) for one in columns if one is not None)]
        if len(set(counts)) != 1:
            raise ValueError(f"a group has different numbers of rewards, masks, ...: {counts}")


def estimate(
    estimator: str,
    groups: Sequence[AnswerGroup],
    *,
    normalize_std: bool,
    normalize_advantages: bool = False,
    gamma: float,
    raw: bool = False,
) -> list[tuple[Advantage, ...]]:
    """Compute the advantages of all answers of a rollout, by group.

    ``estimator`` is the value of --advantage-estimator. ``normalize_std`` divides by the standard
    deviation of the group, as GRPO does; ``normalize_advantages`` whitens the advantages of every
    estimator. Penalties are charged to tokens (``Estimator.charges_tokens``), or to the answer's
    reward. ``gamma`` is the discount per token of estimators with an advantage per token. ``raw``
    takes the rewards, or the returns of turns, for the advantages (``Estimator.has_raw_rewards``).

    Raises:
        KeyError: the estimator is unknown.
    """
    known = ESTIMATORS[estimator]
    if known.of_group is None:
        raise ValueError(f"{estimator}: advantages need the values of a critic")
    has_penalties = any(group.penalties is not None for group in groups)
    if known.charges_tokens and (has_penalties or gamma != 1.0):
        advantages = [_discounted(group, gamma) for group in groups]
    else:
        is_raw = raw and known.has_raw_rewards
        advantages = [_compared(group, known, normalize_std, is_raw) for group in groups]
    if known.whitens or normalize_advantages:
        return whitened(advantages, [group.masks for group in groups])
    return advantages


def _compared(
    group: AnswerGroup, known: Estimator, normalize_std: bool, is_raw: bool
) -> tuple[Advantage, ...]:
    """Advantages of the answers of a group, or of their turns, against its baseline."""
    assert known.of_group is not None
    if group.turns is not None:
        baseline = partial(grpo_advantages, normalize_std=normalize_std)
        lengths = [len(mask) for mask in group.masks]
        return turn_advantages(group.turns, lengths, tuple if is_raw else baseline)
    rewards = group.rewards
    if group.penalties is not None:
        pairs = zip(rewards, group.penalties, strict=True)
        rewards = [reward - math.fsum(penalty) for reward, penalty in pairs]
    return tuple(rewards) if is_raw else known.of_group(rewards, group.lengths, normalize_std)


def _discounted(group: AnswerGroup, gamma: float) -> tuple[Advantage, ...]:
    """Return the returns of the tokens of a group's answers."""
    penalties = group.penalties or [(0.0,) * len(mask) for mask in group.masks]
    answers = zip(group.rewards, penalties, group.masks, strict=True)
    return tuple(FloatColumn(returns_to_go(*answer, gamma=gamma)) for answer in answers)


def whitened(
    advantages: Sequence[Sequence[Advantage]], masks: Masks
) -> list[tuple[Advantage, ...]]:
    """Whiten the advantages of a rollout over its tokens in the loss, by group (``whiten``).

    An advantage of a whole response counts for each of its tokens. Advantages per token are 0 at
    tokens that do not enter the loss.
    """
    flat = list(itertools.chain.from_iterable(advantages))
    flat_masks = list(itertools.chain.from_iterable(masks))
    numbers = [one for one in flat if not isinstance(one, FloatColumn)]
    white: list[Advantage]
    if len(numbers) == len(flat):
        white = list(whiten(numbers, [mask.total() for mask in flat_masks]))
    else:
        pairs = zip(flat, flat_masks, strict=True)
        columns = [_per_token(one, len(mask)) for one, mask in pairs]
        white = list(whitened_tokens(columns, flat_masks))
    return [tuple(part) for part in partition(white, map(len, advantages))]


def whitened_tokens(
    columns: Sequence[FloatColumn], masks: Sequence[RunColumn]
) -> list[FloatColumn]:
    """Whiten values per token over the tokens with mask 1 of all columns; 0 at the others."""
    chain = itertools.chain.from_iterable
    is_trained = list(chain(masks))
    pairs = zip(whiten(list(chain(columns)), is_trained), is_trained, strict=True)
    tokens = [value if trained else 0.0 for value, trained in pairs]
    return [FloatColumn(part) for part in partition(tokens, map(len, columns))]


def _per_token(advantage: Advantage, length: int) -> FloatColumn:
    return advantage if isinstance(advantage, FloatColumn) else FloatColumn([advantage] * length)


def custom_advantages(
    path: str, groups: Sequence[SampleGroup], penalties: Penalties | None
) -> list[tuple[Advantage, ...]]:
    """Advantages by a user function, ``function(groups, penalties)``, by group and sample.

    ``penalties`` holds a tuple per sample. For each group, in order, the function returns an
    advantage per sample: a number, or one per response token.

    Raises:
        ConfigError: the function cannot be imported, or returns something else, or a number that
            is not finite in float32.
    """
    key = "custom_advantage_function_path"
    where = f"{key} = {path}"
    token_penalties = None
    if penalties is not None:
        token_penalties = [list(map(tuple, group)) for group in penalties]
    with blamed_on(path, key=key):
        raw_advantages = load_function(path, key=key)(groups, token_penalties)
    try:
        by_group = [tuple(map(_advantage, group)) for group in raw_advantages]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: got {raw_advantages!r:.200} ({error}); return for each group a list with a number, or "
            "a list of numbers, for each sample"
        ) from error
    got, group_sizes = list(map(len, by_group)), [len(group.samples) for group in groups]
    if got != group_sizes:
        raise ConfigError(
            f"{where}: got {got} advantages by group for {group_sizes} samples; return one for each "
            "sample"
        )
    samples = [scored.sample for group in groups for scored in group.samples]
    for sample, advantage in zip(samples, itertools.chain.from_iterable(by_group), strict=True):
        length = len(sample.response_ids)
        if isinstance(advantage, FloatColumn) and len(advantage) != length:
            raise ConfigError(
                f"{where}: got {len(advantage)} advantages for a response of {length} tokens; "
                "return one number, or one for each token"
            )
        if not _is_finite(advantage):
            raise ConfigError(
                f"{where}: got {advantage!r:.200} for sample {sample.index} of prompt "
                f"{sample.prompt_id}; return finite numbers"
            )
    return by_group


def _is_finite(advantage: Advantage) -> bool:
    if isinstance(advantage, FloatColumn):
        return advantage.find_not_finite() is None
    return is_finite_float32(advantage)


def _advantage(value: Any) -> Advantage:
    """Convert a number or a sequence; zero-dimensional arrays and tensors cannot be iterated."""
    try:
        tokens = iter(value)
    except TypeError:
        return float(value)
    return FloatColumn(float(token) for token in tokens)

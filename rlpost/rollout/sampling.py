"""Sampling parameters, as a frozen dataclass and as SGLang's request fields.

Input: the tables ``[rollout]`` and ``[eval]`` and the stop token ids of the model. Output:
``SamplingParams``. Only fields that rlpost sets are sent, because SGLang rejects unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from rlpost.config.eval_sets import EvalSet
from rlpost.config.groups.eval import EvalConfig
from rlpost.config.groups.rollout import RolloutConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of a request. Temperature 0 is greedy decoding.

    A stop id is part of the answer's ids and log-probs. A stop string is part of its ids, but
    removed from its text. ``max_context_len`` limits prompt and answer together, in tokens.
    ``returns_mask`` asks for the ids that each token was sampled from. Each request gets its own
    seed from ``seed`` (``AnswerLog.next_seed``).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_context_len: int | None = None
    min_new_tokens: int = 0
    returns_mask: bool = False
    seed: int = 0

    def to_sglang(self) -> dict[str, object]:
        """Return the field ``sampling_params`` of ``POST /generate``."""
        least = {"min_new_tokens": self.min_new_tokens} if self.min_new_tokens else {}
        return {
            **least,
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": list(self.stop) or None,
            "stop_token_ids": list(self.stop_token_ids) or None,
        }


def rollout_sampling(rollout: RolloutConfig, eos_token_ids: Iterable[int]) -> SamplingParams:
    """Return the sampling parameters of training."""
    return SamplingParams(
        max_new_tokens=rollout.rollout_max_response_len,
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        stop=rollout.rollout_stop,
        stop_token_ids=tuple(sorted({*rollout.rollout_stop_token_ids, *eos_token_ids})),
        max_context_len=rollout.rollout_max_context_len,
        seed=rollout.rollout_seed,
    )


def eval_sampling(
    one: EvalSet, evaluation: EvalConfig, rollout: RolloutConfig, eos_token_ids: Iterable[int]
) -> SamplingParams:
    """Return the sampling parameters of an evaluation set.

    Each is taken from the set, otherwise from [eval], otherwise from [rollout].
    """
    inherited = rollout_sampling(rollout, eos_token_ids)
    stop_token_ids = (
        None if one.stop_token_ids is None else tuple(sorted({*one.stop_token_ids, *eos_token_ids}))
    )
    return SamplingParams(
        max_new_tokens=_first(
            one.max_response_len, evaluation.eval_max_response_len, inherited.max_new_tokens
        ),
        temperature=_first(one.temperature, evaluation.eval_temperature, inherited.temperature),
        top_p=_first(one.top_p, evaluation.eval_top_p, inherited.top_p),
        top_k=_first(one.top_k, evaluation.eval_top_k, inherited.top_k),
        stop=_first(one.stop, inherited.stop),
        stop_token_ids=_first(stop_token_ids, inherited.stop_token_ids),
        max_context_len=inherited.max_context_len,
        min_new_tokens=evaluation.eval_min_new_tokens or 0,
        seed=inherited.seed,
    )


def _first(*values: T | None) -> T:
    return next(value for value in values if value is not None)

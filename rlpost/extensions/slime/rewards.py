"""Reward functions of slime, and the names of ``slime.rollout.rm_hub`` over rlpost's rewards.

Input: a function ``(args, sample, **kwargs)``, or ``(args, samples, **kwargs)`` with --group-rm;
async or not. Output: a function with rlpost's interface, for the grading processes.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from rlpost.columns import FloatColumn, IntColumn
from rlpost.config.engine_groups import reward_url_group
from rlpost.engines.group_client import GroupClient
from rlpost.errors import ConfigError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.sample import Sample, shown
from rlpost.tasks.reward.answer_extraction import last_boxed
from rlpost.tasks.reward.engine_reward import RemoteReward
from rlpost.tasks.reward.registry import REMOTE, part_of, reward_function
from rlpost.types import Prompt
from rlpost.types import Sample as Answer

BOX_WITHIN = 100  # characters at the end of a solution
INVALID = "[INVALID]"


def slime_reward(
    function: Callable[..., object], args: Arguments
) -> Callable[[Prompt, Answer | Sequence[Answer]], object]:
    """Wrap a reward for one answer or all answers to a prompt."""

    def sample(prompt: Prompt, answer: Answer) -> Sample:
        return shown(prompt, answer, siblings=args.n_samples_per_prompt)

    def score(prompt: Prompt, given: Answer | Sequence[Answer]) -> object:
        if isinstance(given, Answer):
            return function(args, sample(prompt, given))
        return function(args, [sample(prompt, answer) for answer in given])

    return score


async def async_rm(args: Namespace, sample: Sample, **kwargs: object) -> float:
    """Grade one answer with ``rm_type`` of its metadata, or else --rm-type. Raises ConfigError."""
    del kwargs
    metadata = sample.metadata if isinstance(sample.metadata, Mapping) else {}
    name = str(metadata.get("rm_type") or args.rm_type).strip()
    if name == REMOTE:
        return await _remote(args, sample)
    return await asyncio.to_thread(_score, name, sample.response, sample.label, metadata)


def _score(name: str, response: str, label: object, metadata: Mapping[str, object]) -> float:
    text = None if label is None else str(label)
    return reward_function(name)(response, text, metadata)


async def batched_async_rm(
    args: Namespace, samples: Sequence[Sample], **kwargs: object
) -> list[float]:
    """Call ``async_rm`` for several answers concurrently."""
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def _remote(args: Namespace, sample: Any) -> float:
    if args.rm_url is None:
        raise ConfigError(f"--rm-type {REMOTE} needs --rm-url: the address of the reward model")
    client = GroupClient(reward_url_group(args.rm_url, args.rm_url_timeout_s))
    prompt = Prompt(
        sample.group_index or 0, sample.prompt, IntColumn(), sample.label, sample.metadata
    )
    no_ids, no_logprobs = IntColumn(), FloatColumn()
    answer = Answer(
        prompt.prompt_id, sample.index or 0, no_ids, no_ids, no_logprobs, sample.response, "stop", 0
    )
    try:
        return await RemoteReward(client).score(prompt, answer)
    finally:
        await client.close()


class DapoScore(TypedDict):
    """The result of ``dapo_score``; ``pred`` is the graded answer, None without a box."""

    score: float
    acc: bool
    pred: str | None


def dapo_score(
    solution_str: str,
    ground_truth: str,
    strict_box_verify: bool = False,
    pause_tokens_index: object = None,
) -> DapoScore:
    """Return ``score`` (1 or -1), ``acc`` and ``pred`` by DAPO's rules.

    The answer is the last ``Answer:`` line, or with ``strict_box_verify`` the last box near the
    end, which must equal the label exactly.
    """
    if pause_tokens_index is not None:
        raise ConfigError("compute_score: pause_tokens_index is not supported; leave it out")
    if strict_box_verify:
        pred = last_boxed(solution_str[-BOX_WITHIN:])
        is_right = pred == ground_truth
    else:
        is_right = _score("dapo", solution_str, ground_truth, {}) > 0
        answer = part_of("dapo", "graded_answer")(solution_str)
        pred = INVALID if answer is None else answer
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": pred}


def extract_answer(passage: str) -> str | None:
    """Return the content of the last box."""
    return last_boxed(passage)


def deepscaler_reward(response: str, label: object) -> int:
    """Return 1 or 0, like --rm-type deepscaler."""
    return int(_score("deepscaler", response, label, {}))


def gpqa_reward(
    response: str, label: object, metadata: Mapping[str, object] | None = None
) -> float:
    """Return 1 or 0, like --rm-type gpqa."""
    return _score("gpqa", response, label, metadata or {})


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """Return F1, precision and recall over words, like --rm-type f1."""
    value = 0.0 if prediction is None else _score("f1", prediction, ground_truth, {})
    if prediction is None or not value:
        return 0.0, 0.0, 0.0
    words = part_of("f1", "words")
    given, wanted = len(words(prediction)), len(words(ground_truth))
    shared = value * (given + wanted) / 2
    return value, shared / given, shared / wanted

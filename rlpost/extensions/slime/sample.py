"""slime's ``Sample``, made from a prompt and an answer of rlpost.

Input: a ``Prompt``, its partial or complete answer (or none), its reward. Output: a mutable sample
for plug-ins. Changes reach the run only through ``rlpost.extensions.slime.generate``. Images are not
passed on: access to their attributes raises an error that says so.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, TypedDict, TypeVar

from rlpost.errors import ConfigError
from rlpost.extensions.slime.modules import sample_class
from rlpost.tasks.prompts import label_text
from rlpost.types import Prompt
from rlpost.types import Sample as Answer

MULTIMODAL = ("multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id")
ABSENT = {
    **dict.fromkeys(MULTIMODAL, "functions of slime get no images"),
    "spec_info": "rlpost reports speculative decoding in its metrics, by engine",
    "prefix_cache_info": "rlpost reports prefix caches in its metrics, by engine",
}
"""Unsupported attributes of slime's Sample, with the reason."""


class EngineFinish(TypedDict):
    """SGLang's ``finish_reason``."""

    type: str


class MetaInfo(TypedDict, total=False):
    """The fields of SGLang's ``meta_info`` that a sample reads."""

    finish_reason: EngineFinish
    weight_version: str | None


Number = TypeVar("Number", int, float)


class AbsentAttribute(ConfigError, AttributeError):
    """A plug-in uses an unsupported attribute: Python's AttributeError, and a ConfigError."""


@dataclass
class Sample:
    """An answer with slime's attributes.

    ``tokens`` are those of prompt and response. ``loss_mask`` and ``rollout_log_probs`` have one
    entry for each of the ``response_length`` tokens of the response. ``rollout_routed_experts`` is
    an array [tokens, MoE layers, k] of the experts that the engine chose for the first tokens; it
    is read-only, because the run records the routes itself.
    """

    class Status(Enum):
        """State of an answer."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    apply_chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: object = None
    reward: Any = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: object = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, object] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, object] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error; Python calls this only for missing attributes."""
        if name in ABSENT:
            raise AbsentAttribute(f"sample.{name}: {ABSENT[name]}")
        raise AttributeError(f"'Sample' object has no attribute '{name}'")

    @property
    def effective_response_length(self) -> int:
        """The number of response tokens that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: object) -> float:
        """Return the reward as a number: the value under --reward-key if rewards are objects."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, Mapping) else self.reward

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: MetaInfo | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens of the model (``trainable``), or of a tool, which the loss ignores.

        Status and weight version are taken from ``meta_info``, which is that of the engine's
        answer.

        Raises:
            ValueError: tokens of the model have no log-probs, or not one for each.
        """
        added = _numbers(tokens, int)
        added_logprobs = None if log_probs is None else _numbers(log_probs, float)
        if trainable and added and added_logprobs is None:
            raise ValueError(
                "append_response_tokens: tokens of the model need log_probs, one for each"
            )
        if added_logprobs is not None and len(added_logprobs) != len(added):
            raise ValueError(
                f"append_response_tokens: {len(added_logprobs)} log_probs for {len(added)} tokens"
            )
        if not trainable:
            added_logprobs = [0.0] * len(added)
        before = self.response_length
        self.loss_mask = [1] * before if self.loss_mask is None and added else self.loss_mask
        self.tokens = [*self.tokens, *added]
        self.response += text or ""
        self.response_length = before + len(added)
        if added and self.loss_mask is not None:
            self.loss_mask += [int(trainable)] * len(added)
        if added_logprobs is not None:
            self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *added_logprobs]
        if meta_info is not None and update_terminal_info:
            self._end_as(meta_info)

    def to_dict(self) -> dict[str, object]:
        """Return all attributes, including those that the plug-in added."""
        return {**vars(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Sample:
        """The inverse of ``to_dict``."""
        made = cls()
        for name, value in data.items():
            setattr(made, name, value)
        made.status = cls.Status(data["status"])
        return made

    def _end_as(self, meta_info: MetaInfo) -> None:
        if "finish_reason" not in meta_info:
            return
        if meta_info.get("weight_version") is not None:
            self.weight_versions = [*self.weight_versions, str(meta_info["weight_version"])]
        self.status = STATUS[meta_info["finish_reason"]["type"]]


STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}
"""Status of an answer by the engine's finish reason."""

START = "start_rollout_id"
"""Key in the metadata of a resumed answer: the rollout that generated its first token. slime
numbers rollouts from 0, as rlpost numbers policy versions, so the value is the answer's
``oldest_version``.
"""


def begun(prompt: Prompt, index: int, *, siblings: int) -> Sample:
    """Make a sample before generation; ``siblings`` is --n-samples-per-prompt."""
    kind = sample_class()
    made = kind()
    made.group_index = prompt.prompt_id
    made.index = prompt.prompt_id * siblings + index
    made.prompt = prompt.text
    made.label = label_of(prompt)
    made.metadata = copy.deepcopy(dict(prompt.metadata))
    return made


def shown(
    prompt: Prompt,
    answer: Answer,
    *,
    siblings: int,
    reward: float | Mapping[str, float] | None = None,
) -> Sample:
    """Convert an answer to a sample, including the attributes set by a generate function."""
    sample = begun(prompt, answer.index, siblings=siblings)
    sample.tokens = [*answer.prompt_ids, *answer.response_ids]
    sample.response, sample.response_length = answer.text, len(answer.response_ids)
    sample.loss_mask, sample.rollout_log_probs = list(answer.mask), list(answer.rollout_logprobs)
    sample.rollout_routed_experts = None if answer.routes is None else answer.routes.array
    if answer.sampling_mask is not None:
        sample.rollout_top_p_token_ids = list(answer.sampling_mask.token_ids)
        sizes = answer.sampling_mask.sizes
        sample.rollout_top_p_token_offsets = list(itertools.accumulate(sizes, initial=0))
    versions = answer.version_spans or ((answer.policy_version, 0),)
    sample.weight_versions = [str(version) for version, _ in versions]
    sample.status = type(sample).Status(STATUS[answer.finish_reason].value)
    for name, value in answer.extra.items():
        setattr(sample, name, copy.deepcopy(value))
    if len(answer.version_spans) > 1:
        sample.metadata.setdefault(START, answer.oldest_version)
    sample.reward = reward
    return sample


def label_of(prompt: Prompt) -> object:
    """Return the label as the data set has it: ``Prompt.label`` is the JSON text of an object."""
    if prompt.label is None or not prompt.label.startswith("{"):
        return prompt.label
    for value in prompt.metadata.values():
        if isinstance(value, dict) and label_text(value) == prompt.label:
            return copy.deepcopy(value)
    return prompt.label


def _numbers(values: Iterable[float] | None, kind: type[Number]) -> list[Number]:
    """Convert a list, an array or a tensor to a list of numbers; None to an empty list."""
    if values is None:
        return []
    plain: Iterable[float] = values.tolist() if hasattr(values, "tolist") else values
    return [kind(value) for value in plain]

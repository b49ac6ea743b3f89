"""Generate functions of slime: call them once per answer and convert the samples that they return.

Input: a function ``(args, sample, sampling_params)``, optionally with ``evaluation``; async or not.
Output: a function with rlpost's interface.

``post`` records the outputs of the engines, from which each token gets its policy version and
log-prob. Attributes that a plug-in sets on a sample for its reward are passed on in
``Sample.extra``.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from common.addresses import http_url
from rlpost.algorithm.signatures import EVALUATION, takes_evaluation
from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn
from rlpost.engines.connection import Halted
from rlpost.engines.routes import RouteFormat
from rlpost.errors import ConfigError, RolloutError
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.engines import (
    EngineOutput,
    Engines,
    load_tokenizer,
    reachable,
    sampling_fields,
)
from rlpost.extensions.slime.sample import Sample, begun, label_of
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from rlpost.types import Sample as Answer

logger = logging.getLogger(__name__)

FLAG = "--custom-generate-function-path"
MAX_ABORTED = 4  # attempts at one answer that a function aborts
HEAD = 8  # leading ids that identify an engine's output in a response
_KNOWN = frozenset(each.name for each in fields(Sample))
_OF_A_PLUG_IN = ("train_metadata", "teacher_log_probs")
_warned: set[str] = set()


class SlimeGenerate:
    """A generate function of slime with rlpost's interface."""

    def __init__(self, function: Callable[..., Any], args: Arguments, *, evaluation: bool) -> None:
        self._function, self._args = function, args
        takes_flag = takes_evaluation(inspect.signature(function))
        self._keywords = {EVALUATION: evaluation} if takes_flag else {}

    async def __call__(
        self, builder: ResponseBuilder, prompt: Prompt, sampling: SamplingParams
    ) -> list[Answer]:
        """Return one answer, or the several samples into which the function splits it.

        Raises:
            Halted: the rollout was halted; the answer is restarted later.
            ConfigError: the function returned invalid samples.
            RolloutError: the function aborted the answer at every attempt.
        """
        tokenizer = load_tokenizer(self._args.hf_checkpoint)
        for _ in range(MAX_ABORTED):
            address = http_url(self._args.sglang_router_ip, self._args.sglang_router_port)
            engines = Engines(
                builder.connection, tokenizer, prompt, builder.index, address, sampling.seed
            )
            samples = await self._samples(engines, sampling_fields(sampling))
            is_aborted = any(
                sample.status.value == Sample.Status.ABORTED.value for sample in samples
            )
            if engines.was_halted or (is_aborted and builder.connection.halted):
                raise Halted
            if not is_aborted:
                return [trained(sample, engines) for sample in samples]
        raise RolloutError(
            f"{FLAG}: the function returned a sample with the status ABORTED {MAX_ABORTED} times for prompt "
            f"{prompt.prompt_id}, but no engine had aborted it; return FAILED with the tokens generated so far to "
            "train on them"
        )

    async def _samples(self, engines: Engines, sampling_params: dict[str, object]) -> list[Sample]:
        siblings = self._args.n_samples_per_prompt
        sample = begun(engines.prompt, engines.index, siblings=siblings)
        arguments = (self._args, sample, sampling_params)
        with reachable(engines):
            if inspect.iscoroutinefunction(inspect.unwrap(self._function)):
                returned = await self._function(*arguments, **self._keywords)
            else:  # in a thread, because it may wait for a tool
                returned = await asyncio.to_thread(self._function, *arguments, **self._keywords)
                returned = await returned if inspect.isawaitable(returned) else returned
        samples = list(returned) if isinstance(returned, Sequence) else [returned]
        if not samples or not all(
            hasattr(each, "tokens") and hasattr(each, "status") for each in samples
        ):
            raise ConfigError(
                f"{FLAG}: the function returned {repr(returned)[:200]} for prompt {engines.prompt.prompt_id}; it must "
                "return a Sample or a list of Samples"
            )
        return samples


def trained(sample: Sample, engines: Engines) -> Answer:
    """Convert a sample that a plug-in returned.

    Raises:
        ConfigError: tokens, mask, log-probs or versions are missing or inconsistent.
    """
    what = f"{FLAG}: the sample returned for prompt {engines.prompt.prompt_id}"
    length, tokens = int(sample.response_length), [int(token) for token in sample.tokens]
    if length < 1 or len(tokens) <= length:
        raise ConfigError(
            f"{what} has {len(tokens)} tokens and response_length {length}; tokens must hold the prompt followed by "
            "the response, each with at least one token"
        )
    response = tokens[-length:]
    mask = [1] * length if sample.loss_mask is None else [int(value) for value in sample.loss_mask]
    mask = [0] * length if sample.remove_sample else mask
    if len(mask) != length:
        raise ConfigError(
            f"{what} has {len(mask)} values in loss_mask for {length} tokens; give one per token"
        )
    num_versions = len(
        {version for answer in engines.written for version, _ in answer.version_spans}
    )
    # the engines' outputs are not needed
    is_complete = num_versions == 1 and sample.rollout_log_probs is not None
    origins = [None] * length if is_complete else _found(response, engines.written)
    versions = _versions(origins, sample, engines, what)
    spans = RunColumn.of(versions).runs
    is_truncated = sample.status.value == Sample.Status.TRUNCATED.value
    return Answer(
        prompt_id=engines.prompt.prompt_id,
        index=engines.index,
        prompt_ids=IntColumn(tokens[:-length]),
        response_ids=IntColumn(response),
        rollout_logprobs=_logprobs(origins, mask, sample.rollout_log_probs, what),
        text=sample.response,
        finish_reason="length" if is_truncated else "stop",
        policy_version=versions[-1],
        label=engines.prompt.label,
        loss_mask=None if all(mask) else RunColumn.of(mask),
        version_spans=spans if len(spans) > 1 else (),
        extra=_extra(sample, engines.prompt),
        routes=_routes(tokens, length, engines),
        sampling_mask=_sampling_mask(sample, length, what),
    )


def _sampling_mask(sample: Sample, length: int, what: str) -> TokenSetColumn | None:
    """Return the ids that each token was sampled from, if the sample has them.

    Raises:
        ConfigError: they are not those of ``length`` tokens.
    """
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None or offsets is None:
        return None
    sizes = [int(end) - int(start) for start, end in itertools.pairwise(offsets)]
    if len(sizes) != length or sum(sizes) != len(ids):
        raise ConfigError(
            f"{what} has {len(sizes)} sets with {sum(sizes)} ids in rollout_top_p_token_offsets, "
            f"{len(ids)} in rollout_top_p_token_ids and {length} tokens; give one set per token"
        )
    return TokenSetColumn(IntColumn(sizes), IntColumn([int(token) for token in ids]))


def _routes(tokens: Sequence[int], length: int, engines: Engines) -> RouteColumn | None:
    """Return the routes of a sample; its last ``length`` tokens are the response."""
    form = engines.connection.routes
    if form is None:
        return None
    read = [
        _Read(written.request_ids, written.token_ids, written.routes)
        for written in engines.written
        if written.routes is not None
    ]
    return _routes_of(tokens, prompt_length=len(tokens) - length, read=read, form=form)


def _found(response: list[int], written: Sequence[EngineOutput]) -> list[tuple[float, int] | None]:
    """Return log-prob and version of each token that an engine generated; None for others.

    A response contains the outputs of engines in the order of the requests, complete or truncated.
    """
    origins: list[tuple[float, int] | None] = [None] * len(response)
    cursor = 0
    for answer in written:
        start = _place(response, list(answer.token_ids[:HEAD]), cursor)
        if start is None:
            continue  # part of another sample, or unused
        versions = RunColumn(answer.version_spans)
        for at, (token, logprob, version) in enumerate(
            zip(answer.token_ids, answer.logprobs, versions, strict=True), start
        ):
            if at == len(response) or response[at] != token:
                break
            origins[at] = (logprob, version)
            cursor = at + 1
    return origins


def _place(response: list[int], head: list[int], start: int) -> int | None:
    for at in range(start, len(response) - len(head) + 1):
        if response[at] == head[0] and response[at : at + len(head)] == head:
            return at
    return None


def _versions(
    origins: Sequence[tuple[float, int] | None], sample: Sample, engines: Engines, what: str
) -> list[int]:
    """Return the policy version of each token.

    A token of unknown origin, such as a tool's, gets the version of the previous token; the first
    tokens get the oldest version of all. So no token is reported as newer than it is.
    """
    named = [str(version) for version in sample.weight_versions]
    known = [version for answer in engines.written for version, _ in answer.version_spans]
    known = known or [int(version) for version in named if version.isdecimal()]
    if not known:
        raise ConfigError(
            f"{what} has tokens of an unknown policy version; send requests with slime.utils.http_utils.post, or add "
            "meta_info['weight_version'] of each answer to sample.weight_versions"
        )
    versions, last = [], min(known)
    for entry in origins:
        last = last if entry is None else entry[1]
        versions.append(last)
    return versions


def _logprobs(
    origins: Sequence[tuple[float, int] | None],
    mask: Sequence[int],
    logprobs: Sequence[float] | None,
    what: str,
) -> FloatColumn:
    if logprobs is not None and len(logprobs) == len(mask):
        return FloatColumn([float(value) for value in logprobs])
    if logprobs is None and all(
        entry is not None for entry, trains in zip(origins, mask, strict=True) if trains
    ):
        return FloatColumn([0.0 if entry is None else entry[0] for entry in origins])
    has = "no rollout_log_probs" if logprobs is None else f"{len(logprobs)} rollout_log_probs"
    raise ConfigError(
        f"{what} has {has} for a response_length of {len(mask)}; take them from meta_info['output_token_logprobs'] of "
        "each answer, with the ids there, and 0.0 for the tokens of tools"
    )


def _extra(sample: Sample, prompt: Prompt) -> dict[str, object]:
    """Return attributes that a plug-in set, for its reward and filter, and that have no field."""
    left: dict[str, object] = {
        name: value for name, value in vars(sample).items() if name not in _KNOWN
    }
    left |= {
        name: value for name in _OF_A_PLUG_IN if (value := getattr(sample, name, None)) is not None
    }
    if sample.prompt != prompt.text:
        left["prompt"] = sample.prompt
    if sample.label != label_of(prompt):
        left["label"] = sample.label
    if sample.metadata != prompt.metadata:
        left["metadata"] = sample.metadata
    if sample.reward is not None:
        left["reward"] = sample.reward
    return {name: value for name, value in left.items() if _is_kept(name, value)}


def _is_kept(name: str, value: object) -> bool:
    """Whether JSON, in which a value is sent and saved, keeps it; warn once if not."""
    try:
        is_same = json.loads(json.dumps(value)) == _lists(value)
    except (TypeError, ValueError):
        is_same = False
    if not is_same and name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s: sample.%s is not a JSON value and is not passed to the reward", FLAG, name
        )
    return is_same


def _lists(value: object) -> object:
    """Replace tuples by lists, because JSON has no tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(entry) for key, entry in value.items()}
    return [_lists(entry) for entry in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class _Read:
    """Input and output tokens of one request, with the routes of all but the last token."""

    request_ids: IntColumn
    token_ids: IntColumn
    routes: RouteColumn


def _routes_of(
    token_ids: Sequence[int], *, prompt_length: int, read: Iterable[_Read], form: RouteFormat
) -> RouteColumn:
    """Return the routes of a sequence that a function assembled from several requests.

    A token has the routes of the first request that read it after the same prefix. The trainer
    routes response tokens that no engine generated, and tokens that no engine read.
    """
    ids = IntColumn.of(token_ids).array
    column = form.unknown(0)
    is_generated = np.arange(len(ids)) < prompt_length
    for one in read:
        theirs = np.concatenate([one.request_ids.array, one.token_ids.array])
        length = min(len(ids), len(theirs))
        differs = theirs[:length] != ids[:length]
        num_equal = int(differs.argmax()) if differs.any() else length
        is_generated[len(one.request_ids) : num_equal] = True
        column = RouteColumn.joined([column, one.routes[len(column) : num_equal]])
    array = column.array.copy()
    array[~is_generated[: len(array)]] = np.iinfo(array.dtype).max
    return RouteColumn(array)

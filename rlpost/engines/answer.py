"""Parsing of an engine's answers: the JSON of SGLang's ``POST /generate`` into columns. Pure.

Input: the body of a response. Output: an ``Answer`` with one token id and log-prob per generated
token.

An answer of n tokens is about 45 n bytes of JSON, most of it ``output_token_logprobs``: n lists
[log-prob, id, text]. These are read as one flat list of numbers, because n lists would be n objects
for Python's garbage collector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn
from rlpost.engines.routes import NARROW, RouteFormat
from rlpost.errors import RolloutError

_LOGPROBS = b'"output_token_logprobs":[['
"""Cannot occur inside a JSON string, where quotes are escaped."""
MASK_FIELD = "return_sampling_mask"
"""Field of a request that asks for the ids that each token was sampled from."""
ROUNDING = 1e-3
"""By how much a log-prob may exceed 0: one over a sampling mask is a difference of two numbers."""
_BETWEEN, _AT_END = b",null],[", b",null"


@dataclass(frozen=True, slots=True)
class Answer:
    """The response of an engine to one request; after an abort it may have no tokens.

    Attributes:
        finish_reason: SGLang's object with ``type`` and, for a stop token or string, ``matched``.
        version_spans: pairs (policy version, number of tokens) in order.
        routes: experts of the tokens that the engine has read, from the first requested one; None
            if it returned none.
        sampling_mask: the ids that each token was sampled from; None if it returned none. Then
            ``logprobs`` are of the distribution over these ids.
        meta_info: SGLang's other fields, without the lists with one entry per token.
    """

    token_ids: IntColumn
    logprobs: FloatColumn
    text: str
    finish_reason: Mapping[str, Any]
    version_spans: tuple[tuple[int, int], ...]
    meta_info: Mapping[str, object]
    routes: RouteColumn | None = None
    sampling_mask: TokenSetColumn | None = None


def parse(body: bytes, routes: RouteFormat | None = None, *, before: int = 0) -> Answer:
    """Parse one response.

    Args:
        routes: the format of its routes, if they were requested.
        before: tokens of the answer that earlier events of a stream had; those after are returned.

    Raises:
        ValueError: the body is not JSON, or not an answer with log-prob and version of each token.
        RolloutError: the version of the engine's weights is not an integer, or its routes do not
            fit the model.
    """
    raw, pairs = _parsed(body)
    try:
        # A response aborted before its first token has little besides a text and a finish reason.
        meta = raw["meta_info"]
        reason, listed = meta["finish_reason"], meta.pop("output_token_logprobs", None) or []
        token_ids = IntColumn(raw.get("output_ids") or ())
        if pairs is None:
            pairs = np.array([entry[:2] for entry in listed], dtype=np.float64).reshape(-1, 2)
        logprobs, logprob_ids = FloatColumn.view(pairs[:, 0].astype(np.float32)), pairs[:, 1]
        text, parsed_routes = raw.get("text") or "", _routes(meta, routes)
        mask, mask_logprobs = _sampling_mask(meta)
        logprobs = logprobs if mask_logprobs is None else mask_logprobs
        num_new = len(token_ids)
        if before:  # an abort repeats tokens of earlier events
            num_new = meta["completion_tokens"] - before
            new = slice(len(token_ids) - num_new, None)
            token_ids, logprobs = token_ids[new], logprobs[len(logprobs) - num_new :]
            logprob_ids = logprob_ids[len(logprob_ids) - num_new :]
            mask = None if mask is None else mask[len(mask) - num_new :]
    except (KeyError, TypeError, IndexError, OverflowError, AttributeError) as error:
        raise ValueError(f"not an answer of SGLang: {type(error).__name__}: {error}") from error
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(logprobs)} log-probs for {len(token_ids)} tokens")
    if not np.array_equal(logprob_ids, token_ids.array):
        raise ValueError("log-probs of other tokens than those of the answer")
    if logprobs.find_not_finite() is not None:  # a log-prob of null becomes nan
        raise ValueError("a token without a log-prob, or one that is not a finite number")
    if len(logprobs) and logprobs.array.max() > ROUNDING:
        raise ValueError(f"a log-prob of {logprobs.array.max()}, which is no probability")
    if mask is not None and len(mask) != len(token_ids):
        raise ValueError(f"sampling masks of {len(mask)} tokens for {len(token_ids)} tokens")
    spans = version_spans(meta, before + num_new)
    if before:
        spans = RunColumn(spans)[before:].runs
    return Answer(token_ids, logprobs, text, reason, spans, meta, parsed_routes, mask)


def _sampling_mask(meta: dict[str, Any]) -> tuple[TokenSetColumn | None, FloatColumn | None]:
    """Remove each token's sampling mask and its log-prob over the mask from ``meta_info``."""
    sets = meta.pop("output_token_sampling_mask", None)
    logprobs = meta.pop("output_token_sampling_logprobs", None)
    if not sets or not logprobs:
        return None, None
    return TokenSetColumn.of(sets), FloatColumn(logprobs)


def _routes(meta: dict[str, Any], form: RouteFormat | None) -> RouteColumn | None:
    """Remove the routes from ``meta_info`` and decode them."""
    wide, narrow = meta.pop("routed_experts", None), meta.pop(NARROW, None)
    if form is None or (wide is None and narrow is None):
        return None
    return form.decode(wide) if narrow is None else form.decode(narrow, dtype="u1")


def version_spans(meta: Mapping[str, Any], length: int) -> tuple[tuple[int, int], ...]:
    """Return (version, number of tokens) for each span of one response, in order.

    SGLang 0.5.19 and later report ``weight_versions``; earlier releases report only the engine's
    version at the end.

    Raises:
        RolloutError: a version is not an integer, so it was not set by rlpost.
    """
    if not length:
        return ()
    reported = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": length}
    ]
    for span in reported:
        if not str(span["version"]).isdecimal():
            raise RolloutError(
                f"an engine generates with weights of version {span['version']!r}; an integer is needed"
            )
    ends = [*(min(span["end"], length) for span in reported[:-1]), length]
    starts = [min(span["start"], length) for span in reported]
    if starts != [0, *ends[:-1]]:
        raise ValueError(f"weight versions of {reported} are not those of tokens 0 to {length}")
    return tuple(
        (int(span["version"]), end - start)
        for span, start, end in zip(reported, starts, ends, strict=True)
    )


def _parsed(body: bytes) -> tuple[Any, np.ndarray[Any, np.dtype[np.float64]] | None]:
    """Parse JSON; return [log-prob, id] of each token if their list has SGLang's exact formatting."""
    start = body.find(_LOGPROBS) + len(_LOGPROBS)
    end = body.find(b"]]", start)
    if start < len(_LOGPROBS) or end < 0:
        return orjson.loads(body), None
    try:
        values = orjson.loads(
            b"[%b]" % body[start:end].replace(_BETWEEN, b",").removesuffix(_AT_END)
        )
        # Exact: log-probs are float32 numbers, and ids are below 2**53.
        pairs = np.array(values, dtype=np.float64).reshape(-1, 2)
    except (ValueError, TypeError):  # other white space, or texts of tokens
        return orjson.loads(body), None
    # A missing log-prob reads as nan; the others round to the engine's float32 values.
    return orjson.loads(body[: start - 1] + body[end + 1 :]), pairs

"""slime's request functions (``post``, ``GenerateState``) over the engines of this run.

Input: the URL and payload of a request, as in slime's examples. Output: the answer in SGLang's
format.

While a generate function runs, requests to ``/generate`` of the address in ``args`` go through the run's client:
their number is limited, they are retried and authorized, resumed after a weight update, and aborted
when the rollout is halted. Requests to any other URL (a search tool, a judge) are sent unchanged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, ClassVar
from urllib.parse import urlsplit

import aiohttp

from common.addresses import http_url
from rlpost.algorithm.plugin import load_function as import_function
from rlpost.columns import FloatColumn, IntColumn, RouteColumn
from rlpost.engines.connection import Connection, Halted
from rlpost.engines.engine_client import authorization
from rlpost.errors import ConfigError
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.tokenizer import HfTokenizer, hf_tokenizer
from rlpost.types import Prompt

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # between attempts of a request to an external server
SGLANGS_MAX_NEW_TOKENS = 128  # SGLang's default
SUPPORTED = (
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "return_routed_experts",
    "stream",
    "rid",
)
"""The supported fields of a payload of /generate."""


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The output of an engine for one request.

    ``version_spans`` are pairs (policy version, number of tokens); ``routes`` are those of request
    and output, if routes are returned.
    """

    token_ids: IntColumn
    logprobs: FloatColumn
    version_spans: tuple[tuple[int, int], ...]
    request_ids: IntColumn = field(default_factory=IntColumn)
    routes: RouteColumn | None = None


@dataclass
class Engines:
    """Access to the engines for one call of a generate function, with a record of their outputs."""

    connection: Connection
    tokenizer: HfTokenizer
    prompt: Prompt
    index: int
    address: str = ""  # the URL that the function has in ``args``
    seed: int = 0  # of requests; see ``SamplingParams``
    written: list[EngineOutput] = field(default_factory=list)
    conversation: object = field(default_factory=object)
    was_halted: bool = False

    def __post_init__(self) -> None:
        self._log = AnswerLog.off(self.prompt, self.index)  # numbers the requests

    def key_header(self) -> dict[str, str]:
        """Return the header for other requests to the address."""
        places = self.connection.engines.places.all()
        keys = [place.api_key for place in places if place.url == self.address]
        return authorization(keys[0]) if keys else {}

    async def generate(self, payload: Mapping[str, object]) -> dict[str, object]:
        """Generate one answer.

        If the rollout is halted before it ends, its finish reason is "abort", as in slime.

        Raises:
            ConfigError: the payload has an unsupported field.
            RolloutError: the request failed after all retries.
        """
        params = replace(request_params(payload), seed=self.seed)
        form = self.connection.routes if payload.get("return_routed_experts") else None
        if form is None and payload.get("return_routed_experts"):
            raise ConfigError(
                "post(/generate): return_routed_experts needs --use-rollout-routing-replay true"
            )
        token_ids = self._token_ids(payload)
        prompt = replace(self.prompt, token_ids=IntColumn(token_ids))
        builder = ResponseBuilder(
            self.connection,
            prompt,
            params,
            index=self.index,
            log=self._log,
            codec=_Codec(self.tokenizer, params),
            conversation=self.conversation,
        )
        reason: dict[str, object] = {"type": "abort"}
        try:
            await builder.write()
            reason = {"type": builder.finish_reason, "matched": builder.stopped_at}
        except Halted:
            self.was_halted = True
        answer = builder.sample()
        if answer.response_ids:
            self.written.append(
                EngineOutput(
                    answer.response_ids,
                    answer.rollout_logprobs,
                    answer.versions.runs,
                    prompt.token_ids,
                    answer.routes,
                )
            )
        pairs = zip(answer.rollout_logprobs, answer.response_ids, strict=True)
        return {
            "text": self._text(builder, params),
            "output_ids": list(answer.response_ids),
            "meta_info": {
                "id": f"{self.prompt.prompt_id}-{self.index}-{len(self.written)}",
                "finish_reason": reason,
                "output_token_logprobs": [[logprob, token, None] for logprob, token in pairs],
                "prompt_tokens": len(token_ids),
                "completion_tokens": len(answer.response_ids),
                "cached_tokens": 0,
                "weight_version": str(answer.policy_version),
                **(
                    {}
                    if form is None or answer.routes is None
                    else {"routed_experts": form.encode(answer.routes)}
                ),
            },
        }

    def _token_ids(self, payload: Mapping[str, Any]) -> list[int]:
        if payload.get("input_ids") is not None:
            return [int(token) for token in payload["input_ids"]]
        if not isinstance(payload.get("text"), str):
            raise ConfigError(
                "post(/generate): the payload needs input_ids, a list of numbers, or text, a string"
            )
        return list(self.tokenizer(payload["text"])["input_ids"])  # as an engine tokenizes it

    def _text(self, builder: ResponseBuilder, params: RequestParams) -> str:
        """Return the text; with no_stop_trim it ends with the stop token or string."""
        if not params.fields.get("no_stop_trim") or builder.stopped_at is None:
            return builder.text
        matched = builder.stopped_at
        end = (
            matched
            if isinstance(matched, str)
            else _Codec(self.tokenizer, params).decode([matched])
        )
        return builder.text if end in builder.text[-2 * len(end) :] else builder.text + end


@dataclass(frozen=True, slots=True)
class RequestParams(SamplingParams):
    """Sampling parameters of a plug-in: those of rlpost, and additional ``fields`` of SGLang."""

    fields: Mapping[str, object] = field(default_factory=dict)

    def to_sglang(self) -> dict[str, object]:
        """See ``SamplingParams``."""
        return {**self.fields, **SamplingParams.to_sglang(self)}


def request_params(payload: Mapping[str, Any]) -> RequestParams:
    """Return the sampling parameters of a payload.

    Raises:
        ConfigError: the payload has an unsupported field.
    """
    unsupported = [name for name, value in payload.items() if name not in SUPPORTED and value]
    if unsupported:
        raise ConfigError(
            f"post(/generate): {unsupported[0]} is not supported; a payload may have {', '.join(SUPPORTED)}"
        )
    sampling_params = {
        name: value
        for name, value in (payload.get("sampling_params") or {}).items()
        if value is not None
    }
    if payload.get("stream") or sampling_params.pop("n", 1) != 1:
        raise ConfigError(
            "post(/generate): a request returns one complete answer; leave out stream and n"
        )
    stop = sampling_params.pop("stop", ())
    return RequestParams(
        max_new_tokens=int(sampling_params.pop("max_new_tokens", SGLANGS_MAX_NEW_TOKENS)),
        temperature=float(sampling_params.pop("temperature", 1.0)),
        top_p=float(sampling_params.pop("top_p", 1.0)),
        top_k=int(sampling_params.pop("top_k", -1)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(sampling_params.pop("stop_token_ids", ())),
        fields=sampling_params,
    )


def sampling_fields(sampling: SamplingParams) -> dict[str, object]:
    """Return slime's ``sampling_params``, which keep special tokens and stop strings."""
    return {
        **sampling.to_sglang(),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }


_tokenizer = cache(hf_tokenizer)
_current: ContextVar[Engines] = ContextVar("engines of the call under way")


@contextlib.contextmanager
def reachable(engines: Engines) -> Iterator[None]:
    """Route ``post`` and ``get`` to ``engines`` in this context and its tasks and threads."""
    token = _current.set(engines)
    try:
        yield
    finally:
        _current.reset(token)


async def post(
    url: str,
    payload: Mapping[str, object] | None,
    max_retries: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Send a POST request, like slime's function; return parsed JSON, or else the text.

    Raises:
        aiohttp.ClientError: ``max_retries`` requests to an external server failed.
        ConfigError, RolloutError: see ``Engines.generate``.
    """
    engines = _engines_at(url)
    if engines is not None and urlsplit(url).path == "/generate":
        return await engines.generate(payload or {})
    return await _request(
        "POST", url, engines, payload=payload or {}, headers=headers, tries=max_retries
    )


async def get(url: str) -> Any:
    """Send a GET request; return the parsed answer."""
    return await _request("GET", url, _engines_at(url), tries=1)


def _engines_at(url: str) -> Engines | None:
    """Return the engines of the current call if ``url`` is their address in ``args``."""
    engines = _current.get(None)
    if engines is None or urlsplit(url).netloc != urlsplit(engines.address).netloc:
        return None
    return engines


async def _request(
    method: str,
    url: str,
    engines: Engines | None,
    *,
    payload: object = None,
    headers: Mapping[str, str] | None = None,
    tries: int,
) -> object:
    # The API key goes only to the run's engines.
    key_header = {} if engines is None else engines.key_header()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, headers={**(headers or {}), **key_header}
    ) as session:
        for number in range(1, max(1, tries) + 1):
            try:
                async with session.request(method, url, json=payload) as response:
                    response.raise_for_status()
                    text = await response.text()
                break
            except aiohttp.ClientError as error:
                if number >= tries:
                    raise
                logger.info("%s %s: %s; attempt %d of %d", method, url, error, number + 1, tries)
                await asyncio.sleep(PAUSE_S)
    try:
        return json.loads(text)
    except ValueError:
        return text


class SingletonMeta(type):
    """Metaclass of singletons: a class has one instance per process."""

    _made: ClassVar[dict[type, object]] = {}

    def __call__(cls, *args: object, **kwargs: object) -> Any:
        """Return the instance."""
        if cls not in cls._made:
            cls._made[cls] = super().__call__(*args, **kwargs)
        return cls._made[cls]


class GenerateState(metaclass=SingletonMeta):
    """Shared state of generate functions: tokenizer, request limit, sampling parameters."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor = None  # for images, which are not supported
        self.semaphore = asyncio.Semaphore(
            args.sglang_server_concurrency * max(1, args.rollout_num_engines)
        )
        self.sampling_params = sampling_fields(
            SamplingParams(
                max_new_tokens=args.rollout_max_response_len,
                temperature=args.rollout_temperature,
                top_p=args.rollout_top_p,
                top_k=args.rollout_top_k,
                stop=tuple(args.rollout_stop or ()),
                stop_token_ids=tuple(args.rollout_stop_token_ids or ()),
            )
        )

    @property
    def aborted(self) -> bool:
        """Whether the rollout is halted, so that new output is not used."""
        engines = _current.get(None)
        return engines is not None and engines.connection.halted


def get_model_url(args: Namespace, model_name: str, endpoint: str = "/generate") -> str:
    """Return the URL of an endpoint. There is one model, so every name leads to its engines."""
    del model_name
    return http_url(args.sglang_router_ip, args.sglang_router_port) + endpoint


def load_tokenizer(name_or_path: str, **kwargs: object) -> HfTokenizer:
    """Load the tokenizer of a folder once per process; code in the folder is never executed."""
    del kwargs
    return _tokenizer(str(name_or_path))


def load_function(path: str) -> Callable[..., object]:
    """Load a function by its dotted path. Raises ConfigError if it does not exist."""
    return import_function(path, key="load_function")


class _Codec:
    """Convert between text and ids; a request may ask for special tokens in the text."""

    def __init__(self, tokenizer: HfTokenizer, params: RequestParams) -> None:
        self._tokenizer = tokenizer
        self._skips = bool(params.fields.get("skip_special_tokens", True))

    def encode(self, text: str) -> Sequence[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=self._skips)

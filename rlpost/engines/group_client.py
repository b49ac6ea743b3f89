"""Requests to a group of engines by name: judges, reward models, teachers.

Input: the engines that serve now (``places``), the settings of the group. Output: replies. A request
goes to the least busy engine with free capacity. If that engine dies, is busy (429) or fails (5xx)
the request is sent again, to another one where there is one; while none serves, because the only one
is restarted, it waits. So the death of an engine loses no answer unless --bringup-deadline-s ends
the run first.

Equal requests whose reply is the same every time (temperature 0, scores) are sent once: a second one
waits for the first or finds its reply in the cache. Engines that follow the policy have no cache,
because their weights change.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlpost.config.engine_groups import NamedGroup, engine_groups, group_key
from rlpost.config.tree import Config
from rlpost.engines.places import GivenUp, Place, Places, Request
from rlpost.errors import ConfigError, GradingLost, RolloutError, suggestion

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between attempts; doubles
DEFAULT_MODEL = "default"
Message = Mapping[str, object]
"""A chat message of the OpenAI interface: role, content, ..."""


class ChatReply(str):
    """The text of a chat reply.

    Attributes:
        finish_reason: ``stop`` or ``length``, ``content_filter`` for a refusal, and further ones
            of the server.
        response: the whole response of /v1/chat/completions.
    """

    finish_reason: str
    response: Mapping[str, Any]

    @classmethod
    def of(cls, response: Mapping[str, Any]) -> ChatReply:
        """Parse a response. Raises KeyError, IndexError or TypeError for another form."""
        choice = response["choices"][0]
        message = choice["message"]
        reply = cls(message.get("content") or message.get("refusal") or "")
        filtered = "content_filter" if message.get("refusal") else None
        reply.finish_reason = filtered or str(choice.get("finish_reason") or "stop")
        reply.response = response
        return reply


class ReplyCache:
    """Replies by content, the least recently used ones dropped beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._replies: OrderedDict[bytes, bytes] = OrderedDict()

    def get(self, key: bytes) -> bytes | None:
        """Return a reply, which is then the most recently used one."""
        reply = self._replies.get(key)
        if reply is not None:
            self._replies.move_to_end(key)
        return reply

    def put(self, key: bytes, reply: bytes) -> None:
        """Keep a reply, unless it alone is larger than the cache."""
        if len(reply) > self._max_bytes or key in self._replies:
            return
        self._replies[key] = reply
        self._num_bytes += len(reply)
        while self._num_bytes > self._max_bytes:
            _, dropped = self._replies.popitem(last=False)
            self._num_bytes -= len(dropped)


class GroupClient:
    """The client of one group; its calls may be concurrent. ``close`` it last."""

    def __init__(self, group: NamedGroup, places: Places | None = None) -> None:
        """``places``: the engines of the group that serve; None for its URLs.

        Raises ConfigError when the key of its servers cannot be read.
        """
        self.name, self._group, self._settings = group.name, group, group.settings
        self.places = Places() if places is None else places
        if places is None and group.settings.url:
            key, capacity = group_key(group), group.settings.concurrency
            self.places.set_own([Place(url, key, capacity) for url in group.settings.url])
        keeps = 0 if group.settings.follows_policy else group.settings.cache_mib << 20
        self._cache = ReplyCache(keeps) if keeps else None
        self._pending: dict[bytes, asyncio.Task[bytes]] = {}
        self._session: aiohttp.ClientSession | None = None
        self._counts: Counter[str] = Counter()
        self._is_used = False

    async def chat(
        self, messages: Sequence[Message], *, cache: bool | None = None, **sampling: object
    ) -> ChatReply:
        """Return the reply to a conversation, over /v1/chat/completions.

        Args:
            messages: of the OpenAI interface.
            cache: send equal requests once. Default: at temperature 0.
            sampling: further fields of the request, such as ``max_tokens``. ``temperature`` is 0 by
                default.

        Raises:
            GradingLost: no engine answered within ``timeout_s``.
            RolloutError: an engine refused the request, or its reply has another form.
        """
        fields = {"temperature": 0.0, **sampling}
        body = {"model": self._model, "messages": list(messages), **fields}
        response = await self._json("/v1/chat/completions", body, cache=_is_fixed(fields, cache))
        try:
            return ChatReply.of(response)
        except (KeyError, IndexError, TypeError, AttributeError):
            raise self._wrong("/v1/chat/completions", response, "a chat completion") from None

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        cache: bool | None = None,
        fields: Mapping[str, object] | None = None,
        **sampling: object,
    ) -> dict[str, Any]:
        """Return SGLang's response of /generate to a text or to token ids.

        Args:
            prompt: text or token ids.
            cache: as for ``chat``.
            fields: further fields of the request, such as ``return_logprob``.
            sampling: parameters of SGLang. ``temperature`` is 0 by default.

        Raises: as ``chat``.
        """
        params = {"temperature": 0.0, **sampling}
        content: dict[str, object] = {"text": prompt}
        if not isinstance(prompt, str):
            content = {"input_ids": list(prompt)}
        body = {**content, "sampling_params": params, **(fields or {})}
        response = await self._json("/generate", body, cache=_is_fixed(params, cache))
        if not isinstance(response, dict):
            raise self._wrong("/generate", response, "an object")
        return response

    async def classify(self, texts: Sequence[str]) -> list[list[float]]:
        """Return the outputs of a classifier or reward head for each text, over SGLang's /classify.

        The engines need ``sglang_is_embedding = true``. Raises: as ``chat``.
        """

        async def outputs(text: str) -> list[float]:
            response = await self._json("/classify", {"text": text}, cache=True)
            try:
                numbers = [float(number) for number in response["embedding"]]
            except (KeyError, TypeError, ValueError):
                numbers = []
            if not numbers or not all(map(math.isfinite, numbers)):
                raise self._wrong(
                    "/classify", response, "an object with finite numbers as 'embedding'"
                )
            return numbers

        return list(await asyncio.gather(*map(outputs, texts)))

    async def score(self, texts: Sequence[str]) -> list[float]:
        """Return the output of a reward head, which has one, for each text.

        Raises: as ``classify``; RolloutError for a head with several outputs.
        """
        scores = await self.classify(texts)
        if wide := [numbers for numbers in scores if len(numbers) != 1]:
            raise RolloutError(
                f"{self._group.label}: its model has {len(wide[0])} outputs for a text, and score "
                "takes one; use classify"
            )
        return [number for (number,) in scores]

    async def score_labels(
        self, query: str, items: Sequence[str], label_token_ids: Sequence[int]
    ) -> list[list[float]]:
        """Return the probability of each label token after query and item, over SGLang's /v1/score.

        For a generative model as a classifier: probabilities are normalised over the labels.
        Raises: as ``chat``.
        """

        async def one(item: str) -> list[float]:
            body = {
                "query": query,
                "items": [item],
                "label_token_ids": list(label_token_ids),
                "apply_softmax": True,
                "model": self._model,
            }
            response = await self._json("/v1/score", body, cache=True)
            try:
                return [float(number) for number in response["scores"][0]]
            except (KeyError, IndexError, TypeError, ValueError):
                raise self._wrong("/v1/score", response, "an object with 'scores'") from None

        return list(await asyncio.gather(*map(one, items)))

    async def post(self, path: str, body: bytes, *, cache: bool = False) -> bytes:
        """Send a request with a JSON body; return the body of the reply.

        Raises:
            GradingLost: no engine answered within ``timeout_s``.
            RolloutError: an engine refused the request; no retry can help.
        """
        self._counts["requests"] += 1
        if self._cache is None or not cache:
            return await self._send(path, body)
        key = hashlib.sha256(path.encode() + b"\0" + body).digest()
        known = self._cache.get(key)
        if known is not None or key in self._pending:
            self._counts["cached"] += 1
        if known is not None:
            return known
        if key not in self._pending:
            # A task: the request continues for others when its first caller is cancelled.
            self._pending[key] = task = asyncio.create_task(self._send(path, body))
            task.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(self._pending[key])

    def counters(self) -> dict[str, float]:
        """Return metrics of the requests since the last call, as ``engines/NAME/...``.

        Before the first request only the share of busy time: evaluation uses no client.
        """
        prefix, busy = f"engines/{self.name}", self.places.take_busy()
        metrics = {} if busy is None else {f"{prefix}/busy_frac": busy}
        self._is_used = self._is_used or bool(self._counts)
        if not self._is_used:
            return metrics
        counts, self._counts = self._counts, Counter()
        num_sent = counts["answered"]
        metrics[f"{prefix}/num_requests"] = float(counts["requests"])
        metrics[f"{prefix}/num_retries"] = float(counts["retries"])
        if self._cache is not None and counts["requests"]:
            metrics[f"{prefix}/cache_hit_frac"] = counts["cached"] / counts["requests"]
        if num_sent:
            metrics[f"{prefix}/request_s"] = counts["milliseconds"] / 1000 / num_sent
        return metrics

    async def close(self) -> None:
        """Cancel requests in flight and close the connections."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def where(self) -> str:
        """The group as messages spell it, with the URL of a server."""
        return " ".join([self._group.label, *self._settings.url[:1]])

    @property
    def _model(self) -> str:
        return self._settings.served_model or DEFAULT_MODEL

    async def _json(self, path: str, body: Mapping[str, object], *, cache: bool) -> Any:
        content = json.dumps(body, sort_keys=True, default=str).encode()
        reply = await self.post(path, content, cache=cache)
        try:
            return json.loads(reply)
        except ValueError:
            raise self._wrong(path, reply, "JSON") from None

    def _keep(self, key: bytes, done: asyncio.Task[bytes]) -> None:
        del self._pending[key]
        if not done.cancelled() and done.exception() is None and self._cache is not None:
            self._cache.put(key, done.result())

    async def _send(self, path: str, body: bytes) -> bytes:
        """Send a request until an engine answers it or the deadline passes."""
        spent_s, pause_s, failure = 0.0, FIRST_PAUSE_S, "did not answer"
        limit_s = self._settings.timeout_s
        while True:
            url = "" if self._group.is_endpoint else path
            try:
                # Waiting for a place is not the server's delay.
                async with self.places.take(Request()) as place:
                    began = time.monotonic()
                    reply, failure = await self._attempt(place, url, body, limit_s - spent_s)
                    seconds = time.monotonic() - began
                    if reply is not None:
                        self._counts["answered"] += 1
                        self._counts["milliseconds"] += round(1000 * seconds)
                        return reply
                    self.places.failed(place, failure)
            except GivenUp as gone:
                logger.debug("%s: engine %s is lost; its request is sent again", self.name, gone)
                self._counts["retries"] += 1
                continue
            logger.debug("%s %s %s", self._group.label, place.url, failure)
            spent_s += seconds + pause_s
            if spent_s >= limit_s:
                raise GradingLost(
                    f"{self._group.label} {place.url} {failure}, for {limit_s:g} s "
                    f"({self._group.deadline_label}); is it up?"
                )
            self._counts["retries"] += 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _attempt(
        self, place: Place, path: str, body: bytes, within_s: float
    ) -> tuple[bytes | None, str]:
        """Return (reply, "") or (None, reason to retry). Raises RolloutError."""
        import aiohttp

        from rlpost.engines.engine_client import authorization

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),  # places are the only bound
                timeout=aiohttp.ClientTimeout(total=None),
            )
        url, where = _joined(place.url, path), f"{self._group.label} {place.url}"
        headers = {"Content-Type": "application/json"}
        headers |= authorization(place.api_key) if place.api_key else {}
        limit = aiohttp.ClientTimeout(total=within_s)
        try:
            async with self._session.post(
                url, data=body, headers=headers, timeout=limit
            ) as response:
                if response.status == 429 or response.status >= 500:
                    return None, f"answered {response.status}"
                reply = await response.read()
                if response.status != 200:
                    text = reply.decode(errors="replace")[:500]
                    raise RolloutError(f"{where} answered {response.status}: {text}")
                return reply, ""
        except aiohttp.InvalidURL as error:
            raise RolloutError(f"{where}: not a URL; give http://HOST:PORT/PATH") from error
        except TimeoutError:
            return None, "did not answer"
        except aiohttp.ClientError as error:
            return None, f"does not answer ({error or type(error).__name__})"

    def _wrong(self, path: str, found: object, wanted: str) -> RolloutError:
        return RolloutError(
            f"{self._group.label} {path} answered {str(found)[:300]!r}; it must return {wanted}"
        )


class EngineClients(Mapping[str, GroupClient]):
    """The clients of all groups of a run, by name. ``close`` them last."""

    def __init__(self, groups: Mapping[str, NamedGroup]) -> None:
        """Raises ConfigError when a key cannot be read."""
        self._clients = {name: GroupClient(group) for name, group in groups.items()}

    @classmethod
    def of(cls, config: Config) -> EngineClients:
        """Return the clients of a run's groups."""
        return cls(engine_groups(config))

    def __getitem__(self, name: str) -> GroupClient:
        """Return the client of a group. Raises ConfigError for an unknown name."""
        if name not in self._clients:
            known = ", ".join(self._clients) or "none"
            raise ConfigError(
                f"engines[{name!r}]: no such group of engines{suggestion(name, self._clients)}; there "
                f"is {known}; add a table [engines.{name}]"
            )
        return self._clients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __contains__(self, name: object) -> bool:
        return name in self._clients

    def counters(self) -> dict[str, float]:
        """Return the metrics of all groups since the last call."""
        metrics: dict[str, float] = {}
        for client in self._clients.values():
            metrics |= client.counters()
        return metrics

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))


def _is_fixed(sampling: Mapping[str, object], cache: bool | None) -> bool:
    """Whether equal requests are sent once."""
    return sampling.get("temperature") == 0 if cache is None else cache


def _joined(url: str, path: str) -> str:
    """Append the path of a request; a URL that ends in /v1 names the OpenAI interface.

    >>> _joined("http://h/v1", "/v1/chat/completions")
    'http://h/v1/chat/completions'
    """
    return url + (path.removeprefix("/v1") if url.endswith("/v1") else path)

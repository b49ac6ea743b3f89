"""HTTP client for the control requests of one SGLang server.

Input: the engine's address and key. Output: parsed responses, or an error with engine, path, status
and body. The field names are those of SGLang 0.5.21 to 0.5.23
(``sglang/srt/managers/io_struct.py``). Control requests are rare, so a client keeps no connection
and works in any event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import aiohttp

from rlpost.engines.shards.messages import LOADER, Failure
from rlpost.errors import EngineDied, EngineNotPrepared, EngineRefused, RolloutError
from rlpost.types import Bucket

logger = logging.getLogger(__name__)

SESSION_IS_OPEN = "a weight-update session is already open"  # SGLang's refusal of a second one
MAX_SHOWN = 500
"""Characters of an answer in a message."""
LISTENING_POLL_S = 2.0  # interval of checks that a slow engine still listens

Selector = Literal["all", "target"]
"""SGLang's name for the models of an engine that an update fills: with its draft model, or not."""
SECRETS = ("api_key", "admin_api_key", "launch_command")


def authorization(api_key: str) -> dict[str, str]:
    """The HTTP header that engines and router require."""
    return {"Authorization": f"Bearer {api_key}"}


@dataclass(frozen=True, slots=True)
class EngineClient:
    """One engine under ``url`` (``http://HOST:PORT``).

    All methods raise ``EngineDied`` when the engine does not answer in time, and ``RolloutError``
    when it refuses.
    """

    url: str
    api_key: str = field(repr=False)
    timeout_s: float = 60.0
    name: str = "engine"  # in messages; "router" for the router
    selector: Selector = "all"

    async def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stop generating.

        Requests in flight are aborted, recomputed later (retract) or frozen (in_place).
        """
        await self.request("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Generate again."""
        await self.request("POST", "/continue_generation", {})

    async def begin_weight_update(self) -> None:
        """Open a session of weight updates.

        A session that an earlier update left open is closed first: when one engine dies, the update
        of the others is interrupted at any point. The next update sends all weights again.
        """
        try:
            await self._begin()
            return
        except EngineRefused as error:
            if SESSION_IS_OPEN not in str(error.answer):
                raise
        logger.info("engine %s: closing the weight update that an earlier one left open", self.url)
        await self.end_weight_update()
        await self._begin()

    async def _begin(self) -> None:
        await self.request("POST", "/begin_weight_update", {"selector": self.selector})

    async def end_weight_update(self) -> None:
        """Close the session of weight updates."""
        await self.request("POST", "/end_weight_update", {})

    async def init_update_group(
        self,
        *,
        address: tuple[str, int],
        first_rank: int,
        world_size: int,
        group_name: str,
        backend: str,
    ) -> None:
        """Join the process group for weights; return when all ``world_size`` ranks have joined.

        Rank 0 is the sender at ``address``; this engine has one rank per GPU, starting at
        ``first_rank``.
        """
        host, port = address
        body = {
            "master_address": host,
            "master_port": port,
            "rank_offset": first_rank,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self.request("POST", "/init_weights_update_group", body)

    async def destroy_update_group(self, group_name: str) -> None:
        """Leave the process group."""
        await self.request("POST", "/destroy_weights_update_group", {"group_name": group_name})

    async def update_weights(
        self, bucket: Bucket, *, group_name: str, version: int | None = None
    ) -> None:
        """Receive one bucket, broadcast by rank 0 as a single uint8 tensor, and load it.

        ``version``, given with the last bucket of an update, names the update. This does not flush
        the cache: the caller flushes once at the end.
        """
        body = _bucket_body(bucket, group_name, version, self.selector)
        await self.request("POST", "/update_weights_from_distributed", body)

    async def update_weights_from_handles(
        self, handles: Sequence[str], *, version: int | None = None
    ) -> None:
        """Load one bucket from shared memory of this host.

        ``handles`` has one entry per rank of the engine, created by
        ``rlpost.trainer.weights.trainer_side.Sharing``.
        """
        body = {
            "serialized_named_tensors": list(handles),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "selector": self.selector,
            "weight_version": None if version is None else str(version),
        }
        await self.request("POST", "/update_weights_from_tensor", body)

    async def has_shard_loader(self) -> bool:
        """Whether the engine answers rlpost's loader: it runs with it, and without pipeline stages.

        SGLang gives the same payload to the ranks of all stages.
        """
        info = await self.server_info()
        return LOADER in (info.get("custom_weight_loader") or ()) and info.get("pp_size", 1) == 1

    async def send_to_loader(self, payloads: Sequence[str], *, version: int | None = None) -> None:
        """Send a message to the loader of each rank, in a session; return when all have handled it.

        ``payloads`` has one entry per rank of the engine (``rlpost.engines.shards.messages``), and
        ``version`` comes with the last one of an update.

        Raises:
            EngineNotPrepared: a rank lacks what the message assumes.
            RolloutError: a rank failed otherwise.
        """
        body = {
            "serialized_named_tensors": list(payloads),
            "load_format": LOADER,
            "flush_cache": False,
            "selector": self.selector,
            "weight_version": None if version is None else str(version),
        }
        try:
            await self.request("POST", "/update_weights_from_tensor", body)
        except EngineRefused as error:
            answer = error.answer if isinstance(error.answer, dict) else {}
            failure = Failure.from_text(str(answer.get("message")))
            if failure is None:
                raise
            kind = RolloutError if failure.is_prepared else EngineNotPrepared
            texts = "; ".join(failure.texts)[:MAX_SHOWN]
            raise kind(f"{self.name} {self.url}: the loader of slices failed: {texts}") from error

    async def update_weights_from_disk(self, folder: str, *, version: int) -> None:
        """Load the weights of a Hugging Face folder, without flushing the cache.

        Also in an engine that started with random ones (``load_format`` dummy).
        """
        body = {
            "model_path": folder,
            "load_format": "auto",
            "flush_cache": False,
            "weight_version": str(version),
        }
        await self.request("POST", "/update_weights_from_disk", body)

    async def replace_adapter(self, folder: str, *, version: int) -> None:
        """Unload all adapters, load the one in a PEFT folder, and set the weight version.

        The engine is paused, and its requests are aborted: an unload waits for those that use the
        adapter. It needs the tokenizer manager of ``rlpost.engines.adapter_use``.

        Raises:
            RolloutError: the engine refuses or is dead. Ranks that loaded the adapter were asked to
                unload it, so that another call may succeed.
        """
        for name in await self.adapters():
            await self.request("POST", "/unload_lora_adapter", {"lora_name": name})
        name = f"version-{version}"
        try:
            body = {"lora_name": name, "lora_path": folder}
            await self.request("POST", "/load_lora_adapter", body)
        except RolloutError:
            # Some tensor-parallel ranks may hold it. SGLang does not list such an adapter, and
            # refuses its name until it is unloaded.
            with contextlib.suppress(RolloutError):
                await self.request("POST", "/unload_lora_adapter", {"lora_name": name})
            raise
        await self.rename_weights(version)

    async def adapters(self) -> list[str]:
        """Names of the adapters that are loaded."""
        models = (await self._described("/v1/models")).get("data")
        if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
            raise RolloutError(
                f"{self.name} {self.url}: GET /v1/models lists no models: {models!r}"
            )
        return [str(model.get("id")) for model in models if model.get("parent")]

    async def release_memory(self, tags: Sequence[str]) -> None:
        """Release GPU memory: ``kv_cache``, ``weights``, ``cuda_graph``.

        SGLang exits if it is busy, so the engine is paused first and stays paused.
        """
        await self.pause("abort")
        await self.request("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def restore_memory(self, tags: Sequence[str]) -> None:
        """Restore released memory; weights have undefined content and must be updated."""
        await self.request("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def flush_cache(self) -> None:
        """Drop the prefix cache; refused while requests run."""
        await self.request("POST", "/flush_cache", None)

    async def abort(self) -> None:
        """Abort all requests; each returns its tokens so far."""
        await self.request("POST", "/abort_request", {"abort_all": True})

    async def rename_weights(self, version: int) -> None:
        """Set the version of the current weights."""
        await self.request(
            "POST",
            "/update_weight_version",
            {"new_version": str(version), "abort_all_requests": False},
        )

    async def weight_version(self) -> str:
        """The version of the last completed update; ``"0"`` before the first."""
        return str((await self._described("/model_info")).get("weight_version"))

    async def server_info(self) -> dict[str, Any]:
        """All settings of the server and its load, without the keys."""
        return cast("dict[str, Any]", _without_secrets(await self._described("/server_info")))

    async def _described(self, path: str) -> dict[str, Any]:
        """Return the JSON object at a path. Raises RolloutError if another server answers."""
        answer = await self.request("GET", path, None)
        if not isinstance(answer, dict):
            raise RolloutError(
                f"{self.name} {self.url}: GET {path} answered {str(answer)[:MAX_SHOWN]!r}, which is no JSON object; "
                "is another server on this port?"
            )
        return answer

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, object] | bytes | None,
        *,
        missing_ok: bool = False,
    ) -> Any:
        """Send one request, with a body as JSON values or as their text.

        Returns the parsed JSON, or the text if it is not JSON; None for a 404 with ``missing_ok``.

        Waits only while the server listens: a server that shuts down with a pending response stops
        listening, but never closes the connection (SGLang 0.5.21: TERM ends its scheduler first).
        """
        asking = asyncio.ensure_future(self._ask(method, path, body, missing_ok=missing_ok))
        try:
            while not (await asyncio.wait([asking], timeout=LISTENING_POLL_S))[0]:
                if await self._refuses_connections() and not asking.done():
                    raise EngineDied(
                        f"{self.name} {self.url}: {method} {path} has no answer, and the server no longer listens"
                    )
            return asking.result()
        finally:
            asking.cancel()

    async def _refuses_connections(self) -> bool:
        """Whether the port is closed; False for a server that is only slow."""
        where = urlsplit(self.url)
        port = where.port or (443 if where.scheme == "https" else 80)
        try:
            async with asyncio.timeout(LISTENING_POLL_S):
                _, writer = await asyncio.open_connection(where.hostname, port)
        except ConnectionRefusedError:
            return True
        except OSError:  # TimeoutError is one
            return False
        writer.close()
        return False

    async def _ask(
        self, method: str, path: str, body: Mapping[str, object] | bytes | None, *, missing_ok: bool
    ) -> object:
        asked = f"{self.name} {self.url}: {method} {path}"
        content: dict[str, Any] = {"json": body}
        if isinstance(body, bytes):
            content = {"data": body, "headers": {"Content-Type": "application/json"}}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        try:
            async with (
                aiohttp.ClientSession(
                    headers=authorization(self.api_key), timeout=timeout
                ) as session,
                session.request(method, self.url + path, **content) as response,
            ):
                status, text = response.status, await response.text(errors="replace")
        except TimeoutError as error:
            raise EngineDied(f"{asked} not answered after {self.timeout_s:.0f} s") from error
        except aiohttp.ClientError as error:
            raise EngineDied(f"{asked} failed: {error or type(error).__name__}") from error
        if status == 404 and missing_ok:
            return None
        answer = _parsed(text)
        # SGLang also reports a failure with status 200; the router accepts a new worker with 202.
        is_refused = isinstance(answer, dict) and answer.get("success") is False
        if not 200 <= status < 300 or is_refused:
            raise EngineRefused(f"{asked} answered {status}: {text[:MAX_SHOWN]}", answer)
        return answer


@functools.lru_cache(maxsize=1)
def _bucket_body(bucket: Bucket, group_name: str, version: int | None, selector: Selector) -> bytes:
    """Return the request for a bucket as JSON, made once for all engines.

    With many experts it names hundreds of weights.
    """
    body = {
        "names": list(bucket.names),
        "dtypes": list(bucket.dtypes),
        "shapes": [list(shape) for shape in bucket.shapes],
        "group_name": group_name,
        "load_format": "flattened_bucket",
        "flush_cache": False,
        "selector": selector,
        "weight_version": None if version is None else str(version),
    }
    return json.dumps(body).encode()


def _without_secrets(value: object) -> Any:
    """Remove API keys, which SGLang repeats at several depths."""
    if isinstance(value, dict):
        return {key: _without_secrets(inner) for key, inner in value.items() if key not in SECRETS}
    if isinstance(value, list):
        return [_without_secrets(inner) for inner in value]
    return value


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text

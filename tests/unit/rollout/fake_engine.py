"""A fake SGLang engine that logs its requests and answers in SGLang's formats.

The formats are those of a real server of version 0.5.23; ``tests/contract/engines/test_sglang.py``
tests a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.engine_activity import PATH as ACTIVITY
from rlpost.engines.server_proof import PATH, proof
from rlpost.rollout.generate import GroupWriter, write_all
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward.grader import Grader
from rlpost.types import Prompt, SampleGroup

KEY = "the key"


@dataclass
class FakeEngine:
    """The fake engine; its fields control its behaviour and may change while it runs."""

    refuses: str | None = None  # a path that answers 400
    refusal: str = "no"  # the message of that answer
    in_session: bool = False  # whether a weight-update session is open
    ignores_version: bool = False
    answer: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # of POST /generate
    unavailable: int = 0  # number of generations that fail first, with ``unavailable_status``
    unavailable_status: int = 503
    holds: asyncio.Event | None = None  # generations wait for this event
    version: str = "0"
    url: str = ""
    knows: str = KEY  # the key that it proves to know
    adapters: list[str] = field(default_factory=list)
    half_loads: int = 0  # number of adapter loads that fail on some ranks
    half_loaded: list[str] = field(default_factory=list)  # names that must be unloaded first
    log: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    cpu_s: Callable[[], float] = lambda: 0.0  # CPU seconds of its schedulers

    async def handle(self, request: web.Request) -> web.Response:
        if request.path == PATH:  # requested without a key
            own = urlsplit(self.url).netloc
            found = proof(self.knows, request.query["challenge"], own)
            return web.json_response({"proof": found})
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path == ACTIVITY:
            return web.json_response({"cpu_s": self.cpu_s()})
        body = await request.json() if request.can_read_body else {}
        path = request.path.removeprefix("/")
        if path == "generate":
            return await self.generate(body)
        self.log.append(path)
        self.bodies.append(body)
        if path == self.refuses:
            return web.json_response({"success": False, "message": self.refusal}, status=400)
        if path.endswith("_weight_update"):
            if (path == "begin_weight_update") == self.in_session:
                problem = "a weight-update session is already open" if self.in_session else "none"
                return web.json_response({"success": False, "message": problem}, status=400)
            self.in_session = not self.in_session
        if body.get("weight_version") and not self.ignores_version:
            self.version = body["weight_version"]
        if path == "model_info":
            return web.json_response({"model_path": "tiny", "weight_version": self.version})
        if path == "server_info":
            settings = {"api_key": KEY, "tp_size": 1}
            return web.json_response(
                {**settings, "launch_command": KEY, "internal_states": [settings]}
            )
        if path == "v1/models":
            models = [{"id": name, "parent": "tiny"} for name in self.adapters]
            return web.json_response({"data": [{"id": "tiny", "parent": None}, *models]})
        if path == "load_lora_adapter":
            name = body["lora_name"]
            if name in self.half_loaded or self.half_loads > 0:
                self.half_loads -= 1
                self.half_loaded.append(name)
                return web.json_response({"success": False, "message": "no"}, status=400)
            self.adapters.append(name)
        if path == "unload_lora_adapter":
            held = self.half_loaded if body["lora_name"] in self.half_loaded else self.adapters
            held.remove(body["lora_name"])
        if path == "update_weight_version":
            self.version = body["new_version"]
        if path in ("abort_request", "flush_cache"):
            return web.Response(text="")
        return web.json_response({"success": True, "message": "Success"})

    async def generate(self, body: dict[str, Any]) -> web.Response:
        self.log.append("generate")
        self.bodies.append(body)
        if self.unavailable > 0:
            self.unavailable -= 1
            return web.json_response({"error": "not now"}, status=self.unavailable_status)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(0)
            if self.holds is not None:
                await self.holds.wait()
            made = (self.answer or self.echo)(body)
            made.get("meta_info", {}).setdefault("prompt_tokens", len(body["input_ids"]))
        finally:
            self.under_way -= 1
        if body.get("stream"):
            every = body["sampling_params"]["stream_interval"]
            return web.Response(body=b"".join(map(event, streamed(made, every))))
        return web.json_response(made)

    def echo(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the prompt's ids reversed, with finish reason stop."""
        ids = list(reversed(body["input_ids"]))
        return generated(ids, version=self.version, text=" ".join(map(str, ids)))


def generated(
    ids: list[int], *, version: str = "0", text: str = "", reason: str = "stop"
) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": ids,
        "meta_info": {
            "id": "r",
            "finish_reason": {"type": reason},
            "weight_version": version,
            "output_token_logprobs": [
                [-0.5 * (at + 1), token, None] for at, token in enumerate(ids)
            ],
            "completion_tokens": len(ids),
        },
    }


def streamed(made: dict[str, Any], every: int) -> list[dict[str, Any]]:
    """An answer as the events of SGLang's incremental stream, of ``every`` tokens each."""
    found, ids, meta = [], made["output_ids"], made["meta_info"]
    for start in range(0, max(1, len(ids)), every):
        end, is_last = start + every, start + every >= len(ids)
        of_event = {
            **meta,
            "output_token_logprobs": meta["output_token_logprobs"][start:end],
            "completion_tokens": min(end, len(ids)),
            "finish_reason": meta["finish_reason"] if is_last else None,
        }
        if not is_last:  # SGLang sends the versions of all tokens with the last
            of_event.pop("weight_versions", None)
        text = made["text"][start:] if is_last else made["text"][start:end]
        found.append({"text": text, "output_ids": ids[start:end], "meta_info": of_event})
    return found


def event(content: dict[str, Any]) -> bytes:
    """An object as a server-sent event."""
    return b"data: " + json.dumps(content).encode() + b"\n\n"


@asynccontextmanager
async def serving(*engines: FakeEngine) -> AsyncIterator[list[str]]:
    """Serve each engine on a free port; yield their URLs."""
    runners = []
    try:
        for engine in engines:
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", engine.handle)
            runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            engine.url = f"http://{host}:{port}"
        yield [engine.url for engine in engines]
    finally:
        for runner in runners:
            await runner.cleanup()


async def generate_groups(
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    n: int,
    engines: RunEngines,
    grader: Grader,
    stop_requested: Callable[[], bool],
) -> list[SampleGroup]:
    """Generate ``n`` scored samples per prompt over a new connection."""
    async with Connection(engines) as connection:
        writer = GroupWriter(connection, sampling, n=n, grader=grader)
        return await write_all(writer, prompts, stop_requested)

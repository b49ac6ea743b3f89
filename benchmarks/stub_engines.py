"""Engines without a model, in processes of their own, with answers in the format of SGLang.

    python -m benchmarks.stub_engines prepared --port 30000 --length 1024 --delay 5 30
    python -m benchmarks.stub_engines control --port 30000 --num 512
    SGLANG_API_KEY=... python -m benchmarks.stub_engines external --port 30000

``prepared`` answers every request with one of VARIANTS prepared texts, so that it spends its time on
sockets alone. Several processes may share its port (SO_REUSEPORT): the kernel spreads the connections.
``--delay``: seconds until a request is answered, drawn uniformly between the two. ``--chat``: the
answers are chat completions.

``control`` is ``--num`` engines, each with its own port, that accept every control request.
Requests take ANSWER_S, so that many are in flight; ``GET /most`` returns the largest number
of requests in flight since it was last called.

``external`` is an engine for ``--rollout-external-engine-addrs``: it accepts new weights, and answers
with random tokens and the version of the newest weights, after ``--delay`` seconds.

Each process prints ``ready`` and ends with its standard input.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

from aiohttp import web

from rlpost.config.keys import EXTERNAL_ENGINES
from tests.ports import free_port

VARIANTS = 16
LARGEST_ID, LETTERS_A_TOKEN = 150_000, 4
LARGEST_TINY_ID = 16  # of the tiny model's vocabulary
NUM_PROCESSES = 2  # of prepared answers
ANSWER_S = 0.05
MOST = "/most"
VERSION = "0.5.23"
_END = b"\r\n\r\n"


class PreparedAnswer(TypedDict):
    """The fields of SGLang's answer that clients read."""

    text: str
    output_ids: list[int]
    meta_info: Mapping[str, Any]


def prepared_answer(length: int, seed: int, largest_id: int = LARGEST_ID) -> PreparedAnswer:
    """One answer of ``length`` random tokens, as SGLang 0.5.17 sends it with ``return_logprob``."""
    draw = random.Random(seed)
    ids = [draw.randrange(largest_id) for _ in range(length)]
    return {
        "text": "".join(draw.choices("abcdefgh ", k=LETTERS_A_TOKEN * length)),
        "output_ids": ids,
        "meta_info": {
            "id": f"{seed:032x}",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "weight_version": "1",
            "completion_tokens": length,
            "cached_tokens": 0,
            "e2e_latency": 1.5,
            "output_token_logprobs": [[-draw.random(), token, None] for token in ids],
        },
    }


def chat_completion(answer: PreparedAnswer) -> dict[str, object]:
    """Return an answer as a response of /v1/chat/completions."""
    message = {"role": "assistant", "content": answer["text"]}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


class Answering(asyncio.Protocol):
    """One connection with requests one after another."""

    def __init__(self, answers: list[bytes], delay: tuple[float, float]) -> None:
        self._answers, self._delay = answers, delay
        self._received = bytearray()

    def connection_made(self, transport: asyncio.Transport) -> None:
        """See asyncio."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Read whole requests and answer each after its delay."""
        self._received += data
        while (end := self._received.find(_END)) >= 0:
            head = bytes(self._received[:end]).lower()
            _, found, rest = head.partition(b"content-length:")
            size = int(rest.split(b"\r\n")[0]) if found else 0
            if len(self._received) < end + len(_END) + size:
                return
            del self._received[: end + len(_END) + size]
            answer = random.choice(self._answers)
            asyncio.get_running_loop().call_later(
                random.uniform(*self._delay), self._answer, answer
            )

    def _answer(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _response(content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


async def serve_prepared(options: argparse.Namespace) -> None:
    """Answer every request on a port with prepared texts."""
    prepared = [
        prepared_answer(options.length, seed, options.largest_id) for seed in range(VARIANTS)
    ]
    bodies = [chat_completion(answer) if options.chat else answer for answer in prepared]
    answers = [_response(json.dumps(body).encode()) for body in bodies]
    server = await asyncio.get_running_loop().create_server(
        lambda: Answering(answers, tuple(options.delay)),
        "127.0.0.1",
        options.port,
        reuse_port=True,
        backlog=16384,
    )
    async with server:
        await _ready_until_stdin_ends()


class ControlEngines:
    """Engines that accept every control request."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    async def handle(self, request: web.Request) -> web.Response:
        """Accept the request after ANSWER_S."""
        if request.path == MOST:
            most, self.most = self.most, 0
            return web.json_response(most)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await request.read()
            await asyncio.sleep(ANSWER_S)
        finally:
            self.in_flight -= 1
        return web.json_response({"success": True, "weight_version": "1", "version": VERSION})


class ExternalEngine:
    """The control requests of a run, and its generations."""

    def __init__(self, key: str, delay: tuple[float, float]) -> None:
        self._key, self._delay, self._version = key, delay, "0"
        self._seeds = random.Random(0)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer any request that has the key."""
        if request.path in ("/health", "/health_generate"):
            return web.Response()
        if request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            await asyncio.sleep(self._seeds.uniform(*self._delay))
            return web.json_response(self._answer(body["sampling_params"]["max_new_tokens"]))
        if body.get("weight_version"):
            self._version = body["weight_version"]
        info = {"success": True, "tp_size": 1, "version": VERSION, "model_path": "stub"}
        return web.json_response({**info, "weight_version": self._version})

    def _answer(self, longest: int) -> dict[str, object]:
        length = self._seeds.randint(1, longest)
        answer = prepared_answer(length, self._seeds.randrange(2**31), LARGEST_TINY_ID)
        meta = {**answer["meta_info"], "weight_version": self._version}
        return {**answer, "meta_info": meta}


async def serve(engine: ControlEngines | ExternalEngine, ports: Sequence[int]) -> None:
    """Handle every request on these ports."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", engine.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for port in ports:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    await _ready_until_stdin_ends()


async def _ready_until_stdin_ends() -> None:
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def started(*commands: Sequence[object], key: str = "") -> Iterator[None]:
    """Run one process for each command line of this module; kill them at the end.

    ``key``: of external engines.
    """
    pipe = subprocess.PIPE
    environment = {**os.environ, EXTERNAL_ENGINES: key} if key else None
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.stub_engines", *map(str, words)],
            stdin=pipe,
            stdout=pipe,
            text=True,
            env=environment,
        )
        for words in commands
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "a stub engine did not start"
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def prepared_engines(
    length: int,
    *,
    delay: tuple[float, float] = (0.0, 0.0),
    largest_id: int = LARGEST_ID,
    chat: bool = False,
) -> Iterator[str]:
    """Run NUM_PROCESSES processes of prepared answers behind one address; yield its URL."""
    port = free_port()
    words = ["prepared", "--port", port, "--length", length, "--delay", *delay]
    words += ["--largest-id", largest_id, *(["--chat"] if chat else [])]
    with started(*[words] * NUM_PROCESSES):
        yield f"http://127.0.0.1:{port}"


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = parser.add_subparsers(dest="kind", required=True)
    prepared, control = kinds.add_parser("prepared"), kinds.add_parser("control")
    external = kinds.add_parser("external")
    for each in (prepared, control, external):
        each.add_argument("--port", type=int, required=True)
    for each in (prepared, external):
        each.add_argument(
            "--delay", type=float, nargs=2, default=(0.0, 0.0), metavar=("LEAST", "MOST")
        )
    control.add_argument("--num", type=int, required=True, help="engines")
    prepared.add_argument("--length", type=int, required=True, help="tokens of an answer")
    prepared.add_argument("--largest-id", type=int, default=LARGEST_ID, help="of a token")
    prepared.add_argument("--chat", action="store_true", help="answer with chat completions")
    options = parser.parse_args()
    port: int = options.port
    if options.kind == "prepared":
        asyncio.run(serve_prepared(options))
    elif options.kind == "control":
        asyncio.run(serve(ControlEngines(), range(port, port + options.num)))
    else:
        engine = ExternalEngine(os.environ[EXTERNAL_ENGINES], tuple(options.delay))
        asyncio.run(serve(engine, [port]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

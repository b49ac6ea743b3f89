"""An engine without a model: it answers with prepared JSON in the format of SGLang's ``/generate``.

    python -m benchmarks.canned_engine --port 30000 --length 1024 --delay 5 30

Several processes may share one port (SO_REUSEPORT): the kernel spreads the connections. An answer
is one of VARIANTS prepared texts, so the process spends its time on sockets alone. ``--delay``:
seconds until a request is answered, drawn uniformly between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

VARIANTS = 16
LARGEST_ID, LETTERS_A_TOKEN = 150_000, 4
_END = b"\r\n\r\n"


class CannedAnswer(TypedDict):
    """The fields of SGLang's answer that clients read."""

    text: str
    output_ids: list[int]
    meta_info: Mapping[str, Any]


def prepared_answer(length: int, seed: int, largest_id: int = LARGEST_ID) -> CannedAnswer:
    """One answer of ``length`` random tokens, as SGLang 0.5.17 sends it with ``return_logprob``."""
    draw = random.Random(seed)
    ids = [draw.randrange(largest_id) for _ in range(length)]
    return {
        "text": "".join(draw.choices("abcdefgh ", k=LETTERS_A_TOKEN * length)),
        "output_ids": ids,
        "meta_info": {
            "id": f"{seed:032x}",
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "prompt_tokens": 64,
            "weight_version": "1",
            "completion_tokens": length,
            "cached_tokens": 0,
            "e2e_latency": 1.5,
            "output_token_logprobs": [[-draw.random(), token, None] for token in ids],
        },
    }


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


async def serve(port: int, length: int, delay: tuple[float, float], largest_id: int) -> None:
    """Serve until standard input ends."""
    answers = [
        _response(json.dumps(prepared_answer(length, seed, largest_id)).encode())
        for seed in range(VARIANTS)
    ]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Answering(answers, delay), "127.0.0.1", port, reuse_port=True, backlog=16384
    )
    async with server:
        await ready_until_stdin_ends()


async def ready_until_stdin_ends() -> None:
    """Tell ``started`` that the process is ready; return when standard input ends."""
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def started(module: str, *words: object, num_processes: int = 1) -> Iterator[None]:
    """Run processes of a module that calls ``ready_until_stdin_ends``; kill them at the end."""
    command = [sys.executable, "-m", module, *map(str, words)]
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(num_processes)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", f"{module} did not start"
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--length", type=int, required=True, help="tokens of an answer")
    parser.add_argument(
        "--delay", type=float, nargs=2, default=(0.0, 0.0), metavar=("LEAST", "MOST")
    )
    parser.add_argument("--largest-id", type=int, default=LARGEST_ID, help="of a token")
    options = parser.parse_args()
    delay = tuple(options.delay)
    asyncio.run(serve(options.port, options.length, delay, options.largest_id))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The gateway under load: latency that it adds, holds of its loops, memory of the driver.

    python -m benchmarks.gateway_load [--conversations 500] [--turns 10] [--words 40] [--write]

Harnesses in another process hold conversations with stub engines, which answer after ENGINE_S. One
conversation in LONG_SHARE is LONG_FACTOR times longer. Of the requests, one in twenty each is left
and sent again, is sent twice at once, and is repeated after its answer with the header of a client
that lost it. The rest of a conversation continues one of the answers.

The latency is that of answered requests, less ENGINE_S. A hold is the delay of a callback every 5
ms in the loop of the gateway and in that of the driver; other processes of the machine lengthen it,
and an idle process shows by how much. What one request holds is the longest callback of a loop, in
processor time of its thread. --write puts the table into docs/gateway.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import aiohttp

from benchmarks.driver import Lags, LagSampler
from benchmarks.gateway import LAST_ID
from benchmarks.page import machine, make_parser, show, table
from benchmarks.rollout_parts import KEY, TINY
from benchmarks.stub_engines import prepared_engines
from common.garbage import collect_between_steps_only
from rlpost.engines.connection import Connection, RunEngines
from rlpost.extensions.agents.conversation import Line, MessageNode
from rlpost.extensions.agents.gateway import Gateway, OpenEpisode
from rlpost.extensions.agents.http_server import REPEATED_HEADER
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt

T = TypeVar("T")
HEADING = "## Under load"
PAGE = Path(__file__).parents[1] / "docs/gateway.md"
ENGINE_S = 1.0
LENGTH = 128  # tokens of an answer
LONG_SHARE, LONG_FACTOR = 25, 20
FAULT_SHARE = 0.05
COLLECTION = "collection"
RAMP_S = 10.0  # within which the conversations begin


class Harness:
    """Conversations of one process with the gateway."""

    def __init__(self, client: aiohttp.ClientSession, turns: int, words: int) -> None:
        self._client, self._turns, self._words = client, turns, words
        self.latencies: list[float] = []
        self.counts: Counter[str] = Counter()

    async def converse(self, number: int, base_url: str, key: str) -> None:
        """Hold one conversation."""
        draw = random.Random(number)
        await asyncio.sleep(draw.uniform(0, RAMP_S))
        words = self._words * (LONG_FACTOR if number % LONG_SHARE == 0 else 1)
        messages: list[dict[str, object]] = []
        url, headers = base_url + "/chat/completions", {"Authorization": f"Bearer {key}"}
        for _ in range(self._turns):
            text = " ".join(str(draw.randrange(10**6)) for _ in range(words))
            messages.append({"role": "user", "content": text})
            body = json.dumps({"messages": messages, "stream": False}).encode()
            fault = draw.random()
            if fault < FAULT_SHARE:
                await self._leave(url, headers, body, draw)
            if FAULT_SHARE < fault < 2 * FAULT_SHARE:
                self.counts["sent twice"] += 1
                answers = await asyncio.gather(*[self._ask(url, headers, body) for _ in range(2)])
                messages.append(draw.choice(answers))
                continue
            answer = await self._ask(url, headers, body)
            if 2 * FAULT_SHARE < fault < 3 * FAULT_SHARE:
                self.counts["repeated"] += 1
                answer = await self._ask(url, headers | {REPEATED_HEADER: "1"}, body)
            messages.append(answer)

    async def _ask(self, url: str, headers: dict[str, str], body: bytes) -> dict[str, object]:
        began = time.perf_counter()
        async with self._client.post(url, data=body, headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        if REPEATED_HEADER not in headers:
            self.latencies.append(time.perf_counter() - began - ENGINE_S)
        self.counts["answered"] += 1
        message: dict[str, object] = answer["choices"][0]["message"]
        return message

    async def _leave(
        self, url: str, headers: dict[str, str], body: bytes, draw: random.Random
    ) -> None:
        self.counts["left"] += 1
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.uniform(0, ENGINE_S)):
                await self._ask(url, headers, body)


async def converse_all() -> None:
    """Run the conversations that a line of standard input names; print what was seen."""
    turns, words, episodes = json.loads(await asyncio.to_thread(sys.stdin.readline))
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        harness = Harness(client, turns, words)
        talks = (harness.converse(place, *one) for place, one in enumerate(episodes))
        await asyncio.gather(*talks)
    print(json.dumps([harness.latencies, harness.counts]), flush=True)


async def idle() -> None:
    """Print the longest hold of a loop that does nothing, once standard input ends."""
    sampler = LagSampler()
    await sampler.during(asyncio.to_thread(sys.stdin.read))
    print(sampler.lags().most, flush=True)


class WatchedGateway(Gateway):
    """A gateway whose loop can be sampled."""

    async def _serve(self, listening: Future[str]) -> None:
        self._loop = asyncio.get_running_loop()
        await super()._serve(listening)

    async def lags_during(self, work: Awaitable[T]) -> tuple[T, Lags]:
        """Return the result of ``work``, and how long callbacks blocked the gateway's loop meanwhile."""
        sampler, end = LagSampler(), asyncio.Event()
        sampling = asyncio.run_coroutine_threadsafe(sampler.during(end.wait()), self._loop)
        result = await work
        self._loop.call_soon_threadsafe(end.set)
        await asyncio.wrap_future(sampling)
        return result, sampler.lags()


def time_callbacks() -> dict[str, float]:
    """Return the longest callback of each thread's loop, by the thread's name, from now on.

    In seconds of the thread's processor time, without garbage collections, whose longest has the
    name COLLECTION: they are of all objects, and run in the thread that happens to allocate.
    """
    longest = defaultdict[str, float](float)
    run, thread = asyncio.Handle._run, threading.local()

    def collect(phase: str, _: object) -> None:
        if phase == "start":
            thread.began = time.thread_time()
        else:
            seconds = time.thread_time() - thread.began
            thread.collecting = getattr(thread, "collecting", 0.0) + seconds
            longest[COLLECTION] = max(longest[COLLECTION], seconds)

    def timed(handle: asyncio.Handle) -> None:
        began, thread.collecting = time.thread_time(), 0.0
        run(handle)
        seconds = time.thread_time() - began - thread.collecting
        name = threading.current_thread().name
        longest[name] = max(longest[name], seconds)

    gc.callbacks.append(collect)
    asyncio.Handle._run = timed  # type: ignore[method-assign]
    return longest


def memory_mb(field: str = "VmRSS") -> float:
    """Return the memory of this process; VmHWM is its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


async def start_self(option: str) -> asyncio.subprocess.Process:
    """Start this module as another process."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.gateway_load", option]
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 30)


async def run_harness(order: object) -> tuple[list[float], dict[str, int], float]:
    """Run all conversations; return latencies, counts and the longest hold of an idle process."""
    harness, control = await start_self("--harness"), await start_self("--idle")
    output, _ = await harness.communicate(json.dumps(order).encode() + b"\n")
    longest, _ = await control.communicate(b"")
    latencies, counts = json.loads(output)
    return latencies, counts, float(longest)


def check_trained(episodes: list[OpenEpisode], counts: dict[str, int]) -> int:
    """Return the number of trained turns; each answered request must be trained once."""
    trained = sum(
        turn.is_trained
        for episode in episodes
        for each in episode.trajectories()
        for turn in each.turns
    )
    answered = counts["answered"] - counts.get("repeated", 0)
    assert trained == answered, (trained, answered)
    return trained


async def measure(options: argparse.Namespace) -> list[str]:
    """Run the load; return the section of the page."""
    collect_between_steps_only()
    driver = LagSampler()
    delay = (ENGINE_S, ENGINE_S)
    with prepared_engines(LENGTH, delay=delay, largest_id=LAST_ID) as url:
        engines = RunEngines.of([url], KEY, capacity=4 * options.conversations)
        async with (
            WatchedGateway(str(TINY), server_args={"context_length": 1 << 22}) as gateway,
            Connection(engines) as connection,
        ):
            sampling = SamplingParams(max_new_tokens=LENGTH)
            episodes = [
                await gateway.open(Prompt(number, "", ()), sampling, connection=connection)
                for number in range(options.conversations)
            ]
            addresses = [(each.base_url, each.api_key) for each in episodes]
            gc.collect()
            start_mb = memory_mb()
            began, longest = time.perf_counter(), time_callbacks()
            order = [options.turns, options.words, addresses]
            harness = driver.during(run_harness(order))
            (latencies, counts, idle_s), lags = await gateway.lags_during(harness)
            seconds, longest = time.perf_counter() - began, dict(longest)
            num_trained = check_trained(episodes, counts)
            for episode in episodes:
                await episode.close()
            episodes.clear()
            del episode
            gc.collect()
            end_mb = memory_mb()
            kept = sum(type(each) in (Line, MessageNode) for each in gc.get_objects())
    assert kept == 0, f"{kept} messages and lines are kept after their episodes"
    latencies.sort()
    added = [latencies[int(share * (len(latencies) - 1))] for share in (0.5, 0.95, 0.99, 1.0)]
    rows = [
        ["answered requests (left, sent twice, repeated)", _counts(counts)],
        ["turns trained, each answered request once", f"{num_trained:,}"],
        ["added latency, p50 / p95 / p99 / max", _milliseconds(added)],
        [
            "longest callback of the gateway's loop / the driver's / garbage collection",
            _milliseconds([longest[name] for name in ("rlpost-gateway", "MainThread", COLLECTION)]),
        ],
        *(
            [f"hold of {name}, p99.9 / longest", _milliseconds([each.p999, each.most])]
            for name, each in (("the gateway's loop", lags), ("the driver's", driver.lags()))
        ),
        ["longest hold of an idle process beside it", _milliseconds([idle_s])],
        [
            "driver's memory at start / peak / end",
            f"{start_mb:.0f} / {memory_mb('VmHWM'):.0f} / {end_mb:.0f} MB",
        ],
        ["messages and lines kept after the conversations", str(kept)],
    ]
    return [
        f"`python -m benchmarks.gateway_load --write`; {machine()}; {options.conversations} conversations of "
        f"{options.turns} turns in {seconds:.0f} s, {LENGTH} tokens an answer, engines that answer after "
        f"{ENGINE_S:.0f} s. Callbacks in processor time of the loop's thread, holds in wall time.",
        "",
        *table(["", "seen"], rows),
    ]


def _counts(counts: dict[str, int]) -> str:
    others = ", ".join(f"{counts.get(name, 0):,}" for name in ("left", "sent twice", "repeated"))
    return f"{counts['answered']:,} ({others})"


def _milliseconds(seconds: list[float]) -> str:
    return " / ".join(f"{1000 * each:,.0f}" for each in seconds) + " ms"


def main() -> int:
    """Measure."""
    parser = make_parser(__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--words", type=int, default=40, help="numbers in a message of the user")
    for hidden in ("--harness", "--idle"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.harness or options.idle:
        asyncio.run(converse_all() if options.harness else idle())
        return 0
    show(HEADING, asyncio.run(measure(options)), write=options.write, page=PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The gateway compared with direct generation: tokens/s, lag of the driver's loop, processor time.

    python -m benchmarks.gateway [--rounds 3] [--only stubs] [--write]

The same conversations are generated twice, with the same tokens from the engines: directly, by a
function that holds the tokens itself and adds user messages to them (as custom generate functions
do), and by harnesses in another process that send whole message lists to the gateway.

1. Stub engines that answer after 4 to 6 s, as at 100 tokens/s for each answer: the effect on a run.
2. Stub engines that answer at once: an upper bound of the driver's cost for a token.
3. The tiny model on one real SGLang server.

Each round measures both, and which is first alternates. The overhead is the median of the
ratios of the rounds, because the speed of a busy machine drifts. --write puts the table into
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import aiohttp

from benchmarks.driver import LagSampler, cost_of
from benchmarks.page import machine, make_parser, show, table
from benchmarks.rollout_parts import KEY, TINY, Forced, serving
from benchmarks.stub_engines import prepared_engines
from rlpost.engines.connection import Connection, RunEngines
from rlpost.extensions.agents.gateway import Gateway, OpenEpisode
from rlpost.rollout.response_builder import ResponseBuilder
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt

HEADING = "## Gateway"
USER = "Q:12+30=" * 4
LAST_ID = 50  # ordinary tokens of the tiny model


@dataclass(frozen=True)
class Load:
    """Concurrent conversations, their turns, and the tokens of each answer."""

    name: str
    conversations: int
    turns: int
    length: int
    delay: tuple[float, float] | None  # of stub engines; None for SGLang
    rounds: int = 1  # for each of --rounds


LOADS = (
    Load("stub engines, 4 to 6 s an answer", 128, 4, 512, (4.0, 6.0)),
    Load("stub engines, at once", 64, 4, 512, (0.0, 0.0)),
    Load("SGLang, tiny model", 8, 4, 48, None, rounds=3),  # short ones
)


@dataclass(frozen=True)
class Measured:
    """One round: tokens/s, processor seconds per million tokens, the loop's longest lag in s."""

    tokens_per_s: float
    loop_s: float
    all_s: float
    lag_s: float


async def direct(connection: Connection, load: Load, gateway: Gateway) -> int:
    """Generate all conversations with response builders."""
    codec = gateway.policy.template
    turn = f"<|user|>{USER}<|assistant|>"
    prompt_ids = codec.encode(turn)
    sampling = SamplingParams(max_new_tokens=1 << 20)

    async def conversation(number: int) -> int:
        builder = ResponseBuilder(connection, Prompt(number, "", prompt_ids), sampling, codec=codec)
        for place in range(load.turns):
            if place:
                builder.insert(turn)
            await builder.write(max_new_tokens=load.length)
        return builder.sample().mask.total()

    return sum(await asyncio.gather(*map(conversation, range(load.conversations))))


async def through_gateway(episodes: list[OpenEpisode], harness: asyncio.subprocess.Process) -> int:
    """Run the harnesses; return the number of sampled tokens, all of which must be trained."""
    assert harness.stdin is not None
    assert harness.stdout is not None
    harness.stdin.write(b"go\n")
    num_tokens = int(await harness.stdout.readline())
    num_trained = 0
    for episode in episodes:
        (trajectory,) = episode.trajectories()
        num_trained += trajectory.loss_mask.total()
    assert num_trained == num_tokens, (num_trained, num_tokens)
    return num_tokens


class Order(TypedDict):
    """The work of the harnesses; an episode is its URL and its API key."""

    turns: int
    user: str
    episodes: list[tuple[str, str]]


async def converse(client: aiohttp.ClientSession, order: Order, base_url: str, key: str) -> int:
    """Run one episode; return the number of sampled tokens."""
    messages: list[dict[str, object]] = []
    num_tokens = 0
    headers = {"Authorization": f"Bearer {key}"}
    for _ in range(order["turns"]):
        messages.append({"role": "user", "content": order["user"]})
        body = {"messages": messages}
        async with client.post(base_url + "/chat/completions", json=body, headers=headers) as got:
            answer = await got.json()
            assert got.status == 200, answer
        messages.append(answer["choices"][0]["message"])
        num_tokens += answer["usage"]["completion_tokens"]
    return num_tokens


async def converse_all(order: Order) -> int:
    """Run all episodes concurrently after a line on standard input; return the number of sampled tokens."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        talks = (converse(client, order, url, key) for url, key in order["episodes"])
        return sum(await asyncio.gather(*talks))


async def started_harness(load: Load, episodes: list[OpenEpisode]) -> asyncio.subprocess.Process:
    """Start the process of the harnesses, and wait until it is ready for its first request."""
    pipe = asyncio.subprocess.PIPE
    command = [sys.executable, "-m", "benchmarks.gateway", "--harness"]
    harness = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert harness.stdin is not None
    assert harness.stdout is not None
    order: Order = {
        "episodes": [(one.base_url, one.api_key) for one in episodes],
        "turns": load.turns,
        "user": USER,
    }
    harness.stdin.write(json.dumps(order).encode() + b"\n")
    assert await harness.stdout.readline() == b"ready\n"
    return harness


async def measured(work: Awaitable[int]) -> Measured:
    """Measure ``work``, which returns a number of tokens."""
    sampler, started = LagSampler(), time.perf_counter()
    num_tokens, cost = await cost_of(sampler.during(work))
    seconds = time.perf_counter() - started
    per_million = cost / (num_tokens / 1e6)
    return Measured(
        num_tokens / seconds, per_million.loop_s, per_million.all_s, sampler.lags().own_most
    )


async def rounds_of(
    load: Load, engines: RunEngines, num_rounds: int
) -> tuple[list[Measured], list[Measured]]:
    """Measure direct generation and the gateway; the first round is a warm-up."""
    directly: list[Measured] = []
    by_gateway: list[Measured] = []
    sampling = SamplingParams(max_new_tokens=load.length)
    async with Gateway(str(TINY), server_args={"context_length": 1 << 20}) as gateway:

        async def measure_direct(connection: Connection) -> None:
            directly.append(await measured(direct(connection, load, gateway)))

        for number in range(num_rounds + 1):
            async with Forced(engines, lambda what, input_ids: load.length) as connection:
                if number % 2 == 0:
                    await measure_direct(connection)
                episodes = [
                    await gateway.open(Prompt(number, "", ()), sampling, connection=connection)
                    for number in range(load.conversations)
                ]
                harness = await started_harness(load, episodes)
                by_gateway.append(await measured(through_gateway(episodes, harness)))
                await harness.wait()
                for episode in episodes:
                    await episode.close()
                if number % 2:
                    await measure_direct(connection)
    return directly[1:], by_gateway[1:]


async def measure(load: Load, num_rounds: int) -> list[str]:
    """Measure one load; return its row of the table."""
    num_rounds *= load.rounds
    if load.delay is None:
        with tempfile.TemporaryDirectory() as folder:
            async with serving(Path(folder), concurrency=load.conversations) as served:
                rounds = await rounds_of(load, served.engines, num_rounds)
    else:
        with prepared_engines(load.length, delay=load.delay, largest_id=LAST_ID) as url:
            engines = RunEngines.of([url], KEY, capacity=load.conversations)
            rounds = await rounds_of(load, engines, num_rounds)
    ratios = [
        by_gateway.tokens_per_s / directly.tokens_per_s
        for directly, by_gateway in zip(*rounds, strict=True)
    ]
    return [
        load.name,
        f"{load.conversations} x {load.turns} x {load.length}",
        *_medians(rounds, lambda one: one.tokens_per_s, ",.0f"),
        f"{_loss(statistics.median(ratios))} ({_loss(max(ratios))} to {_loss(min(ratios))})",
        *_medians(rounds, lambda one: one.loop_s, ".2f"),
        *_medians(rounds, lambda one: one.all_s, ".2f"),
        *_medians(rounds, lambda one: 1000 * one.lag_s, ".0f"),
    ]


def _medians(
    found: Iterable[Iterable[Measured]], figure: Callable[[Measured], float], form: str
) -> list[str]:
    """Cells of direct generation and of the gateway."""
    return [format(statistics.median(map(figure, rounds)), form) for rounds in found]


def _loss(ratio: float) -> str:
    return f"{100 * (1 - ratio):+.1f} %"


def main() -> int:
    """Measure."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("stubs", "sglang"))
    parser.add_argument("--harness", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.harness:
        order = json.loads(sys.stdin.readline())
        print(asyncio.run(converse_all(order)), flush=True)
        return 0
    loads = [
        load
        for load in LOADS
        if options.only is None or (options.only == "sglang") == (load.delay is None)
    ]
    where = machine()
    rows = [asyncio.run(measure(load, options.rounds)) for load in loads]
    header = [
        *("engines", "conversations x turns x tokens", "tokens/s direct", "gateway"),
        "overhead, median (range) of rounds",
        *("loop s/M tokens, direct", "gateway", "all threads s/M tokens, direct", "gateway"),
        *("longest hold of the loop ms, direct", "gateway"),
    ]
    lines = [
        f"`python -m benchmarks.gateway --write`; {where}; medians of {options.rounds} rounds, of SGLang "
        f"{3 * options.rounds}. The harnesses run in a separate process and send whole message lists.",
        "",
        *table(header, rows),
    ]
    show(HEADING, lines, write=options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())

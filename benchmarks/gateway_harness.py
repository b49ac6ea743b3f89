"""Conversations of harnesses with the gateway, in a process separate from the driver's.

    python -m benchmarks.gateway_harness < ORDER

ORDER is one JSON line with ``episodes`` (pairs of base URL and key), ``turns`` and ``user`` (the text
of each user message). All episodes run concurrently. Prints ``ready``, waits for a line ``go``, and
prints the number of sampled tokens.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TypedDict

import aiohttp


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
    """Run all episodes concurrently; return the number of sampled tokens."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        talks = (converse(client, order, url, key) for url, key in order["episodes"])
        return sum(await asyncio.gather(*talks))


if __name__ == "__main__":
    print(asyncio.run(converse_all(json.loads(sys.stdin.readline()))), flush=True)

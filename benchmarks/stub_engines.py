"""Engines and a router that accept every control request, in a separate process.

    python -m benchmarks.stub_engines --port 30000 --num 512

Each engine has its own port. Requests take ANSWER_S, so that many are in flight at once; ``GET
/most`` returns the largest number of requests in flight since it was last called. ``/workers`` is
the router's list.
"""

from __future__ import annotations

import argparse
import asyncio
import sys

from aiohttp import web

from benchmarks.canned_engine import ready_until_stdin_ends

ANSWER_S = 0.05
WORKERS, MOST = "/workers", "/most"


class Stubs:
    """All engines, and the router."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0
        self.urls: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        """Accept the request after ANSWER_S."""
        if request.path == MOST:
            most, self.most = self.most, 0
            return web.json_response(most)
        if request.path == WORKERS:
            return web.json_response(await self._workers(request))
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            await request.read()
            await asyncio.sleep(ANSWER_S)
        finally:
            self.in_flight -= 1
        return web.json_response({"success": True, "weight_version": "1", "version": "0.5.21"})

    async def _workers(self, request: web.Request) -> dict[str, list[dict[str, object]]]:
        if request.method == "POST":
            self.urls.append((await request.json())["url"])
        return {"workers": [{"url": url, "is_healthy": True, "id": url} for url in self.urls]}


async def serve(port: int, num: int) -> None:
    """Answer until standard input ends."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", Stubs().answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    for number in range(num):
        await web.TCPSite(runner, "127.0.0.1", port + number).start()
    await ready_until_stdin_ends()


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--num", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.num))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""An external engine without a model: it accepts new weights, and answers with random tokens.

    SGLANG_API_KEY=... python -m benchmarks.soak_engine --port 30000

An answer has the format of SGLang's ``/generate`` and the version of the newest weights.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys

from aiohttp import web

from benchmarks.canned_engine import prepared_answer, ready_until_stdin_ends
from rlpost.config.keys import EXTERNAL_ENGINES

VERSION = "0.5.23"
LARGEST_ID = 16  # of the tiny model's vocabulary


class Engine:
    """The control requests of a run, and its generations."""

    def __init__(self, key: str) -> None:
        self._key, self._version = key, "0"
        self._seeds = random.Random(0)

    async def handle(self, request: web.Request) -> web.Response:
        """Answer any request that has the key."""
        if request.path in ("/health", "/health_generate"):
            return web.Response()
        if request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/generate":
            return web.json_response(self._answer(body["sampling_params"]["max_new_tokens"]))
        if body.get("weight_version"):
            self._version = body["weight_version"]
        info = {"success": True, "tp_size": 1, "version": VERSION, "model_path": "stub"}
        return web.json_response({**info, "weight_version": self._version})

    def _answer(self, longest: int) -> dict[str, object]:
        length = self._seeds.randint(1, longest)
        answer = prepared_answer(length, self._seeds.randrange(2**31), LARGEST_ID)
        meta = {**answer["meta_info"], "weight_version": self._version}
        return {**answer, "meta_info": meta}


async def serve(port: int) -> None:
    """Answer until standard input ends."""
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", Engine(os.environ[EXTERNAL_ENGINES]).handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await ready_until_stdin_ends()


def main() -> int:
    """Serve."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    # the router first tries HTTP/2, which aiohttp reports with a traceback
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    asyncio.run(serve(parser.parse_args().port))
    return 0


if __name__ == "__main__":
    sys.exit(main())

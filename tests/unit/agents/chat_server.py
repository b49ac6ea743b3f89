"""A fake gateway that answers and records chat requests of known API keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Reply = Callable[[dict[str, Any]], dict[str, Any]]


class ChatServer:
    """The fake gateway; ``reply`` returns the assistant message for a request."""

    def __init__(self, keys: set[str], reply: Reply) -> None:
        self.keys, self.reply = keys, reply
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.base_url = ""

    async def handle(self, request: web.Request) -> web.Response:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if key not in self.keys:
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        body = await request.json()
        self.asked.append((key, body))
        message = {"role": "assistant", "content": ""} | self.reply(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return web.json_response(
            {
                "id": "chat-1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [
                    {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            }
        )


@asynccontextmanager
async def serving(server: ChatServer) -> AsyncIterator[ChatServer]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.base_url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        yield server
    finally:
        await runner.cleanup()

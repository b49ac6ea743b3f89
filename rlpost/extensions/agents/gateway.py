"""The gateway: an endpoint for harnesses in front of the engines, exact to the token.

Input: a model folder; for each episode a prompt, sampling parameters and the connection of its
rollout. Output: an address and a key for the harness, and what it sampled.

    harness -> HTTP -> gateway thread: keys, messages, template, tokens
                          |  one answer
                          v
                       driver's event loop: connection -> router, engines

The server has a thread with its own event loop, so that templates, tokenizer and JSON of long
conversations do not hold the driver's loop. It is not a separate process: the connection, with its
capacity, retries and halts, belongs to the driver.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

from rlpost.config.checks.context_length import longest_request
from rlpost.engines.connection import Connection
from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.episode import Limit, OpenEpisode
from rlpost.extensions.agents.http_server import END_EPISODE, make_app
from rlpost.extensions.agents.listener import start_listener
from rlpost.extensions.agents.policy import EpisodeLimits, Policy
from rlpost.models.config_file import read_config
from rlpost.rollout.answer_log import AnswerLog
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt

__all__ = ["EpisodeLimits", "Gateway", "Limit", "OpenEpisode"]

STOP_S = 10.0
NO_LIMITS = EpisodeLimits()


class Gateway:
    """Serves the harnesses of all episodes of a run; an asynchronous context manager.

    One per driver. It listens from ``__aenter__`` to ``__aexit__``.

        async with Gateway(model_folder, host="127.0.0.1") as gateway:
            async with await gateway.open(prompt, sampling, connection=connection) as episode:
                await run_harness(episode.base_url, episode.api_key)
                samples = to_samples(episode.trajectories(), prompt.prompt_id, index)
    """

    def __init__(
        self,
        model_folder: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        template_kwargs: Mapping[str, object] | None = None,
        server_args: Mapping[str, object] | None = None,
    ) -> None:
        """
        Args:
            model_folder: the Hugging Face folder with tokenizer and chat template
                (``--hf-checkpoint``).
            host: the address to bind and to name in ``base_url``; harnesses must reach it.
            port: 0 for any free one.
            template_kwargs: additional arguments of the chat template
                (``--apply-chat-template-kwargs``).
            server_args: of the engines, as ``--sglang-...`` has them; those about the context count.

        Raises:
            ConfigError: the folder has no tokenizer or no chat template.
        """
        template = ChatTemplate(model_folder, template_kwargs)
        longest = longest_request_of(model_folder, server_args or {})
        self.policy = Policy(template, longest_request=longest)
        self._host, self._port = host, port
        # By id. Thread-safe: each change is one operation on the dict.
        self._episodes: dict[str, OpenEpisode] = {}
        self._thread: threading.Thread | None = None
        self._stop: Future[None] = Future()
        self._address = ""
        self._call_in_server: Callable[[str], object] = lambda _: None

    @property
    def url(self) -> str:
        """``http://HOST:PORT`` while it listens."""
        assert self._address, "used outside its context"
        return self._address

    async def open(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        connection: Connection,
        index: int = 0,
        limits: EpisodeLimits = NO_LIMITS,
        log: AnswerLog | None = None,
    ) -> OpenEpisode:
        """Open an episode. All its requests go through ``connection`` and sample with ``sampling``.

        ``sampling.max_new_tokens`` limits each turn; requests may ask for less. Call it in the
        event loop of ``connection``. ``prompt`` and ``index`` name the episode in messages; the
        harness builds its own first message. ``log`` keeps the responses for a resume.
        """
        episode_id = secrets.token_hex(8)
        episode = OpenEpisode(
            prompt,
            sampling,
            index=index,
            connection=connection,
            policy=self.policy,
            url=self.url,
            # Hexadecimal, because the server splits the key at dashes.
            api_key=f"sk-rlpost-{episode_id}-{secrets.token_hex(32)}",
            limits=limits,
            log=log,
            on_close=lambda: self._end_episode(episode_id),
        )
        self._episodes[episode_id] = episode
        return episode

    def _end_episode(self, episode_id: str) -> None:
        """Refuse the key of an episode, and end its connections; in any thread."""
        episode = self._episodes.pop(episode_id, None)
        if episode is not None and not self._stop.done():
            with contextlib.suppress(RuntimeError):  # the server's loop has ended
                self._call_in_server(episode.api_key)

    async def __aenter__(self) -> Gateway:
        listening: Future[str] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(listening,), name="rlpost-gateway", daemon=True
        )
        self._thread.start()
        self._address = await asyncio.wrap_future(listening)
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._thread is not None
        self._stop.set_result(None)
        await asyncio.to_thread(self._thread.join, STOP_S)

    def _run(self, listening: Future[str]) -> None:
        """Run the server; the target of the gateway's thread."""
        try:
            asyncio.run(self._serve(listening))
        except BaseException as error:
            # Before the server listens, ``__aenter__`` waits for this error.
            if not listening.done():
                listening.set_exception(error)
            else:
                raise

    async def _serve(self, listening: Future[str]) -> None:
        # A client that disconnects will not read its answer, so its generation is cancelled.
        app, loop = make_app(self._episodes), asyncio.get_running_loop()
        self._call_in_server = lambda key: loop.call_soon_threadsafe(app[END_EPISODE], key)
        runner, url = await start_listener(app, self._host, self._port, shutdown_s=1.0)
        try:
            listening.set_result(url)
            await asyncio.wrap_future(self._stop)
        finally:
            await runner.cleanup()


def longest_request_of(model_folder: str, server_args: Mapping[str, object]) -> int | None:
    """Return ``longest_request`` of a model; None if its config.json says nothing."""
    is_there = (Path(model_folder) / "config.json").is_file()
    return longest_request(server_args, read_config(model_folder) if is_there else {})

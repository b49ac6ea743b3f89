"""The reward ``remote_rm``: a reward model behind an HTTP server.

Input: a URL, a prompt and a sample. Output: the reward.

The request is ``{"prompt", "response", "label", "metadata"}`` as JSON. The response is a number, or
an object with a number under ``reward`` or ``score``. A request is retried until the deadline if
the server does not respond, is busy (429) or fails (5xx).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlpost.errors import GradingLost, RolloutError
from rlpost.types import Prompt, Sample

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between attempts; doubles
KEYS = ("reward", "score")


class RemoteReward:
    """A reward model at ``url``.

    ``deadline_s`` limits one score with all its attempts, from when it has a connection slot.
    """

    def __init__(self, url: str, *, deadline_s: float) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._session: aiohttp.ClientSession | None = None
        # The deadline starts behind this semaphore: waiting here is not the server's delay.
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def score(self, prompt: Prompt, sample: Sample) -> float:
        """Return the reward of a sample.

        Raises:
            GradingLost: the server did not respond in time, or was busy or failed at every attempt.
            RolloutError: it refused the request or did not return a number; no retry can help.
        """
        async with self._slots:
            return await self._score(prompt, sample)

    async def _score(self, prompt: Prompt, sample: Sample) -> float:
        body = {
            "prompt": prompt.text,
            "response": sample.text,
            "label": prompt.label,
            "metadata": dict(prompt.metadata),
        }
        deadline = time.monotonic() + self._deadline_s
        pause_s = FIRST_PAUSE_S
        failure = "did not answer"
        try:
            async with asyncio.timeout(self._deadline_s):
                while True:
                    reward, failure = await self._post(body)
                    if reward is not None:
                        return reward
                    left_s = deadline - time.monotonic()
                    logger.debug("--rm-url %s %s; %.0f s left", self._url, failure, left_s)
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        except TimeoutError:
            raise GradingLost(
                f"--rm-url {self._url} {failure}, for {self._deadline_s:g} s (--rm-url-timeout-s); is it up?"
            ) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, body: Mapping[str, object]) -> tuple[float | None, str]:
        """Return (reward, "") or (None, reason to retry).

        Raises RolloutError if a retry cannot help.
        """
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None),
                # metadata from Parquet may hold dates
                json_serialize=lambda body: json.dumps(body, default=str),
            )
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status == 429 or response.status >= 500:
                    return None, f"answered {response.status}"
                text = (await response.read()).decode(errors="replace")
                if response.status != 200:
                    raise RolloutError(
                        f"--rm-url {self._url} answered {response.status}: {text[:500]}"
                    )
                return self._number(text), ""
        except aiohttp.InvalidURL as error:
            raise RolloutError(
                f"--rm-url {self._url}: not a URL; give http://HOST:PORT/PATH"
            ) from error
        except aiohttp.ClientError as error:
            return None, f"does not answer ({error or type(error).__name__})"

    def _number(self, text: str) -> float:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if isinstance(answer, dict):
            answer = next((answer[key] for key in KEYS if key in answer), None)
        if isinstance(answer, bool | int | float) and math.isfinite(answer):
            return float(answer)
        wanted = "a number, or an object with one under 'reward' or 'score'"
        raise RolloutError(f"--rm-url {self._url} answered {text[:500]!r}; it must return {wanted}")

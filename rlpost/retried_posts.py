"""POST requests to one URL of a server that may be busy or down, retried until a deadline.

Input: the URL and the deadline, with their flags for messages; the body of each request. Output: the
body of the response, or an error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlpost.errors import GradingLost, RolloutError

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # between attempts; doubles


class RetriedPosts:
    """A connection to ``url``; at most MAX_CONNECTIONS requests at a time."""

    def __init__(
        self,
        url: str,
        *,
        flag: str,
        deadline_s: float,
        deadline_flag: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """``deadline_s`` limits one request with all its attempts, from when it has a slot."""
        self._url, self._named = url, f"{flag} {url}"
        self._deadline_s, self._deadline_flag = deadline_s, deadline_flag
        self._headers = {"Content-Type": "application/json"} | dict(headers or {})
        self._session: aiohttp.ClientSession | None = None
        # The deadline starts behind this semaphore: waiting here is not the server's delay.
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def post(self, body: bytes) -> bytes:
        """Return the response to a request whose body is JSON.

        Raises:
            GradingLost: the server did not respond in time, or was busy or failed at every attempt.
            RolloutError: it refused the request; no retry can help.
        """
        failure, pause_s = "did not answer", FIRST_PAUSE_S
        async with self._slots:
            try:
                async with asyncio.timeout(self._deadline_s):
                    while True:
                        answer, failure = await self._try(body)
                        if answer is not None:
                            return answer
                        logger.debug("%s %s", self._named, failure)
                        await asyncio.sleep(pause_s)
                        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except TimeoutError:
                raise GradingLost(
                    f"{self._named} {failure}, for {self._deadline_s:g} s ({self._deadline_flag}); "
                    "is it up?"
                ) from None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _try(self, body: bytes) -> tuple[bytes | None, str]:
        """Return (response, "") or (None, reason to retry). Raises RolloutError."""
        import aiohttp  # late: the login node checks settings without it

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        try:
            async with self._session.post(self._url, data=body, headers=self._headers) as response:
                if response.status == 429 or response.status >= 500:
                    return None, f"answered {response.status}"
                answer = await response.read()
                if response.status != 200:
                    text = answer.decode(errors="replace")[:500]
                    raise RolloutError(f"{self._named} answered {response.status}: {text}")
                return answer, ""
        except aiohttp.InvalidURL as error:
            raise RolloutError(f"{self._named}: not a URL; give http://HOST:PORT/PATH") from error
        except aiohttp.ClientError as error:
            return None, f"does not answer ({error or type(error).__name__})"

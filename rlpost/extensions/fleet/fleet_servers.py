"""Requests to the servers of a fleet, each with a deadline.

A server must first prove that it knows the fleet's key.

Input: the record of an engine, the key. Output: a server that holds a version, generates, or has
stopped; or an error with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rlpost.driver.engines.engine_life import EngineLife, check_engine
from rlpost.engines.engine_client import EngineClient
from rlpost.engines.engine_side_weights import Receiver
from rlpost.engines.load_check import LoadCheck
from rlpost.engines.server_proof import check_server
from rlpost.errors import RolloutError, SyncError, WeightError
from rlpost.extensions.fleet.records import EngineRecord
from rlpost.types import EngineAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds.

    Attributes:
        update_s: for reading all weights.
        control_s: for other requests, except health checks.
        health_s: for a health check.
        health_every_s: between health checks.
    """

    update_s: float = 600.0
    control_s: float = 10.0
    health_s: float = 30.0
    health_every_s: float = 30.0


DEADLINES = Deadlines()


class FleetServers:
    """Talks to the servers of the fleet's engines."""

    def __init__(
        self,
        key: str,
        deadlines: Deadlines = DEADLINES,
        *,
        load_adapters: bool = False,
    ) -> None:
        """
        Args:
            key: the fleet's secret.
            load_adapters: whether a folder of weights has adapters alone.
        """
        self._key, self._deadlines = key, deadlines
        self._load_adapters, self._load_check = load_adapters, LoadCheck()
        self._checked: set[tuple[str, str]] = set()  # engines and their incarnations
        self._lives: dict[str, tuple[str, EngineLife]] = {}  # by engine, of its newest incarnation

    async def update(self, record: EngineRecord, weights: Path | None, version: int) -> None:
        """Bring a server to a version; it stays paused. Raises RolloutError, TimeoutError.

        ``weights``: None for those of the server's model, which get the number of the version.
        """
        async with self._client(record, self._deadlines.update_s) as client:
            await client.pause("abort")
            if weights is None:
                await client.rename_weights(version)
            elif self._load_adapters:
                await client.replace_adapter(str(weights), version=version)
            else:
                await self._check_loads(client, record, weights)
                await client.update_weights_from_disk(str(weights), version=version)
            await client.flush_cache()

    async def _check_loads(self, client: EngineClient, record: EngineRecord, weights: Path) -> None:
        """Check once that a server loads all that it will read. Raises RolloutError."""
        server = (record.engine, record.incarnation)
        if server in self._checked:
            return
        receiver = Receiver(EngineAddress(record.url, record.num_gpus), client)
        try:
            await self._load_check.check_folder([receiver], weights)
        except (SyncError, WeightError) as error:
            raise RolloutError(f"{record.url}: {error}") from error
        self._checked.add(server)

    async def admit(self, record: EngineRecord, version: int) -> None:
        """Check the version of a server and let it generate. Raises RolloutError, TimeoutError."""
        async with self._client(record, self._deadlines.control_s) as client:
            found = await client.weight_version()
            if found != str(version):
                raise RolloutError(f"{record.url} has version {found!r} instead of {version}")
            await client.resume()
        logger.info("fleet engine %s serves version %d", record.engine, version)

    async def stop(self, record: EngineRecord) -> bool:
        """Abort the requests of a server and pause it; return whether it did so."""
        try:
            async with self._client(record, self._deadlines.control_s) as client:
                await client.pause("abort")
        except (RolloutError, TimeoutError) as error:
            logger.warning("fleet engine %s: %s", record.engine, error or "no answer")
            return False
        return True

    async def check(self, record: EngineRecord) -> str | None:
        """Let a server generate a token; return the problem, None if it works or is busy."""
        deadlines = self._deadlines
        proof_s = min(deadlines.health_s, deadlines.control_s)
        life = EngineLife(record.url, deadlines.health_every_s)
        incarnation, earlier = self._lives.get(record.engine, ("", life))
        if incarnation == record.incarnation:
            life = earlier
        self._lives[record.engine] = record.incarnation, life
        try:
            await check_server(record.url, self._key, timeout_s=proof_s)
            client = EngineClient(record.url, self._key, timeout_s=deadlines.health_s)
            return await check_engine(client, life)
        except (RolloutError, OSError, ValueError) as error:
            return str(error)

    @asynccontextmanager
    async def _client(self, record: EngineRecord, deadline_s: float) -> AsyncIterator[EngineClient]:
        """Yield a client once the server has proved itself; the block has ``deadline_s`` seconds.

        Raises RolloutError, TimeoutError.
        """
        proof_s = min(deadline_s, self._deadlines.control_s)
        await check_server(record.url, self._key, timeout_s=proof_s)
        async with asyncio.timeout(deadline_s):
            yield EngineClient(record.url, self._key, timeout_s=deadline_s)

"""Writes the SGLang servers of a run that Prometheus scrapes to RUN/engines.json.

Input: the engines that serve now, by address. Output: a file for ``file_sd_configs``, which is
updated when engines end, restart, move to another node, join from other jobs or leave.

Invariants: no write while another attempt owns the run; a failure is a warning and never ends a
run. The file is compared with the engines at every poll, so that changes by other programs are
corrected as well.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from common.files import write_atomic
from common.fleet_name import POLICY
from common.scrape_targets import ENGINE_TARGETS, NONE, targets_text
from rlpost.config.engine_groups import group_config
from rlpost.config.tree import Config
from rlpost.durable.daemon_threads import in_daemon
from rlpost.durable.run_files import LAST_S
from rlpost.errors import Fenced

if TYPE_CHECKING:
    from rlpost.driver.engines.own_engines import OwnEngines

logger = logging.getLogger(__name__)

POLL_S = 2.0
JOINED = "fleet"
"""Label ``engine`` of engines in other jobs, which have no number."""


def engine_targets(groups: Sequence[OwnEngines], run: str) -> str:
    """Return the file for the engines that serve, of all groups. Pure."""
    urls = []
    for engines in groups:
        urls += [
            (address.url, engines.name(index).removeprefix("engine-"))
            for index, address in enumerate(engines.addresses)
            if index not in engines.members.dismissed
        ]
        label = JOINED if engines.group == POLICY else f"{engines.group}-{JOINED}"
        urls += [(place.url, label) for place in engines.serving.places.joined]
    return targets_text(
        [(urlsplit(url).netloc, {"run": run, "engine": engine}) for url, engine in urls]
    )


class EngineTargets:
    """The file of one attempt. Call ``begin`` first, ``close`` last."""

    def __init__(
        self,
        run_folder: Path,
        targets: Callable[[], str],
        *,
        check: Callable[[], None],
        poll_s: float = POLL_S,
    ) -> None:
        """
        Args:
            targets: returns the text of the file as it should be now.
            check: raises Fenced when another attempt owns the run.
        """
        self._path, self._targets = run_folder / ENGINE_TARGETS, targets
        self._check, self._poll_s = check, poll_s
        self._polling: asyncio.Task[None] | None = None
        # The thread of a cancelled poll may still write.
        self._writing = threading.Lock()
        self._is_closed = False
        self._has_warned = False

    async def begin(self) -> None:
        """Write the file and follow the engines from now on."""
        await self._step(self._targets())
        self._polling = asyncio.create_task(self._poll())

    async def close(self) -> None:
        """Empty the file within LAST_S, unless another attempt owns the run."""
        if self._polling is None:
            return
        self._polling.cancel()
        await asyncio.wait([self._polling])
        self._is_closed = True
        try:
            async with asyncio.timeout(LAST_S):
                await self._step(NONE)
        except (TimeoutError, Fenced):
            logger.warning("%s was not emptied: the storage hangs, or a newer attempt", self._path)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self._step(self._targets())
            except Fenced:  # the driver notices it too, and ends
                return

    async def _step(self, text: str) -> None:
        """Write the file if it differs. Raises Fenced."""
        try:
            await in_daemon(lambda: self._write(text))
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                logger.warning("%s: %s; Prometheus does not follow the engines", self._path, error)
            self._has_warned = True

    def _write(self, text: str) -> None:
        with self._writing:
            wanted = NONE if self._is_closed else text
            try:
                found = self._path.read_text(errors="replace")
            except FileNotFoundError:
                found = ""
            if found != wanted:
                self._check()
                write_atomic(self._path, wanted)


async def follow_engines(
    config: Config, groups: Mapping[str, OwnEngines], run_folder: Path, check: Callable[[], None]
) -> Callable[[], Awaitable[None]] | None:
    """Keep RUN/engines.json up to date for Prometheus; return ``EngineTargets.close``.

    Returns None without engines that serve metrics. Raises Fenced.
    """
    followed = [one for name, one in groups.items() if has_metrics(group_config(config, name))]
    if not followed:
        return None
    targets = EngineTargets(
        run_folder, partial(engine_targets, followed, run_folder.name), check=check
    )
    await targets.begin()
    return targets.close


def has_metrics(config: Config) -> bool:
    """Whether the engines of a group serve metrics (--sglang-enable-metrics)."""
    return bool(config.sglang.server_args.get("enable_metrics"))

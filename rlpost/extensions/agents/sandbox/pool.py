"""Sandboxes of this node: at most ``size`` at a time, first come first served, some prewarmed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rlpost.errors import ConfigError
from rlpost.extensions.agents.sandbox.cgroup import Parent, open_parent
from rlpost.extensions.agents.sandbox.images import ImageCache
from rlpost.extensions.agents.sandbox.local import LocalSandbox, Root
from rlpost.extensions.agents.sandbox.protocol import Limits, Sandbox, SandboxLost

logger = logging.getLogger(__name__)

Start = Callable[[Limits], Awaitable[LocalSandbox]]


class LocalPool:
    """Implements ``Pool`` on this node.

    A sandbox is used once. ``warm`` fresh ones with the pool's limits wait in advance; they count
    towards ``size``, so a waiting caller never loses its place to them.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        size: int,
        warm: int = 1,
        root: Root | None = None,
        start: Start | None = None,
        images: ImageCache | None = None,
    ) -> None:
        self.limits, self.size = limits, size
        self._root = root or Root()
        self._images = images or ImageCache()
        self._cgroups: Parent | None = None
        self._start = start or self._start_here
        self._places = asyncio.Semaphore(size)  # wakes its waiters in order
        self._warm_target = min(warm, size)
        self._warm: list[LocalSandbox] = []
        self._used: set[LocalSandbox] = set()
        self._num_held = 0
        """Callers that have a sandbox or start one."""
        self._starting: set[asyncio.Task[None]] = set()
        self._giving_back: set[asyncio.Task[None]] = set()
        self._closed = False

    async def __aenter__(self) -> LocalPool:
        """Start the first sandbox. Raises ConfigError when this node cannot run any."""
        self._cgroups, how = open_parent()
        logger.info("sandboxes: limited by %s", how)
        try:
            first = await self._start(self.limits)
        except SandboxLost as lost:
            raise ConfigError(
                f"this node cannot run sandboxes: {lost}; they need user namespaces "
                "(user.max_user_namespaces above 0, kernel.unprivileged_userns_clone = 1, "
                "kernel.apparmor_restrict_unprivileged_userns = 0), or --sandbox-backend slurm with "
                "nodes that have them"
            ) from lost
        if self._warm_target:
            self._warm.append(first)
        else:
            await first.close()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start_here(self, limits: Limits) -> LocalSandbox:
        return await LocalSandbox.start(limits, self._root, self._cgroups)

    @property
    def in_use(self) -> int:
        """Number of sandboxes that callers hold."""
        return len(self._used)

    async def acquire(self, limits: Limits | None = None, image: str | None = None) -> Sandbox:
        """Wait for a fresh sandbox; see ``Pool.acquire``."""
        if self._closed:
            raise SandboxLost("the pool of sandboxes is closed")
        await self._places.acquire()
        self._num_held += 1
        try:
            if image is None:
                sandbox = await self._take(limits or self.limits)
            else:
                sandbox = await self._start_with(image, limits or self.limits)
        except BaseException:
            self._release()
            raise
        self._used.add(sandbox)
        sandbox.on_close = lambda: self._take_back(sandbox, image)
        self._refill()
        return sandbox

    async def _start_with(self, image: str, limits: Limits) -> LocalSandbox:
        """Start a sandbox with its own root."""
        await self._make_room()
        root = Root(await self._images.take(image), self._root.read_only)
        try:
            return await LocalSandbox.start(limits, root, self._cgroups)
        except BaseException:
            await self._images.give_back(image)
            raise

    async def _take(self, limits: Limits) -> LocalSandbox:
        while limits == self.limits and self._warm and not self._closed:
            sandbox = self._warm.pop(0)
            if sandbox.alive:
                return sandbox
            await sandbox.close()
        await self._make_room()
        return await self._start(limits)

    async def _make_room(self) -> None:
        """Close warm sandboxes, so that never more than ``size`` exist."""
        while self._warm and len(self._warm) + self._num_held > self.size:
            await self._warm.pop().close()
        if self._closed:
            raise SandboxLost("the pool of sandboxes is closed")

    def _take_back(self, sandbox: LocalSandbox, image: str | None) -> None:
        self._used.discard(sandbox)
        self._release()
        self._refill()
        if image is not None and not self._closed:
            task = asyncio.ensure_future(self._images.give_back(image))
            self._giving_back.add(task)
            task.add_done_callback(self._giving_back.discard)

    def _release(self) -> None:
        self._num_held -= 1
        self._places.release()

    def _refill(self) -> None:
        wanted = min(self._warm_target, self.size - self._num_held)
        if not self._closed and len(self._warm) + len(self._starting) < wanted:
            task = asyncio.ensure_future(self._warm_up())
            self._starting.add(task)
            task.add_done_callback(self._end_start)

    def _end_start(self, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._refill()

    async def _warm_up(self) -> None:
        try:
            sandbox = await self._start(self.limits)
        except SandboxLost as lost:
            logger.warning("%s", lost)
            raise
        # Callers may have taken all places while it started.
        if self._closed or len(self._warm) + self._num_held >= self.size:
            await sandbox.close()
        else:
            self._warm.append(sandbox)

    async def close(self) -> None:
        """End all sandboxes; see ``Pool.close``."""
        self._closed = True
        if self._starting:
            await asyncio.gather(*self._starting, return_exceptions=True)
        for sandbox in [*self._warm, *self._used]:
            await sandbox.close()
        self._warm.clear()
        if self._giving_back:
            await asyncio.gather(*self._giving_back, return_exceptions=True)
        await self._images.close()

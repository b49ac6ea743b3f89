"""A process group of trainer ranks and all engine ranks.

Input: an address and the number of ranks. Output: broadcasts and exchanges of messages that return
or raise, even if engines die. The trainer's ranks come first.

The group is formed as SGLang does it (rendezvous at an address, keys under the group's name), with
torch's private helper, because torch has no public API for a group with processes outside the world.
The store of the rendezvous is authenticated (``common.torch_store``), except with engines that were
started outside the run.

On NCCL a collective returns at once, and with a dead peer it never completes: its kernel spins on
the GPU. So an operation is started asynchronously, polled until it completes on the device, and
abandoned at a deadline or when another thread cancels it. The group is aborted, not
destroyed, because destruction waits for pending operations (torch: ProcessGroupNCCL::shutdown
flushes them, ProcessGroupNCCL::abort does not).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend,
    PrefixStore,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from common.addresses import host_port
from common.torch_store import close_store, join_ranks, open_store
from rlpost.errors import SyncError

logger = logging.getLogger(__name__)
T = TypeVar("T")

SHORTEST_POLL_S = 1e-4
LONGEST_POLL_S = 2e-3  # bound of the added latency; long enough not to occupy a core
ABORT_S = 60.0
"""Seconds to wait for an abort. NCCL kernels poll for it constantly; only torch may be slow."""
SLACK_S = 5.0
"""Seconds after the deadline of joining in which the store names the missing ranks."""
JOIN_POLL_S = 1.0
"""Interval in which the wait for engines outside of the run checks whether it is cancelled."""
CANCELLED = "cancelled because an engine failed"
NO_WATCHDOG = "TORCH_NCCL_BLOCKING_WAIT"


@dataclass(frozen=True, slots=True)
class TrainerRank:
    """This process among the trainer ranks of a group."""

    rank: int
    count: int


class EngineGroup:
    """A group of trainer ranks, of which this process is one, and the engine ranks after them."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta,
        store: dist.Store | None = None,
        backend: str = "",
        cancelled: threading.Event | None = None,
    ) -> None:
        """Use a group that ``form`` created; ``timeout`` is the deadline of each operation.

        ``store`` is that of the group, closed by ``leave``. ``cancelled``, set in another thread,
        abandons the current operation and all later ones.
        """
        self._backend = backend
        self._group: dist.ProcessGroup | None = group
        self._store = store
        self._timeout = timeout
        self._cancelled = threading.Event() if cancelled is None else cancelled

    @classmethod
    def form(
        cls,
        address: tuple[str, int],
        *,
        name: str,
        num_engine_ranks: int,
        backend: str,
        timeout: timedelta,
        join: timedelta,
        secret: str | None,
        cancelled: threading.Event,
        trainer: TrainerRank = TrainerRank(0, 1),
        joined_as: str = "",
    ) -> EngineGroup:
        """Join all trainer and engine ranks; the first trainer rank listens on ``address``.

        Only those who know ``secret`` can join. None: engines outside the run join, as anyone can.
        ``joined_as``: see ``common.torch_store.join_ranks``; SGLang's own groups have no such name.
        ``join`` is the deadline of joining, and ``timeout`` that of each operation; ``cancelled``
        ends both early.

        Raises:
            SyncError: they did not join in time, or ``cancelled`` was set. It names the missing
                ranks; the engine's ranks come after the trainer's.
        """
        host, port = address
        world_size = trainer.count + num_engine_ranks
        started = time.monotonic()
        store: dist.Store | None = None
        listener: socket.socket | None = None
        try:
            if secret is None:
                listener = _listen(host, port, world_size)
            else:
                place = {"rank": trainer.rank, "world_size": world_size}
                store = open_store(host, port, **place, secret=secret, timeout=join)

            def formed() -> tuple[dist.ProcessGroup, dist.Store]:
                if store is not None:
                    opened = store
                    join_ranks(store, trainer.rank, world_size, group=joined_as)
                else:
                    assert listener is not None
                    opened = _open_to_anyone(listener, world_size, join, cancelled)
                return _group(opened, name, trainer.rank, world_size, backend, timeout), opened

            launched = _started(formed, "form engine group")
            _wait_until(launched.done, cancelled, deadline_s=join.total_seconds() + SLACK_S)
            group, store = launched.result()
        except (dist.DistError, OSError, RuntimeError, ValueError, _Cancelled) as error:
            close_store(store)  # ends the wait of all ranks that have joined
            if listener is not None:
                wait([launched], SLACK_S)  # until its store no longer listens
            raise SyncError(
                f"cannot form group {name!r} of {trainer.count} trainer ranks and {num_engine_ranks} engine ranks at "
                f"{host_port(host, port)} (abandoned after {time.monotonic() - started:.1f} s): {error}"
            ) from error
        finally:
            if listener is not None:
                listener.close()
        # The helper does not register the ranks of the group, and torch looks them up here.
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return cls(group, timeout=timeout, store=store, backend=backend, cancelled=cancelled)

    def broadcast(self, flat: torch.Tensor) -> None:
        """Send ``flat`` [N] from rank 0 to all; returns when the device no longer reads it.

        Raises:
            SyncError: an engine did not take part within the timeout, or it was cancelled. The group
                is aborted; only ``leave`` may be called after that.
        """
        self._run(
            lambda group: [dist.broadcast(flat, group=group, group_src=0, async_op=True)],
            flat.device,
        )

    def meet(self, device: torch.device, *, within: timedelta) -> None:
        """Wait for all ranks, up to a deadline. Collective.

        NCCL creates its communicator in the first operation of a group, in which all ranks must
        take part; an exchange is between some of them (``torch.distributed.batch_isend_irecv``).

        Raises SyncError like ``broadcast``.
        """
        one = torch.zeros(1, device=device)
        self._run(
            lambda group: [dist.all_reduce(one, group=group, async_op=True)], device, within=within
        )

    def send_messages(self, messages: Mapping[int, torch.Tensor]) -> None:
        """Send a flat message [N] to each of some ranks.

        Returns when the device no longer reads them.

        Raises SyncError like ``broadcast``.
        """
        if not messages:
            return
        device = next(iter(messages.values())).device

        def start(group: dist.ProcessGroup) -> list[dist.Work]:
            operations = [
                dist.P2POp(dist.isend, flat, group=group, group_peer=rank)
                for rank, flat in messages.items()
            ]
            works: list[dist.Work] = dist.batch_isend_irecv(operations)
            if self._backend != "gloo":
                return works
            # gloo completes a send only in its ``wait``, which blocks this thread alone, and does
            # not report it afterwards.
            for work in works:
                work.wait()
            return []

        self._run(start, device)

    def _run(
        self,
        start: Callable[[dist.ProcessGroup], list[dist.Work]],
        device: torch.device,
        *,
        within: timedelta | None = None,
    ) -> None:
        """Start an operation and wait until it is complete on the device."""
        started = time.monotonic()
        # In a thread: the first collective of an NCCL group creates the communicator, which blocks
        # until all ranks have joined and cannot be aborted before that.
        launched = _started(self._on_stream(start, device), "start broadcast")
        try:
            # ``is_completed`` of the work queries NCCL's event on the device.
            _wait_until(
                lambda: launched.done() and all(one.is_completed() for one in launched.result()),
                self._cancelled,
                deadline_s=(within or self._timeout).total_seconds(),
            )
            for one in launched.result():
                one.wait()  # raises errors; on NCCL it also releases the tensor
        except (dist.DistError, RuntimeError, TimeoutError, _Cancelled) as error:
            after_s = time.monotonic() - started
            self.leave()
            raise SyncError(
                f"{error or type(error).__name__} (abandoned after {after_s:.1f} s)"
            ) from error

    def leave(self) -> None:
        """Abort the group and its pending operations; does nothing if already left."""
        if self._group is None:
            return
        # In a thread: torch may wait as long for an abort as for a broadcast. The thread must hold
        # the last reference, because gloo cannot be aborted and its destructor waits for
        # operations.
        left, self._group = [self._group], None
        aborted = threading.Event()
        threading.Thread(
            target=_abort, args=(left, aborted), name="abort group", daemon=True
        ).start()
        if not aborted.wait(ABORT_S):
            logger.warning(
                "the abort of the engine group did not finish within %.0f s; abandoned it", ABORT_S
            )
        close_store(self._store)

    def _on_stream(
        self, start: Callable[[dist.ProcessGroup], list[dist.Work]], device: torch.device
    ) -> Callable[[], list[dist.Work]]:
        """``start`` on this thread's stream, which another thread does not use by itself."""
        group = self._group
        if group is None:
            raise SyncError("the engine group was aborted; connect again before the next broadcast")
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

        def started() -> list[dist.Work]:
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                return start(group)

        return started


def _group(
    store: dist.Store, name: str, rank: int, world_size: int, backend: str, timeout: timedelta
) -> dist.ProcessGroup:
    """This rank's end of a process group; on gloo all ranks are connected on return."""
    with _without_watchdog():
        group, _ = _new_process_group_helper(
            world_size,
            rank,
            [],
            Backend(backend),
            PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=timeout,
        )
    return group


def _wait_until(
    is_done: Callable[[], bool], cancelled: threading.Event, *, deadline_s: float
) -> None:
    """Raises TimeoutError, or _Cancelled when ``cancelled`` is set."""
    pause, deadline = SHORTEST_POLL_S, time.monotonic() + deadline_s
    while not is_done():
        if cancelled.wait(pause):
            raise _Cancelled(CANCELLED)
        if time.monotonic() > deadline:
            raise TimeoutError(f"not completed within {deadline_s:.0f} s")
        pause = min(2 * pause, LONGEST_POLL_S)


def _listen(host: str, port: int, world_size: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=world_size + 16)


def _open_to_anyone(
    listener: socket.socket, world_size: int, timeout: timedelta, cancelled: threading.Event
) -> dist.Store:
    """Return torch's store on this listener instead of on all addresses, once all have joined.

    Raises TimeoutError, or _Cancelled when ``cancelled`` is set; nothing listens then.
    """
    host, port = listener.getsockname()[:2]
    deadline = time.monotonic() + timeout.total_seconds()
    options = {"is_master": True, "timeout": timedelta(seconds=JOIN_POLL_S), "multi_tenant": True}
    server = dist.TCPStore(
        host,
        port,
        world_size,
        wait_for_workers=False,
        master_listen_fd=os.dup(listener.fileno()),
        **options,
    )
    # torch's wait for all ranks cannot be cancelled, so each is short. Each also counts this process
    # as one more rank that has joined, so the next waits for a larger world.
    for size in itertools.count(world_size):
        try:
            store = dist.TCPStore(host, port, size, **options)
        except dist.DistStoreError:
            problem: Exception | None = None
            if cancelled.is_set():
                problem = _Cancelled(CANCELLED)
            elif time.monotonic() >= deadline:
                problem = TimeoutError(f"not all of {world_size} ranks joined within {timeout}")
            if problem is not None:
                del server  # it listens as long as it exists, and the error refers to this frame
                raise problem from None
        else:
            break
    store.set_timeout(timeout)
    return store


class _Cancelled(Exception):
    pass


def _started(start: Callable[[], T], name: str) -> Future[T]:
    """The result of ``start``, which runs in a thread that nothing waits for."""
    launched: Future[T] = Future()

    def launch() -> None:
        try:
            launched.set_result(start())
        except BaseException as error:
            launched.set_exception(error)

    threading.Thread(target=launch, name=name, daemon=True).start()
    return launched


def _abort(left: list[dist.ProcessGroup], aborted: threading.Event) -> None:
    group = left.pop()  # the caller keeps an empty list
    try:
        _abort_process_group(group)
    except (dist.DistError, RuntimeError) as error:
        logger.warning("cannot abort the engine group: %s", error)
    finally:
        aborted.set()


@contextlib.contextmanager
def _without_watchdog() -> Iterator[None]:
    """Context in which an NCCL group is created without a watchdog.

    The watchdog thread ends the whole process when a peer dies or an operation times out
    (TORCH_NCCL_ASYNC_ERROR_HANDLING = 3); for this group the caller handles both. torch reads the
    variable when a group is created. Only this group goes without: training relies on the watchdog.
    """
    before = os.environ.get(NO_WATCHDOG)
    os.environ[NO_WATCHDOG] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_WATCHDOG]
        else:
            os.environ[NO_WATCHDOG] = before


class Sender:
    """A trainer rank that sends weights to engines, over one group after another."""

    def __init__(self, *, backend: str, timeout_s: float, secret: str | None) -> None:
        """``timeout_s``: deadline of each bucket; ``secret``: see ``EngineGroup.form``."""
        self.backend, self.secret = backend, secret
        self.timeout = timedelta(seconds=timeout_s)
        self.group: EngineGroup | None = None
        self._cancelled = threading.Event()

    def abort(self) -> None:
        """Make calls that use the group fail now instead of at their deadlines, after an engine failed.

        It holds until ``disconnect``, also for a ``connect`` that has not begun. Not collective; safe
        to call from another thread while they run.
        """
        self._cancelled.set()

    def disconnect(self) -> None:
        """Leave the group, so that another can be formed; does nothing without a group."""
        self._cancelled = threading.Event()
        group, self.group = self.group, None
        if group is not None:
            group.leave()

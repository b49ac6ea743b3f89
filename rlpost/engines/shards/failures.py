"""SGLang's processes with updates of weights whose failures on any rank are answers.

SGLang 0.5.21 answers with what the first rank of an engine says: a bucket or a folder that another
rank could not load counts as loaded. What a custom weight loader raises even ends the scheduler, and
so the engine; with several ranks the others then wait in a barrier. Here every rank of the engine
reports the failure of any, and the engine takes the next update. The same holds for the prefix caches of
data-parallel ranks: one that keeps its cache is a failure of the flush. The module becomes unnecessary
when SGLang does so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

import torch.distributed as dist

from rlpost.engines.shards.messages import LOADER, Failure, NotPrepared

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )

logger = logging.getLogger(__name__)
UPDATES = (
    "update_weights_from_tensor",
    "update_weights_from_distributed",
    "update_weights_from_disk",
)
"""Methods of SGLang's manager, each called on every rank with the same request."""


class Request(Protocol):
    """What the requests for updates of SGLang have in common."""

    load_format: str | None


class Answer(Protocol):
    """What SGLang's answers to them have in common."""

    success: bool
    message: str


Update = Callable[["SchedulerWeightUpdaterManager", Request], Answer]


def run_scheduler(*args: object, **kwargs: object) -> object:
    """SGLang's ``run_scheduler_process``, the main function of an engine rank."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    report_failures()
    return run_scheduler_process(*args, **kwargs)


def report_flushes() -> None:
    """Let this process, which has the HTTP server, answer a flush with the failure of any rank.

    SGLang 0.5.21 answers with that of the first data-parallel rank: the others could keep
    keys and values of old weights.
    """
    from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin

    flush = TokenizerControlMixin.flush_cache

    @functools.wraps(flush)
    async def flush_all(self: TokenizerControlMixin, *args: object, **kwargs: object) -> Answer:
        if not isinstance(self.flush_cache_communicator, _FailuresFirst):
            self.flush_cache_communicator = _FailuresFirst(self.flush_cache_communicator)
        return cast(Answer, await flush(self, *args, **kwargs))

    TokenizerControlMixin.flush_cache = flush_all


class _FailuresFirst:
    """A request to all data-parallel ranks whose first answer is a failure if there is one."""

    def __init__(self, ask: Callable[[object], Awaitable[list[Answer]]]) -> None:
        self._ask = ask

    async def __call__(self, request: object) -> list[Answer]:
        return sorted(await self._ask(request), key=lambda answer: answer.success)

    def __getattr__(self, name: str) -> object:  # as ``set_fan_out``, which SGLang calls
        return getattr(self._ask, name)


def report_failures() -> None:
    """Let this process answer updates with the failures of all ranks of its engine."""
    from sglang.srt.managers.scheduler_components import weight_updater

    manager = weight_updater.SchedulerWeightUpdaterManager
    for name in UPDATES:
        setattr(manager, name, _reporting(getattr(manager, name)))


def _reporting(update: Update) -> Update:
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    @functools.wraps(update)
    def reporting(self: SchedulerWeightUpdaterManager, request: Request) -> Answer:
        group, is_slices = self.tp_cpu_group, request.load_format == LOADER
        is_prepared = True
        try:
            answer = update(self, request)
            text = "" if answer.success else answer.message or "failed, without a reason"
        except Exception as error:
            if not is_slices:
                raise
            logger.exception("a message to the loader of slices failed")
            text, is_prepared = (
                f"{type(error).__name__}: {error}",
                not isinstance(error, NotPrepared),
            )
            answer = UpdateWeightsFromTensorReqOutput(success=False, message=text)
            dist.barrier(group=group)  # that of SGLang, which the failure left out
        outcomes = [("", True)] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (text, is_prepared), group=group)
        texts = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(outcomes) if text]
        if texts:
            failure = Failure(tuple(texts), all(is_prepared for _, is_prepared in outcomes))
            answer.success = False
            answer.message = failure.to_text() if is_slices else "; ".join(texts)
        return answer

    return reporting

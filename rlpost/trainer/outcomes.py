"""Exchange the outcome of what each rank does alone, such as a read of a file.

A rank that failed alone would leave the others in their next collective until the distributed
timeout. So every read that may fail on one rank and is followed by a collective goes through here.
Each function is collective over the world: call it on every rank, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from rlpost.errors import RlpostError

T = TypeVar("T")
Failure = tuple[type[RlpostError] | None, str]
"""The class of an error of rlpost, None for any other error; and its text."""


def gather_objects(value: T) -> list[T]:
    """Gather one small object from each rank of the world; of a single process its own."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def on_every_rank(act: Callable[[], T], failed: Callable[[str], RlpostError]) -> T:
    """Call ``act`` on each rank; if it fails on any, raise on all.

    ``act`` must not be collective: a rank that fails inside would wait here for the others.

    Args:
        act: what a rank does alone.
        failed: makes the exception from the text of an error that is none of rlpost's.

    Raises:
        RlpostError: of the first rank that failed, of the same class and text on every rank; it names
            the rank, unless all ranks failed alike.
    """
    result, failed_with = None, None
    try:
        result = act()
    except Exception as error:
        failed_with = error
    raise_on_every_rank(failed_with, failed)
    return result  # type: ignore[return-value]


def raise_on_every_rank(cause: Exception | None, failed: Callable[[str], RlpostError]) -> None:
    """Raise on every rank if any has a ``cause``, as ``on_every_rank`` does."""
    failure = None
    if cause is not None:
        kind = type(cause) if isinstance(cause, RlpostError) else None
        failure = (kind, str(cause) or repr(cause))
    failures: list[Failure | None] = gather_objects(failure)
    first = next((rank for rank, each in enumerate(failures) if each is not None), None)
    if first is None:
        return
    kind, text = failures[first] or (None, "")
    if any(each != failures[first] for each in failures):
        text = f"rank {first}: {text}"
    raise (kind or failed)(text) from cause


def same_on_every_rank(read: Callable[[], T], failed: Callable[[str], RlpostError]) -> T:
    """As ``on_every_rank``, for a small result that decides what all ranks do next.

    Raises:
        RlpostError: as ``on_every_rank``; or ``failed``, if the ranks see different results, as after a
            change that one node's file system does not show yet.
    """
    result = on_every_rank(read, failed)
    for rank, other in enumerate(results := gather_objects(result)):
        if other != results[0]:
            raise failed(
                f"rank 0 reads {results[0]} and rank {rank} reads {other}; use a folder that all nodes "
                "see alike, and try again if it has just changed"
            )
    return result

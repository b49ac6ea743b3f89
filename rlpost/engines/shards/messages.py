"""Messages to the loader of an engine rank (``rlpost.engines.shards.loader``). Pure Python.

SGLang calls a custom loader with the named tensors of ``update_weights_from_tensor``, one list for
each rank of the engine. A message is a list with one tensor: its name is the message as JSON, the
tensor is the data, flat bytes, empty for most messages. Field ``do`` names the message, ``id``
distinguishes it from all others that the engine gets: SGLang calls the loader once for each model
(policy, then drafts) with the same message.

- ``record``: record ``load_weights`` with the tensors of the file ``tensors``, and write the boxes
  that the rank needs, and what fills each of its parameters, to the file ``answer``. It and later
  files name a tensor by its number in ``tensors``.
- ``plan``: read from ``file`` what each bucket brings.
- ``connect``: join the group ``name`` of senders and receivers at ``host`` and ``port`` as ``rank``
  of ``world_size``, with ``backend``, the deadline ``join_s`` of joining, and ``timeout_s`` of each
  operation; give up when ``folder`` is gone, which exists as long as the driver forms the group.
- ``receive``: receive ``bucket`` from the group and load it.
- ``apply``: load ``bucket`` from the data of the message.
- ``checksum``: write a digest of each tensor of the models to the file ``answer``.
- ``disconnect``: leave the group.

All are sent in a session (``begin_weight_update``): SGLang refuses them outside, and only there
parameters have the shapes that are loaded. Every rank gets all buckets in order, and refuses others.
"""

from __future__ import annotations

import base64
import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from rlpost.models.regions import Box, Boxes, group_from_json, group_to_json

LOADER = "rlpost.engines.shards.loader.load"
"""The argument of SGLang's --custom-weight-loader, and the load format of a message."""


class Message(TypedDict, total=False):
    """The fields of all messages, see the head of this module."""

    do: Literal["record", "plan", "connect", "receive", "apply", "checksum", "disconnect"]
    id: str
    tensors: str
    answer: str
    file: str
    name: str
    folder: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: str
    join_s: float
    timeout_s: float
    bucket: int


class NotPrepared(RuntimeError):
    """This rank lacks something that the plan of the update assumes; ``record`` and what follows it
    mend that.
    """


def kind_of(name: str) -> str:
    """A name without its numbers, which are those of layers and experts."""
    return re.sub(r"\d+", "#", name)


_BEGIN = b"\x80\x02]"  # protocol 2, empty list
_TEXT = b"X"
_NO_TENSOR = b"ctorch\nByteTensor\n)R"
_END = b"\x86a."  # tuple of two, append, stop


def serialised(message: Mapping[str, object]) -> str:
    """A message without data as SGLang reads it: the pickle of ``[(text, torch.ByteTensor())]``.

    It is written without torch, which the driver's process does not have.
    """
    text = json.dumps(message).encode()
    pickled = _BEGIN + _TEXT + struct.pack("<I", len(text)) + text + _NO_TENSOR + _END
    return base64.b64encode(pickled).decode()


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the ranks of an engine could not handle a message."""

    texts: tuple[str, ...]
    """One for each rank that failed."""
    is_prepared: bool
    """False if one of them raised ``NotPrepared``."""

    def to_text(self) -> str:
        """Return the failure as the message of SGLang's answer."""
        return json.dumps({"failures": self.texts, "is_prepared": self.is_prepared})

    @classmethod
    def from_text(cls, text: str) -> Failure | None:
        """Invert ``to_text``; None for other messages.

        With DP attention SGLang joins the messages of all data-parallel ranks, which are equal.
        """
        try:
            values, _ = json.JSONDecoder().raw_decode(text)
            return cls(tuple(values["failures"]), values["is_prepared"])
        except (ValueError, TypeError, KeyError):
            return None


PlannedBucket = Sequence[tuple[int, Boxes]]
"""For each sender, by its rank in the group, the boxes of its message in order."""


def plan_to_json(tensors: Iterable[str], buckets: Iterable[PlannedBucket]) -> list[object]:
    """The file of ``plan``: what each bucket brings to a rank; tensors by their number."""
    numbers = {name: number for number, name in enumerate(tensors)}
    return [
        [
            [sender, [group_to_json(group, numbers) for group in boxes.groups]]
            for sender, boxes in bucket
        ]
        for bucket in buckets
    ]


def buckets_from_json(
    buckets: Iterable[Iterable[tuple[int, Sequence[Sequence[object]]]]], tensors: Iterable[str]
) -> list[list[tuple[int, list[Box]]]]:
    """The buckets of ``plan_to_json``."""
    names = list(tensors)
    return [
        [
            (sender, list(Boxes(tuple(group_from_json(group, names) for group in groups))))
            for sender, groups in bucket
        ]
        for bucket in buckets
    ]

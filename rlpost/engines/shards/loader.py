"""The loader of an engine rank that receives slices: SGLang's ``--custom-weight-loader``.

SGLang calls ``load`` in the process of each rank; ``rlpost.engines.shards.messages`` describes the
messages. A rank records what its models do with the tensors of a checkpoint, and afterwards copies
the boxes that it receives to where their ``load_weights`` would.

Invariant: after the last bucket of an update all tensors of the models are those that
``load_weights`` makes of the same checkpoint, bit for bit. What cannot be recorded is given to
``load_weights`` as a whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from common.addresses import host_port
from common.files import write_atomic
from rlpost.engines.shards import messages
from rlpost.engines.shards.copies import row_strides
from rlpost.engines.shards.messages import Message
from rlpost.engines.shards.parameters import Parameters
from rlpost.engines.shards.recorder import Recording, record
from rlpost.engines.shards.tracking import TensorTypes
from rlpost.models.regions import Box, Region, group_to_json, grouped, intersect, whole

logger = logging.getLogger(__name__)
Data = list[tuple[Box, torch.Tensor]]
"""Boxes with their elements, in the shape of the box."""
JOIN_POLL_S = 1.0
"""Interval in which a rank that waits for a group checks whether the driver still forms it."""
NOT_RECORDED = "this engine has not recorded what its model loads; record it first"


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Handle a message for a model; SGLang reports what this raises as the failure of the update."""
    ((text, data),) = named_tensors
    RANK.handle(model, json.loads(text), data)


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements of a box that go to one parameter."""

    index: int
    """Of the box in its bucket."""
    source: tuple[int, tuple[int, ...]]
    """Offset and strides in the box."""
    parameter: str
    target: tuple[int, tuple[int, ...]]
    """Offset and strides in the parameter's storage."""
    size: tuple[int, ...]


@dataclass
class LoadedModel:
    """A model of this rank: the policy, or a draft model for speculative decoding."""

    model: torch.nn.Module
    recording: Recording = field(default_factory=Recording)
    fingerprint: str = ""
    regions: dict[str, list[Region]] = field(default_factory=dict)
    """Of the recording, by tensor."""
    _copies: dict[int, list[_Copy]] = field(default_factory=dict)
    """By bucket, of the current plan."""
    _next_bucket: int = 0

    def forget_plan(self) -> None:
        """Prepare for other buckets."""
        self._copies.clear()
        self._next_bucket = 0

    def expect(self, bucket: int) -> None:
        """Raise RuntimeError unless this bucket comes next; the first begins an update again."""
        if bucket not in (0, self._next_bucket):
            raise RuntimeError(
                f"bucket {bucket} came instead of bucket {self._next_bucket}; send all buckets in order"
            )
        self._next_bucket = 0

    def record(self, tensors: TensorTypes) -> None:
        """Record what the model loads."""
        self.recording = record(self.model, tensors)
        self.fingerprint = self._facts()
        self.regions = {}
        for region in self.recording.regions:
            self.regions.setdefault(region.tensor, []).append(region)

    def is_recorded(self, model: torch.nn.Module) -> bool:
        """Whether this is the recording of a model, which has not changed since."""
        return self.model is model and self._facts() == self.fingerprint

    def begin(self) -> None:
        """Set constants, before the first bucket of an update."""
        parameters = Parameters(self.model)
        if self._facts() != self.fingerprint:
            raise messages.NotPrepared(
                "parameters have other shapes, or experts other places, than when this engine recorded"
            )
        for fill in self.recording.fills:
            target = parameters.tensors[fill.parameter].data
            target.as_strided(fill.view.size, fill.view.strides, fill.view.offset).fill_(fill.value)

    def load(self, bucket: int, data: Data, by_name: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Copy the boxes of a bucket into parameters, and load whole tensors."""
        if bucket not in self._copies:
            self._copies[bucket] = list(self._planned(data))
        parameters = {name: one.data for name, one in Parameters(self.model).tensors.items()}
        targets, sources = [], []
        for copy in self._copies[bucket]:
            offset, strides = copy.target
            target = parameters[copy.parameter].as_strided(copy.size, strides, offset)
            offset, strides = copy.source
            values = data[copy.index][1]
            offset += values.storage_offset()
            targets.append(target)
            sources.append(values.as_strided(copy.size, strides, offset))
        if targets:
            torch._foreach_copy_(targets, sources)
        recorded = [(name, one) for name, one in by_name if name in self.recording.by_name]
        if recorded:
            self.model.load_weights(recorded)
        self._next_bucket = bucket + 1

    def _planned(self, data: Data) -> Iterator[_Copy]:
        for index, (box, _) in enumerate(data):
            received = Region(box.tensor, box.start, box.size, "", 0, row_strides(box.size))
            for region in self.regions.get(box.tensor, ()):
                parts = intersect(received, region)
                if parts is not None:
                    source, target = ((part.offset, part.strides) for part in parts)
                    yield _Copy(index, source, region.parameter, target, parts[0].size)

    def _facts(self) -> str:
        """Everything outside the tensors of a checkpoint that decides where they are copied."""
        return f"{Parameters(self.model).fingerprint()} {_expert_places()}"

    def finish(self) -> None:
        """Derive weights from others, after the last bucket of an update."""
        for call in self.recording.post_load:
            call.call()


class ShardedRank:
    """The state of this process."""

    def __init__(self) -> None:
        self.models: list[LoadedModel] = []
        self._id: object = None
        self._kept: Any = None
        """What all models of the current message share."""
        self._tensors: TensorTypes = {}
        self._buckets: list[list[tuple[int, list[Box]]]] = []
        self._group: dist.ProcessGroup | None = None
        self._timeout = timedelta(minutes=30)

    def handle(self, model: torch.nn.Module, message: Message, data: torch.Tensor) -> None:
        """Handle a message for a model."""
        is_first = message["id"] != self._id
        if is_first:
            self._id, self._kept = message["id"], None
        do = message["do"]
        if do == "record":
            self._record(model, message, is_first=is_first)
        elif do == "checksum":
            self._kept = (self._kept or []) + [Parameters(model).checksums()]
            digests = {
                f"{number}:{name}": digest
                for number, kept in enumerate(self._kept)
                for name, digest in kept.items()
            }
            write_atomic(Path(message["answer"]), json.dumps(digests))
        elif do in ("receive", "apply"):
            self._load(model, message, data)
        elif is_first:
            handlers = {"plan": self._plan, "connect": self._connect, "disconnect": self._leave}
            handlers[do](message)

    def _record(self, model: torch.nn.Module, message: Message, *, is_first: bool) -> None:
        if is_first:
            tensors = tensor_types(json.loads(Path(message["tensors"]).read_text()))
            is_same = [*tensors.items()] == [*self._tensors.items()]
            self._kept = self.models if is_same else []
            self._tensors, self.models = tensors, []
        loaded = next((one for one in self._kept if one.is_recorded(model)), None)
        if loaded is None:
            loaded = LoadedModel(model)
            loaded.record(self._tensors)
        loaded.forget_plan()
        self.models.append(loaded)
        write_atomic(Path(message["answer"]), json.dumps(self.answer()))

    def answer(self) -> dict[str, object]:
        """What all models load, in the form of ``record``'s answer."""
        regions: list[Region] = []
        together: list[list[str]] = []
        reasons: dict[str, str] = {}
        numbers = {name: number for number, name in enumerate(self._tensors)}
        filled: dict[str, list[int]] = {}
        for place, one in enumerate(self.models):
            for parameter, names in one.recording.filled.items():
                filled[f"{place}:{parameter}"] = sorted(map(numbers.__getitem__, names))
            regions += one.recording.regions
            reasons |= one.recording.by_name
            together += one.recording.together
        regions += [whole(name, self._tensors[name][0]) for name in reasons]
        return {
            "boxes": [group_to_json(group, numbers) for group in grouped(regions)],
            "together": together,
            "models": len(self.models),
            "reasons": reasons,
            "filled": filled,
        }

    def _plan(self, message: Message) -> None:
        if not self.models:
            raise messages.NotPrepared(NOT_RECORDED)
        planned = json.loads(Path(message["file"]).read_text())
        self._buckets = messages.buckets_from_json(planned, self._tensors)
        for one in self.models:
            one.forget_plan()

    def _connect(self, message: Message) -> None:
        """Join the group; all ranks of it then reduce one element, which opens the connections.

        Until the deadline of joining no rank makes a communicator, which could not be abandoned.
        """
        self._leave(message)
        self._timeout = timedelta(seconds=message["timeout_s"])
        store = _joined_store(message)
        from sglang.srt.utils import init_custom_process_group

        self._group = init_custom_process_group(
            backend=message["backend"],
            store=dist.PrefixStore(message["name"], store),
            timeout=self._timeout,
            world_size=message["world_size"],
            rank=message["rank"],
            group_name=message["name"],
        )
        dist.all_reduce(torch.zeros(1, device=_device(message["backend"])), group=self._group)

    def _leave(self, _: Message) -> None:
        group, self._group = self._group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _load(self, model: torch.nn.Module, message: Message, data: torch.Tensor) -> None:
        try:
            self._load_bucket(model, message, data)
        except BaseException:
            self._kept = None  # free the memory; the engine lives on
            raise

    def _load_bucket(self, model: torch.nn.Module, message: Message, data: torch.Tensor) -> None:
        loaded = next((one for one in self.models if one.model is model), None)
        if loaded is None:
            raise messages.NotPrepared(NOT_RECORDED)
        number = message["bucket"]
        loaded.expect(number)
        bucket = self._buckets[number]
        if self._kept is None:
            flat = [data] if message["do"] == "apply" else self._receive(bucket, data.device)
            boxes = list(self._split(bucket, flat))
            self._kept = boxes, self._whole(boxes)
        if number == 0:
            loaded.begin()
        loaded.load(number, *self._kept)
        if number == len(self._buckets) - 1:
            loaded.finish()
        if message["do"] == "apply" and data.is_cuda:
            # SGLang answers as soon as the copies are queued, and the trainer then overwrites the
            # memory that they read.
            torch.cuda.current_stream(data.device).synchronize()
        if loaded is self.models[-1]:
            self._kept = None  # free the memory

    def _receive(
        self, bucket: list[tuple[int, list[Box]]], device: torch.device
    ) -> list[torch.Tensor]:
        """Receive the bytes of each sender's message."""
        if self._group is None:
            raise messages.NotPrepared(
                "this engine is not connected to the trainer; connect it first"
            )
        sizes = [sum(self._num_bytes(box) for box in boxes) for _, boxes in bucket]
        flat = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        receiving = [
            dist.P2POp(dist.irecv, one, group=self._group, group_peer=sender)
            for (sender, _), one in zip(bucket, flat, strict=True)
        ]
        for work in dist.batch_isend_irecv(receiving) if receiving else ():
            work.wait(self._timeout)
        return flat

    def _num_bytes(self, box: Box) -> int:
        return box.num_elements * self._tensors[box.tensor][1].itemsize

    def _split(
        self, bucket: list[tuple[int, list[Box]]], flat: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Box, torch.Tensor]]:
        for (sender, boxes), one in zip(bucket, flat, strict=True):
            start, size = 0, sum(self._num_bytes(box) for box in boxes)
            if size != one.numel():
                raise RuntimeError(
                    f"a message of rank {sender} has {one.numel()} bytes instead of {size}"
                )
            for box in boxes:
                stop = start + self._num_bytes(box)
                values = one[start:stop].view(self._tensors[box.tensor][1])
                yield box, values.view(box.size)
                start = stop

    def _whole(self, data: Data) -> list[tuple[str, torch.Tensor]]:
        """Assemble the tensors that a model loads by name, in the order of the checkpoint."""
        parts: dict[str, Data] = {}
        for box, values in data:
            if any(box.tensor in one.recording.by_name for one in self.models):
                parts.setdefault(box.tensor, []).append((box, values))
        return [
            (name, self._assembled(name, parts[name])) for name in self._tensors if name in parts
        ]

    def _assembled(self, name: str, parts: Data) -> torch.Tensor:
        shape, dtype = self._tensors[name]
        for box, values in parts:
            if box.size == tuple(shape):  # other boxes are those of another model's regions
                return values
        elements = sum(box.num_elements for box, _ in parts)
        if elements != math.prod(shape):
            raise RuntimeError(
                f"{name} is loaded by name, and its bucket has {elements} of {math.prod(shape)} elements"
            )
        assembled = torch.empty(tuple(shape), dtype=dtype, device=parts[0][1].device)
        everything = Box(name, (0,) * len(shape), tuple(shape))
        for box, values in parts:
            _narrowed(assembled, everything, box).copy_(values)
        return assembled


def _joined_store(message: Message) -> dist.Store:
    """Wait for all ranks in the store of the group, as long as the driver forms it.

    A message can arrive after the driver gave up, and another group may be formed at the address.

    Raises RuntimeError: the folder of the group is gone, or a rank did not join in time.
    """
    name, join_s = message["name"], message["join_s"]
    url = f"tcp://{host_port(message['host'], message['port'])}?group={name}"
    ranks, deadline = (message["rank"], message["world_size"]), time.monotonic() + join_s
    while True:
        poll = timedelta(seconds=min(JOIN_POLL_S, join_s))
        try:
            store, _, _ = next(dist.rendezvous(url, *ranks, timeout=poll))
        except dist.DistStoreError as error:
            if not Path(message["folder"]).is_dir():
                raise RuntimeError(f"the driver no longer forms group {name!r}") from error
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"group {name!r} is not complete after {join_s:.0f} s: {error}"
                ) from error
        else:
            store.set_timeout(timedelta(seconds=join_s))
            return store


def tensor_types(described: Mapping[str, tuple[Sequence[int], str]]) -> TensorTypes:
    """Shapes and dtypes from JSON."""
    return {
        name: (tuple(shape), getattr(torch, dtype)) for name, (shape, dtype) in described.items()
    }


def _expert_places() -> str:
    """Digest of which expert each slot of each layer has; SGLang can move them (--enable-eplb)."""
    module = sys.modules.get("sglang.srt.eplb.expert_location")  # imported by layers with experts
    metadata = None if module is None else module.get_global_expert_location_metadata()
    if metadata is None:
        return ""
    places = metadata.physical_to_logical_map_cpu.tolist()
    return hashlib.sha256(json.dumps(places).encode()).hexdigest()


def _narrowed(values: torch.Tensor, box: Box, part: Box) -> torch.Tensor:
    """The elements of ``part``, which lies in ``box``."""
    for dim, (start, first, size) in enumerate(zip(part.start, box.start, part.size, strict=True)):
        values = values.narrow(dim, start - first, size)
    return values


def _device(backend: str) -> torch.device:
    return torch.device("cpu") if backend == "gloo" else torch.device("cuda")


RANK = ShardedRank()
"""SGLang has one process for each rank."""

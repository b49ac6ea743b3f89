"""Plan which trainer rank sends which box of which tensor to which engine rank. Pure.

Input: the boxes that each trainer rank holds and each receiving rank needs
(``rlpost.models.regions``), and the tensors in order. Output: a ``ShardPlan``: for each bucket the
messages between ranks.

A large model has tens of thousands of tensors and millions of boxes, but few kinds of tensors:
those of one kind have the same shape, and the same ranks hold and need the same boxes of them. Each
kind is planned once, and the tensors of a kind in a bucket are assigned to senders together.

- A receiving rank gets every element that it needs once.
- Among the ranks that hold the same box, the bytes are balanced; those that few ranks hold are
  assigned first, and large boxes are divided.
- No rank sends or receives more than a bucket at a time, unless a tensor that is loaded by name is
  larger.
- Buckets have weights of all pipeline stages in proportion, so that all stages send all the time.
- The plan depends on the input alone.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from common.units import counted
from rlpost.config.plan.shard_balance import Balance, Part, Piece, Transfer
from rlpost.errors import WeightError
from rlpost.models.regions import (
    Box,
    BoxGroup,
    Index,
    Message,
    disjoint,
    in_parts,
    whole_box,
    without,
)


@dataclass(frozen=True, slots=True)
class SentTensor:
    """A Hugging Face tensor as it is sent; ``dtype`` is torch's name."""

    name: str
    shape: Index
    dtype: str

    @property
    def element_bytes(self) -> int:
        return _width(self.dtype)

    @property
    def num_bytes(self) -> int:
        return whole_box(self.name, self.shape).num_elements * self.element_bytes


@lru_cache
def _width(dtype: str) -> int:
    """Bytes of an element; the first number in a dtype's name is its number of bits."""
    return int(re.findall(r"\d+", dtype)[0]) // 8


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that belong into one bucket, because engines may load them together."""

    stage: int
    """The pipeline stage that holds them."""
    tensors: tuple[SentTensor, ...]
    is_divisible: bool = True
    """Whether parts of them may be in several buckets: not if a trainer rank computes them."""
    is_optional: bool = False
    """Whether engines may load none of them: a layer for multi-token prediction."""

    def joined(self, other: Unit) -> Unit:
        is_divisible = self.is_divisible and other.is_divisible
        is_optional = self.is_optional and other.is_optional
        return Unit(self.stage, self.tensors + other.tensors, is_divisible, is_optional)


@dataclass(frozen=True)
class ShardPlan:
    """The messages of each bucket; ranks of senders and of receivers count separately from 0."""

    buckets: tuple[tuple[Message, ...], ...]
    element_bytes: Mapping[str, int]
    """Of each tensor."""
    beside: Mapping[int, int]
    """The sender on the device of a receiver; what it sends there crosses no network."""

    def num_bytes(self, message: Message) -> int:
        groups = message.boxes.groups
        return sum(group.num_elements * self.element_bytes[group.tensors[0]] for group in groups)

    @cached_property
    def sized(self) -> tuple[tuple[tuple[Message, int], ...], ...]:
        """The messages of each bucket with their bytes."""
        return tuple(
            tuple((message, self.num_bytes(message)) for message in bucket)
            for bucket in self.buckets
        )

    @cached_property
    def sent(self) -> Counter[int]:
        """Bytes that each sender sends over the network."""
        return self._sum(lambda message: message.sender)

    @cached_property
    def received(self) -> Counter[int]:
        """Bytes that each receiver gets over the network."""
        return self._sum(lambda message: message.receiver)

    @cached_property
    def tensors(self) -> tuple[tuple[str, ...], ...]:
        """The tensors of each bucket, in an order common to all ranks."""
        orders = []
        for bucket in self.buckets:
            groups = (group for message in bucket for group in message.boxes.groups)
            # Many messages have the same tensors.
            different = dict.fromkeys(group.tensors for group in groups)
            orders.append(tuple(dict.fromkeys(itertools.chain.from_iterable(different))))
        return tuple(orders)

    @cached_property
    def largest_bytes(self) -> int:
        """The most bytes that a rank sends or receives in a bucket."""
        largest = 0
        for bucket in self.sized:
            sizes: Counter[tuple[str, int]] = Counter()
            for message, size in bucket:
                sizes["to", message.receiver] += size
                sizes["from", message.sender] += size
            largest = max(largest, *sizes.values())
        return largest

    def rank_of(self, receiver: int) -> int:
        """The rank to which a sender sends what a receiver gets: the receiver, or that beside it."""
        return self.beside.get(receiver, receiver)

    def _sum(self, rank_of: Callable[[Message], int]) -> Counter[int]:
        sizes: Counter[int] = Counter()
        for message, size in itertools.chain.from_iterable(self.sized):
            if self.beside.get(message.receiver) != message.sender:
                sizes[rank_of(message)] += size
        return sizes


def plan_shards(
    units: Sequence[Unit],
    sources: Sequence[Iterable[BoxGroup]],
    sinks: Sequence[Iterable[BoxGroup]],
    *,
    max_bytes: int,
    beside: Mapping[int, int] | None = None,
    receiver: str = "engine rank",
) -> ShardPlan:
    """Plan an update, or another exchange of weights.

    Args:
        units: all tensors of the model, in the order in which they should arrive.
        sources: by sender, what it holds.
        sinks: by receiver, what it needs.
        max_bytes: the size of a bucket.
        beside: the sender on the device of each receiver, which sends what it holds itself.
        receiver: what a receiver is, in errors.

    Raises:
        WeightError: a box lies outside of its tensor, or no sender holds an element that a
            receiver needs; the message names tensor, rank and both shapes.
    """
    with no_garbage_collection():
        return _planned(units, sources, sinks, max_bytes, beside or {}, receiver)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause the collector: a plan has a million objects that live on, and no cycles.

    Each collection would visit all of them, for half of the planner's time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _planned(
    units: Sequence[Unit],
    sources: Sequence[Iterable[BoxGroup]],
    sinks: Sequence[Iterable[BoxGroup]],
    max_bytes: int,
    beside: Mapping[int, int],
    receiver: str,
) -> ShardPlan:
    tensors = {tensor.name: tensor for unit in units for tensor in unit.tensors}
    kinds = _Kinds(_Spans(sources, tensors, "trainer rank"), _Spans(sinks, tensors, receiver))
    pieces: list[Piece] = []
    parts_of: dict[object, list[Part]] = {}
    for unit in units:
        kind = (unit.is_divisible, *map(kinds.of, unit.tensors))
        if kind not in parts_of:
            parts_of[kind] = _parts_of(unit, kinds, max_bytes)
        names = tuple(tensor.name for tensor in unit.tensors)
        pieces += [Piece(unit.stage, names, part) for part in parts_of[kind]]
    balance = Balance(len(sources), max_bytes, beside)
    buckets: list[tuple[Message, ...]] = []
    for bucket in _cut(_interleaved(pieces), len(sources), max_bytes):
        buckets += balance.assign(bucket)
    sizes = {name: tensor.element_bytes for name, tensor in tensors.items()}
    return ShardPlan(tuple(buckets), sizes, beside)


def joined_units(units: Sequence[Unit], together: Iterable[Iterable[str]]) -> list[Unit]:
    """Join units whose tensors belong together by any of the sets in ``together``."""
    unit_of = {tensor.name: at for at, unit in enumerate(units) for tensor in unit.tensors}
    first = list(range(len(units)))
    """Of each unit, the index of the unit that it joins."""

    def root(at: int) -> int:
        while first[at] != at:
            at = first[at]
        return at

    for tensors in together:
        roots = sorted({root(unit_of[name]) for name in tensors})
        for other in roots[1:]:
            first[other] = roots[0]
    joined: dict[int, Unit] = {}
    for at, unit in enumerate(units):
        into = root(at)
        joined[into] = joined[into].joined(unit) if into in joined else unit
    return [joined[at] for at in sorted(joined)]


def check_complete(
    units: Sequence[Unit], engines: Mapping[str, Sequence[Iterable[BoxGroup]]]
) -> None:
    """Check that the ranks of each engine hold all of every tensor that they must have.

    A model of other sizes would load the first rows or columns of a tensor without an error, and one
    with fewer layers would leave out those of the others.

    Args:
        units: all tensors of the model.
        engines: by the URL of an engine and rank, what it needs.

    Raises:
        WeightError: names the engine, the tensor, and the elements that it needs.
    """
    shapes = {tensor.name: tensor.shape for unit in units for tensor in unit.tensors}
    required = [one.name for unit in units if not unit.is_optional for one in unit.tensors]
    held_of: dict[tuple[Index, frozenset[tuple[Index, Index]]], int] = {}
    for url, groups in _distinct(engines):
        spans: dict[str, set[tuple[Index, Index]]] = {}
        for group in groups:
            for name in group.tensors:
                spans.setdefault(name, set()).add((group.start, group.size))
        if left_out := [name for name in required if name not in spans]:
            raise WeightError(
                f"{left_out[0]}: the ranks of engine {url} load nothing of it, the first of "
                f"{counted(len(left_out), 'tensor')}; trainer and engine must have the same model"
            )
        for name, held in spans.items():
            shape = shapes.get(name, ())
            key = (shape, frozenset(held))
            if key not in held_of:
                boxes = disjoint([Box(name, *span) for span in sorted(held)])
                held_of[key] = sum(box.num_elements for box in boxes)
            if held_of[key] < math.prod(shape):
                raise WeightError(
                    f"{name}: the ranks of engine {url} need {held_of[key]} elements of it, but its shape "
                    f"in the trainer is {shape}; trainer and engine must have the same model"
                )


def _distinct(
    engines: Mapping[str, Sequence[Iterable[BoxGroup]]],
) -> Iterator[tuple[str, list[BoxGroup]]]:
    """Yield URL and groups of each engine that needs something else than those before it."""
    known: set[tuple[BoxGroup, ...]] = set()
    for url, ranks in engines.items():
        groups = list(itertools.chain.from_iterable(ranks))
        key = tuple(groups)
        if key not in known:
            known.add(key)
            yield url, groups


Ranks = tuple[int, ...]
Span = tuple[Index, Index, bool]
"""Start and size of a box, and whether the tensor is loaded by name."""
SpansByRank = tuple[tuple[int, Span], ...]


class _Spans:
    """For each tensor, the ranks and what they have of it: the same for all tensors of a list.

    The boxes of a rank are groups with long lists of tensors, and most ranks have the same lists.
    """

    def __init__(
        self, ranks: Sequence[Iterable[BoxGroup]], tensors: Mapping[str, SentTensor], who: str
    ) -> None:
        """``who``: what a rank is, in errors."""
        self.who = who
        order = itertools.count()
        lists: dict[tuple[str, ...], list[tuple[int, tuple[int, Span]]]] = {}
        for rank, groups in enumerate(ranks):
            for group in groups:
                rank_spans = (rank, (group.start, group.size, group.is_by_name))
                lists.setdefault(group.tensors, []).append((next(order), rank_spans))
        lists_of: dict[str, list[int]] = {name: [] for name in tensors}
        for number, (names, ((_, (rank, _)), *_)) in enumerate(lists.items()):
            for name in names:
                if name not in lists_of:
                    raise WeightError(f"{who} {rank} has {name}, which the trainer does not train")
                lists_of[name].append(number)
        spans, numbers = list(lists.values()), dict[SpansByRank, int]()
        number_of: dict[tuple[int, ...], int] = {}
        self._numbers: dict[str, int] = {}
        for name, lists_of_name in lists_of.items():
            if (key := tuple(lists_of_name)) not in number_of:
                merged = sorted(itertools.chain.from_iterable(spans[one] for one in key))
                rank_groups = tuple(rank_spans for _, rank_spans in merged)
                number_of[key] = numbers.setdefault(rank_groups, len(numbers))
            self._numbers[name] = number_of[key]
        self._spans = list(numbers)

    def number(self, tensor: str) -> int:
        """Equal for tensors of which the ranks have the same."""
        return self._numbers[tensor]

    def of(self, tensor: str) -> SpansByRank:
        return self._spans[self._numbers[tensor]]


class _Kinds:
    """The kinds of tensors, and what is transferred of one of each."""

    def __init__(self, held: _Spans, needed: _Spans) -> None:
        self._held, self._needed = held, needed
        self._numbers: dict[object, int] = {}

    def of(self, tensor: SentTensor) -> int:
        """The number of the tensor's kind."""
        numbers = (self._held.number(tensor.name), self._needed.number(tensor.name))
        key = (tensor.shape, tensor.element_bytes, *numbers)
        return self._numbers.setdefault(key, len(self._numbers))

    def is_by_name(self, tensor: SentTensor) -> bool:
        """Whether any receiver loads it by name."""
        return any(is_by_name for _, (_, _, is_by_name) in self._needed.of(tensor.name))

    def transfers(self, tensor: SentTensor) -> list[Transfer]:
        """Everything that the receivers need of a tensor."""
        held = _by_box(tensor, self._held)
        needed = _by_box(tensor, self._needed)
        return _transfers(tensor, held, needed, self._needed.who)


def _parts_of(unit: Unit, kinds: _Kinds, max_bytes: int) -> list[Part]:
    """What is transferred of a unit, in parts that fit into a bucket if it is divisible."""
    part = Part.of(
        (index, transfer)
        for index, tensor in enumerate(unit.tensors)
        for transfer in kinds.transfers(tensor)
    )
    if not part.transfers:
        return []
    if not unit.is_divisible or any(map(kinds.is_by_name, unit.tensors)):
        return [part]
    return _divided(part, max_bytes)


def _by_box(tensor: SentTensor, spans: _Spans) -> dict[Box, Ranks]:
    """The different boxes of a tensor, and the ranks that have them."""
    boxes: dict[int, list[Box]] = {}
    for rank, (start, size, _) in spans.of(tensor.name):
        boxes.setdefault(rank, []).append(Box(tensor.name, start, size))
    ranks: dict[Box, list[int]] = {}
    for rank, own in boxes.items():
        for box in disjoint(own):
            _check_bounds(box, tensor, spans.who, rank)
            ranks.setdefault(box, []).append(rank)
    return {box: tuple(holders) for box, holders in ranks.items()}


def _check_bounds(box: Box, tensor: SentTensor, who: str, rank: int) -> None:
    stop = tuple(start + size for start, size in zip(box.start, box.size, strict=True))
    if len(stop) != len(tensor.shape) or any(
        end > length for end, length in zip(stop, tensor.shape, strict=True)
    ):
        raise WeightError(
            f"{tensor.name}: {who} {rank} has elements up to {stop} of it, but its shape in the trainer is "
            f"{tensor.shape}; all ranks must have the same model"
        )


def _transfers(
    tensor: SentTensor, held: Mapping[Box, Ranks], needed: Mapping[Box, Ranks], who: str
) -> list[Transfer]:
    """Everything that the receivers, each a ``who``, need of a tensor."""
    transfers = []
    for box, receivers in needed.items():
        remaining = [box]
        for source, senders in held.items():
            left = []
            for part in remaining:
                common = part.intersect(source)
                if common is None:
                    left.append(part)
                    continue
                transfers.append(Transfer(common, tensor.element_bytes, senders, receivers))
                if common != part:
                    left += without(part, common)
            remaining = left
            if not remaining:
                break
        if remaining:
            raise WeightError(
                f"{tensor.name} {tensor.shape}: {who} {receivers[0]} needs {remaining[0].size} elements from "
                f"{remaining[0].start} on, which no trainer rank holds; the trainer has "
                f"{[(each.start, each.size) for each in list(held)[:8]]}"
            )
    return transfers


def _divided(whole: Part, max_bytes: int) -> list[Part]:
    """Divide what is larger than a bucket for one of its receivers."""
    count = -(-max(whole.received.values()) // max_bytes)
    if count <= 1:
        return [whole]
    parts: list[list[tuple[int, Transfer]]] = [[] for _ in range(count)]
    for index, transfer in whole.transfers:
        boxes = in_parts(transfer.box, count)
        for part, box in zip(parts, boxes, strict=False):
            part.append((index, replace(transfer, box=box)))
    return [Part.of(part) for part in parts if part]


def _interleaved(pieces: Sequence[Piece]) -> list[Piece]:
    """Order pieces of all stages by the share of the stage's bytes before each of them."""
    totals: Counter[int] = Counter()
    for piece in pieces:
        totals[piece.stage] += piece.part.total
    before: Counter[int] = Counter()
    placed = []
    for index, piece in enumerate(pieces):
        placed.append((before[piece.stage] / totals[piece.stage], index))
        before[piece.stage] += piece.part.total
    return [pieces[index] for _, index in sorted(placed)]


def _cut(pieces: Sequence[Piece], num_senders: int, max_bytes: int) -> list[list[Piece]]:
    """Cut pieces into buckets by the bytes of each receiver, and by those of an average sender."""
    received_by_kind = _received_by_kind({id(piece.part): piece.part for piece in pieces})
    buckets: list[list[Piece]] = []
    received: dict[int, int] = {}
    total = 0
    for piece in pieces:
        more = received_by_kind[id(piece.part)]
        fits = all(received.get(kind, 0) + size <= max_bytes for kind, size in more)
        is_small = total + piece.part.total <= max_bytes * num_senders
        if not buckets or not (fits and is_small):
            buckets.append([])
            received, total = {}, 0
        buckets[-1].append(piece)
        total += piece.part.total
        for kind, size in more:
            received[kind] = received.get(kind, 0) + size
    return buckets


def _received_by_kind(parts: Mapping[int, Part]) -> dict[int, tuple[tuple[int, int], ...]]:
    """For each part, (kind of receivers, bytes of each): those of a kind get equally much of all."""
    profiles: dict[int, list[tuple[int, int]]] = {}
    for key, part in parts.items():
        for receiver, size in part.received.items():
            profiles.setdefault(receiver, []).append((key, size))
    received: dict[int, list[tuple[int, int]]] = {key: [] for key in parts}
    for kind, profile in enumerate({tuple(each): None for each in profiles.values()}):
        for key, size in profile:
            received[key].append((kind, size))
    return {key: tuple(sizes) for key, sizes in received.items()}

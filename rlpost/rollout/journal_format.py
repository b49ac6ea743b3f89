"""What a journal holds, as bytes and back: records in segments. Reads files, writes none.

Comes in: what happened to a rollout (a group finished, a batch was taken, an evaluation was made). Goes out: framed
records, and from a folder of segments the records that follow on a checkpoint.

    record    length (4 bytes, little endian), CRC-32 (4 bytes) of what follows, kind (1 byte), body (length - 1 bytes)
    segment   NUMBER.log: one HEADER record, then records in the order in which things happened

A crash cuts a segment anywhere: reading ends before the first record that is incomplete or does not fit its checksum.
Token ids and log-probs are arrays of 4 and 8 bytes an entry behind a short JSON text, so that writing costs little and
a log-prob reads back to the last bit.
"""

from __future__ import annotations

import json
import struct
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpost.records import group_from, group_record
from rlpost.types import SampleGroup

HEADER, GROUP, BATCH, EVALUATION = range(1, 5)
_FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_ARRAYS = {"prompt_ids": "i", "response_ids": "i", "rollout_logprobs": "d", "loss_mask": "b"}
assert [array(code).itemsize for code in "idb"] == [4, 8, 1]


@dataclass(frozen=True, slots=True)
class Header:
    """Segment ``number`` goes on from the checkpoint state that names segment ``base``, of ``step`` trained steps.

    A state makes a new segment, whose base is itself; a resume writes what it found once more, under the same base.
    ``settings`` is a hash of all settings that say what is generated; ``unbroken`` is False when the segment before it
    could not be written to its end.
    """

    number: int
    base: int
    step: int
    settings: str
    unbroken: bool = True


@dataclass(frozen=True, slots=True)
class Record:
    """A record where it lies. ``meta`` is its JSON part: of a group ``prompt_id``, ``wanted`` and ``num_tokens``; of a
    batch ``step``, ``prompt_ids`` and ``counts``; of an evaluation ``step`` and ``metrics``."""

    kind: int
    meta: Mapping[str, Any]
    path: Path
    offset: int  # of the frame
    size: int  # with the frame

    @property
    def key(self) -> tuple[int, int]:
        """Equal for two records of the same event."""
        return self.kind, self.meta["prompt_id" if self.kind == GROUP else "step"]

    def framed(self) -> bytes:
        """The record as it lies there."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)

    def group(self) -> SampleGroup:
        """The group of a GROUP record."""
        return _group(memoryview(self.framed())[_FRAME.size + 1 :])


@dataclass(frozen=True, slots=True)
class Segment:
    """One file: its records in order, how many bytes of it are good, and what is wrong with the rest."""

    path: Path
    header: Header
    records: tuple[Record, ...]
    good_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Found:
    """What follows on a checkpoint: records in order, each event once, and what had to be left out, in words."""

    records: tuple[Record, ...] = ()
    problems: tuple[str, ...] = ()


def group_bytes(group: SampleGroup, *, wanted: bool) -> bytes:
    """A finished group; not ``wanted`` when a filter dropped it."""
    record, arrays = group_record(group), []
    for scored in record["samples"]:
        sample = scored["sample"]
        for name, code in _ARRAYS.items():
            if name in sample:
                arrays.append(array(code, sample[name]).tobytes())
                sample[name] = len(sample[name])
    meta = {"prompt_id": group.prompt_id, "wanted": wanted, "num_tokens": group.num_tokens, "group": record}
    text = _json(meta)
    return _framed(GROUP, _LENGTH.pack(len(text)) + text + b"".join(arrays))


def batch_bytes(step: int, prompt_ids: Iterable[int], counts: Mapping[str, float]) -> bytes:
    """After ``step`` trained steps the groups of ``prompt_ids`` were taken as the next batch."""
    return _framed(BATCH, _json({"step": step, "prompt_ids": list(prompt_ids), "counts": dict(counts)}))


def evaluation_bytes(step: int, metrics: Mapping[str, float]) -> bytes:
    """What the evaluation after ``step`` trained steps found."""
    return _framed(EVALUATION, _json({"step": step, "metrics": dict(metrics)}))


def header_bytes(header: Header) -> bytes:
    """The first record of a segment."""
    return _framed(HEADER, _json({name: getattr(header, name) for name in Header.__dataclass_fields__}))


def segment_path(folder: Path, number: int) -> Path:
    """Where segment ``number`` lies."""
    return folder / f"{number:07d}.log"


def read_segment(path: Path) -> Segment | None:
    """A segment as far as it is good; None when not even its header is."""
    records, end, problem = [], 0, None
    header: Header | None = None
    with open(path, "rb") as file:
        for kind, body, offset, size, why in _frames(file):
            if why is not None:
                problem = why
                break
            end = offset + size
            meta = _meta(kind, body)
            if header is None:
                if kind != HEADER:
                    return None
                header = Header(**meta)
            else:
                records.append(Record(kind, meta, path, offset, size))
    return None if header is None else Segment(path, header, tuple(records), end, problem)


def read_header(path: Path) -> Header | None:
    """The header of a segment; None when it is not good."""
    with open(path, "rb") as file:
        kind, body, *_, problem = next(_frames(file), (0, memoryview(b""), 0, 0, "it is empty"))
    return Header(**json.loads(bytes(body))) if problem is None and kind == HEADER else None


def segments(folder: Path) -> list[Segment]:
    """All readable segments of a journal, by number."""
    paths = sorted(folder.glob("*.log")) if folder.is_dir() else []
    return [segment for segment in map(read_segment, paths) if segment is not None]


def follow(found: Iterable[Segment], base: int, step: int, settings: str | None = None) -> Found:
    """What happened after the checkpoint state of ``step`` steps that names segment ``base``.

    It is in the newest segment of that base and in those that later states began. Of an event that stands there twice
    (what a resume had not come to when its next state was saved) the first counts. What follows on a damaged record
    is left out; so is everything when ``settings`` are not those under which it was written.
    """
    ordered = sorted(found, key=lambda segment: segment.header.number)
    first = next((each for each in reversed(ordered) if (each.header.base, each.header.step) == (base, step)), None)
    if first is None:
        return Found()
    if settings is not None and first.header.settings != settings:
        return Found(problems=(f"{first.path}: settings of what is generated have changed since; it is not used",))
    number = first.header.number
    chain = [first, *(each for each in ordered if each.header.number == each.header.base > number)]
    events: dict[tuple[int, int], Record] = {}
    problems = []
    for place, segment in enumerate(chain):
        if place and (chain[place - 1].problem is not None or not segment.header.unbroken):
            problems += [f"{lost.path}: follows on records that are lost" for lost in chain[place:] if lost.records]
            break
        for record in segment.records:
            events.setdefault(record.key, record)
        if segment.problem is not None:
            problems.append(f"{segment.path}: {segment.problem}")
    return Found(tuple(events.values()), tuple(problems))


def _frames(file: Any) -> Iterator[tuple[int, memoryview, int, int, str | None]]:
    """Kind, body, offset and size of each frame; at the first one that is not good the reason, and no more."""
    while True:
        offset = file.tell()
        frame = file.read(_FRAME.size)
        if not frame:
            return
        length, checksum = _FRAME.unpack(frame) if len(frame) == _FRAME.size else (0, 0)
        rest = file.read(length)
        if len(frame) < _FRAME.size or len(rest) < length:
            torn = len(frame) + len(rest)
            yield 0, memoryview(b""), offset, 0, f"the last {torn} bytes, from {offset} on, are half a record"
            return
        if length == 0 or zlib.crc32(rest) != checksum:
            yield 0, memoryview(b""), offset, 0, f"the record at byte {offset} is damaged"
            return
        yield rest[0], memoryview(rest)[1:], offset, _FRAME.size + length, None


def _meta(kind: int, body: memoryview) -> dict[str, Any]:
    if kind != GROUP:
        return json.loads(bytes(body))
    meta = json.loads(_text(body))
    return {name: meta[name] for name in ("prompt_id", "wanted", "num_tokens")}


def _group(body: memoryview) -> SampleGroup:
    text = _text(body)
    record, at = json.loads(text)["group"], _LENGTH.size + len(text)
    for scored in record["samples"]:
        sample = scored["sample"]
        for name, code in _ARRAYS.items():
            if name in sample:
                values = array(code)
                size = sample[name] * values.itemsize
                values.frombytes(body[at : at + size])
                sample[name], at = values.tolist(), at + size
    return group_from(record)


def _text(body: memoryview) -> bytes:
    (length,) = _LENGTH.unpack_from(body)
    return bytes(body[_LENGTH.size : _LENGTH.size + length])


def _framed(kind: int, body: bytes) -> bytes:
    content = bytes([kind]) + body
    return _FRAME.pack(len(content), zlib.crc32(content)) + content


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")  # a label may hold half a pair; json.loads reads it back

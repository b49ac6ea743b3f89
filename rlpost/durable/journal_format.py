"""The file format of the journal: encodes and decodes single records.

Input: events of a rollout (an answer or a group is finished, a batch was taken, an evaluation is
complete). Output: framed records. ``journal_segments`` reads files, ``segment_writer`` writes them.

    record    length (4 bytes, little endian), checksum (4 bytes) of the rest, kind (1 byte), body (length - 1 bytes)
    segment   NUMBER.log: one HEADER record, then records in the order of events

The checksum is a CRC-32 that continues from checksum and kind of the record before, so a record is
only valid in its place. A header may hold a ``Seal`` of the segment that it continues; ``journal_chain``
follows these from file to file.

The columns of a record follow a short JSON text (``group_records.Behind``): 8 bytes a token for ids
and log-probs, which are restored bit for bit.

A PART is what a group in generation has so far: a finished answer, a turn of a conversation. The
GROUP record that ends the group refers to its answers instead of repeating them; ``journal_chain``
links the two.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlpost.durable.group_records import (
    Answers,
    Behind,
    Column,
    column_from,
    column_json,
    group_from,
    group_record,
    sample_from,
    sample_record,
)
from rlpost.durable.run_files import read_again
from rlpost.errors import CheckpointError
from rlpost.types import Prompt, Sample, SampleGroup, sequence_digest

FORMAT = 4  # format of the segments that this program writes
OLDEST_FORMAT = 3
HEADER, GROUP, BATCH, EVALUATION, PART, DROPPED = range(1, 7)
ANSWER, REWARD, BEGUN = "answer", "reward", "begun"
TURN, TOKENS, STEP, STATE = "turn", "tokens", "step", "state"
"""What a PART holds; see ``Part``."""
FRAME = struct.Struct("<II")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Seal:
    """The content of a segment when the next one began.

    It is given by the BLAKE2b ``digest`` of lengths and checksums of the records in its first
    ``num_bytes`` bytes; in format 3, of all these bytes.
    """

    number: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Header:
    """The first record of segment ``number``.

    The segment continues from the checkpoint state of ``step`` trained steps that names segment
    ``base``. A state begins a new segment that is its own base; a resume copies its records into a
    new one with the same base. ``settings`` is ``ResultSettings.to_json`` (a hash in segments of
    rlpost 0.2), ``data`` a fingerprint of the prompt files (None if unknown; without their images in
    segments of rlpost 0.2, see ``rlpost.images.store.WITH_IMAGES``). ``previous`` is the
    segment whose records led to the base's state (None if unknown). ``unbroken`` is False when
    those records could not be written completely.
    """

    number: int
    base: int
    step: int
    settings: str
    unbroken: bool = True
    format: int = FORMAT
    data: str | None = None
    previous: Seal | None = None


@dataclass(frozen=True, slots=True)
class PartKey:
    """Names a part of a group in generation; a later part with an equal key replaces it."""

    prompt_id: int
    index: int
    kind: str
    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """One thing that a group in generation has so far.

    Attributes:
        index: of the answer within its group.
        kind: ANSWER (finished: its samples), REWARD (of one of these samples), TURN (what an engine
            returned to one request), TOKENS (some that an engine has streamed of a request), STEP
            (what the environment returned to a turn), STATE (what its ``save`` returned, as
            ``data``), BEGUN (an answer that a resume begins again; nothing else is kept of it).
        number: counts the parts of one kind; of REWARD the position of the sample; 0 for ANSWER,
            STATE and BEGUN.
        spans: policy versions of the tokens of TURN and TOKENS, with their number.
        columns: of TURN and TOKENS.
        value: JSON values.
    """

    prompt_id: int
    index: int
    kind: str
    number: int = 0
    samples: tuple[Sample, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    value: Mapping[str, Any] = field(default_factory=dict)
    data: bytes = b""

    @property
    def key(self) -> PartKey:
        return PartKey(self.prompt_id, self.index, self.kind, self.number)


@dataclass(frozen=True, slots=True)
class Record:
    """A record in a file.

    ``meta`` is its JSON part: of a group ``prompt_id``, ``wanted``, ``num_tokens``, ``prompt`` (a
    digest, where it is known), ``oldest_version``, ``newest_version`` and ``refers_to`` (indices of
    answers that it refers to); of a part the same
    without ``wanted``, and ``index``, ``part`` and ``number`` of its ``PartKey``; of a batch
    ``step``, ``prompt_ids``, ``counts`` and, where they are known, ``newest_id`` and
    ``drops_parts``; of an evaluation ``step`` and ``metrics``; of DROPPED the ``prompt_id`` and ``index`` of the parts
    that are void, null for all. ``answers`` are the records that a group refers to.
    """

    kind: int
    meta: Mapping[str, Any]
    path: Path
    offset: int  # position of the frame in the file
    size: int  # number of bytes, including the frame
    seed: int = 0  # the checksum that this record's continues
    answers: tuple[Record, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Equal for two records of the same group, batch or evaluation."""
        return self.kind, self.meta["prompt_id" if self.kind == GROUP else "step"]

    @property
    def part_key(self) -> PartKey:
        meta = self.meta
        return PartKey(meta["prompt_id"], meta["index"], meta["part"], meta["number"])

    def content(self) -> bytes:
        """Read kind and body, as they were appended.

        Raises DamagedRecord when it has changed since the attempt began, CheckpointError when it
        still cannot be read after retries.
        """
        place = f"{self.path}: the record at byte {self.offset}"
        try:
            return read_again(lambda: self._read(place))
        except OSError as error:
            raise CheckpointError(unreadable_words(place, error)) from error

    def group(self) -> SampleGroup:
        """The group of a GROUP record, without answers that are damaged. Raises as ``content`` does."""
        answers = [answer.part() for answer in self.answers]
        return _group(
            memoryview(self.content())[1:], {each.index: each.samples for each in answers}
        )

    def part(self) -> Part:
        """The part of a PART record. Raises as ``content`` does."""
        return _part(memoryview(self.content())[1:])

    def _read(self, place: str) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            frame = file.read(self.size)
        content = frame[FRAME.size :]
        head = FRAME.pack(len(content), zlib.crc32(content, self.seed))
        if len(frame) != self.size or frame[: FRAME.size] != head:
            raise DamagedRecord(
                f"{place} was valid when this attempt began and is damaged now; the next attempt "
                "uses the records before it and generates the rest again"
            )
        return content


class DamagedRecord(CheckpointError):
    """The bytes of a record have changed since it was written."""


def unreadable_words(what: Path | str, error: OSError) -> str:
    """Say that ``what`` cannot be read, which is not damage: nothing is deleted or left out."""
    return (
        f"{what} cannot be read: {error}; repair the storage or the mount. A requeue resumes from "
        "the same checkpoint and journal"
    )


class Framing:
    """Frames the records of one segment, in order.

    Each checksum continues the one before; one digest covers all lengths and checksums.
    """

    def __init__(self, *, written_format: int = FORMAT) -> None:
        """In format 3 the digest covers all bytes, and checksums continue without the kind."""
        self.checksum, self.num_bytes = 0, 0  # the next record's checksum continues this one
        self._is_oldest = written_format == OLDEST_FORMAT
        self._digest = hashlib.blake2b(digest_size=16)

    def copy(self) -> Framing:
        """Return the current state, to continue from after later records are cut off."""
        other = Framing()
        other._is_oldest = self._is_oldest
        other.checksum, other.num_bytes = self.checksum, self.num_bytes
        other._digest = self._digest.copy()
        return other

    def frame(self, content: bytes) -> bytes:
        """Return the next record as the file holds it."""
        checksum = zlib.crc32(content, self.checksum)
        framed = FRAME.pack(len(content), checksum) + content
        self.count_record(framed, checksum)
        return framed

    def count_record(self, framed: bytes, checksum: int) -> None:
        """Add a record with its checksum to the segment."""
        self.num_bytes += len(framed)
        if self._is_oldest:
            self.checksum = checksum
            self._digest.update(framed)
        else:
            kind = framed[FRAME.size : FRAME.size + 1]
            self.checksum = zlib.crc32(kind, checksum)
            self._digest.update(memoryview(framed)[: FRAME.size])

    def digest(self) -> str:
        """Digest of all records so far."""
        return self._digest.hexdigest()

    def seal(self, number: int) -> Seal:
        """Seal the current content as that of segment ``number``."""
        return Seal(number, self.num_bytes, self.digest())


def group_content(
    group: SampleGroup,
    *,
    is_kept: bool,
    prompt: Prompt | None = None,
    answers: Answers | None = None,
) -> bytes:
    """Encode a finished group, the answers to ``prompt``; ``is_kept``: no filter dropped it.

    ``answers``: those that the journal holds, to which the record refers.
    """
    columns = Behind()
    samples = [scored.sample for scored in group.samples]
    record = group_record(group, columns, answers or {})
    meta = _describe(group.prompt_id, _runs(samples), prompt) | {
        "wanted": is_kept,
        "refers_to": sorted(
            {scored["answer"][0] for scored in record["samples"] if "answer" in scored}
        ),
        "group": record,
    }
    return _with_columns(GROUP, meta, columns)


def part_meta(part: Part, prompt: Prompt | None = None) -> dict[str, Any]:
    """Return what the ``meta`` of a part's record holds; ``prompt`` is that of its group."""
    place = {"index": part.index, "part": part.kind, "number": part.number}
    return _describe(part.prompt_id, [*_runs(part.samples), *part.spans], prompt) | place


def part_content(part: Part, meta: Mapping[str, Any]) -> bytes:
    """Encode a part with its ``part_meta``."""
    columns = Behind()
    body = {
        "samples": [sample_record(sample, columns) for sample in part.samples],
        "spans": part.spans,
        "columns": {name: column_json(each, columns) for name, each in part.columns.items()},
        "value": part.value,
        "data": columns.packed(memoryview(part.data)),
    }
    return _with_columns(PART, {**meta, "body": body}, columns)


def dropped_content(prompt_id: int | None = None, index: int | None = None) -> bytes:
    """Encode that the earlier parts of an answer, of a group, or of all groups are void."""
    return bytes([DROPPED]) + _json({"prompt_id": prompt_id, "index": index})


def _runs(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    """Return (policy version, number of tokens) of the parts of samples."""
    return [run for sample in samples for run in sample.versions.runs]


def _describe(
    prompt_id: int, spans: Sequence[tuple[int, int]], prompt: Prompt | None
) -> dict[str, Any]:
    """Return what a resume needs to know of tokens without reading them."""
    versions = [version for version, _ in spans]
    meta = {
        "prompt_id": prompt_id,
        "num_tokens": sum(count for _, count in spans),
        "oldest_version": min(versions, default=0),
        "newest_version": max(versions, default=0),
    }
    return meta if prompt is None else meta | {"prompt": prompt_digest(prompt)}


def _with_columns(kind: int, meta: Mapping[str, Any], columns: Behind) -> bytes:
    text = _json(meta)
    return bytes([kind]) + _LENGTH.pack(len(text)) + text + b"".join(columns.parts)


def batch_content(
    step: int,
    prompt_ids: Iterable[int],
    counts: Mapping[str, float],
    newest_id: int | None = None,
    *,
    drops_parts: bool = False,
) -> bytes:
    """Encode the batch of ``prompt_ids`` that was taken after ``step`` trained steps.

    ``newest_id`` is the prompt fetched last by then; ``counts`` includes the rows skipped before
    it. ``drops_parts``: groups that were not finished by then begin from scratch.
    """
    meta: dict[str, Any] = {
        "step": step,
        "prompt_ids": list(prompt_ids),
        "counts": dict(counts),
    }
    if drops_parts:
        meta["drops_parts"] = True
    if newest_id is not None:
        meta["newest_id"] = newest_id
    return bytes([BATCH]) + _json(meta)


def evaluation_content(step: int, metrics: Mapping[str, float]) -> bytes:
    """Encode the metrics of the evaluation after ``step`` trained steps."""
    return bytes([EVALUATION]) + _json({"step": step, "metrics": dict(metrics)})


def header_content(header: Header) -> bytes:
    """Encode the first record of a segment."""
    return bytes([HEADER]) + _json(asdict(header))


def prompt_digest(prompt: Prompt) -> str:
    """Digest of a prompt: text, tokens, images and label."""
    digest = sequence_digest(prompt.token_ids, prompt.images, size=8)
    digest.update(_json([prompt.text, prompt.label]))
    return digest.hexdigest()


def segment_path(folder: Path, number: int) -> Path:
    """The path of segment ``number``."""
    return folder / f"{number:07d}.log"


def _group(body: memoryview, answers: Answers | None = None) -> SampleGroup:
    text = json_text(body)
    record, columns = json.loads(text)["group"], body[_LENGTH.size + len(text) :]
    return group_from(record, Behind(columns), answers)


def _part(body: memoryview) -> Part:
    text = json_text(body)
    meta, columns = json.loads(text), Behind(body[_LENGTH.size + len(text) :])
    content = meta["body"]
    return Part(
        meta["prompt_id"],
        meta["index"],
        meta["part"],
        meta["number"],
        samples=tuple(sample_from(sample, columns) for sample in content["samples"]),
        spans=tuple((version, count) for version, count in content["spans"]),
        columns={name: column_from(each, columns) for name, each in content["columns"].items()},
        value=content["value"],
        data=columns.unpacked(content["data"]),
    )


def json_text(body: memoryview) -> bytes:
    """Return the JSON text of a record with columns; ``body`` is its content without the kind."""
    (length,) = _LENGTH.unpack_from(body)
    return bytes(body[_LENGTH.size : _LENGTH.size + length])


def _json(value: object) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # A label may hold a lone surrogate; json.loads restores it.
    return text.encode("utf-8", "surrogatepass")

"""Conversion of groups and backlogs to JSON values and back.

Recordings, checkpoints and the journal use it. Input: groups and backlogs. Output: JSON values that
read back to equal objects. Fields with default values are left out.

A column is written in one of two ways, and both are always read:

    as numbers   a list; recordings, which people read
    as bytes     {"int32": PACKED}, {"float32": PACKED}, {"runs": [[value, count], ...]},
                 {"routes": PACKED, "dtype": "uint8", "shape": [tokens, layers, k]} or
                 {"set_sizes": PACKED, "set_ids": PACKED}

PACKED stands for bytes (little endian). In a checkpoint it is base64 text; in the journal it is the
number of bytes, which follow the JSON text (see ``Packing``). Routes are not compressed: zlib at
its fastest level saves 7 to 12 % of the bytes and takes 22 ms per megabyte, which is 16 s per
million tokens with 89 layers and 8 experts each.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypedDict

import numpy as np

from rlpost.columns import FloatColumn, IntColumn, RouteColumn, RunColumn, TokenSetColumn
from rlpost.types import Backlog, ImageSpan, Prompt, Sample, SampleGroup, ScoredSample, Unfinished

_COLUMNS = (
    "prompt_ids",
    "response_ids",
    "rollout_logprobs",
    "loss_mask",
    "routes",
    "teacher_logprobs",
    "teacher_top_ids",
    "teacher_top_logprobs",
    "sampling_mask",
)
"""The columns of a sample, in the order of its fields; ``Behind`` relies on this order."""
_ABSENT_IF_NONE = (*_COLUMNS[3:], "reward")
"""Fields that are left out of a record when a sample lacks them."""
_NUMBER_COLUMNS: dict[str, type[IntColumn] | type[FloatColumn]] = {
    "int32": IntColumn,
    "float32": FloatColumn,
}


class ScoredRecord(TypedDict, total=False):
    """One sample of a group.

    ``sample`` holds the fields of a ``Sample``. Instead, ``answer`` may refer to one that is stored
    elsewhere, by index and position among the samples of this index; then ``sample`` has only the
    fields that differ.
    """

    sample: Mapping[str, object]
    answer: tuple[int, int]
    reward: float


Column = IntColumn | FloatColumn | RunColumn | RouteColumn | TokenSetColumn
Answers = Mapping[int, Sequence[Sample]]
"""The samples of finished answers, by index."""


class GroupRecord(TypedDict):
    """A scored group as JSON."""

    prompt_id: int
    samples: list[ScoredRecord]


class UnfinishedRecord(TypedDict):
    """A group in generation as JSON; ``prompt`` holds the fields of a ``Prompt``."""

    prompt: Mapping[str, object]
    samples: list[Mapping[str, object]]


class CountsRecord(TypedDict, total=False):
    """The numbers of a backlog as JSON."""

    num_fetched: int
    num_trained: int
    num_filtered: int
    newest_id: int
    counts: Mapping[str, float]
    lent_counts: Mapping[str, float] | None


class BacklogRecord(CountsRecord):
    """A backlog as JSON."""

    finished: list[GroupRecord]
    unfinished: list[UnfinishedRecord]


class Packing(Protocol):
    """How the bytes of a column are written inside a JSON value."""

    def packed(self, data: memoryview) -> object:
        """Return the JSON value for ``data``, which is not modified."""

    def unpacked(self, value: Any) -> bytes:
        """Return the bytes of a JSON value."""


class Base64:
    """Bytes as text inside the JSON value."""

    def packed(self, data: memoryview) -> str:
        """Return ``data`` as ASCII text."""
        return binascii.b2a_base64(data, newline=False).decode()

    def unpacked(self, value: str) -> bytes:
        """Return the bytes. Raises ValueError when ``value`` is not base64."""
        return binascii.a2b_base64(value, strict_mode=True)


class Behind:
    """Packing with the bytes after the JSON text; the JSON value is the number of bytes."""

    def __init__(self, data: memoryview | bytes = b"") -> None:
        self._data = memoryview(data)
        self._position = 0
        self.parts: list[memoryview] = []

    def packed(self, data: memoryview) -> int:
        """Append ``data`` to ``parts``, without a copy."""
        self.parts.append(data)
        return data.nbytes

    def unpacked(self, value: int) -> bytes:
        """Return the next ``value`` bytes.

        Columns are read in the order in which they were written.

        Raises:
            ValueError: there are fewer bytes.
        """
        start = self._position
        self._position += value
        if self._position > len(self._data):
            raise ValueError(f"a column ends at byte {self._position} of {len(self._data)}")
        return bytes(self._data[start : self._position])


BASE64 = Base64()


def group_record(
    group: SampleGroup, packing: Packing | None = None, answers: Answers | None = None
) -> GroupRecord:
    """Convert a scored group; columns are written as numbers without a ``packing``.

    Samples that are among ``answers``, or are copies of them with other fields, are written as
    references.
    """
    samples: list[ScoredRecord] = [
        _scored_record(scored, packing, answers or {}) for scored in group.samples
    ]
    return {"prompt_id": group.prompt_id, "samples": samples}


def _scored_record(scored: ScoredSample, packing: Packing | None, answers: Answers) -> ScoredRecord:
    sample = scored.sample
    for position, answer in enumerate(answers.get(sample.index, ())):
        if answer.response_ids is sample.response_ids:  # ``replace`` keeps the column
            changed = {
                name: _json_of(getattr(sample, name), packing)
                for name in Sample.__dataclass_fields__
                if not _is_same(getattr(sample, name), getattr(answer, name))
            }
            return {"answer": (sample.index, position), "sample": changed, "reward": scored.reward}
    return {"sample": sample_record(sample, packing), "reward": scored.reward}


def _is_same(value: object, other: object) -> bool:
    """Whether two fields hold the same value; equal columns that are different objects do not."""
    is_plain = isinstance(value, str | int | float | tuple | None)
    return value is other or (is_plain and value == other)


def group_from(
    raw: GroupRecord, packing: Packing = BASE64, answers: Answers | None = None
) -> SampleGroup:
    """The inverse of ``group_record``; samples that refer to a missing answer are left out.

    Raises KeyError, TypeError, ValueError or IndexError for malformed input.
    """
    samples = []
    for scored in raw["samples"]:
        sample = _sample_of(scored, packing, answers or {})
        if sample is not None:
            samples.append(ScoredSample(sample, scored["reward"]))
    return SampleGroup(raw["prompt_id"], tuple(samples))


def _sample_of(scored: ScoredRecord, packing: Packing, answers: Answers) -> Sample | None:
    """Return a sample; None if it refers to an answer that is not there."""
    if "answer" not in scored:
        return sample_from(scored["sample"], packing)
    index, position = scored["answer"]
    changed = _fields(scored["sample"], packing)
    return replace(answers[index][position], **changed) if index in answers else None


def sample_record(sample: Sample, packing: Packing | None = None) -> dict[str, object]:
    """Convert one sample; columns are written as numbers without a ``packing``."""
    record = {
        name: _json_of(getattr(sample, name), packing) for name in Sample.__dataclass_fields__
    }
    if not sample.version_spans:
        del record["version_spans"]
    for name in _ABSENT_IF_NONE:
        if record[name] is None:
            del record[name]
    for name in ("images", "extra"):
        if not record[name]:
            del record[name]
    return record


def sample_from(raw: Mapping[str, object], packing: Packing = BASE64) -> Sample:
    """The inverse of ``sample_record``.

    Raises KeyError, TypeError or ValueError for malformed input.
    """
    return Sample(**_fields(raw, packing))


def _fields(raw: Mapping[str, object], packing: Packing) -> dict[str, Any]:
    """Return the values of the fields that a record has."""
    values: dict[str, Any] = dict(raw)
    if "version_spans" in values:
        values["version_spans"] = tuple(
            (version, count) for version, count in values["version_spans"]
        )
    if "images" in values:
        values["images"] = _images_from(values["images"])
    for name in _COLUMNS:
        if name in values:
            values[name] = column_from(values[name], packing)
    return values


def _images_from(value: Sequence[Sequence[object]]) -> tuple[ImageSpan, ...]:
    return tuple(ImageSpan.from_json(span) for span in value)


def _json_of(value: object, packing: Packing | None) -> object:
    """Return a field as a JSON value."""
    if isinstance(value, tuple) and any(isinstance(each, ImageSpan) for each in value):
        return [span.to_json() for span in value]
    return column_json(value, packing)


def backlog_json(backlog: Backlog) -> Iterator[str]:
    """Convert a backlog to the text of a JSON object, in pieces of at most one group each.

    ``json.dumps`` holds the GIL until it returns, about one second per million tokens of a backlog.
    Between the pieces the other threads of the driver can run.
    """
    yield '{"finished": '
    yield from _list_json(group_record(group, BASE64) for group in backlog.finished)
    yield ', "unfinished": '
    yield from _list_json(_unfinished_record(each) for each in backlog.unfinished)
    yield ", " + json.dumps(_counts_record(backlog)).removeprefix("{")


def _list_json(records: Iterable[Mapping[str, object]]) -> Iterator[str]:
    yield "["
    separator = ""
    for record in records:
        yield separator + json.dumps(record)
        separator = ", "
    yield "]"


def _unfinished_record(entry: Unfinished) -> dict[str, object]:
    return {
        "prompt": {
            name: _json_of(getattr(entry.prompt, name), BASE64)
            for name in Prompt.__dataclass_fields__
            if name != "images" or entry.prompt.images
        },
        "samples": [sample_record(sample, BASE64) for sample in entry.samples],
    }


def _counts_record(backlog: Backlog) -> CountsRecord:
    return {
        "num_fetched": backlog.num_fetched,
        "num_trained": backlog.num_trained,
        "num_filtered": backlog.num_filtered,
        "newest_id": backlog.newest_id,
        "counts": dict(backlog.counts),
        # existing checkpoints name it so
        "lent_counts": None
        if backlog.counts_in_training is None
        else dict(backlog.counts_in_training),
    }


def backlog_from(raw: BacklogRecord) -> Backlog:
    """The inverse of ``backlog_json`` after parsing.

    Raises KeyError, TypeError or ValueError for malformed input.
    """
    return Backlog(
        finished=tuple(group_from(group) for group in raw["finished"]),
        unfinished=tuple(_unfinished_from(entry) for entry in raw["unfinished"]),
        num_fetched=raw["num_fetched"],
        num_trained=raw["num_trained"],
        num_filtered=raw["num_filtered"],
        newest_id=raw["newest_id"],
        counts=raw.get("counts", {}),
        counts_in_training=raw.get("lent_counts"),
    )


def _unfinished_from(raw: UnfinishedRecord) -> Unfinished:
    fields: dict[str, Any] = dict(raw["prompt"])
    fields["token_ids"] = column_from(fields["token_ids"], BASE64)
    fields["images"] = _images_from(fields.get("images", ()))
    return Unfinished(Prompt(**fields), tuple(sample_from(sample) for sample in raw["samples"]))


def column_json(value: object, packing: Packing | None) -> object:
    """Return a column as a JSON value, and any other value unchanged."""
    if isinstance(value, RouteColumn):  # has no readable form
        packed = (packing or BASE64).packed(_bytes(value.array))
        return {"routes": packed, "dtype": value.array.dtype.name, "shape": list(value.array.shape)}
    if isinstance(value, TokenSetColumn):
        if packing is None:
            return list(value)
        sizes, ids = (packing.packed(_bytes(part.array)) for part in (value.sizes, value.token_ids))
        return {"set_sizes": sizes, "set_ids": ids}
    if not isinstance(value, IntColumn | FloatColumn | RunColumn):
        return value
    if packing is None:
        return list(value)
    if isinstance(value, RunColumn):
        return {"runs": value.runs}
    return {value.DTYPE: packing.packed(_bytes(value.array))}


def column_from(value: object, packing: Packing) -> Any:
    """The inverse of ``column_json``; lists of numbers and None are returned unchanged."""
    if not isinstance(value, Mapping):
        return value
    if "runs" in value:
        return RunColumn((int(entry), int(count)) for entry, count in value["runs"])
    if "routes" in value:
        flat = np.frombuffer(packing.unpacked(value["routes"]), dtype=value["dtype"])
        return RouteColumn(flat.reshape(value["shape"]))
    if "set_sizes" in value:
        sizes = IntColumn.view(packing.unpacked(value["set_sizes"]))
        return TokenSetColumn(sizes, IntColumn.view(packing.unpacked(value["set_ids"])))
    ((name, packed),) = value.items()
    return _NUMBER_COLUMNS[name].view(packing.unpacked(packed))


def _bytes(array: np.ndarray[object, object]) -> memoryview:
    """Return the values in memory order, without a copy if they are contiguous."""
    if array.size == 0:  # ``cast`` refuses it
        return memoryview(b"")
    return memoryview(np.ascontiguousarray(array)).cast("B")

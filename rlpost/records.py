"""Conversion of groups and backlogs to JSON values and back, for recordings and checkpoints.

Input: groups and backlogs. Output: plain values that read back to equal objects. Fields with default values are left
out, so that records of older versions can be read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rlpost.columns import FloatColumn, IntColumn, RunColumn
from rlpost.types import Backlog, Prompt, Sample, SampleGroup, ScoredSample, Unfinished


def group_record(group: SampleGroup) -> dict[str, Any]:
    """Convert a scored group."""
    samples = [{"sample": sample_record(scored.sample), "reward": scored.reward} for scored in group.samples]
    return {"prompt_id": group.prompt_id, "samples": samples}


def group_from(raw: Mapping[str, Any]) -> SampleGroup:
    """The inverse of ``group_record``. Raises KeyError or TypeError for malformed input."""
    samples = (ScoredSample(sample_from(scored["sample"]), scored["reward"]) for scored in raw["samples"])
    return SampleGroup(raw["prompt_id"], tuple(samples))


def sample_record(sample: Sample) -> dict[str, Any]:
    """Convert one sample."""
    record = {name: _plain(getattr(sample, name)) for name in Sample.__dataclass_fields__}
    if sample.loss_mask is None:
        del record["loss_mask"]
    if not sample.version_spans:
        del record["version_spans"]
    if sample.routes is None:
        del record["routes"]
    if not sample.extra:
        del record["extra"]
    return record


def sample_from(raw: Mapping[str, Any]) -> Sample:
    """The inverse of ``sample_record``. Raises KeyError or TypeError for malformed input."""
    fields = dict(raw)
    if "version_spans" in fields:
        fields["version_spans"] = tuple((version, count) for version, count in fields["version_spans"])
    return Sample(**fields)


def backlog_json(backlog: Backlog) -> Iterator[str]:
    """Convert a backlog to the text of a JSON object, in pieces of at most one group each.

    ``json.dumps`` keeps the interpreter's lock until it returns, and a large backlog takes it a second for every
    million tokens: in pieces the other threads of the driver can run between them.
    """
    yield '{"finished": '
    yield from _list_json(group_record(group) for group in backlog.finished)
    yield ', "unfinished": '
    yield from _list_json(_unfinished_record(each) for each in backlog.unfinished)
    yield ", " + json.dumps(_counts_record(backlog)).removeprefix("{")


def _list_json(records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield "["
    separator = ""
    for record in records:
        yield separator + json.dumps(record)
        separator = ", "
    yield "]"


def _unfinished_record(entry: Unfinished) -> dict[str, Any]:
    return {
        "prompt": {name: _plain(getattr(entry.prompt, name)) for name in Prompt.__dataclass_fields__},
        "samples": [sample_record(sample) for sample in entry.samples],
    }


def _counts_record(backlog: Backlog) -> dict[str, Any]:
    return {
        "num_fetched": backlog.num_fetched,
        "num_trained": backlog.num_trained,
        "num_filtered": backlog.num_filtered,
        "newest_id": backlog.newest_id,
        "counts": dict(backlog.counts),
        "lent_counts": None if backlog.counts_in_training is None else dict(backlog.counts_in_training),
    }


def backlog_from(raw: Mapping[str, Any]) -> Backlog:
    """The inverse of ``backlog_json``, once parsed. Raises KeyError or TypeError for malformed input."""
    return Backlog(
        finished=tuple(group_from(group) for group in raw["finished"]),
        unfinished=tuple(
            Unfinished(
                Prompt(**each["prompt"]),
                tuple(sample_from(sample) for sample in each["samples"]),
            )
            for each in raw["unfinished"]
        ),
        num_fetched=raw["num_fetched"],
        num_trained=raw["num_trained"],
        num_filtered=raw["num_filtered"],
        newest_id=raw["newest_id"],
        counts=raw.get("counts", {}),
        counts_in_training=raw.get("lent_counts"),
    )


def _plain(value: Any) -> Any:
    """Return a column as a list, and any other value as it is."""
    return list(value) if isinstance(value, IntColumn | FloatColumn | RunColumn) else value

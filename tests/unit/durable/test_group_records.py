"""Groups and backlogs as JSON values: equal when read back, about as small as their columns."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlpost.columns import RouteColumn
from rlpost.durable.group_records import (
    BASE64,
    Behind,
    backlog_json,
    group_from,
    group_record,
)
from rlpost.durable.journal_format import GROUP, Framing, Record, group_content
from rlpost.types import Backlog, Sample, SampleGroup, ScoredSample

LENGTH = 500
RANDOM = np.random.default_rng(0)
IDS = tuple(range(100000, 100000 + LENGTH))
LOGPROBS = tuple(RANDOM.standard_normal(LENGTH).astype(np.float32).tolist())
MASK = (1,) * 100 + (0,) * 50 + (1,) * (LENGTH - 150)
ROUTES = RouteColumn(RANDOM.integers(0, 8, (LENGTH + 2, 3, 2)).astype(np.uint8))
PLAIN = Sample(4, 0, (7, 8), IDS, LOGPROBS, "é\u2028", "stop", 3)
SAMPLES = {
    "plain": PLAIN,
    "masked": replace(
        PLAIN,
        loss_mask=(1,) * 100 + (0,) * 50 + (1,) * (LENGTH - 150),
        version_spans=((2, 1), (3, 499)),
    ),
    "scored by a teacher": replace(PLAIN, teacher_logprobs=tuple(-0.5 for _ in PLAIN.response_ids)),
    "scored by a teacher over its top tokens": replace(
        PLAIN,
        teacher_logprobs=LOGPROBS,
        teacher_top_ids=(*IDS, *IDS),
        teacher_top_logprobs=(*LOGPROBS, *LOGPROBS),
    ),
    "sampled from a part of the vocabulary": replace(
        PLAIN, sampling_mask=tuple((token, 3, 5)[: token % 4] for token in IDS)
    ),
    "routed": replace(PLAIN, routes=ROUTES, extra={"a": [1, None]}),
    "empty": Sample(4, 0, (), (), (), "", "abort", 0),
}


def group(*names: str) -> SampleGroup:
    samples = (replace(SAMPLES[name], index=index) for index, name in enumerate(names))
    return SampleGroup(4, tuple(ScoredSample(sample, 0.5) for sample in samples))


EVERY = group(*SAMPLES)


@pytest.mark.parametrize("packing", [None, BASE64])
def test_a_group_survives_json(packing: object) -> None:
    assert group_from(json.loads(json.dumps(group_record(EVERY, packing)))) == EVERY  # type: ignore[arg-type]


def test_a_group_survives_json_followed_by_bytes() -> None:
    written = Behind()
    text = json.dumps(group_record(EVERY, written))
    assert group_from(json.loads(text), Behind(b"".join(written.parts))) == EVERY


def test_a_record_of_the_journal_has_eight_bytes_per_token(tmp_path: Path) -> None:
    """The mask of a tool's output adds a few bytes in all."""
    for name in ("plain", "masked"):
        content = group_content(group(name), is_kept=True)
        path = tmp_path / name
        path.write_bytes(Framing().frame(content))
        assert Record(GROUP, {"prompt_id": 4}, path, 0, path.stat().st_size).group() == group(name)
        assert len(content) - 8 * LENGTH < 500


def test_a_checkpoint_has_eleven_bytes_per_token() -> None:
    """Eight bytes in base64."""
    text = "".join(backlog_json(Backlog((group("plain"),))))
    assert len(text) < 11 * LENGTH + 600


def test_columns_are_written_without_a_copy() -> None:
    """A group with routes has tens of megabytes, and is written in the event loop."""
    written = Behind()
    group_record(group("routed"), written)
    sample = SAMPLES["routed"]
    assert sample.routes is not None
    for column in (sample.response_ids.array, sample.rollout_logprobs.array, sample.routes.array):
        assert any(
            np.shares_memory(np.frombuffer(part, np.uint8), column)
            for part in written.parts
            if len(part)
        )


def test_a_truncated_record_is_malformed() -> None:
    written = Behind()
    record = group_record(EVERY, written)
    with pytest.raises(ValueError):
        group_from(record, Behind(b"".join(written.parts)[:-1]))

"""Which records of the journal a resume replays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlpost.durable.journal_format import BATCH, GROUP, Record
from rlpost.rollout.buffer import RolloutBuffer, Rules
from rlpost.rollout.replay import fit
from rlpost.types import Backlog
from tests.unit.rollout.test_collector import Counter


def group(prompt_id: int, version: int) -> Record:
    meta: dict[str, Any] = {"prompt_id": prompt_id, "wanted": True, "num_tokens": 3}
    versions = {"oldest_version": version, "newest_version": version}
    return Record(GROUP, meta | versions, Path("journal"), 0, 0)


def batch(step: int, *prompt_ids: int) -> Record:
    meta = {"step": step, "prompt_ids": list(prompt_ids), "counts": {}}
    return Record(BATCH, meta, Path("journal"), 0, 0)


@pytest.mark.parametrize(("newest_usable", "position"), [(None, 6), (2, 6), (1, 4), (0, 2)])
def test_what_weights_of_other_settings_have_generated_is_not_replayed(
    newest_usable: int | None, position: int
) -> None:
    """A batch of usable answers is trained again; after it, the weights are others."""
    records = [group(0, 0), batch(0, 0), group(1, 1), batch(1, 1), group(2, 2), batch(2, 2)]
    buffer = RolloutBuffer(Rules(batch_size=1, start_size=1, num_steps=9), Backlog(), step=0)
    parts = [{"prompt_id": 3, "index": 1, "newest_version": 1}]
    usable = fit(records, buffer, Counter(), parts=parts, newest_usable=newest_usable)
    assert (usable.position, usable.step) == (position, position // 2)
    assert (usable.why is None) == (position == 6)
    assert bool(usable.invalid_parts) == (newest_usable == 0)

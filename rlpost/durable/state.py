"""The state of a run that a commit stores besides Megatron's tensors. JSON, pure.

A ``RunState`` describes a run after ``step`` completed steps, never within a step. Prompts and
samples that were fetched or generated for a later step are in its backlog, and the prompt cursor is
after them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlpost.durable.group_records import backlog_from, backlog_json
from rlpost.errors import CheckpointError
from rlpost.types import Backlog


@dataclass(frozen=True, slots=True)
class RunState:
    """State after ``step`` completed steps.

    Attributes:
        step: completed steps.
        cursor: state of the prompt cursor.
        pending: metrics of ``step`` until its evaluation and its metrics line are done. A resume
            runs an evaluation that was interrupted, and none twice.
        backlog: prompts and samples before the cursor that are not yet trained.
        journal: the journal segment with the events after this state.
    """

    step: int = 0
    cursor: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, float] | None = None
    backlog: Backlog = field(default_factory=Backlog)
    journal: int = 0

    @property
    def policy_version(self) -> int:
        """Version of the weights; it increases by one per step."""
        return self.step

    def trained(self, metrics: Mapping[str, float]) -> RunState:
        """The state after one more completed step."""
        return replace(self, step=self.step + 1, pending=dict(metrics))

    def holding(self, cursor: Mapping[str, int], backlog: Backlog) -> RunState:
        """The same state with another cursor and backlog."""
        return replace(self, cursor=dict(cursor), backlog=backlog)

    def recorded(self) -> RunState:
        """The same state with its metrics line written."""
        return replace(self, pending=None)

    def to_json(self) -> str:
        return "".join(self.json_pieces())

    def json_pieces(self) -> Iterator[str]:
        """The text of ``to_json`` in pieces; see ``group_records.backlog_json``."""
        record = {
            "step": self.step,
            "cursor": self.cursor,
            "pending": self.pending,
            "journal": self.journal,
        }
        yield json.dumps(record).removesuffix("}") + ', "backlog": '
        yield from backlog_json(self.backlog)
        yield "}"

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Parse a state. Raises CheckpointError when the text is not one."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if "backlog" in raw:
                raw["backlog"] = backlog_from(raw["backlog"])
            return cls(**raw)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"not the state of a run: {error}; got {text[:200]!r}") from None

"""What one commit holds beside Megatron's tensors: where the run stands. JSON, pure.

A ``RunState`` describes the moment after ``step`` steps were trained. It never describes half a step: whatever was
fetched or generated for a step that was not trained is in its backlog, and the cursor stands behind it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlpost.errors import CheckpointError
from rlpost.records import backlog_from, backlog_record
from rlpost.types import Backlog


@dataclass(frozen=True, slots=True)
class RunState:
    """``pending`` holds the metrics of ``step`` while its evaluation and its metrics line are still to come.

    It is also the mark that an evaluation is owed: a resume evaluates what was interrupted, and nothing twice.
    ``cursor`` is the state of the prompt cursor; ``backlog`` what was fetched before it and is not yet trained;
    ``journal`` the segment of the journal that says what happened afterwards.
    """

    step: int = 0
    cursor: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, float] | None = None
    backlog: Backlog = field(default_factory=Backlog)
    journal: int = 0

    @property
    def policy_version(self) -> int:
        """The version of the weights: one a step."""
        return self.step

    def trained(self, metrics: Mapping[str, float]) -> RunState:
        """The state after one more step was trained."""
        return replace(self, step=self.step + 1, pending=dict(metrics))

    def holding(self, cursor: Mapping[str, int], backlog: Backlog) -> RunState:
        """The same state with the prompts that are in hand now."""
        return replace(self, cursor=dict(cursor), backlog=backlog)

    def settled(self) -> RunState:
        """The same state with its metrics line written."""
        return replace(self, pending=None)

    def to_json(self) -> str:
        record = {"step": self.step, "cursor": self.cursor, "pending": self.pending, "journal": self.journal}
        return json.dumps(record | {"backlog": backlog_record(self.backlog)})

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Raises CheckpointError when the text is not a state."""
        try:
            raw: dict[str, Any] = json.loads(text)
            if "backlog" in raw:
                raw["backlog"] = backlog_from(raw["backlog"])
            return cls(**raw)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"not the state of a run: {error}; got {text[:200]!r}") from None

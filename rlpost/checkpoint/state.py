"""What one commit holds beside Megatron's tensors: where the run stands. JSON, pure.

A ``RunState`` describes the moment after ``step`` steps were trained. It never describes half a step: prompts fetched
for a step that was not trained are fetched again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rlpost.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RunState:
    """``pending`` holds the metrics of ``step`` while its evaluation and its metrics line are still to come.

    ``cursor`` is the state of the prompt cursor: the next prompt to fetch belongs to the next step.
    """

    step: int = 0
    cursor: Mapping[str, int] = field(default_factory=dict)
    pending: Mapping[str, float] | None = None

    @property
    def policy_version(self) -> int:
        """The version of the weights: one a step."""
        return self.step

    def trained(self, cursor: Mapping[str, int], metrics: Mapping[str, float]) -> RunState:
        """The state after one more step was trained."""
        return RunState(step=self.step + 1, cursor=dict(cursor), pending=dict(metrics))

    def settled(self) -> RunState:
        """The same state with its metrics line written."""
        return replace(self, pending=None)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> RunState:
        """Raises CheckpointError when the text is not a state."""
        try:
            raw: dict[str, Any] = json.loads(text)
            return cls(**raw)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"not the state of a run: {error}; got {text[:200]!r}") from None

"""Provenance of a commit: the settings that affect results, the model, the W&B run id. JSON.

Input: the settings of an attempt and the config.json of its model. Output: a small file in every
commit, and at a resume the differences. A different model is an error; another value of a setting
that decides results (``result_settings``) is allowed and reported by key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpost.config.tree import Config
from rlpost.durable.result_settings import CONTENT, difference, result_settings
from rlpost.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

PROVENANCE_FILE = "provenance.json"
# fmt: off
FIXED = frozenset(
    {
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size",
        "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
        "num_experts", "n_routed_experts", "first_k_dense_replace", "n_shared_experts",
    }
)
"""Keys of config.json that must be equal for the tensors of a checkpoint to fit the model."""
# fmt: on
MODEL = "config.json: "


@dataclass(frozen=True, slots=True)
class Provenance:
    """The settings that affect results, by key; keys of config.json have the prefix MODEL, digests
    of files the prefix CONTENT."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    wandb_run_id: str | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        model: Mapping[str, object],
        *,
        weights: Mapping[str, str | None] | None = None,
        inputs: Mapping[str, str] | None = None,
        wandb_run_id: str | None = None,
    ) -> Provenance:
        """Return the provenance of an attempt.

        Args:
            model: the config.json of --hf-checkpoint.
            weights: see ``result_settings``.
            inputs: digests of files by name, such as the code of reward functions.
        """
        settings = result_settings(config, weights)
        held = {**settings.generated, **settings.trained}
        held |= {CONTENT + name: digest for name, digest in (inputs or {}).items()}
        held |= {MODEL + key: model[key] for key in sorted(FIXED & model.keys())}
        return cls(held, wandb_run_id)

    @property
    def hash(self) -> str:
        """SHA-256 of all settings, as hex."""
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()

    def to_json(self) -> str:
        record = {"hash": self.hash, "settings": self.settings, "wandb_run_id": self.wandb_run_id}
        return json.dumps(record, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Provenance:
        """Parse a provenance file. Raises CheckpointError when the text is malformed."""
        try:
            raw: dict[str, Any] = json.loads(text)
            return cls(dict(raw["settings"]), raw["wandb_run_id"])
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"not a {PROVENANCE_FILE}: {error!r}; got {text[:200]!r}"
            ) from None


@dataclass(frozen=True, slots=True)
class Changes:
    """Lines ``key: before -> now``. Only a changed model prevents a resume."""

    model: tuple[str, ...]
    mathematics: tuple[str, ...]


def changes(before: Provenance, now: Provenance) -> Changes:
    """Return the differences of two provenances. Keys that only one of them has are ignored."""
    common = before.settings.keys() & now.settings.keys()
    lines = difference(
        {key: before.settings[key] for key in common}, {key: now.settings[key] for key in common}
    )
    model = tuple(line for line in lines if line.startswith(MODEL))
    return Changes(model, tuple(line for line in lines if line not in model))


def check_provenance(checkpoint: Path, now: Provenance) -> tuple[str, ...]:
    """Return the changed settings that decide results, one a line, after a warning that names them.

    Raises ConfigError when the checkpoint has another model.
    """
    file = checkpoint / PROVENANCE_FILE
    if not file.exists():
        return ()
    changed = changes(Provenance.from_json(file.read_text()), now)
    if changed.model:
        raise ConfigError(
            f"{checkpoint} was made with another model than --hf-checkpoint: {'; '.join(changed.model)}; resume with "
            "the original model, or start from scratch with another --save"
        )
    if changed.mathematics:
        logger.warning(
            "resuming %s with changed settings, so results differ from those of the original run: %s",
            *(checkpoint, "; ".join(changed.mathematics)),
        )
    return changed.mathematics

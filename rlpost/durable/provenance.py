"""Provenance of a commit: the settings that affect results, the model, the W&B run id. JSON, pure.

Input: the settings of an attempt and the config.json of its model. Output: a small file in every
commit, and at a resume the differences. A different model is an error. Different mathematics (loss,
optimizer, schedule, prompts, sampling, precision) is allowed and reported by key. Placement, memory
use and polling intervals are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rlpost.config.critic_ranks import LAYOUT
from rlpost.config.tree import Config
from rlpost.errors import CheckpointError

PROVENANCE_FILE = "provenance.json"
GROUPS = ("grpo", "critic", "optimizer", "lora", "rollout", "model", "megatron")
# fmt: off
INDIFFERENT = frozenset(
    {
        "optimizer_cpu_offload", "optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d",
        "log_probs_chunk_size", "guard_initial_kl", "guard_rollout_logprob_diff", "guard_grad_norm_factor",
        "reward_timeout_s", "reward_workers", "rm_url", "rm_url_timeout_s", "judge_url", "judge_engines",
        "judge_timeout_s",
        "num_rollout", "num_epoch",
        "num_steps_per_rollout", "lr_decay_iters", "moe_token_dispatcher_type", "moe_enable_deepep",
        "moe_grouped_gemm", "moe_permute_fusion", "no_rope_fusion", "override_hf_config", "global_batch_size",
        "rollout_function_path", "lora_export", "critic_own_gpus", *LAYOUT,
    }
)
"""Keys of these groups that do not affect results, or that enter as a derived value instead."""
# fmt: on
PRECISION = ("bf16", "accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32")
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
CONTENT = "content of "


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
        inputs: Mapping[str, str] | None = None,
        wandb_run_id: str | None = None,
    ) -> Provenance:
        """Return the provenance of an attempt.

        Args:
            model: the config.json of --hf-checkpoint.
            inputs: digests of files by name, such as the code of reward functions.
        """
        tree = config.model_dump(mode="json")
        held = {
            key: value
            for group in GROUPS
            for key, value in tree[group].items()
            if key not in INDIFFERENT
        }
        held |= {key: tree["perf"][key] for key in PRECISION}
        held["num_steps_per_rollout"] = config.num_steps_per_rollout
        held["eps_clip"] = config.loss_settings.eps_clip
        if (
            config.optimizer.lr_decay_style != "constant"
            or config.optimizer.weight_decay_incr_style != "constant"
        ):
            held["lr_decay_iters"] = config.lr_decay_iters
        held |= {CONTENT + name: digest for name, digest in (inputs or {}).items()}
        return cls(
            held | {MODEL + key: model[key] for key in sorted(FIXED & model.keys())}, wandb_run_id
        )

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
    lines = [
        f"{key}: {before.settings[key]!r} -> {now.settings[key]!r}"
        for key in sorted(before.settings.keys() & now.settings.keys())
        if before.settings[key] != now.settings[key]
    ]
    model = tuple(line for line in lines if line.startswith(MODEL))
    return Changes(model, tuple(line for line in lines if line not in model))

"""Which settings decide results: one table, for the journal and for checkpoints. JSON, pure.

Input: the settings of an attempt, and fingerprints of the weights that it starts from. Output: the
values that decide which answers are generated, and those that decide only how they are trained. The
journal compares both with those of its records, a resume those of its checkpoint; what is in
neither (placement, memory, polling, addresses of services) may change.

A change of what is generated voids the journal. A change of training voids what later weights than
the checkpoint's have generated: with the new settings these weights would be others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from rlpost.config.flags import groups
from rlpost.config.masking import mask
from rlpost.config.model_arguments import NAMES as MODEL_ARGUMENTS
from rlpost.config.tree import Config

CONTENT = "content of "
"""Prefix of the fingerprints of folders and files."""
Kind = Literal["generated", "trained", "neither"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The kind of the settings in one table of a recipe, and of those that differ from it."""

    others: Kind = "neither"
    generated: frozenset[str] = frozenset()
    trained: frozenset[str] = frozenset()
    neither: frozenset[str] = frozenset()

    def kind(self, key: str) -> Kind:
        """The kind of a setting."""
        if key in self.generated:
            return "generated"
        if key in self.trained:
            return "trained"
        return "neither" if key in self.neither else self.others


def _keys(text: str) -> frozenset[str]:
    return frozenset(text.split())


TABLE: Mapping[str, Rule] = MappingProxyType(
    {
        # Weights are compared by content, prompt files too (``journal_format.Header.data``).
        "checkpoint": Rule(generated=_keys("override_hf_config")),
        "rollout": Rule(
            "generated",
            neither=_keys(
                "rm_url rm_url_timeout_s judge_url judge_engines judge_timeout_s reward_timeout_s "
                "reward_workers num_rollout num_epoch partial_rollout_record_s "
                "rollout_function_path global_batch_size num_steps_per_rollout"
            ),
        ),
        "grpo": Rule(
            "trained",
            generated=_keys("loss_type use_rollout_routing_replay use_rollout_sampling_mask"),
            neither=_keys(
                "log_probs_chunk_size guard_initial_kl guard_rollout_logprob_diff "
                "guard_grad_norm_factor"
            ),
        ),
        "critic": Rule("trained"),
        "optimizer": Rule(
            "trained",
            neither=_keys(
                "lr_decay_iters optimizer_cpu_offload optimizer_offload_fraction "
                "overlap_cpu_optimizer_d2h_h2d"
            ),
        ),
        # What the adapter adds to the base changes with these at once, in the checkpoint too.
        "lora": Rule("generated", trained=_keys("lora_dropout"), neither=_keys("lora_export")),
        "megatron": Rule("trained"),
        "perf": Rule(
            generated=_keys("bf16 moe_router_dtype"),
            trained=_keys("accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32"),
        ),
        "distillation": Rule(
            "generated",
            trained=_keys("opd_kl_coef opd_alone"),
            neither=_keys("opd_type opd_teacher_url opd_teacher_engines opd_teacher_timeout_s"),
        ),
        "sglang": Rule(
            generated=_keys(
                "sglang_quantization sglang_quantization_param_path sglang_kv_cache_dtype sglang_dtype "
                "sglang_enable_fp32_lm_head sglang_rl_on_policy_target sglang_sampling_backend "
                "sglang_json_model_override_args sglang_chat_template"
            )
        ),
        **dict.fromkeys(
            (
                *("cluster", "assets", "eval", "engines", "sync"),
                *("wandb", "observe", "debug"),
            ),
            Rule(),
        ),
    }
)
"""The core's tables of a recipe. ``_derived`` adds values that follow from several settings."""
_FREE = frozenset().union(*(rule.neither for rule in TABLE.values()))


def rule_of(table: str) -> Rule:
    """Return the rule of a table; one of an extension states what it decides itself."""
    if table in TABLE:
        return TABLE[table]
    return Rule(generated=groups()[table].decides)


@dataclass(frozen=True, slots=True)
class ResultSettings:
    """The values that decide results, by setting."""

    generated: Mapping[str, object] = field(default_factory=dict)
    trained: Mapping[str, object] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


def result_settings(
    config: Config, weights: Mapping[str, str | None] | None = None
) -> ResultSettings:
    """Return the values of a run.

    ``weights``: fingerprints of initial weights, by flag. A table that has
    no effect on the run is left out.
    """
    tree = config.model_dump(mode="json")
    is_used = {
        "critic": config.use_critic,
        "lora": bool(config.lora.lora_rank),
        "distillation": config.distillation.use_opd,
    }
    values: dict[Kind, dict[str, object]] = {"generated": {}, "trained": {}, "neither": {}}
    for name in type(config).model_fields:
        if is_used.get(name, getattr(config, name).has_effect):
            rule = rule_of(name)
            for key, value in tree[name].items():
                values[rule.kind(key)][key] = _hide_secrets(key, value)
    generated, trained = _derived(config)
    contents = {CONTENT + flag: digest for flag, digest in (weights or {}).items()}
    return ResultSettings(values["generated"] | generated | contents, values["trained"] | trained)


def _hide_secrets(key: str, value: object) -> object:
    """Return a value that differs as the setting does; journals and checkpoints may be shared."""
    shown = mask(key, value)
    if shown == value:
        return value
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return f"{json.dumps(shown, sort_keys=True)} (digest {digest[:16]})"


def _derived(config: Config) -> tuple[dict[str, object], dict[str, object]]:
    """Return what follows from several settings, for generation and for training."""
    judges = {
        name: [str(group.model), group.served_model]
        for name, group in config.engines.groups.items()
        if name != config.eval.eval_engines
    }
    # Their models decide rewards and a teacher's log-probs.
    generated: dict[str, object] = {"engines": judges} if judges else {}
    trained: dict[str, object] = {
        "num_steps_per_rollout": config.num_steps_per_rollout,
        "eps_clip": config.loss_settings.eps_clip,  # by default those of the loss
        "eps_clip_high": config.loss_settings.eps_clip_high,
    }
    optimizer = config.optimizer
    if {optimizer.lr_decay_style, optimizer.weight_decay_incr_style} != {"constant"}:
        trained["lr_decay_iters"] = config.lr_decay_iters
    return generated, trained


@dataclass(frozen=True, slots=True)
class Change:
    """Lines ``key: before -> now``, of what decides generation and of what decides training."""

    generated: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()


def compare(before: str, now: str) -> Change:
    """Compare two texts of ``ResultSettings.to_json``; a setting that one lacks counts as unset.

    What another version recorded and this one takes for no matter of results is left out, and so is
    a setting that only this version has, at its default: results are then those of before.
    """
    if before == now:
        return Change()
    try:
        one, other = _current(json.loads(before), json.loads(now)), json.loads(now)
        for kind in ("generated", "trained"):
            for key in one[kind].keys() & _FREE - other[kind].keys():
                del one[kind][key]
            for key in other[kind].keys() & _defaults().keys() - one[kind].keys():
                if other[kind][key] == _defaults()[key]:
                    del other[kind][key]
        return Change(*(difference(one[kind], other[kind]) for kind in ("generated", "trained")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Change(generated=("recorded by another version of rlpost",))


@cache
def _defaults() -> Mapping[str, object]:
    """Return the defaults of all settings, as recorded."""
    defaults: dict[str, object] = {}
    for table in groups().values():
        defaults |= table.model_construct().model_dump(mode="json")
    return defaults


def _current(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return an earlier version's record, which holds MODEL_ARGS, as this version would make it.

    They agreed with config.json, whose folder has a fingerprint, but for overrides, which such a
    record does not name: those of now count if they have the recorded values.
    """
    if "num_layers" not in before["generated"]:
        return before
    generated, overrides = before["generated"], now["generated"].get("override_hf_config", {})
    kept = {name: generated[name] for name in overrides if name in generated}
    return {
        "generated": _without_arguments(generated) | {"override_hf_config": kept},
        "trained": _without_arguments(before["trained"]),
    }


def _without_arguments(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name not in MODEL_ARGUMENTS}


def difference(before: Mapping[str, object], now: Mapping[str, object]) -> tuple[str, ...]:
    """Return a line for each key whose value differs, without secrets.

    A key that one side lacks counts as not set, as do None and an empty list or table: another
    version has a setting that is not set here.
    """
    return tuple(
        f"{key}: {mask(key, before.get(key))!r} -> {mask(key, now.get(key))!r}"
        for key in sorted(before.keys() | now.keys())
        if _value(before.get(key)) != _value(now.get(key))
    )


def _value(recorded: object) -> object:
    return None if recorded in ([], {}) else recorded

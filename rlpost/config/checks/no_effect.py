"""Check for settings that have no effect with the other settings. Pure.

Input: a ``Config``. Output: one line for each reason. ``ROWS`` has every setting that acts only
under a condition; tests/unit/config/test_settings_act.py changes each setting of a run and finds
those that neither act nor have a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.algorithm.loss_settings import POLICY_LOSS_ROWS
from rlpost.config import extensions
from rlpost.config.flags import fields, flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled, value_of, value_text

DETERMINISTIC = ("enable_deterministic_inference", "rl_on_policy_target")
"""Arguments of SGLang with which engines draw tokens by the seed of a request."""


@dataclass(frozen=True, slots=True)
class Row:
    """Settings that act under a condition alone.

    Attributes:
        keys: the settings.
        acts: whether they act.
        where: where they do not, behind "has no effect".
        remedy: how they would; empty if other settings leave nothing for them to do.
        is_note: recipes have them for another kind of run, so they are noted, not refused.
    """

    keys: tuple[str, ...]
    acts: Callable[[Config], bool]
    where: str
    remedy: str = ""
    is_note: bool = False


def no_effect_problems(config: Config) -> list[str]:
    """Settings that differ from their defaults and have no effect; each in one line at most."""
    problems: list[str] = []
    for row, idle in _idle(config):
        if row.is_note:
            continue
        defaults = " ".join(f"{flag(key)} {_default_text(config, key)}" for key in idle)
        remedy = f"use {defaults}"
        if row.remedy:
            link = ", or " if row.remedy.startswith("use ") else ", or use "
            remedy = f"{row.remedy}{link}{defaults}"
        problems.append(f"{_sentence(config, row, idle)}; {remedy}")
    return problems


def no_effect_notes(config: Config) -> list[str]:
    """The same, where the settings may stay: one line for each reason."""
    return [_sentence(config, row, idle) for row, idle in _idle(config) if row.is_note]


def idle_settings(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield settings that ``no_effect_problems`` refuses, and why they have no effect."""
    for row, idle in _idle(config):
        if not row.is_note:
            yield idle, _sentence(config, row, idle)


def _idle(config: Config) -> Iterator[tuple[Row, list[str]]]:
    """Yield the rows of settings without effect, with those settings, each once."""
    changed = _changed_keys(config)
    for row in ROWS:
        idle = [key for key in row.keys if key in changed]
        if idle and not row.acts(config):
            changed -= set(idle)
            yield row, idle


def _sentence(config: Config, row: Row, idle: Sequence[str]) -> str:
    names = listed([spelled(config, key) for key in idle], "and")
    return f"{names} {'has' if len(idle) == 1 else 'have'} no effect {row.where}"


def _changed_keys(config: Config) -> set[str]:
    tables = {fields()[key] for row in ROWS for key in row.keys}
    return {key for table in tables for key in getattr(config, table).changed_keys}


def _default_text(config: Config, key: str) -> str:
    default = getattr(type(getattr(config, fields()[key]))(), key)
    return "none" if default in (None, ()) else value_text(default)


def _is_on(key: str) -> Callable[[Config], bool]:
    return lambda config: bool(value_of(config, key))


def _moves_policy(config: Config) -> bool:
    """Whether the policy of a loss may differ from the old policy, so that ratios are not all 1."""
    grpo = config.grpo
    return config.num_steps_per_rollout > 1 or grpo.use_rollout_logprobs or grpo.keep_old_actor


def _divides_by_std(config: Config) -> bool:
    grpo = config.grpo
    is_replaced = grpo.custom_advantage_function_path or grpo.custom_reward_post_process_path
    is_used = not (is_replaced or grpo.disable_rewards_normalization)
    return ESTIMATORS[grpo.advantage_estimator].divides_by_std and is_used


def _whitens(config: Config) -> bool:
    row = ESTIMATORS[config.grpo.advantage_estimator]
    return row.whitens and config.grpo.custom_advantage_function_path is None


def _estimates(config: Config) -> bool:
    """Whether the estimator computes advantages or chooses the policy loss."""
    grpo = config.grpo
    names_loss = ESTIMATORS[grpo.advantage_estimator].loss != ESTIMATORS["grpo"].loss
    is_replaced = grpo.custom_advantage_function_path is not None
    return not is_replaced or (names_loss and grpo.policy_loss is None)


def _has_dual_clip(config: Config) -> bool:
    return POLICY_LOSS_ROWS[config.loss_settings.policy_loss].has_dual_clip


def _punishes(config: Config) -> bool:
    return "punish" in (config.grpo.truncated_answers, config.grpo.repetitive_answers)


def _has_objects_as_rewards(config: Config) -> bool:
    rollout = config.rollout
    return any((rollout.custom_rm_path, rollout.custom_generate_function_path))


def _ends_schedule(config: Config) -> bool:
    table = config.optimizer
    changes = (table.lr_decay_style, table.weight_decay_incr_style) != ("constant", "constant")
    return changes or table.lr_warmup_fraction is not None


def _decay_changes(config: Config) -> bool:
    table = config.optimizer
    start = table.weight_decay if table.start_weight_decay is None else table.start_weight_decay
    end = table.weight_decay if table.end_weight_decay is None else table.end_weight_decay
    return start != end


_REFERENCE = "add --use-kl-loss true or --kl-coef"
_SWITCHES = (
    "kl_coef", "use_kl_loss", "kl_loss_coef", "entropy_coef", "use_tis", "use_opsm",
    "use_rollout_logprobs", "keep_old_actor", "use_unbiased_kl", "disable_rewards_normalization",
    "disable_grpo_std_normalization", "normalize_advantages", "custom_advantage_function_path",
    "custom_reward_post_process_path", "ref_update_interval",
)  # fmt: skip
"""What is added to a policy loss; supervised training has none."""
_OF_RECIPES = (
    "advantage_estimator", "policy_loss", "eps_clip", "eps_clip_high", "eps_clip_c",
    "overlong_buffer_len", "truncated_answers", "repetitive_answers", "rm_type", "custom_rm_path",
    "group_rm", "reward_key", "reward_weights", "rollout_top_p", "rollout_top_k", "rollout_stop",
    "rollout_stop_token_ids", "rollout_mode", "over_sampling_batch_size",
    "dynamic_sampling_filter_path", "partial_rollout", "buffer_filter_path",
    "custom_generate_function_path", "rollout_max_response_len",
)  # fmt: skip
"""What recipes that generate have, and supervised training does not use."""
ROWS = (
    Row(_SWITCHES, lambda config: not config.grpo.is_supervised, "with --loss-type sft_loss"),
    Row(
        _OF_RECIPES,
        lambda config: not config.grpo.is_supervised,
        "with --loss-type sft_loss",
        is_note=True,
    ),
    Row(
        ("tis_level", "tis_mode", "tis_clip", "tis_clip_low"),
        _is_on("use_tis"),
        "without --use-tis",
        "add --use-tis true",
    ),
    Row(("opsm_delta",), _is_on("use_opsm"), "without --use-opsm", "add --use-opsm true"),
    Row(
        ("kl_loss_coef",), _is_on("use_kl_loss"), "without --use-kl-loss", "add --use-kl-loss true"
    ),
    Row(
        ("kl_loss_type",),
        lambda config: config.grpo.needs_reference,
        "without a KL divergence",
        _REFERENCE,
    ),
    Row(("eps_clip_c",), _has_dual_clip, "with --policy-loss cispo, which has no dual clip"),
    Row(
        ("use_opsm", "eps_clip_c"),
        lambda config: config.grpo.loss_type == "custom_loss" or _moves_policy(config),
        "with one optimizer step per rollout, where the policy is the old policy",
        "add --num-steps-per-rollout 2 or --use-rollout-logprobs true",
    ),
    Row(
        ("eps_clip", "eps_clip_high", "policy_loss"),
        lambda config: config.grpo.loss_type == "custom_loss" or _moves_policy(config),
        "with one optimizer step per rollout, where the policy is the old policy",
        is_note=True,
    ),
    Row(
        ("disable_grpo_std_normalization",),
        _divides_by_std,
        "where advantages are not divided by a standard deviation",
        "use --advantage-estimator grpo alone",
    ),
    Row(
        ("advantage_estimator",),
        _estimates,
        "with --custom-advantage-function-path",
        "use --custom-advantage-function-path none",
    ),
    Row(
        ("normalize_advantages",),
        lambda config: not _whitens(config),
        "with an --advantage-estimator that whitens over the batch",
    ),
    Row(
        ("disable_rewards_normalization",),
        lambda config: config.grpo.custom_reward_post_process_path is None,
        "with --custom-reward-post-process-path, whose rewards get no baseline",
    ),
    Row(
        ("guard_initial_kl",),
        lambda config: not (config.grpo.use_rollout_logprobs or config.grpo.keep_old_actor),
        "where the policy is not compared with itself before the first optimizer step",
    ),
    Row(
        ("overlong_penalty",),
        _is_on("overlong_buffer_len"),
        "without --overlong-buffer-len",
        "add --overlong-buffer-len",
    ),
    Row(
        ("punished_reward",),
        _punishes,
        "where no response is punished",
        "add --truncated-answers punish or --repetitive-answers punish",
    ),
    Row(
        ("mtp_loss_scaling_factor",),
        _is_on("enable_mtp_training"),
        "without --enable-mtp-training",
        "add --enable-mtp-training true",
    ),
    Row(
        ("apply_chat_template_kwargs",),
        lambda config: config.applies_chat_template or config.answers_are_episodes,
        "without --apply-chat-template",
        "add --apply-chat-template true",
    ),
    Row(
        ("rollout_seed",),
        lambda config: (
            config.rollout.rollout_shuffle
            or any(table.draws_by_seed for table in config.tables)
            or any(map(config.sglang.server_args.get, DETERMINISTIC))
        ),
        "without --rollout-shuffle",
        "add --rollout-shuffle true",
    ),
    Row(
        ("partial_rollout_record_s",),
        _is_on("partial_rollout"),
        "without --partial-rollout",
        "add --partial-rollout true",
    ),
    Row(
        ("reward_key",),
        _has_objects_as_rewards,
        "with rewards by name, which are numbers",
        "add --custom-rm-path with a function that returns an object",
    ),
    Row(
        ("muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_scale"),
        lambda config: config.optimizer.optimizer == "muon",
        "with --optimizer adam",
        "use --optimizer muon",
    ),
    Row(
        ("min_lr",),
        lambda config: config.optimizer.lr_decay_style != "constant",
        "with --lr-decay-style constant",
        "use --lr-decay-style cosine",
    ),
    Row(
        ("lr_decay_iters",),
        _ends_schedule,
        "with --lr-decay-style constant",
        "use --lr-decay-style cosine",
    ),
    Row(
        ("lr_warmup_init",),
        lambda config: bool(
            config.optimizer.lr_warmup_iters or config.optimizer.lr_warmup_fraction
        ),
        "without a warm-up",
        "add --lr-warmup-iters",
    ),
    Row(
        ("lr_wsd_decay_iters", "lr_wsd_decay_style"),
        lambda config: config.optimizer.lr_decay_style == "WSD",
        "with another --lr-decay-style than WSD",
        "use --lr-decay-style WSD",
    ),
    Row(
        ("weight_decay_incr_style",),
        _decay_changes,
        "where --start-weight-decay and --end-weight-decay are equal (default: --weight-decay)",
        "add --end-weight-decay",
    ),
    Row(
        ("optimizer_offload_fraction",),
        _is_on("optimizer_cpu_offload"),
        "without --optimizer-cpu-offload",
        "add --optimizer-cpu-offload true",
    ),
    Row(
        ("lora_alpha", "lora_dropout", "lora_targets", "lora_export"),
        _is_on("lora_rank"),
        "without adapters",
        "add --lora-rank",
    ),
    *(
        Row(
            tuple(key for key in kind.model_fields if key != switch.key),
            _is_on(switch.key),
            switch.where,
            switch.remedy,
        )
        for kind in extensions.tables().values()
        if (switch := kind.switch) is not None
    ),
)
"""The first row that says it counts, where several have a setting."""

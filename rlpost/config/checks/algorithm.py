"""Settings of the algorithm that contradict or need each other. Pure.

In: a ``Config``. Out: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.tree import Config


def algorithm_problems(config: Config) -> list[str]:
    """Of the table [grpo]."""
    grpo = config.grpo
    is_custom, is_sft = grpo.loss_type == "custom_loss", grpo.loss_type == "sft_loss"
    without_meaning = [
        name
        for name in ("kl_coef", "use_kl_loss", "entropy_coef", "use_tis", "custom_advantage_function_path")
        if is_sft and getattr(grpo, name)
    ]
    rules = [
        (
            bool(grpo.kl_coef and grpo.kl_loss_coef),
            f"kl_coef = {grpo.kl_coef} and kl_loss_coef = {grpo.kl_loss_coef} count the divergence twice: choose one",
        ),
        (
            is_custom and grpo.custom_loss_function_path is None,
            "loss_type = custom_loss needs custom_loss_function_path",
        ),
        (
            not is_custom and grpo.custom_loss_function_path is not None,
            f"custom_loss_function_path is not used with loss_type = {grpo.loss_type}; set loss_type = custom_loss",
        ),
        (
            grpo.tis_clip_low >= grpo.tis_clip,
            f"tis_clip_low = {grpo.tis_clip_low} must be below tis_clip = {grpo.tis_clip}",
        ),
        (bool(without_meaning), f"loss_type = sft_loss has no use for {', '.join(without_meaning)}; leave them out"),
    ]
    problems = [f"grpo.{problem}" for broken, problem in rules if broken]
    if is_sft and config.rollout.n_samples_per_prompt != 1:
        problems.append(
            f"rollout.n_samples_per_prompt = {config.rollout.n_samples_per_prompt}: with grpo.loss_type = sft_loss a "
            "line of --prompt-data has one response; leave it at 1"
        )
    if is_sft and config.rollout.label_key is None and not config.rollout.apply_chat_template:
        problems.append(
            "grpo.loss_type = sft_loss needs rollout.label_key (where a line has its response), or "
            "rollout.apply_chat_template with messages that end with one of an assistant"
        )
    return problems

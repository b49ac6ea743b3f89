"""Check the tables [grpo] and [critic]. Pure.

Input: a ``Config`` and, if available, the model's ``config.json``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.algorithm.advantage import ESTIMATORS
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled


def algorithm_problems(config: Config) -> list[str]:
    """Problems of the tables [grpo] and [critic]."""
    return [
        *_grpo_problems(config),
        *_reward_problems(config),
        *_no_advantage_problems(config),
        *_old_policy_problems(config),
        *critic_problems(config),
    ]


def _reward_problems(config: Config) -> list[str]:
    """Problems of the settings that turn rewards into advantages."""
    grpo = config.grpo
    row = ESTIMATORS[grpo.advantage_estimator]
    have_raw = listed(name for name, other in ESTIMATORS.items() if other.has_raw_rewards)
    unused, changed = _without_rewards(config), _shaping_of_rewards(config)
    rules = [
        (
            grpo.disable_rewards_normalization and not row.has_raw_rewards,
            f"--disable-rewards-normalization leaves nothing of "
            f"{spelled(config, 'advantage_estimator')}; use it with {have_raw}",
        ),
        (
            grpo.disable_rewards_normalization and grpo.custom_advantage_function_path is not None,
            "--disable-rewards-normalization does not apply to --custom-advantage-function-path; use "
            "one of them",
        ),
        (
            grpo.custom_reward_post_process_path is not None
            and row.compares
            and not row.has_raw_rewards,
            f"--custom-reward-post-process-path takes the place of a baseline, which is all of "
            f"{spelled(config, 'advantage_estimator')}; use --advantage-estimator grpo",
        ),
        (
            bool(unused and changed),
            f"{listed([spelled(config, key) for key in changed], 'and')} with {unused}, which trains without rewards; "
            "leave out one of them",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _without_rewards(config: Config) -> str:
    """The setting with which generated answers train without rewards; empty without."""
    rules = {
        "disable_compute_advantages_and_returns": (
            config.grpo.disable_compute_advantages_and_returns
        ),
        "opd_alone": config.distillation.use_opd and config.distillation.opd_alone,
    }
    return next((spelled(config, key) for key, is_set in rules.items() if is_set), "")


def _shaping_of_rewards(config: Config) -> list[str]:
    """The settings that change the rewards of answers."""
    grpo = config.grpo
    rules = {
        "overlong_buffer_len": grpo.overlong_buffer_len is not None,
        "truncated_answers": grpo.truncated_answers == "punish",
        "repetitive_answers": grpo.repetitive_answers == "punish",
        "custom_reward_post_process_path": grpo.custom_reward_post_process_path is not None,
    }
    return [key for key, is_set in rules.items() if is_set]


def _grpo_problems(config: Config) -> list[str]:
    grpo, rollout = config.grpo, config.rollout
    is_custom, is_sft = grpo.loss_type == "custom_loss", grpo.is_supervised
    rules = [
        (
            bool(grpo.kl_coef and grpo.kl_loss_coef),
            f"{spelled(config, 'kl_coef')} and {spelled(config, 'kl_loss_coef')} count the KL divergence twice; use "
            "--kl-coef 0 or --kl-loss-coef 0",
        ),
        (
            is_custom and grpo.custom_loss_function_path is None,
            "--loss-type custom_loss needs a loss function; add --custom-loss-function-path FILE.py:FUNCTION, or use "
            "--loss-type policy_loss",
        ),
        (
            not is_custom and grpo.custom_loss_function_path is not None,
            f"{spelled(config, 'custom_loss_function_path')} is not used with {spelled(config, 'loss_type')}; use "
            "--loss-type custom_loss, or --custom-loss-function-path none",
        ),
        (
            (grpo.overlong_buffer_len or 0) > rollout.rollout_max_response_len,
            f"{spelled(config, 'overlong_buffer_len')} is longer than "
            f"{spelled(config, 'rollout_max_response_len')}; use a fraction of it",
        ),
        (
            bool(grpo.normalize_advantages and grpo.custom_advantage_function_path),
            f"--normalize-advantages true does not apply to {spelled(config, 'custom_advantage_function_path')}; "
            "normalize in the function, and use --normalize-advantages false",
        ),
        (
            grpo.use_rollout_logprobs and grpo.use_tis,
            "--use-rollout-logprobs true and --use-tis true correct the engines' log-probs twice; use one of them",
        ),
        (
            grpo.use_unbiased_kl and not grpo.kl_loss_coef,
            "--use-unbiased-kl true has no KL divergence to weight; add --use-kl-loss and --kl-loss-coef, or use "
            "--use-unbiased-kl false",
        ),
        (
            grpo.ref_update_interval is not None and not (grpo.use_kl_loss or grpo.kl_coef),
            f"{spelled(config, 'ref_update_interval')} has no reference to update; add --use-kl-loss "
            "or --kl-coef, or leave it out",
        ),
        (
            grpo.tis_clip_low >= grpo.tis_clip,
            f"{spelled(config, 'tis_clip_low')} must be below {spelled(config, 'tis_clip')}; use --tis-clip-low 0",
        ),
        (
            bool(grpo.use_kl_loss and grpo.kl_loss_coef)
            and grpo.kl_loss_type == "k1"
            and not grpo.use_unbiased_kl,
            f"--kl-loss-type k1 with {spelled(config, 'kl_loss_coef')} has no effect: the gradient of k1 is 0 in "
            "expectation, so the policy may move away from the reference; use --kl-loss-type k2, or "
            "--use-unbiased-kl true",
        ),
        (
            is_sft and rollout.n_samples_per_prompt != 1,
            f"{spelled(config, 'n_samples_per_prompt')}: with --loss-type sft_loss a line of --prompt-data has one "
            "response; use --n-samples-per-prompt 1",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def _uses_advantages(config: Config) -> str:
    """The first setting that changes advantages; empty without."""
    grpo = config.grpo
    given = {
        "advantage_estimator": config.use_critic,
        "kl_coef": bool(grpo.kl_coef),
        "normalize_advantages": grpo.normalize_advantages,
        "custom_advantage_function_path": grpo.custom_advantage_function_path is not None,
        "opd_type": config.distillation.use_opd and config.distillation.opd_form == "advantage",
    }
    return next((spelled(config, key) for key, is_set in given.items() if is_set), "")


def _no_advantage_problems(config: Config) -> list[str]:
    """Problems of --disable-compute-advantages-and-returns."""
    if not config.grpo.disable_compute_advantages_and_returns:
        return []
    user = _uses_advantages(config)
    if not user and config.grpo.loss_type != "policy_loss":
        return []
    return [
        f"--disable-compute-advantages-and-returns true with {user or spelled(config, 'loss_type')}, which needs them; "
        "use --loss-type sft_loss or custom_loss, or omit it"
    ]


def _old_policy_problems(config: Config) -> list[str]:
    """Problems of --keep-old-actor."""
    grpo, rollout = config.grpo, config.rollout
    if not grpo.keep_old_actor:
        return []
    rules = [
        (
            rollout.rollout_mode == "sync" and rollout.update_weights_interval == 1,
            "--keep-old-actor true with --rollout-mode sync and --update-weights-interval 1: the weights that "
            "generated are those before the first optimizer step, to which the policy is compared anyway; omit it",
        ),
        (
            grpo.use_rollout_logprobs,
            "--keep-old-actor true and --use-rollout-logprobs true both say what the policy is compared with; use one "
            "of them",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]


def critic_problems(config: Config) -> list[str]:
    """Problems of the critic, and of discounts that the estimator does not use."""
    grpo, critic = config.grpo, config.critic
    estimator = spelled(config, "advantage_estimator")
    row = ESTIMATORS[grpo.advantage_estimator]
    is_ppo = row.has_critic
    critic_keys = critic.changed_keys
    words = listed([spelled(config, key) for key in critic_keys], "and")
    discount = listed(name for name, other in ESTIMATORS.items() if other.discounts)
    critic_lr = config.optimizer.lr if critic.critic_lr is None else critic.critic_lr
    rules = [
        (
            bool(critic_keys) and not is_ppo,
            f"{words} {'needs' if len(critic_keys) == 1 else 'need'} a critic, but {estimator} trains none; use "
            f"--advantage-estimator ppo, or leave {'it' if len(critic_keys) == 1 else 'them'} out",
        ),
        (
            grpo.gamma != 1.0 and not row.discounts,
            f"{spelled(config, 'gamma')} is not used with {estimator}, which gives all tokens of a response one "
            f"advantage; use --gamma 1, or --advantage-estimator {discount}",
        ),
        (
            grpo.lambd != 1.0 and not is_ppo,
            f"{spelled(config, 'lambd')} belongs to GAE, which {estimator} does not use; use --lambd 1, or "
            "--advantage-estimator ppo",
        ),
        (
            is_ppo and grpo.is_supervised,
            f"{estimator} trains a critic, and --loss-type sft_loss has no rewards; use --advantage-estimator grpo",
        ),
        (
            is_ppo and config.optimizer.min_lr > critic_lr,
            f"{spelled(config, 'min_lr')} is above the critic's learning rate, {critic_lr:g}; use --min-lr 0, or "
            f"--critic-lr {config.optimizer.min_lr:g} or more",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]

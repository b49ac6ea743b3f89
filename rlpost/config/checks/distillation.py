"""Check the table [distillation] for conflicting or missing settings. Pure.

Input: a ``Config``. Output: one line for each problem.
"""

from __future__ import annotations

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled


def distillation_problems(config: Config) -> list[str]:
    """Problems of the table [distillation]."""
    given = config.distillation
    if not given.use_opd:
        if not given.changed_keys:
            return []
        named = listed([flag(key) for key in sorted(given.changed_keys)], "and")
        return [f"{named} without --use-opd: no teacher is used; add --use-opd, or leave them out"]
    return _teacher_problems(config) + _conflicts(config)


def _teacher_problems(config: Config) -> list[str]:
    """Problems of the teacher's location: engines of a group, or a server."""
    url, group = config.distillation.opd_teacher_url, config.distillation.opd_teacher_engines
    if url is None and group is None:
        return [
            "--use-opd needs a teacher; add --opd-teacher-engines NAME, or --opd-teacher-url "
            "http://HOST:PORT"
        ]
    if url is not None and group is not None:
        return [
            f"{spelled(config, 'opd_teacher_engines')} and --opd-teacher-url name two teachers; "
            "leave one of them out"
        ]
    if url is not None and not url.startswith(("http://", "https://")):
        return [f"--opd-teacher-url {url!r}: must start with http:// or https://"]
    return []


def _conflicts(config: Config) -> list[str]:
    """Conflicts with settings of other tables."""
    distillation, grpo, rollout = config.distillation, config.grpo, config.rollout
    is_loss, is_alone = distillation.opd_form == "loss", distillation.opd_alone
    rules = [
        (
            grpo.is_supervised,
            "--use-opd needs generated responses, and --loss-type sft_loss has those of "
            "--prompt-data; use --loss-type policy_loss",
        ),
        (
            is_loss and grpo.loss_type == "custom_loss",
            "--opd-form loss is a term of the policy loss, which --loss-type custom_loss replaces; "
            "use --opd-form advantage",
        ),
        (
            distillation.opd_top_k is not None and not is_loss,
            f"{spelled(config, 'opd_top_k')}: the divergence over several tokens is no advantage of "
            "the one that was generated; add --opd-form loss",
        ),
        (
            rollout.rollout_temperature != 1.0,
            f"{spelled(config, 'rollout_temperature')} with --use-opd: a server scores given tokens "
            "at temperature 1, and the policy would be compared at another; use "
            "--rollout-temperature 1",
        ),
        (
            is_alone and grpo.kl_coef > 0,
            f"--opd-alone sets every advantage of a reward to 0, and {spelled(config, 'kl_coef')} "
            "is a part of the reward; use --kl-loss-coef, or --kl-coef 0",
        ),
        (
            is_alone and grpo.custom_advantage_function_path is not None,
            "--opd-alone leaves nothing for --custom-advantage-function-path to compute; use one of "
            "them",
        ),
        (
            is_alone and is_loss and grpo.normalize_advantages,
            "--opd-alone with --opd-form loss has no advantages, which --normalize-advantages would "
            "scale; use --normalize-advantages false",
        ),
        (
            is_alone and config.use_critic,
            "--opd-alone leaves nothing for a critic to estimate; use --advantage-estimator grpo",
        ),
        (
            config.use_critic and not is_loss and grpo.normalize_advantages,
            "--normalize-advantages with a critic whitens before the teacher's part; use "
            "--normalize-advantages false, or --opd-form loss",
        ),
        (
            is_alone and distillation.opd_kl_coef == 0,
            "--opd-alone with --opd-kl-coef 0 trains on nothing; use --opd-kl-coef 1",
        ),
    ]
    return [problem for is_broken, problem in rules if is_broken]

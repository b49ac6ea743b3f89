"""Decide whether a beginning that samples share is computed once (--share-prefix). Pure.

Input: a ``Config`` and the model's fields of Megatron's TransformerConfig. Output: the reason
against it, or None.
"""

from __future__ import annotations

from rlpost.config.flags import flag
from rlpost.config.tree import Config
from rlpost.errors import WeightError
from rlpost.models.families import family
from rlpost.models.model_types import HfConfig, MegatronFields


def prefix_problem(config: Config, fields: MegatronFields) -> str | None:
    """Return why samples cannot share rows, naming the option or the model; None if they can."""
    options = config.megatron.options
    backend = options.get("attention_backend")
    if config.perf.context_parallel_size > 1:
        return f"{flag('context_parallel_size')} splits each sequence over ranks"
    if fields.get("multi_latent_attention"):
        return "the model's latent attention rotates each sequence from position 0"
    if fields.get("linear_attention_freq"):
        return "layers of the model pass a state from token to token"
    if config.grpo.enable_mtp_training:
        return f"{flag('enable_mtp_training')} predicts from the tokens that follow in the row"
    if options.get("moe_z_loss_coeff"):
        return f"--moe-z-loss-coeff {options['moe_z_loss_coeff']} counts each row once"
    if options.get("moe_expert_capacity_factor") is not None:
        return "--moe-expert-capacity-factor drops tokens by the number of rows"
    if backend == "unfused":
        return "--attention-backend unfused has as many keys as queries"
    return None


def with_prefix_sharing(
    config: Config, hf: HfConfig, *, has_gpus: bool
) -> tuple[Config, str | None]:
    """Return the settings with ``share_prefix`` decided, and the reason if it is off by default.

    ``hf`` is the model's config.json.
    """
    if config.perf.share_prefix is not None:
        return config, None
    try:
        known = family((hf.get("architectures") or ["an unnamed architecture"])[0])
    except WeightError as error:
        reason: str | None = str(error)  # only engines may use such a model
    else:
        reason = prefix_problem(config, known.fields(known.resolved(hf)))
    if reason is None and has_gpus:
        reason = "it has not been measured on GPUs"
    perf = config.perf.model_copy(update={"share_prefix": reason is None})
    return config.model_copy(update={"perf": perf}), reason

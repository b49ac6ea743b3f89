"""The modules and names of slime that plug-ins may import, and their implementations. Pure data.

They can be imported without slime (``rlpost.extensions.slime.modules``). Other names raise an error
that refers to the documentation.
"""

from __future__ import annotations

from rlpost.errors import choice, suggestion

_HERE = "rlpost.extensions.slime."
_RM = "slime.rollout.rm_hub"
PROVIDED: dict[str, dict[str, str]] = {
    "slime.utils.types": {"Sample": _HERE + "sample.Sample"},
    "slime.utils.http_utils": {"post": _HERE + "engines.post", "get": _HERE + "engines.get"},
    "slime.utils.misc": {
        "load_function": _HERE + "engines.load_function",
        "SingletonMeta": _HERE + "engines.SingletonMeta",
    },
    "slime.utils.processing_utils": {"load_tokenizer": _HERE + "engines.load_tokenizer"},
    "slime.rollout.sglang_rollout": {
        "GenerateState": _HERE + "engines.GenerateState",
        "get_model_url": _HERE + "engines.get_model_url",
    },
    "slime.rollout.filter_hub.base_types": {
        "DynamicFilterOutput": _HERE + "filters.DynamicFilterOutput"
    },
    "slime.rollout.filter_hub.dynamic_sampling_filters": {
        "check_reward_nonzero_std": _HERE + "filters.check_reward_nonzero_std",
        "check_reward_nonzero_std_with_fallback": _HERE
        + "filters.check_reward_nonzero_std_with_fallback",
    },
    "slime.rollout.filter_hub.buffer_filters": {"pop_first": _HERE + "filters.pop_first"},
    "slime.rollout.data_source": {"pop_first": _HERE + "filters.pop_first"},
    _RM: {
        "async_rm": _HERE + "rewards.async_rm",
        "batched_async_rm": _HERE + "rewards.batched_async_rm",
    },
    f"{_RM}.deepscaler": {"get_deepscaler_rule_based_reward": _HERE + "rewards.deepscaler_reward"},
    f"{_RM}.f1": {"f1_score": _HERE + "rewards.f1_score"},
    f"{_RM}.gpqa": {"compute_gpqa_reward": _HERE + "rewards.gpqa_reward"},
    f"{_RM}.math_dapo_utils": {"compute_score": _HERE + "rewards.dapo_score"},
    f"{_RM}.math_utils": {"extract_answer": _HERE + "rewards.extract_answer"},
}
"""Module -> name -> dotted path of the implementation."""
REMEDY = "copy what the plug-in needs of it into the plug-in (docs/extending.md lists the available names)"


def packages() -> set[str]:
    """Return ``slime`` and every parent package of a module of the table."""
    found = set()
    for module in PROVIDED:
        parts = module.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts))}
    return found


def lacking(module: str, name: str | None = None) -> str | None:
    """Return the reason why ``module``, or ``name`` in it, cannot be imported; None if it can."""
    if module not in PROVIDED and module not in packages():
        return f"rlpost has no {module}{suggestion(module, PROVIDED)}; {REMEDY}"
    known = PROVIDED.get(module, {})
    if name is None or name in known or f"{module}.{name}" in {*packages(), *PROVIDED}:
        return None
    has = choice(name, list(known)) if known else f"; {REMEDY}"
    return f"rlpost's {module} has no {name}{has}"

"""Variables of SGLang's environment that change what engines answer.

The checks of settings refuse them, and no engine inherits them from a shell or an image.
"""

from __future__ import annotations

from collections.abc import Mapping

_DRAFTED = "engines accept drafted tokens that the policy would not have sampled"
_EXPERTS = "engines choose experts by their number"
_ATTENTION = "engines leave out parts of attention"
_DAMAGED = "engines damage their KV cache, as a test of SGLang"
VARIABLES: Mapping[str, tuple[bool | float | None, str]] = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": (
        False,
        "engines return log-probs at temperature 1, whatever they sample with",
    ),
    "SGLANG_SANITIZE_NAN_LOGITS": (False, "engines sample where logits are no numbers"),
    "SGLANG_SIMULATE_ACC_LEN": (-1, _DRAFTED),
    "SGLANG_SIMULATE_ROUND_ROBIN_EXPERTS": (False, _EXPERTS),
    "SGLANG_SIMULATE_UNIFORM_EXPERTS": (False, _EXPERTS),
    "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR": (None, _ATTENTION),
    "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR": (None, _ATTENTION),
    "SGLANG_KV_CANARY_PERTURB_NEXT_TOKEN_SWAP_PROB": (0.0, _DAMAGED),
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_POST_FORWARD_PROB": (0.0, _DAMAGED),
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_UNUSED_CACHE_PROB": (0.0, _DAMAGED),
    "SGLANG_KV_CANARY_PERTURB_REAL_KV_USED_PROB": (0.0, _DAMAGED),
    "SGLANG_KV_CANARY_PERTURB_REQ_TO_TOKEN_PROB": (0.0, _DAMAGED),
}
"""Variables with which answers or their log-probs are not those of the policy: SGLang's default, with
which they are, and why."""
_FALSE = ("false", "0", "no", "n")  # SGLang's EnvBool


def is_default(name: str, value: str) -> bool:
    """Return whether a variable of the table has SGLang's default; an empty one has."""
    default, _ = VARIABLES[name]
    if not value:
        return True
    if isinstance(default, bool):
        return value.lower() in _FALSE
    try:
        return float(value) == default
    except ValueError:
        return False

"""Names of settings in other programs, and the corresponding flags. Pure data.

Input: an unknown flag of a command line. Output: the flag to use instead. The names are those of
Megatron-LM, SGLang, vLLM, verl, TRL and of papers. None of them is an option of Megatron-core,
which would be passed through (a test checks that). slime's own flags are in
``rlpost.compat.slime.flags``.
"""

from __future__ import annotations

from rlpost.compat.slime.flags import LACKING

ABBREVIATIONS: dict[str, tuple[str, ...]] = {
    "adv-estimator": ("--advantage-estimator",),
    "algo": ("--advantage-estimator",),
    "algorithm": ("--advantage-estimator",),
    "batch-size": ("--rollout-batch-size", "--global-batch-size"),
    "beta": ("--kl-loss-coef",),
    "bs": ("--rollout-batch-size", "--global-batch-size"),
    "bsz": ("--rollout-batch-size", "--global-batch-size"),
    "checkpoint": ("--hf-checkpoint", "--save"),
    "ckpt": ("--hf-checkpoint", "--save"),
    "clip": ("--eps-clip",),
    "clip-eps": ("--eps-clip",),
    "cp": ("--context-parallel-size",),
    "cp-size": ("--context-parallel-size",),
    "data": ("--prompt-data",),
    "dataset": ("--prompt-data",),
    "entropy": ("--entropy-coef",),
    "ep": ("--expert-model-parallel-size",),
    "ep-size": ("--expert-model-parallel-size",),
    "etp": ("--expert-tensor-parallel-size",),
    "gbs": ("--global-batch-size",),
    "gpus": ("--num-gpus-per-node",),
    "gpus-per-node": ("--num-gpus-per-node",),
    "group-size": ("--n-samples-per-prompt",),
    "image": ("--container-image",),
    "kl": ("--kl-loss-coef",),
    "kl-beta": ("--kl-loss-coef",),
    "learning-rate": ("--lr",),
    "max-len": ("--rollout-max-response-len",),
    "max-new-tokens": ("--rollout-max-response-len",),
    "max-response-len": ("--rollout-max-response-len",),
    "max-tokens": ("--rollout-max-response-len", "--max-tokens-per-gpu"),
    "mbs": ("--micro-batch-size",),
    "mem-fraction": ("--sglang-mem-fraction-static",),
    "mem-fraction-static": ("--sglang-mem-fraction-static",),
    "mounts": ("--container-mounts",),
    "n": ("--n-samples-per-prompt",),
    "n-samples": ("--n-samples-per-prompt",),
    "num-generations": ("--n-samples-per-prompt",),
    "num-gpus": ("--num-gpus-per-node",),
    "num-nodes": ("--nodes",),
    "num-steps": ("--num-rollout",),
    "output-dir": ("--run-folder", "--runs-dir"),
    "pp": ("--pipeline-model-parallel-size",),
    "pp-size": ("--pipeline-model-parallel-size",),
    "prompts": ("--prompt-data",),
    "ref": ("--ref-load",),
    "ref-model": ("--ref-load",),
    "reward": ("--rm-type",),
    "rm": ("--rm-type",),
    "steps": ("--num-rollout",),
    "temp": ("--rollout-temperature",),
    "temperature": ("--rollout-temperature",),
    "top-k": ("--rollout-top-k",),
    "top-p": ("--rollout-top-p",),
    "tp": ("--tensor-model-parallel-size",),
    "tp-size": ("--tensor-model-parallel-size",),
    "vpp": ("--num-layers-per-virtual-pipeline-stage",),
    "wandb": ("--use-wandb",),
    "warmup": ("--lr-warmup-iters",),
    "wd": ("--weight-decay",),
}
"""Name without leading dashes -> the flags that it may mean."""

_DERIVED = (
    "the data-parallel size is what --tensor-model-parallel-size, --pipeline-model-parallel-size and "
    "--context-parallel-size leave of the GPUs that train (--actor-num-nodes x --actor-num-gpus-per-node)"
)
DERIVED = {"dp": _DERIVED, "dp-size": _DERIVED, "data-parallel-size": _DERIVED}
"""Names of values that are derived from settings, and how."""


def meant(word: str) -> str | None:
    """Return an error that says what to write instead of ``--tp``, ``-n`` or a flag of slime.

    None for a name that no setting has.
    """
    name = word.lstrip("-").replace("_", "-").lower()
    if name in DERIVED:
        return f"{word}: no such flag; {DERIVED[name]}"
    if name in ABBREVIATIONS:
        return f"{word}: no such flag; use {' or '.join(ABBREVIATIONS[name])}"
    if name in LACKING:
        return f"{word}: a flag of slime that rlpost does not have; {LACKING[name]}"
    return None

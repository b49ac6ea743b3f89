"""Names of settings in other programs and in earlier versions, and their replacements. Pure.

``ABBREVIATIONS`` has names of Megatron-LM, SGLang, vLLM, verl, TRL and of papers; none is an option of
Megatron-core, which would be passed through (a test checks that). Extensions know more flags of others.
"""

from __future__ import annotations

from rlpost.config.extensions import answer_to

CRITIC_LAYOUT = (
    "the ranks of the policy train the critic too, with its layout and micro-batches; leave it out"
)
TEACHER = (
    "a teacher runs on engines, not in the trainer: use --opd-teacher-engines, or --opd-teacher-url"
)
TEACHER_IN_TRAINER = (
    f"{TEACHER}; a torch_dist folder is made one of Hugging Face by `rlpost convert`, where installed, and "
    "--rollout-temperature must be 1"
)

_NAMES = {
    "--advantage-estimator": "adv-estimator algo algorithm",
    "--container-image": "image",
    "--container-mounts": "mounts",
    "--context-parallel-size": "cp cp-size",
    "--entropy-coef": "entropy",
    "--eps-clip": "clip clip-eps",
    "--expert-model-parallel-size": "ep ep-size",
    "--expert-tensor-parallel-size": "etp",
    "--rollout-batch-size": "batch-size bs bsz",
    "--global-batch-size": "batch-size bs bsz gbs",
    "--hf-checkpoint": "checkpoint ckpt",
    "--kl-loss-coef": "beta kl kl-beta",
    "--lr": "learning-rate",
    "--lr-warmup-iters": "warmup",
    "--rollout-max-response-len": "max-len max-new-tokens max-response-len max-tokens",
    "--max-tokens-per-gpu": "max-tokens",
    "--micro-batch-size": "mbs",
    "--n-samples-per-prompt": "group-size n n-samples num-generations",
    "--nodes": "num-nodes",
    "--num-gpus-per-node": "gpus gpus-per-node num-gpus",
    "--num-layers-per-virtual-pipeline-stage": "vpp",
    "--num-rollout": "num-steps steps",
    "--pipeline-model-parallel-size": "pp pp-size",
    "--prompt-data": "data dataset prompts",
    "--ref-load": "ref ref-model",
    "--rm-type": "reward rm",
    "--rollout-temperature": "temp temperature",
    "--rollout-top-k": "top-k",
    "--rollout-top-p": "top-p",
    "--run-folder": "output-dir",
    "--runs-dir": "output-dir",
    "--save": "checkpoint ckpt",
    "--sglang-mem-fraction-static": "mem-fraction mem-fraction-static",
    "--tensor-model-parallel-size": "tp tp-size",
    "--use-wandb": "wandb",
    "--weight-decay": "wd",
}
"""Flag -> its names in other programs, without leading dashes."""


def _flags_by_name() -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for flag, names in _NAMES.items():
        for name in names.split():
            found[name] = (*found.get(name, ()), flag)
    return found


ABBREVIATIONS = _flags_by_name()
"""Name without leading dashes -> the flags that it may mean, the more likely one first."""

_DERIVED = (
    "the data-parallel size is what --tensor-model-parallel-size, --pipeline-model-parallel-size and "
    "--context-parallel-size leave of the GPUs that train (--actor-num-nodes x --actor-num-gpus-per-node)"
)
DERIVED = {"dp": _DERIVED, "dp-size": _DERIVED, "data-parallel-size": _DERIVED}
"""Names of values that are derived from settings, and how."""


REMOVED = {
    "scale-down": (
        "rlpost rehearse RECIPE, where installed, runs a step of every rank without GPUs, and rlpost "
        "submit tiny trains on this machine"
    ),
    "router-policy": (
        "there is no router: the driver sends each request to the engine that it chooses"
    ),
    "loss-unit": "all samples of an answer always count as one answer, in baseline, loss and metrics",
    "critic-num-nodes": CRITIC_LAYOUT,
    "critic-num-gpus-per-node": CRITIC_LAYOUT,
    "critic-own-gpus": CRITIC_LAYOUT,
    "critic-tensor-model-parallel-size": CRITIC_LAYOUT,
    "critic-pipeline-model-parallel-size": CRITIC_LAYOUT,
    "critic-context-parallel-size": CRITIC_LAYOUT,
    "critic-expert-model-parallel-size": CRITIC_LAYOUT,
    "critic-max-tokens-per-gpu": CRITIC_LAYOUT,
    "critic-micro-batch-size": CRITIC_LAYOUT,
    "opd-teacher-hf-checkpoint": TEACHER_IN_TRAINER,
    "otlp-endpoint": "use --trace-steps, which writes traces of all processes to RUN/traces",
}
"""Flags of versions before this one, and what to use instead."""


def meant(word: str) -> str | None:
    """Return an error with the flag to use instead of ``--tp``, ``-n`` or another program's flag.

    None for a name that is not known.
    """
    name = word.lstrip("-").replace("_", "-").lower()
    if name in DERIVED:
        return f"{word}: no such flag; {DERIVED[name]}"
    if name in ABBREVIATIONS:
        return f"{word}: no such flag; use {' or '.join(ABBREVIATIONS[name])}"
    if name in REMOVED:
        return f"{word}: rlpost 0.2 had this flag; {REMOVED[name]}"
    return answer_to(word)

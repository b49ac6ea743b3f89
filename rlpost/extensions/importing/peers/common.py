"""Conversions that rows of several stacks use. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath

from rlpost.config.flags import fields
from rlpost.config.megatron_options import option_names
from rlpost.config.model_arguments import NAMES as MODEL_ARGUMENTS
from rlpost.config.model_arguments import ONLY_ZERO, OVERRIDABLE, WITHOUT_EFFECT
from rlpost.extensions.importing.peers.row import (
    Convert,
    Given,
    Needless,
    NotHere,
    Settings,
    as_number,
    same,
)

FILTER = "rlpost.rollout.filters.check_reward_nonzero_std"
MEGATRON_NAMES = {
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32",
}
"""Fields of Megatron-core that have a setting of another name here."""
RECOMPUTE_ALL: Settings = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_DROPOUTS = ("attention_dropout", "embd_pdrop", "resid_pdrop", "hidden_dropout")
_TARGETS = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1",
    "up_proj": "linear_fc1",
    "down_proj": "linear_fc2",
    "linear_qkv": "linear_qkv",
    "linear_proj": "linear_proj",
    "linear_fc1": "linear_fc1",
    "linear_fc2": "linear_fc2",
}


def as_is(setting: str) -> Convert:
    """Return a conversion that takes a value as it is."""
    return lambda it: {setting: it.value}


def switch(settings: Settings) -> Convert:
    """Return a conversion of a switch: ``settings`` where it is on; off, nothing is needed."""

    def convert(it: Given) -> Settings:
        if not same(it.value, True):
            raise Needless("off, as here")
        return {**settings}

    return convert


def interval(setting: str) -> Convert:
    """Return a conversion of a number of steps; 0 and below are off."""

    def convert(it: Given) -> Settings:
        if it.count() <= 0:
            raise Needless("off, as here")
        return {setting: it.count()}

    return convert


def rank_of_adapters(it: Given) -> Settings:
    """Convert the rank of LoRA adapters; 0 and below mean none."""
    if it.count() <= 0:
        raise Needless("off, as here")
    return {"lora_rank": it.count()}


def optimizer_steps(setting: str, steps_per_rollout: Callable[[Given], int]) -> Convert:
    """Return a conversion of rollouts to optimizer steps; None is the whole run."""

    def convert(it: Given) -> Settings:
        if it.value is None:
            raise Needless("all steps of the run, as here")
        return {setting: it.count() * steps_per_rollout(it)}

    return convert


filter_groups = switch({"dynamic_sampling_filter_path": FILTER})
eager = switch({"sglang_disable_cuda_graph": True})


def model(it: Given) -> Settings:
    """Return the folder of a model, and what to fetch if the value is a name of the hub."""
    name = text(it)
    if not _HUB.fullmatch(name):
        return {"hf_checkpoint": name}
    folder = f"$RLPOST_ASSETS/{name.rpartition('/')[2]}"
    return {"hf_checkpoint": folder, "hub_models": [name]}


def text(it: Given) -> str:
    """Return a value that must be text. Raises NotHere."""
    if not isinstance(it.value, str) or not it.value:
        raise NotHere(f"{it.key} must be a text here")
    return it.value


def paths(it: Given) -> list[str]:
    """Return one path or a list of them. Raises NotHere."""
    values = it.value if isinstance(it.value, list) else [it.value]
    if not values or not all(isinstance(one, str) and one for one in values):
        raise NotHere(f"{it.key} must be a path, or a list of them, here")
    return [str(one) for one in values]


def eval_sets(it: Given) -> Settings:
    """Return the evaluation sets: the stem names a file, its folder as well where stems repeat."""
    files = [PurePosixPath(path) for path in paths(it)]
    if len(files) == 1:
        return {"eval_prompt_data": [str(files[0])]}
    stems = [path.stem for path in files]
    names = [
        path.stem if stems.count(path.stem) == 1 else f"{path.parent.name}_{path.stem}"
        for path in files
    ]
    if len(set(names)) < len(names):
        names = [f"{name}_{index}" for index, name in enumerate(names)]
    pairs = zip(names, files, strict=True)
    return {"eval_prompt_data": [word for name, path in pairs for word in (name, str(path))]}


def megatron_option(it: Given) -> Settings:
    """Return an option of Megatron-core under its name here, a setting where there is one."""
    name = MEGATRON_NAMES.get(it.tail, it.tail)
    if name in WITHOUT_EFFECT:
        raise Needless("the coefficient of that loss is 0")
    if name in ONLY_ZERO:
        if not it.value:
            raise Needless("0, as here")
        raise NotHere("only 0 is supported; leave it out (docs/models.md)")
    if it.value is None or it.value == []:
        raise Needless("without a value, Megatron-core's own default holds")
    if name in MODEL_ARGUMENTS:
        return {"model_args": {name: it.value}}
    known = option_names()
    if name in fields() or known is None or name in known:
        return {name: it.value}
    raise NotHere(f"Megatron-core has no option {name} that a recipe may set")


def hf_override(it: Given) -> Settings:
    """Return keys that change the model's config.json. Raises NotHere, Needless."""
    if it.value is None or it.value == {}:
        raise Needless("none, as here")
    given = it.value if isinstance(it.value, Mapping) else {it.tail.rpartition(".")[2]: it.value}
    if all(name in _DROPOUTS and not value for name, value in given.items()):
        raise Needless("there is no dropout")
    own = {theirs: name for name, theirs in OVERRIDABLE.items()}
    unknown = [name for name in given if name not in own]
    if unknown:
        raise NotHere(
            f"config.json states {unknown[0]}; of its keys --override-hf-config changes "
            f"{', '.join(own)} (docs/models.md)"
        )
    return {"override_hf_config": {own[name]: as_number(name, one) for name, one in given.items()}}


def sglang_option(it: Given) -> Settings:
    """Return an option of SGLang's server."""
    return {f"sglang_{it.tail}": it.value}


def lora_targets(it: Given) -> Settings:
    """Return the layers with adapters by Megatron's names."""
    if it.value in ("all-linear", ["all-linear"]):
        return {"lora_targets": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]}
    words = [str(word) for word in (it.value if isinstance(it.value, list) else [it.value])]
    unknown = [word for word in words if word not in _TARGETS]
    if unknown:
        raise NotHere(f"no layer here is called {unknown[0]}; use --lora-targets (docs/lora.md)")
    names = list(dict.fromkeys(_TARGETS[word] for word in words))
    parts = {"q_proj", "k_proj", "v_proj"}
    if parts & set(words) and not parts <= set(words):
        raise NotHere("an adapter of linear_qkv is on q_proj, k_proj and v_proj together")
    return {"lora_targets": names}


def job_name(it: Given) -> Settings:
    """Return a name of a job and its run folder: letters, digits, ``.``, ``_`` and ``-``."""
    name = re.sub(r"[^\w.-]+", "_", str(it.value)).strip("._-")
    if not name:
        raise NotHere("a job's name has letters or digits; use --job-name")
    return {"job_name": name}

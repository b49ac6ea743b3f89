"""Export adapters as a folder that PEFT reads.

Input: the inventory of this rank, with the low-rank updates of its weights. Output:
``adapter_model.safetensors`` and ``adapter_config.json``. Megatron fuses query, key and value, and
gate and up; Hugging Face does not. An adapter of a fused layer becomes one for each part: A is the
same in all of them, B has the rows of the part, so that each part's update is the rows of B A.

PEFT finds modules by the names that transformers gives them. In models with an encoder of images
these differ from the names in older folders, and the encoder has modules of equal last names.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError

from rlpost.errors import CheckpointError
from rlpost.models.families.multimodal import LANGUAGE
from rlpost.models.family import Family
from rlpost.models.names import Rule, renamed
from rlpost.trainer.weights.folder_export import save_tensors
from rlpost.trainer.weights.hf_folder import name_base
from rlpost.trainer.weights.importer import HuggingFaceFolder
from rlpost.trainer.weights.inventory import Entry, Held, Inventory
from rlpost.trainer.weights.whole_tensors import BUCKET_BYTES, WholeTensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""PEFT wraps the model in two modules; keys of its files have both names."""


@dataclass(frozen=True, slots=True)
class PeftSettings:
    """The settings of the adapters, equal for all weights."""

    base: str
    """Hugging Face folder of the base."""
    rank: int
    alpha: float
    dropout: float
    adapted: frozenset[str]
    """Megatron names of the weights with adapters, as ``template`` returns them."""


def write_peft_folder(
    tensors: Mapping[str, torch.Tensor],
    inventory: Inventory,
    folder: str | Path,
    settings: PeftSettings,
) -> None:
    """Write the folder of ``tensors``, those of ``peft_tensors``: A [rank, in], B [out, rank].

    On one rank.

    Raises:
        WeightError: the base has an encoder of images, and its folder lacks tensors.
        OSError: writing failed.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, folder, TENSORS)
        config = peft_config(tensors, settings, all_modules=_modules(inventory, settings.base))
        (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    except SafetensorError as error:
        raise OSError(f"{folder}: {error}") from error


def peft_tensors(inventory: Inventory, settings: PeftSettings) -> dict[str, torch.Tensor]:
    """Return all factors by PEFT's names, on the host; on rank 0 alone. Collective.

    Raises:
        CheckpointError: a rank failed; on every rank.
    """
    whole = WholeTensors(adapter_inventory(inventory, settings))
    factors: dict[str, torch.Tensor] = {}

    def add(tensors: Mapping[str, torch.Tensor]) -> None:
        factors.update({name: one.to("cpu", copy=True) for name, one in tensors.items()})

    whole.to_first_rank(add, max_bytes=BUCKET_BYTES, failed=_cannot_collect)
    named: dict[str, torch.Tensor] = {}
    for entry in inventory.entries:
        for rule in entry.rules:
            first = _factor(rule.hugging_face[0], "A")
            if first not in factors:
                continue
            for name in rule.hugging_face:
                module = PREFIX + _in_transformers(name, inventory.family)
                named[_factor(module, "A")] = factors[first].clone()
                named[_factor(module, "B")] = factors[_factor(name, "B")]
    return named


def _cannot_collect(problem: str) -> CheckpointError:
    return CheckpointError(f"cannot collect the adapters: {problem}")


def adapter_inventory(inventory: Inventory, settings: PeftSettings) -> Inventory:
    """Return an inventory whose weights are the factors of all adapters.

    B is split as its weight is. A has the name of the first Hugging Face tensor of its weight.
    """
    factors = copy.copy(inventory)
    factors.entries = tuple(
        factor
        for entry in inventory.entries
        if template(entry.rules[0].megatron) in settings.adapted
        for factor in _entries(entry, settings.rank)
    )
    factors.held = {
        part.rule.megatron: part
        for held in inventory.held.values()
        if held.low_rank is not None
        for part in _held(held)
    }
    return factors


def template(name: str) -> str:
    """Return the name of a Megatron weight with ``#`` for the numbers of layer and expert."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _factor(name: str, factor: str) -> str:
    """The name of a factor, from that of its Hugging Face weight."""
    return f"{name.removesuffix('.weight')}.lora_{factor}.weight"


def _rule_of_a(rule: Rule) -> Rule:
    return Rule(f"{rule.megatron}.A", (_factor(rule.hugging_face[0], "A"),))


def _rule_of_b(rule: Rule) -> Rule:
    names = tuple(_factor(name, "B") for name in rule.hugging_face)
    return Rule(f"{rule.megatron}.B", names, rule.layout)


def _entries(entry: Entry, rank: int) -> tuple[Entry, Entry]:
    out_size, in_size = entry.full_shape
    b_shapes = tuple((shape[0], rank) for shape in entry.shapes)
    rules_a = tuple(_rule_of_a(rule) for rule in entry.rules)
    rules_b = tuple(_rule_of_b(rule) for rule in entry.rules)
    a_shape, b_shape = (rank, in_size), (out_size, rank)
    return (
        replace(entry, rules=rules_a, full_shape=a_shape, shapes=(a_shape,) * len(rules_a)),
        replace(entry, rules=rules_b, full_shape=b_shape, shapes=b_shapes),
    )


def _held(held: Held) -> tuple[Held, Held]:
    low_rank, rule = held.low_rank, held.rule
    assert low_rank is not None
    # W = B A: A is sharded where the columns of W are, B where its rows are.
    a_dim = 1 if held.dim == 1 else None
    b_dim = 0 if held.dim == 0 else None
    return (
        Held(low_rank.a, _rule_of_a(rule), held.group, a_dim),
        Held(low_rank.b, _rule_of_b(rule), held.group, b_dim),
    )


def _modules(inventory: Inventory, base: str) -> set[str]:
    """Names of all modules with a matrix, and of those of the encoder of images in ``base``."""
    family = inventory.family
    names = {
        _in_transformers(name, family)
        for entry in inventory.entries
        for name, shape in zip(entry.hugging_face, entry.shapes, strict=True)
        if len(shape) == 2
    }
    if family.carried:
        stored = HuggingFaceFolder(base).file_of
        names |= {name for name in stored if name.startswith(family.carried)}
    return {name.removesuffix(".weight") for name in names}


def _in_transformers(name: str, family: Family) -> str:
    """The name in transformers' model of a weight of the language model in a folder."""
    if family.vision is None:
        return name
    return renamed(name, {family.renamed["model."]: LANGUAGE})


def peft_config(
    tensors: Mapping[str, torch.Tensor], settings: PeftSettings, *, all_modules: set[str]
) -> dict[str, object]:
    """Return adapter_config.json; the factors are lora_A [rank, in] and lora_B [out, rank]."""
    adapted = {
        name.removeprefix(PREFIX).removesuffix(".lora_B.weight")
        for name in tensors
        if name.endswith(".lora_B.weight")
    }
    base, revision = name_base(Path(settings.base))
    alpha = settings.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": settings.rank,
        # an int in PEFT's and vLLM's declarations
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": settings.dropout,
        "target_modules": shortest_suffixes(adapted, all_modules - adapted),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def shortest_suffixes(adapted: set[str], others: set[str]) -> list[str]:
    """Return endings of names, in whole parts, that match all adapted modules and no other.

    PEFT and engines compare ``target_modules`` with the ends of names; most expect last parts.

    >>> shortest_suffixes({"0.shared.up_proj", "0.q_proj"}, {"0.experts.1.up_proj"})
    ['q_proj', 'shared.up_proj']
    """
    of_others = {ending for name in others for ending in _endings(name)}
    return sorted(
        {next(each for each in _endings(name) if each not in of_others) for name in adapted}
    )


def _endings(name: str) -> list[str]:
    """The ends of a name in whole parts, shortest first."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]

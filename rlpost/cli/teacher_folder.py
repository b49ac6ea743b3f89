"""Check the folders of a teacher in the trainer before a job starts. Without torch.

Input: the settings, and the folders that they name. Output: one line for each problem, and a note
on the teacher's memory.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from common.units import size_text
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.rank_memory import parameter_bytes
from rlpost.config.plan.shape import Shape, layout_of, rank_parameters, teacher_layout
from rlpost.config.tree import Config
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.errors import RlpostError, WeightError
from rlpost.models.config_file import read_config
from rlpost.tasks.tokenizer import VOCABULARIES
from rlpost.trainer.teacher_description import teacher_description, teacher_folder
from rlpost.trainer.weights.safetensors_files import file_problems


def teacher_problems(config: Config) -> list[str]:
    """Problems of --opd-teacher-load and --opd-teacher-hf-checkpoint; none without them."""
    distillation, policy = config.distillation, Path(config.checkpoint.hf_checkpoint)
    load = distillation.opd_teacher_load
    if not distillation.use_opd or distillation.opd_type != "megatron" or load is None:
        return []
    if problem := _weight_problem(load):
        return [problem]
    folder = teacher_folder(load, distillation.opd_teacher_hf_checkpoint, str(policy))
    key = f"--opd-teacher-load {load}"
    if distillation.opd_teacher_hf_checkpoint is not None:
        key = f"--opd-teacher-hf-checkpoint {folder}"
    try:
        theirs = read_config(folder)
        own = read_config(policy)
        teacher_description(config)
    except (OSError, ValueError) as error:
        return [f"{key}: config.json cannot be read: {error}; give a Hugging Face folder"]
    except RlpostError as error:
        return [str(error)]
    if theirs["vocab_size"] < own["vocab_size"]:
        return [
            f"{key}: vocab_size = {theirs['vocab_size']} of the teacher is below {own['vocab_size']} "
            "of --hf-checkpoint, so it has no log-prob for the last tokens; use another teacher"
        ]
    top_k = distillation.opd_top_k
    if top_k is not None and top_k > own["vocab_size"]:
        return [
            f"--opd-top-k {top_k} is more than vocab_size = {own['vocab_size']} of --hf-checkpoint; "
            "use 64, for instance"
        ]
    problem = vocabulary_problem(policy, folder)
    if problem is None:
        return []
    return [f"{key}: {problem}; distillation needs a teacher with the same tokenizer"]


def teacher_shape(config: Config) -> Shape | None:
    """Shape of a teacher in the trainer; None without one, or if its config is not usable."""
    given = config.distillation
    if not given.use_opd or given.opd_type != "megatron" or given.opd_teacher_load is None:
        return None
    policy, own = config.checkpoint.hf_checkpoint, given.opd_teacher_hf_checkpoint
    folder = teacher_folder(given.opd_teacher_load, own, policy)
    try:
        return hf_shape(read_config(folder))
    except (OSError, ValueError, WeightError):
        return None


def teacher_note(config: Config) -> str | None:
    """Note on the memory of a teacher in the trainer; None without one, or for a plugin."""
    shape = teacher_shape(config)
    if shape is None:
        return None
    layout = layout_of(config)
    own = teacher_layout(config, layout)
    most = max(rank_parameters(shape, own, stage).total for stage in range(layout.pipeline))
    each = most * parameter_bytes(config).weights
    node = each * config.cluster.actor_num_gpus_per_node
    return (
        f"--opd-teacher-load: the teacher takes {size_text(node)} of host memory a node, and "
        f"{size_text(each)} on each GPU of the trainer during its pass, which `rlpost plan` counts"
    )


def _weight_problem(load: str) -> str | None:
    """Return the problem of the folder with the teacher's weights, if any."""
    if find_checkpoint(load) is not None:
        return None
    if not any(Path(load).glob("*.safetensors")):
        is_there = os.path.isdir(load)
        what = "holds neither a torch_dist checkpoint nor *.safetensors"
        return (
            f"--opd-teacher-load {load}: {what if is_there else 'no such folder'}; give a Hugging "
            "Face folder, one written by tools/convert_hf_to_torch_dist.py, or the checkpoints of a run "
            "that trains the teacher (docs/distillation.md)"
        )
    broken = file_problems(Path(load))
    return f"--opd-teacher-load {broken[0]}" if broken else None


def vocabulary_problem(own: Path, theirs: Path) -> str | None:
    """Return how the vocabulary of ``theirs`` differs from that of ``own``; None if it does not.

    It may have more tokens. Where both folders have a tokenizer.json it decides; else the other
    vocabulary files, byte for byte, and the added tokens. No tokenizer is loaded.
    """
    common = [name for name in VOCABULARIES if (own / name).is_file() and (theirs / name).is_file()]
    if not common:
        return f"no vocabulary file in common with {own} ({', '.join(VOCABULARIES)})"
    is_whole = "tokenizer.json" in common
    differs = [(own / name).read_bytes() != (theirs / name).read_bytes() for name in common]
    if not is_whole and all(differs):
        return f"{common[0]} differs from that of {own}"
    read = _all_tokens if is_whole else _added_tokens
    try:
        ours, other = read(own), read(theirs)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"the tokenizer of {theirs} cannot be compared with that of {own}: {error!r}"
    if not is_whole and not other:  # the folder does not say
        return None
    for token, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if other.get(token) != number:
            return f"token {token!r} has id {number} in {own} and {other.get(token)} in {theirs}"
    return None


def _added_tokens(folder: Path) -> dict[str, int]:
    """The id of each token that a folder adds to its vocabulary file, special ones included."""
    added: dict[str, int] = {}
    if (folder / "added_tokens.json").is_file():
        added |= json.loads((folder / "added_tokens.json").read_text())
    if (folder / "tokenizer_config.json").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text())
        decoder = config.get("added_tokens_decoder") or {}
        added |= {entry["content"]: int(number) for number, entry in decoder.items()}
    if (folder / "tokenizer.json").is_file():
        content = json.loads((folder / "tokenizer.json").read_text())
        added |= {entry["content"]: entry["id"] for entry in content.get("added_tokens", [])}
    return added


def _all_tokens(folder: Path) -> dict[str, int]:
    """The id of each token of a folder with a tokenizer.json, added tokens included."""
    content: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    if isinstance(vocab, list):  # unigram models list [token, score] by id
        vocab = {entry[0]: number for number, entry in enumerate(vocab)}
    return {**vocab, **_added_tokens(folder)}

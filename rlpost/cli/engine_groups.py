"""Check the engines of the tables [engines.NAME] before a job starts: folders, SGLang settings.

Input: the settings, and the folders that they name. Output: one line for each problem.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from rlpost.config.checks.engine_groups import group_model_problems
from rlpost.config.engine_groups import group_config, teacher_group
from rlpost.config.tree import Config
from rlpost.engines.cuda_graphs import graph_problems
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError
from rlpost.models.config_file import read_config
from rlpost.models.model_types import HfConfig
from rlpost.tasks.tokenizer import VOCABULARIES
from rlpost.trainer.weights.safetensors_files import file_problems, tensor_files

HEADS_WITH_BIAS = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
"""Architectures whose head has a bias in SGLang (``models/qwen3_classification.py``, 0.5.21 to
0.5.23) and none in transformers, so that no checkpoint has it."""


def head_problem(hf: HfConfig, tensors: Collection[str]) -> str | None:
    """Return why the scores of a model would depend on the engine; None if they do not.

    A bias that is not loaded keeps its random initial value, another one in each process: rewards
    of two engines, or before and after a restart, differ by a constant.
    """
    architecture = (hf.get("architectures") or [""])[0]
    if architecture not in HEADS_WITH_BIAS or "score.bias" in tensors:
        return None
    return (
        f"SGLang gives the head of {architecture} a bias, which the checkpoint lacks and which is "
        "then random in each engine; add a tensor score.bias of num_labels zeros to its safetensors "
        "file (docs/engines.md)"
    )


def group_args_problems(config: Config) -> Iterator[str]:
    """Yield settings of groups that SGLang lacks or whose value it rejects."""
    for name in config.engines.started:
        group = group_config(config, name)
        gpus = group.cluster.rollout_num_gpus_per_engine
        try:
            check_server_args(group.sglang.given_server_args, gpus_per_engine=gpus)
        except ConfigError as error:
            yield from (f"[engines.{name}]: {line}" for line in str(error).splitlines())
            continue
        if group.sglang.server_args.get("load_format") == "dummy":
            yield (
                f"[engines.{name}]: sglang_load_format dummy: no update replaces the random weights "
                "of this group; leave it out"
            )
        environment = config.cluster.environment
        for line in graph_problems(group.sglang.server_args, environment, offloads=False):
            yield f"[engines.{name}]: {line}"


def group_folder_problems(config: Config) -> Iterator[str]:
    """Yield problems of the model folders of groups; none for a folder that does not exist."""
    policy = Path(config.checkpoint.hf_checkpoint)
    for name, group in config.engines.started.items():
        folder = None if group.model is None else Path(group.model)
        if folder is None or not folder.is_dir():
            continue  # ``missing_problems`` reports it
        key = f"model {folder} of [engines.{name}]"
        try:
            theirs = read_config(folder)
        except (OSError, ValueError) as error:
            yield f"{key}: config.json cannot be read: {error}; give a Hugging Face folder of a model"
            continue
        broken = file_problems(folder)
        yield from (f"{key}: {problem}" for problem in broken)
        if not broken and (problem := head_problem(theirs, tensor_files(folder))):
            yield f"{key}: {problem}"
        if not (policy / "config.json").is_file():
            continue
        policy_config = read_config(policy)
        yield from group_model_problems(config, name, theirs, policy_config)
        if name == teacher_group(config):
            yield from _teacher_problems(config, key, folder, theirs, policy_config)


def _teacher_problems(
    config: Config, key: str, folder: Path, theirs: HfConfig, policy_config: HfConfig
) -> Iterator[str]:
    """Yield problems of a teacher's vocabulary; ``policy_config`` is that of the policy."""
    if theirs["vocab_size"] < policy_config["vocab_size"]:
        yield (
            f"{key}: vocab_size = {theirs['vocab_size']} of the teacher is below {policy_config['vocab_size']} "
            "of --hf-checkpoint, so it has no log-prob for the last tokens; use another teacher"
        )
    top_k = config.distillation.opd_top_k
    if top_k is not None and top_k > policy_config["vocab_size"]:
        yield (
            f"--opd-top-k {top_k} is more than vocab_size = {policy_config['vocab_size']} of --hf-checkpoint; "
            "use 64, for instance"
        )
    if problem := vocabulary_problem(Path(config.checkpoint.hf_checkpoint), folder):
        yield f"{key}: {problem}; distillation needs a teacher with the same tokenizer"


def vocabulary_problem(policy: Path, theirs: Path) -> str | None:
    """Return how the vocabulary of ``theirs`` differs from that of ``policy``; None if it does not.

    It may have more tokens. Where both folders have a tokenizer.json it decides; else the other
    vocabulary files, byte for byte, and the added tokens. No tokenizer is loaded.
    """
    common = [
        name for name in VOCABULARIES if (policy / name).is_file() and (theirs / name).is_file()
    ]
    if not common:
        return f"no vocabulary file in common with {policy} ({', '.join(VOCABULARIES)})"
    is_whole = "tokenizer.json" in common
    differs = [(policy / name).read_bytes() != (theirs / name).read_bytes() for name in common]
    if not is_whole and all(differs):
        return f"{common[0]} differs from that of {policy}"
    read = _all_tokens if is_whole else _added_tokens
    try:
        ours, other = read(policy), read(theirs)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"the tokenizer of {theirs} cannot be compared with that of {policy}: {error!r}"
    if not is_whole and not other:  # the folder does not say
        return None
    for token, number in sorted(ours.items(), key=lambda pair: pair[1]):
        if other.get(token) != number:
            return f"token {token!r} has id {number} in {policy} and {other.get(token)} in {theirs}"
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

"""Check the engines of the tables [engines.NAME] before a job starts: folders, SGLang settings.

Input: the settings, and the folders that they name. Output: one line for each problem.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from rlpost.cli.teacher_folder import vocabulary_problem
from rlpost.config.checks.engine_groups import group_model_problems
from rlpost.config.engine_groups import group_config, teacher_group
from rlpost.config.tree import Config
from rlpost.engines.cuda_graphs import graph_problems
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError
from rlpost.models.config_file import read_config
from rlpost.models.model_types import HfConfig
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
        own = read_config(policy)
        yield from group_model_problems(config, name, theirs, own)
        if name == teacher_group(config) and (problem := vocabulary_problem(policy, folder)):
            yield f"{key}: {problem}; distillation needs a teacher with the same tokenizer"

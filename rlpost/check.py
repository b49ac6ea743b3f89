"""Everything that can be known wrong before a job starts: arithmetic of the settings and the files they name.

Runs on the login node (no torch, no ray, well under a second) and once more in the job before training. All problems
are reported at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlpost.config.check import batch_problems, debug_problems, eval_problems, layout_problems, model_problems
from rlpost.config.tree import Config
from rlpost.data.prompts import check_prompt_file
from rlpost.data.tokenizer import check_tokenizer_folder
from rlpost.errors import ConfigError, RlpostError
from rlpost.reward.registry import reward_function
from rlpost.rollout.server_args import check_server_args


def check(config: Config) -> None:
    """Raise ConfigError with one line for each problem, or return."""
    problems = [
        *layout_problems(config),
        *batch_problems(config),
        *eval_problems(config),
        *debug_problems(config),
        *_model_folder_problems(config),
        *_prompt_problems(config),
        *_collect(lambda: reward_function(config.rollout.rm_type)),
        *_collect(lambda: check_server_args(config.sglang.server_args)),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _collect(probe: Any) -> list[str]:
    try:
        probe()
    except RlpostError as error:
        return str(error).splitlines()
    return []


def _model_folder_problems(config: Config) -> list[str]:
    folder = config.checkpoint.hf_checkpoint
    key = "checkpoint.hf_checkpoint (--hf-checkpoint)"
    if not folder:
        return [f"{key} is not set: give the Hugging Face folder of the model to train"]
    path = Path(folder)
    if not path.is_dir():
        return [f"{key} = {folder}: no such folder"]
    problems = []
    try:
        problems += model_problems(config, json.loads((path / "config.json").read_text()))
    except FileNotFoundError:
        problems.append(f"{key} = {folder}: has no config.json; is it a Hugging Face model folder?")
    except json.JSONDecodeError as error:
        problems.append(f"{key} = {folder}: config.json is not valid JSON: {error}")
    if not any(path.glob("*.safetensors")):
        problems.append(f"{key} = {folder}: has no *.safetensors; download the weights into it")
    return problems + _collect(lambda: check_tokenizer_folder(path))


def _prompt_problems(config: Config) -> list[str]:
    rollout = config.rollout
    if not rollout.prompt_data:
        return ["rollout.prompt_data (--prompt-data) is not set: give a JSONL file of prompts"]
    paths = [rollout.prompt_data, *(path for _, path in config.eval_sets)]
    return [
        problem
        for path in paths
        for problem in _collect(
            lambda path=path: check_prompt_file(Path(path), input_key=rollout.input_key, label_key=rollout.label_key)
        )
    ]

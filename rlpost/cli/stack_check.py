"""Check a model folder and its prompts with the installed transformers, before a job starts.

Input: the settings of a run. Output: one line for each problem: values that the engines resolve from
config.json differently than the trainer, and prompts that the tokenizer or its chat template refuses.

``StackCheck`` runs this module in a process beside the other checks. torch is hidden there, because
importing it takes longer than the check, and the command line stays free of both. Code in a model
folder never runs: ``trust_remote_code`` is False, and standard input is closed.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from common.installed import is_package
from rlpost.cli.resolved_model import differences, engine_model, model_context, trainer_model
from rlpost.cli.row_check import check_rows
from rlpost.config.checks.context_length import engine_context
from rlpost.config.eval_sets import eval_sets
from rlpost.config.keys import without_keys
from rlpost.config.load import dump, parse_dump
from rlpost.config.path_variables import variable_problems
from rlpost.config.tree import Config
from rlpost.config.wording import value_text
from rlpost.errors import ConfigError, RlpostError
from rlpost.models.config_file import TIED, language_model, read_config
from rlpost.models.families import FAMILIES
from rlpost.models.model_types import HfConfig
from rlpost.tasks.passed_checks import PassedCheck, model_files
from rlpost.tasks.rows import split_source
from rlpost.tasks.tokenizer import eos_token_ids
from rlpost.tasks.without_torch import imports_deferred, load_hf_config
from rlpost.trainer.model_description import read_description

PROJECT = Path(__file__).parents[2]
OVERRIDES = "--sglang-json-model-override-args"
DEADLINE_S = 120.0
CPU_S, DATA_BYTES = 100, 8 << 30
"""Limits of the process: a chat template is a program from the model folder."""
TOO_MUCH = "its chat template or tokenizer"
NOT_INSTALLED = (
    "transformers is not installed here: the model's configuration and its chat template are checked "
    "when the job starts"
)


class StackCheck:
    """The check in a separate process; start it early and call ``finish`` when its result counts."""

    def __init__(self, config: Config) -> None:
        """Start the process if transformers is installed and the model folder is known.

        It is not started if the same input passed before.
        """
        self._process: subprocess.Popen[str] | None = None
        self._folder = config.checkpoint.hf_checkpoint
        if not is_installed() or variable_problems(config) or not _has_model(config):
            return
        self._passed = PassedCheck("stack", dump(config), partial(_input_files, config))
        if _has_listed_family(config) and self._passed.exists:
            return
        searched = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rlpost.cli.stack_check"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=without_keys(os.environ) | {"PYTHONPATH": searched, "HF_HUB_OFFLINE": "1"},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(dump(config))
        self._process.stdin.close()
        self._process.stdin = None  # ``communicate`` would flush it

    def finish(self) -> tuple[list[str], list[str]]:
        """Wait for the process; return problems and notes."""
        if self._process is None:
            return [], [] if is_installed() else [NOT_INSTALLED]
        try:
            text, _ = self._process.communicate(timeout=DEADLINE_S)
            result = json.loads(text)
            if not result["problems"] and not result["notes"]:
                self._passed.record()
            return result["problems"], result["notes"]
        except (ValueError, subprocess.TimeoutExpired):
            if self._process.poll() == -signal.SIGXCPU:
                return [f"{self._folder}: {TOO_MUCH} took more than {CPU_S} s of CPU time"], []
            why = f"no result within {DEADLINE_S:g} s" if self._process.poll() is None else "ended"
            return [], [f"the check with transformers failed ({why}); the job repeats it"]
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the process without its result."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def is_installed() -> bool:
    """Whether this environment has transformers. Does not import it."""
    return is_package("transformers")


def _has_model(config: Config) -> bool:
    folder = config.checkpoint.hf_checkpoint
    return bool(folder) and (Path(folder) / "config.json").is_file()


def _has_listed_family(config: Config) -> bool:
    """Whether the model's family is part of rlpost, and so of the digest of a passed check."""
    try:
        hf = read_config(config.checkpoint.hf_checkpoint)
        return (hf.get("architectures") or [""])[0] in FAMILIES
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RlpostError):
        return False


def _input_files(config: Config) -> list[Path]:
    """The files that the check reads. Raises OSError."""
    sources = [*config.rollout.prompt_data, *(one.path for one in eval_sets(config.eval))]
    return [
        *model_files(Path(config.checkpoint.hf_checkpoint)),
        *(split_source(source)[0] for source in sources),
    ]


def model_problems(config: Config) -> tuple[list[str], list[str]]:
    """Return differences between trainer and engines, and notes; imports transformers.

    Models that the trainer does not support are left out: ``rlpost.cli.check_settings`` reports them.
    """
    path = Path(config.checkpoint.hf_checkpoint) / "config.json"
    try:
        description = read_description(path.parent, config.checkpoint)
        ends = eos_token_ids(path.parent)
    except ConfigError as error:
        return str(error).splitlines(), []
    except RlpostError:
        return [], []
    with imports_deferred():
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    hf = json.loads(path.read_text())
    if (kind := hf.get("model_type")) not in CONFIG_MAPPING_NAMES:
        return [], [f"{path}: model_type {kind!r} is not known to transformers here; not compared"]
    try:
        whole = _resolved(config, path.parent)
    except ConfigError as error:
        return [str(error)], []
    resolved = text_model(whole, hf)
    context = config.sglang.server_args.get("context_length")
    problems = []
    if context is not None and context > model_context(resolved):
        problems.append(
            f"--sglang-context-length {context}: more than the {model_context(resolved)} tokens of {path}, "
            f"with which SGLang does not start; use {model_context(resolved)} or less"
        )
    context_of_run = engine_context(config.sglang.server_args, language_model(hf))
    trainer = trainer_model(description, context=context_of_run, end_tokens=ends)
    engines = engine_model(resolved, generation_eos=_generation_eos(path.parent), context=context)
    remedy = _remedy(config)
    problems += [f"{path}: {line}; {remedy}" for line in differences(trainer, engines)]
    return problems, []


def text_model(whole: Any, config: HfConfig) -> Any:
    """Return the language model's part of transformers' configuration, as engines use it.

    ``config`` is config.json: where it says nothing of the whole, the default of the whole's class
    may be another one than that of the weights.
    """
    text = whole.get_text_config()
    text.eos_token_id = getattr(whole, "eos_token_id", None)
    if config.get(TIED) is not None:
        text.tie_word_embeddings = config[TIED]
    return text


def _resolved(config: Config, folder: Path) -> Any:
    """Return transformers' configuration with the overrides of the engines, as SGLang sets them.

    Raises:
        ConfigError: transformers refuses config.json, or the overrides are no JSON object.
    """
    import transformers

    try:
        resolved = load_hf_config(folder)
    except Exception as error:  # of any type, from the content
        words = " ".join(str(error).split())
        raise ConfigError(
            f"{folder / 'config.json'}: transformers {transformers.__version__}, with which the engines read "
            f"it, refuses it: {words}; write it as the model's page has it"
        ) from error
    text = config.sglang.server_args.get("json_model_override_args") or "{}"
    try:
        overrides = json.loads(text)
        for key, value in overrides.items():
            setattr(resolved, key, value)
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"{OVERRIDES} {text}: must be a JSON object ({error})") from error
    return resolved


def _remedy(config: Config) -> str:
    if config.sglang.server_args.get("json_model_override_args"):
        return f"write the value into config.json for both sides, without {OVERRIDES}"
    if overrides := config.checkpoint.override_hf_config:
        return f"write the value into config.json instead of --override-hf-config {value_text(overrides)}"
    return "write the value into config.json, where both sides read it"


def _generation_eos(folder: Path) -> Any:
    file = folder / "generation_config.json"
    return json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None


def limited_check(config: Config) -> tuple[list[str], list[str]]:
    """Return problems and notes; the limits hold for this process from now on."""
    # Not RLIMIT_AS: allocators reserve address space for each core without using it.
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    try:
        problems, notes = model_problems(config)
        if not problems:
            problems, row_notes = check_rows(config)
            notes += row_notes
    except MemoryError:
        folder = config.checkpoint.hf_checkpoint
        problems = [f"{folder}: {TOO_MUCH} took more than {DATA_BYTES >> 30} GiB of memory"]
        notes = []
    return problems, notes


def main() -> int:
    """Read the settings from standard input, and write the result as JSON."""
    config = parse_dump(sys.stdin.read())
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no part of the result
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without it
    problems, notes = limited_check(config)
    json.dump({"problems": problems, "notes": notes}, result)
    result.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

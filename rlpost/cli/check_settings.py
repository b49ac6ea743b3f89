"""Check a run's settings, and the files they name, before a job starts.

Runs on the login node in well under a second, without torch or ray. ``check_installed`` checks what
depends on the nodes. All problems are reported together.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rlpost.cli.check_installed import lines_of, package_problems, pass_through_problems
from rlpost.cli.engine_groups import group_folder_problems
from rlpost.config import extensions
from rlpost.config.checks import engine_groups as group_checks
from rlpost.config.checks.algorithm import (
    algorithm_problems,
)
from rlpost.config.checks.batch import batch_problems
from rlpost.config.checks.container import container_problems, interpreter_note
from rlpost.config.checks.context_length import context_notes, context_problems
from rlpost.config.checks.data_notes import data_notes
from rlpost.config.checks.distillation import distillation_problems
from rlpost.config.checks.engine_model import (
    engine_model_problems,
    load_format_problems,
    update_problems,
)
from rlpost.config.checks.environment_variables import environment_problems
from rlpost.config.checks.export_folder import export_problems
from rlpost.config.checks.functions import function_problems, whole_rollout_problems
from rlpost.config.checks.images import image_model_problems, image_setting_problems
from rlpost.config.checks.layout import cold_start_note, layout_problems, model_problems
from rlpost.config.checks.lora import (
    adapter_engine_model_problems,
    adapter_engine_problems,
    lora_model_problems,
    lora_problems,
)
from rlpost.config.checks.missing import (
    has_folder,
    image_problems,
    is_there,
    missing_problems,
)
from rlpost.config.checks.no_effect import no_effect_notes, no_effect_problems
from rlpost.config.checks.observe import observe_problems
from rlpost.config.checks.optimizer import optimizer_problems
from rlpost.config.checks.policy_passes import pass_problems
from rlpost.config.checks.precision import precision_model_problems, precision_problems
from rlpost.config.checks.prefix import prefix_problem
from rlpost.config.checks.rollout import (
    debug_problems,
    eval_problems,
    rollout_problems,
    sampling_note,
    staleness_note,
)
from rlpost.config.checks.routing import routing_model_problems, routing_problems
from rlpost.config.eval_sets import eval_sets, set_settings
from rlpost.config.masking import masking_problems
from rlpost.config.megatron_options import option_names
from rlpost.config.model_file import other_model_problem
from rlpost.config.path_variables import variable_problems
from rlpost.config.plan.architecture import mtp_problem, sharding_problem
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.vision import longest_sample
from rlpost.config.tree import Config
from rlpost.config.wording import with_origins
from rlpost.durable.commit import foreign
from rlpost.durable.torch_dist_folder import find_checkpoint
from rlpost.engines.cuda_graphs import graph_problems
from rlpost.errors import ConfigError, RlpostError, WeightError
from rlpost.models.config_file import read_config
from rlpost.models.families import family
from rlpost.models.family import STACKED
from rlpost.models.fp8 import SUFFIX
from rlpost.models.model_types import HfConfig
from rlpost.tasks.prompt_settings import check_prompts, image_processor
from rlpost.tasks.reward.grader import check_reward
from rlpost.tasks.tokenizer import check_tokenizer_folder
from rlpost.trainer.attention_backends import BEST_GPU, Options, attention_of, choose
from rlpost.trainer.model_description import description_of, read_description
from rlpost.trainer.weights.safetensors_files import file_problems, tensor_files

REWARD_KEYS = {"rm_type", "custom_rm_path"}  # an evaluation set may override these


def check(
    config: Config,
    *,
    run: Path | None = None,
    mounted: Sequence[str] = (),
    recipe: str | None = None,
    origins: Mapping[str, str] | None = None,
    is_dry: bool = False,
) -> None:
    """Raise ConfigError with one line for each problem, root causes first, or return.

    Args:
        run: the run folder; None if it does not exist yet.
        mounted: folders mounted in the container besides the run folder and ``container_mounts``.
        recipe: the recipe as named on the command line, for remedies that are commands.
        origins: origin of each given ``group.key``, to be named in messages.
        is_dry: nothing is submitted, so missing files (``absent``) are not reported.
    """
    unset, no_image = variable_problems(config), image_problems(config)
    problems = [] if is_dry else absent(config, recipe)
    problems += [*no_image, *_settings_problems(config)]
    if not unset:  # otherwise paths are unknown
        problems += _model_folder_problems(config)
        problems += group_folder_problems(config)
        problems += _save_problems(config)
        problems += export_problems(config.checkpoint, run, num_steps=config.rollout.num_rollout)
        problems += _prompt_problems(config)
        always = (*mounted, *(() if run is None else (str(run.absolute()),)))
        problems += [] if no_image else container_problems(config, always)
    problems += pass_through_problems(config)
    if option_names() is not None and config.cluster.container == "none":
        problems += package_problems(config)
    if problems:
        lines = list(dict.fromkeys(problems))
        if origins is not None:
            lines = [with_origins(line, config, origins) for line in lines]
        raise ConfigError("\n".join(lines))


def _settings_problems(config: Config) -> list[str]:
    """Problems of the settings alone; the layout first, because batch sizes depend on it."""
    return [
        *layout_problems(config),
        *batch_problems(config),
        *algorithm_problems(config),
        *(lines_of(extensions.examples) if config.grpo.is_supervised else []),
        *no_effect_problems(config),
        *distillation_problems(config),
        *group_checks.engine_group_problems(config),
        *extensions.problems(config),
        *routing_problems(config),
        *function_problems(config),
        *whole_rollout_problems(config),
        *optimizer_problems(config),
        *lora_problems(config),
        *precision_problems(config),
        *pass_problems(config),
        *rollout_problems(config),
        *eval_problems(config),
        *debug_problems(config),
        *adapter_engine_problems(config),
        *load_format_problems(config),
        *update_problems(config),
        *image_setting_problems(config),
        *observe_problems(config),
        *masking_problems(config),
        *lines_of(lambda: check_reward(config.rollout)),
        *environment_problems(config),
        *graph_problems(
            config.sglang.server_args, config.cluster.environment, offloads=config.offload_rollout
        ),
    ]


def absent(config: Config, recipe: str | None) -> list[str]:
    """Problems of variables and files that the job needs, with the commands that create them."""
    if unset := variable_problems(config):
        return unset
    return [
        *missing_problems(config, recipe),
        *_weight_problems(
            config.checkpoint.ref_load,
            "--ref-load",
            "the weights of --hf-checkpoint as the reference",
        ),
        *_weight_problems(config.critic.critic_load, "--critic-load", "those of the policy"),
    ]


def notes(config: Config) -> list[str]:
    """Valid settings that are probably unintended, one line each. Call ``check`` first.

    Without the model's config.json, as in a dry run, the notes that depend on it are left out.
    """
    path = Path(config.checkpoint.hf_checkpoint) / "config.json"
    settings = [*no_effect_notes(config), *data_notes(config), *group_checks.key_notes(config)]
    single = (sampling_note(config), staleness_note(config), interpreter_note(config))
    settings += [note for note in single if note is not None]
    if not path.is_file():
        return settings
    hf = read_config(path.parent)
    try:
        shape = hf_shape(hf)
    except WeightError:
        shape = None  # a plugin's model family
    note_lines = (
        *extensions.notes(config, hf),
        cold_start_note(config, shape),
        *context_notes(config, hf),
    )
    return [*settings, *(note for note in note_lines if note is not None)]


def _model_folder_problems(config: Config) -> list[str]:
    folder = config.checkpoint.hf_checkpoint
    if not folder:
        return ["--hf-checkpoint is not given; give the Hugging Face folder of the model to train"]
    path, key = Path(folder), f"--hf-checkpoint {folder}"
    if not has_folder(folder):  # also False without permission
        # ``missing_problems`` reports it
        named = config.checkpoint.model is not None
        return lines_of(lambda: description_of(config)) if named else []
    problems = [] if (other := other_model_problem(config.checkpoint)) is None else [other]
    try:
        hf_config = read_config(path)
        problems += [*model_problems(config, hf_config), *routing_model_problems(config, hf_config)]
        problems += precision_model_problems(config, hf_config)
        problems += extensions.model_problems(config, hf_config)
        problems += group_checks.spare_model_problems(config, hf_config)
        problems += lora_model_problems(config, hf_config)
        problems += image_model_problems(config, hf_config) or lines_of(
            lambda: image_processor(config)
        )
        problems += adapter_engine_model_problems(config, hf_config)
        problems += context_problems(config, hf_config)
        problems += _of_file("--hf-checkpoint", lines_of(lambda: _check_description(config, path)))
        problems += _engine_problems(config, hf_config)
    except FileNotFoundError:
        problems.append(f"{key}: has no config.json; give a Hugging Face folder of a model")
    except json.JSONDecodeError as error:
        problems.append(f"{key}: config.json is not valid JSON ({error}); fetch the model again")
    except OSError as error:
        problems.append(
            f"{key}: config.json cannot be read: {error.strerror}; ask its owner for chmod a+r"
        )
    broken = [f"--hf-checkpoint {problem}" for problem in file_problems(path)]
    problems += broken or [*_mtp_problems(config), *_stacked_scale_problems(path)]
    return problems + lines_of(lambda: check_tokenizer_folder(path))


def _check_description(config: Config, path: Path) -> None:
    """Raise ConfigError or WeightError if the model is not supported, or not at this layout."""
    perf = config.perf
    description = read_description(path, config.checkpoint)
    problem = sharding_problem(
        description.fields,
        tensor=perf.tensor_model_parallel_size,
        expert=perf.expert_model_parallel_size,
        expert_tensor=perf.expert_tensor_parallel_size or perf.tensor_model_parallel_size,
        context=perf.context_parallel_size,
    )
    if problem is not None:
        raise ConfigError(problem)
    if config.perf.share_prefix and (reason := prefix_problem(config, description.fields)):
        raise ConfigError(f"--share-prefix true: {reason}; leave it out")
    attention = attention_of(
        description.hf_config,
        description.fields,
        head_dim=description.head_dim,
        tensor=perf.tensor_model_parallel_size,
        context=perf.context_parallel_size,
        is_16_bit=perf.bf16 is not False,
        shares_rows=bool(perf.share_prefix),
    )
    choice = choose(
        attention,
        BEST_GPU,
        with_engine=config.lora.lora_rank is None,
        options=Options.of(config.megatron.options),
    )
    if isinstance(choice, str):
        raise ConfigError(choice)


def _engine_problems(config: Config, hf: HfConfig) -> list[str]:
    """Problems of the engines with the model; none if its architecture is not supported at all."""
    try:
        known = family((hf.get("architectures") or ["none given"])[0])
        window = None
        if known.engines_lack_windows:
            window = known.fields(known.resolved(hf)).get("window_size")
    except (RlpostError, KeyError):
        return []  # reported by ``read_description``
    return engine_model_problems(
        config,
        hf,
        longest=longest_sample(config),
        ignored_window=None if window is None else window[0] + 1,
    )


def _stacked_scale_problems(path: Path) -> list[str]:
    """A problem if one tensor holds the FP8 scales of all experts, which the importer cannot read."""
    if not any(name.endswith(STACKED + SUFFIX) for name in tensor_files(path)):
        return []
    return [
        f"--hf-checkpoint {path}: the experts of a layer are one tensor in FP8, which is not "
        "supported; use the model in bfloat16"
    ]


def _mtp_problems(config: Config) -> list[str]:
    """Problems of --enable-mtp-training if the model or its weights lack that layer."""
    path = Path(config.checkpoint.hf_checkpoint)
    if not config.grpo.enable_mtp_training or not (path / "config.json").is_file():
        return []
    hf = read_config(path)
    try:
        problem = mtp_problem(family((hf.get("architectures") or ["none given"])[0]), hf)
        name = f"model.layers.{hf['num_hidden_layers']}.eh_proj.weight"
        reads_hf = config.checkpoint.ref_load is None
        if problem is None and reads_hf and name not in tensor_files(path):
            problem = (
                f"--enable-mtp-training: the weights in {path} have no tensor {name}, and training does not start "
                "from random values; use a checkpoint that has the layer, or --enable-mtp-training false"
            )
    except (RlpostError, KeyError):
        return []  # reported by ``read_description``
    return [] if problem is None else [problem]


def _weight_problems(folder: str | None, given: str, default: str) -> list[str]:
    """Problems of a folder of weights, which may be torch_dist or Hugging Face."""
    if folder is None or find_checkpoint(folder) is not None:
        return []
    if any(Path(folder).glob("*.safetensors")):
        return []
    what = "no such folder"
    if os.path.isdir(folder):
        what = "holds neither a torch_dist checkpoint nor *.safetensors"
    return [
        f"{given} {folder}: {what}; make it with {extensions.command('convert RECIPE')}, or use {given} none "
        f"to take {default}"
    ]


def _save_problems(config: Config) -> list[str]:
    """Problems of --save: a checkpoint of another trainer blocks the step of the same number."""
    folder = config.checkpoint.save
    if folder is None:
        return []
    try:
        theirs = foreign(Path(folder))
    except RlpostError as error:
        return [f"--save {folder}: {error}; give another folder"]
    if not theirs:
        return []
    return [
        f"--save {folder}: {theirs[0].name} in it is a checkpoint of another program, under a name that this run may "
        "write; use another folder, or --save none for RUN/checkpoints (another trainer's weights go into "
        "--ref-load)"
    ]


def _prompt_problems(config: Config) -> list[str]:
    rollout = config.rollout
    if not rollout.prompt_data:
        return [
            "--prompt-data is not given; give a file of prompts, JSON Lines or Parquet (docs/data.md)"
        ]
    problems = list[str]()
    try:
        processor = image_processor(config)
    except ConfigError:  # reported with the model
        return problems
    read = partial(check_prompts, has_environment=config.answers_are_episodes, processor=processor)
    if is_there(rollout.prompt_data):
        trains = config.grpo.is_supervised
        new_problems = lines_of(partial(read, rollout.prompt_data, rollout, trains_label=trains))
        problems += _of_file("--prompt-data", new_problems)
    try:
        sets = eval_sets(config.eval)
    except ConfigError:  # reported by another check
        return problems
    for one in sets:
        settings = set_settings(one, config.eval, rollout)
        if is_there([one.path]):
            new_problems = lines_of(partial(read, [one.path], settings, flag_prefix="--eval-"))
            problems += _of_file(f"--eval-prompt-data {one.name}", new_problems)
        if any(getattr(one, key) is not None for key in REWARD_KEYS):
            new_problems = lines_of(partial(check_reward, settings))
            problems += [f"{one.name}: {line}" for line in new_problems]
    return problems


def _of_file(setting: str, lines: Iterable[str]) -> list[str]:
    """Prefix messages about a file with the flag that names it."""
    return [line if line.startswith("--") else f"{setting}: {line}" for line in lines]

"""Check what is known only on the nodes: packages, and options of SGLang and Megatron-core.

Runs before training, in the environment that trains. All problems are reported together.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import PathFinder

from common.installed import is_package
from rlpost.cli.engine_groups import group_args_problems
from rlpost.config.checks.environment_variables import allocator_problems
from rlpost.config.extensions import command
from rlpost.config.megatron_options import option_names, option_problems
from rlpost.config.transformer_engine import RULED_OUT, needs_transformer_engine
from rlpost.config.tree import Config
from rlpost.engines.server_args import check_server_args
from rlpost.errors import ConfigError, RlpostError


def check_installed(config: Config) -> None:
    """Check what is known only on the nodes: installed packages, options of SGLang and
    Megatron-core.

    Raises ConfigError with one line for each problem.
    """
    problems = [
        *_stack_problems(config),
        *pass_through_problems(config),
        *package_problems(config),
        *allocator_problems(config, os.environ),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _stack_problems(config: Config) -> list[str]:
    """Packages missing from this environment.

    Without this check engines and actors would fail minutes later, and the job would be requeued.
    """
    trains = not config.debug.debug_rollout_only
    parts = [
        (True, "the cluster", ("ray",)),
        (trains, "the trainer", ("torch", "megatron-core")),
        (config.generates, "the engines", ("sglang",)),
    ]
    where = f"{sys.executable}: install the missing packages (make install)"
    if config.cluster.container != "none":
        image = config.cluster.container_image
        where = (
            f"{sys.executable} of container_image = {image}: name another interpreter of the image with "
            f"--python, or list its missing packages with {command('doctor --image')}"
        )
    problems = []
    for is_used, part, packages in parts:
        missing = [package for package in packages if is_used and not _is_installed(package)]
        problems += [
            f"{package} is not installed, and {part} cannot start; this is {where}"
            for package in missing
        ]
    return problems


def _is_installed(package: str) -> bool:
    """Whether a package is installed. Does not import it; others share the name ``megatron``."""
    if package == "megatron-core":
        return option_names() is not None
    spec = PathFinder.find_spec(package.replace("-", "_"))
    return spec is not None and spec.origin is not None  # a folder of that name has none


def pass_through_problems(config: Config) -> list[str]:
    """Pass-through options that SGLang or Megatron-core lacks or whose value it rejects."""
    gpus, given = config.cluster.rollout_num_gpus_per_engine, config.sglang.given_server_args
    return [
        *lines_of(lambda: check_server_args(given, gpus_per_engine=gpus)),
        *group_args_problems(config),
        *option_problems(config.megatron.options),
    ]


def package_problems(config: Config) -> list[str]:
    """Optional packages that settings need and this environment lacks."""
    optional = [
        (config.wandb.is_on, "--use-wandb", "wandb"),
        (config.observe.use_tensorboard, "--use-tensorboard", "tensorboard"),
        (config.observe.use_prometheus, "--use-prometheus", "prometheus-client"),
    ]
    problems = []
    for is_used, setting, package in optional:
        if is_used and not is_package(package.replace("-", "_")):
            problems.append(
                f"{setting} true: the package {package} is not installed; pip install {package}, or use {setting} false"
            )
    return problems + _transformer_engine_problems(config)


def _transformer_engine_problems(config: Config) -> list[str]:
    """Settings that need TransformerEngine where GPUs are used and it is missing or disabled."""
    if not _is_for_gpus():
        return []
    required = [need for need in needs_transformer_engine(config) if need.is_required]
    if not is_package("transformer_engine"):
        return [need.problem("which is not installed in this environment") for need in required]
    if config.lora.lora_rank is not None:
        return [need.problem(RULED_OUT) for need in required if need.is_of_layers]
    return []


def _is_for_gpus() -> bool:
    """Whether torch is installed with GPU support, judged by its version without importing it."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def lines_of(probe: Callable[[], object]) -> list[str]:
    """Return the lines of the error that ``probe`` raises, if any."""
    try:
        probe()
    except RlpostError as error:
        return str(error).splitlines()
    return []

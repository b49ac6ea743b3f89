"""Groups of engines by name, and the settings of each in the form of a run's. Pure.

Input: the settings of a run. Output: its groups, those of short forms (--opd-teacher-url, --rm-url)
included; for a group that the job starts, the tree with the group's model, GPUs and SGLang settings
in place of the policy's, so that everything that reads the settings of engines serves both.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.fleet_name import POLICY
from rlpost.config.groups.engines import EngineGroup
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.groups.sglang import SglangConfig
from rlpost.config.keys import TEACHER
from rlpost.config.tree import Config
from rlpost.config.wording import with_values
from rlpost.errors import ConfigError

TEACHER_GROUP, REWARD_GROUP, JUDGE_GROUP = "teacher", "reward", "judge"
"""Names of the groups of --opd-teacher-url, --rm-url and --judge-url."""


@dataclass(frozen=True, slots=True)
class NamedGroup:
    """A group of engines, and how messages spell it.

    Attributes:
        label: the table or the flag that declares it.
        deadline_label: the same for its ``timeout_s``.
        is_endpoint: its URLs are complete; no path is added to them.
    """

    name: str
    settings: EngineGroup
    label: str
    deadline_label: str
    is_endpoint: bool = False

    @classmethod
    def declared(cls, name: str, settings: EngineGroup) -> NamedGroup:
        label = f"[engines.{name}]"
        return cls(name, settings, label, f"timeout_s of {label}")


def engine_groups(config: Config) -> dict[str, NamedGroup]:
    """Return the groups beside the policy's engines: tables and short forms."""
    groups = {
        name: NamedGroup.declared(name, group) for name, group in config.engines.groups.items()
    }
    return groups | short_forms(config)


def short_forms(config: Config) -> dict[str, NamedGroup]:
    """Return the groups that a flag declares: a teacher, a reward model."""
    distillation, rollout = config.distillation, config.rollout
    groups = {}
    if distillation.use_opd and distillation.opd_teacher_url:
        url, timeout_s = distillation.opd_teacher_url, distillation.opd_teacher_timeout_s
        groups[TEACHER_GROUP] = teacher_url_group(url, timeout_s)
    if rollout.rm_url is not None:
        groups[REWARD_GROUP] = reward_url_group(rollout.rm_url, rollout.rm_url_timeout_s)
    if rollout.judge_url is not None:
        groups[JUDGE_GROUP] = judge_url_group(
            rollout.judge_url, rollout.judge_model, rollout.judge_timeout_s
        )
    return groups


def judge_url_group(
    url: str, model: str, timeout_s: float, *, label: str = "--judge-url"
) -> NamedGroup:
    """Return the group of --judge-url: a server with the OpenAI interface."""
    settings = EngineGroup.model_construct(
        url=(url.rstrip("/"),), served_model=model, timeout_s=timeout_s, cache_mib=0
    )
    return NamedGroup(JUDGE_GROUP, settings, label, "--judge-timeout-s")


def judge_group(rollout: RolloutConfig) -> str | None:
    """Return the name of the group of --rm-type judge; None without one."""
    if rollout.judge_engines is not None:
        return rollout.judge_engines
    return None if rollout.judge_url is None else JUDGE_GROUP


def teacher_url_group(url: str, timeout_s: float) -> NamedGroup:
    """Return the group of --opd-teacher-url: a server with SGLang's /generate."""
    settings = EngineGroup.model_construct(
        url=(generate_url(url),), timeout_s=timeout_s, api_key_env=TEACHER, cache_mib=0
    )
    flags = "--opd-teacher-url", "--opd-teacher-timeout-s"
    return NamedGroup(TEACHER_GROUP, settings, *flags, is_endpoint=True)


def reward_url_group(url: str, timeout_s: float) -> NamedGroup:
    """Return the group of --rm-url: a server that returns a number for each answer."""
    settings = EngineGroup.model_construct(url=(url,), timeout_s=timeout_s, cache_mib=0)
    return NamedGroup(REWARD_GROUP, settings, "--rm-url", "--rm-url-timeout-s", is_endpoint=True)


def teacher_group(config: Config) -> str | None:
    """Return the name of the group with the teacher of distillation; None without one."""
    given = config.distillation
    return given.opd_teacher_engines or TEACHER_GROUP if given.use_opd else None


def generate_url(url: str) -> str:
    """Return the URL of the requests: ``/generate`` is appended if ``url`` has no path."""
    return url if urlsplit(url).path.strip("/") else url.rstrip("/") + "/generate"


def group_config(config: Config, name: str) -> Config:
    """Return the settings of a run whose engines are those of a group that is started for it.

    ``POLICY`` is the run itself. Engines of another group have GPUs of their own, are never
    offloaded, and return neither routes nor answers of adapters unless they follow the policy.
    Their weights are read from files. Raises ConfigError for an unknown group.
    """
    if name == POLICY:
        return config
    group = config.engines.started.get(name)
    if group is None:
        raise ConfigError(f"[engines.{name}]: the run has no such group of engines")
    cluster, sglang = config.cluster, config.sglang
    size = group.gpus_per_engine(cluster.num_gpus_per_node)
    group_settings = SglangConfig(
        sglang_server_concurrency=group.concurrency,
        rollout_health_check_interval=sglang.rollout_health_check_interval,
        rollout_health_check_timeout=sglang.rollout_health_check_timeout,
        **(group.model_extra or {}),
    )
    values: dict[str, object] = {
        "rollout_num_gpus": group.num_placed * size,
        "rollout_num_gpus_per_engine": size,
        "colocate": False,
        "offload_train": False,
        "offload_rollout": False,
        "update_weight_transport": "disk",
        "hf_checkpoint": group.model or config.checkpoint.hf_checkpoint,
        "use_rollout_routing_replay": False,
        "enable_mtp_training": False,
    }
    if not group.follows_policy:
        values |= {"update_weight_mode": "full", "lora_rank": None, "bf16": None}
        # another model reads text
        values |= {"multimodal_keys": {}, "image_max_pixels": None, "vision_tower": "frozen"}
    return with_values(config, **values).model_copy(update={"sglang": group_settings})


def engines_to_place(config: Config) -> list[tuple[str, int]]:
    """Return the group and the GPUs of each engine with GPUs of its own, in the order of placement.

    Larger ones first, because they need whole nodes or most of one; equal ones as declared, the
    policy's first.
    """
    a_node = config.cluster.num_gpus_per_node
    engines: list[tuple[str, int]] = []
    if not config.cluster.colocate:
        engines += [(POLICY, config.cluster.rollout_num_gpus_per_engine)] * config.num_engines
    for name, group in config.engines.started.items():
        engines += [(name, group.gpus_per_engine(a_node))] * group.num_placed
    return sorted(engines, key=lambda engine: -engine[1])


def group_key(group: NamedGroup, environ: Mapping[str, str] = os.environ) -> str:
    """Return the API key of the servers of a group; empty for none.

    Raises:
        ConfigError: its file cannot be read, or other users can read it.
    """
    settings = group.settings
    if settings.api_key_file is None:
        return environ.get(settings.api_key_env or "", "")
    path = Path(settings.api_key_file)
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(
                f"api_key_file {path} of {group.label}: other users can read it; chmod 600 {path}"
            )
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"api_key_file {path} of {group.label}: cannot be read: {error}; give a file with the key"
        ) from None

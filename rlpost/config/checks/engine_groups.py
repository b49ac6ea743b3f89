"""Check the tables [engines.NAME], and the settings that name one of them. Pure.

Input: a ``Config``, the content of config.json of a group's model. Output: one line for each
problem. GPUs are summed by ``checks.layout``.
"""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from urllib.parse import urlsplit

from common.fleet_name import POLICY
from common.units import counted
from rlpost.config import extensions
from rlpost.config.engine_groups import NamedGroup, engine_groups, short_forms
from rlpost.config.flags import flag
from rlpost.config.keys import EXTERNAL_ENGINES, SUFFIX, TEACHER, is_for_engines
from rlpost.config.tree import Config
from rlpost.config.wording import listed, spelled, value_of
from rlpost.errors import suggestion
from rlpost.models.model_types import HfConfig

NAMING = ("opd_teacher_engines", "judge_engines", "eval_engines")
"""Settings whose value is the name of a group."""
SIZES = (
    "architectures",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
"""Keys of config.json in which engines that receive the policy's weights agree with it."""
_OF_URL = ("served_model", "api_key_env", "api_key_file")
_OF_STARTED = ("model", "engines", "gpus", "nodes", "follows_policy", "fleet")


def key_notes(config: Config) -> list[str]:
    """Return where keys of variables go, one line for each group, and which go unencrypted."""
    lines = []
    for named in engine_groups(config).values():
        variable, url = named.settings.api_key_env, named.settings.url
        if variable is None or not url:
            continue
        parts = [urlsplit(each) for each in url]
        hosts = listed(sorted({part.hostname or "?" for part in parts}), "and")
        text = f"{named.label}: the key in {variable} is sent to {hosts}"
        if any(part.scheme == "http" and not _is_loopback(part.hostname) for part in parts):
            text += " over http, readable on the network between; use https where others share it"
        lines.append(text)
    return lines


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


def engine_group_problems(config: Config) -> list[str]:
    """Problems of the settings alone."""
    problems: list[str] = []
    for name, group in config.engines.groups.items():
        named = NamedGroup.declared(name, group)
        problems += _url_problems(named) if group.url else _started_problems(config, named)
    return [*problems, *_name_problems(config), *_eval_problems(config)]


def group_model_problems(config: Config, name: str, hf: HfConfig, policy: HfConfig) -> list[str]:
    """Problems of a group's model: weights of the policy need its architecture.

    ``hf`` is the config.json of the group, ``policy`` that of --hf-checkpoint.
    """
    group = config.engines.groups[name]
    if not group.follows_policy:
        return []
    where = f"[engines.{name}] follows_policy with model {group.model}"
    differ = [key for key in SIZES if hf.get(key) != policy.get(key)]
    if differ:
        pairs = [f"{key} {hf.get(key)} and {policy.get(key)}" for key in differ]
        return [
            f"{where}: its config.json and that of --hf-checkpoint differ in {listed(pairs, 'and')}; "
            "weights of the policy fit only its own architecture; leave model out, or use "
            "follows_policy = false"
        ]
    if hf.get("quantization_config"):
        return [
            f"{where}: its weights are quantised, and the files of an update have the trainer's "
            "precision; use a checkpoint in bf16"
        ]
    return []


def spare_model_problems(config: Config, hf: HfConfig) -> list[str]:
    """Problems of evaluation on the policy's engines with this model; ``hf``: its config.json."""
    if config.eval.eval_engines != POLICY or not hf.get("quantization_config"):
        return []
    return [
        "--eval-engines policy: --hf-checkpoint has quantised weights, and the files of an evaluation "
        "have the trainer's precision; use a checkpoint in bf16, or --eval-engines none"
    ]


def _eval_problems(config: Config) -> Iterator[str]:
    """Evaluation beside training: engines that follow the policy, and something to evaluate."""
    name, known = config.eval.eval_engines, config.engines.groups
    for other, group in config.engines.started.items():
        if group.follows_policy and other != name:
            yield (
                f"[engines.{other}] follows_policy: only the engines of --eval-engines get weights of the "
                f"policy; add --eval-engines {other}, or give it a model of its own"
            )
    if name == POLICY:
        yield from _spare_problems(config)
    if name is not None and config.eval.eval_interval is None and name in (POLICY, *known):
        yield f"--eval-engines {name} without --eval-interval evaluates nothing; add --eval-interval"
    if name is None or name not in known:
        return
    group = known[name]
    if not group.follows_policy:
        yield (
            f"--eval-engines {name}: [engines.{name}] keeps weights of its own; add follows_policy = "
            "true to it"
        )


def _spare_problems(config: Config) -> Iterator[str]:
    """Engines of the policy that evaluate: on GPUs of their own, and one that generates is left."""
    number = config.eval.eval_policy_engines
    if config.cluster.colocate or config.offload_rollout:
        why = "--colocate" if config.cluster.colocate else "--offload-rollout"
        yield (
            f"--eval-engines policy with {why}: no engine has its memory while the trainer works; use a "
            "group [engines.NAME] with follows_policy = true, or --eval-engines none"
        )
    elif number >= config.num_engines:
        a_group = config.cluster.rollout_num_gpus_per_engine
        yield (
            f"--eval-engines policy with {spelled(config, 'eval_policy_engines')} of "
            f"{counted(config.num_engines, 'engine')} of the run's own job leaves none that generates; "
            f"use --rollout-num-gpus {(number + 1) * a_group} or more"
        )


def _url_problems(named: NamedGroup) -> Iterator[str]:
    group, label = named.settings, named.label
    engine_keys = [key for key in group.changed_keys if key in _OF_STARTED]
    engine_keys += [*(group.model_extra or {})]
    if engine_keys:
        yield (
            f"{label}: url names servers that exist, and {listed(engine_keys, 'and')} "
            f"{'is' if len(engine_keys) == 1 else 'are'} for engines that the run starts; leave "
            "one of them out"
        )
    variable = group.api_key_env
    if variable is not None and not is_for_engines(variable):
        yield (
            f"{label} api_key_env = {variable!r}: the name must end in {SUFFIX} or be "
            f"{EXTERNAL_ENGINES} or {TEACHER}: only those are kept from other processes and meant "
            f"for servers of engines; use {variable.upper()}{SUFFIX}"
        )
    if variable is not None and group.api_key_file is not None:
        yield f"{label}: api_key_env and api_key_file; leave one of them out"


def _started_problems(config: Config, named: NamedGroup) -> Iterator[str]:
    group, label = named.settings, named.label
    if url_keys := [key for key in _OF_URL if getattr(group, key) is not None]:
        yield (
            f"{label}: {listed(url_keys, 'and')} without url; engines that the run starts have a key of "
            "their own; leave it out, or add url"
        )
    if group.model is None and not group.follows_policy:
        yield (
            f"{label} needs a model; add model = FOLDER, follows_policy = true for the policy's, or url "
            "for servers that exist"
        )
    if group.gpus is not None and group.nodes is not None:
        yield (
            f"{label} gpus = {group.gpus} and nodes = {group.nodes}: both are the size of an engine; "
            "leave one of them out"
        )
    if not (group.engines or group.fleet):
        yield (
            f"{label} engines = 0: the group has no engine; use 1 or more, or fleet = true for engines "
            "that join from other jobs"
        )
    if group.fleet and extensions.joining_engines() is None:
        yield f"{label} fleet = true: {extensions.NO_JOINING}"
    if not config.generates:
        why = "--debug-train-only" if config.debug.debug_train_only else "--loss-type sft_loss"
        yield f"{label}: {why} generates nothing, so nothing uses these engines; leave the table out"


def _name_problems(config: Config) -> Iterator[str]:
    """Settings that name an unknown group, and tables with the name of a short form."""
    groups = config.engines.groups
    for key in NAMING:
        name = value_of(config, key)
        if name is None or name in groups or (name, key) == (POLICY, "eval_engines"):
            continue
        known = f"; there is {listed(groups, 'and')}" if groups else "; add a table [engines.NAME]"
        yield f"{flag(key)} {name}: no such group of engines{suggestion(name, groups) or known}"
    for name, short in short_forms(config).items():
        if name in groups:
            yield (
                f"[engines.{name}] and {short.label}, which is the short form of a group of that name; "
                "leave one of them out"
            )

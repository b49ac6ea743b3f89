"""The environment of each prompt. Pure.

Input: the words of --env, weights, a prompt. Output: the environments, and that of a prompt.

    LABEL=ENVIRONMENT   ENVIRONMENT   pkg.mod:Class   FILE.py:Class   verifiers:NAME   openenv:URL
                                      tau2:DOMAIN   harbor:FOLDER   nemogym:URL
                                      gymnasium:ID   textarena:ID   reasoning_gym:NAME
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rlpost.errors import ConfigError, DataError, choice, suggestion

Kind = Literal[
    "own",
    "verifiers",
    "openenv",
    "tau2",
    "harbor",
    "nemogym",
    "gymnasium",
    "textarena",
    "reasoning_gym",
]
ADAPTERS: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind) if kind != "own"}
BEFORE, HERE = "rlpost.agents.", "rlpost.extensions.agents."
"""Recipes may name the examples by their path in version 0.2."""
_LABEL = re.compile(r"[A-Za-z0-9_.-]+")
_NAMED = re.compile(r"([A-Za-z0-9_.-]+)=(.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class EnvName:
    """One word of --env: the label in metrics and prompts, the kind, and what it names."""

    label: str
    kind: Kind
    target: str
    word: str


def parse_env(word: str) -> EnvName:
    """Parse one word of --env.

    >>> parse_env("calc=my.envs:Calculator").label, parse_env("verifiers:owner/wordle").label
    ('calc', 'verifiers-wordle')

    Raises ConfigError.
    """
    named = _NAMED.fullmatch(word)
    label, environment = named.groups() if named else (None, word)
    if environment.startswith(BEFORE):
        environment = HERE + environment.removeprefix(BEFORE)
    prefix, colon, target = environment.partition(":")
    if not colon or not target:
        raise ConfigError(
            f"--env {word}: names no environment; write pkg.mod:Class, FILE.py:Class, verifiers:NAME, openenv:URL, "
            "tau2:DOMAIN, harbor:FOLDER, nemogym:URL, gymnasium:ID, textarena:ID or reasoning_gym:NAME"
            f"{suggestion(environment, ADAPTERS)}"
        )
    if kind := ADAPTERS.get(prefix):
        return EnvName(label or _label_of(kind, target), kind, target, word)
    module, _, name = environment.rpartition(":")
    is_module = all(part.isidentifier() for part in module.split("."))
    is_slip = bool(suggestion(prefix, ADAPTERS, cutoff=0.85))  # verifier: instead of verifiers:
    if is_slip or not name.isidentifier() or not (module.endswith(".py") or is_module):
        raise ConfigError(
            f"--env {word}: neither pkg.mod:Class nor FILE.py:Class, and {prefix} is no adapter"
            f"{suggestion(prefix, ADAPTERS)}; adapters are {', '.join(ADAPTERS)}"
        )
    return EnvName(label or name, "own", environment, word)


def _label_of(kind: str, target: str) -> str:
    is_address = kind in ("openenv", "nemogym")
    plain = re.sub(r"^[a-z]+://", "", target)
    if not is_address:
        plain = target.rstrip("/").rpartition("/")[2]
    return f"{kind}-" + "-".join(_LABEL.findall(plain))


def parse_envs(words: Sequence[str]) -> tuple[EnvName, ...]:
    """Parse --env. Raises ConfigError also for two environments with one label."""
    found = tuple(parse_env(word) for word in words)
    labels = [each.label for each in found]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(
                f"--env: two environments have the label {label}; write OTHER_LABEL=ENVIRONMENT for one of them"
            )
    return found


def env_of(
    labels: Sequence[str],
    weights: Sequence[float],
    *,
    metadata: Mapping[str, object],
    key: str,
    prompt_id: int,
    seed: int,
) -> str:
    """Return the label of a prompt's environment.

    It is the one that the prompt's metadata names, else one drawn by ``weights``. The draw depends
    only on seed and prompt id, so a resumed run draws the same.

    Raises DataError for a label that does not exist.
    """
    named = metadata.get(key)
    if named is not None:
        if named not in labels:
            raise DataError(
                f"prompt {prompt_id}: {key!r} in its metadata is {named!r}, which --env does not have"
                f"{choice(str(named), list(labels))}"
            )
        return str(named)
    shares = list(weights) or [1.0] * len(labels)
    digest = hashlib.sha256(f"{seed}:{prompt_id}".encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") / 2**64 * sum(shares)
    for label, bound in zip(labels, itertools.accumulate(shares), strict=True):
        if drawn < bound:
            return label
    return labels[-1]

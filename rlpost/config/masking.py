"""Settings without their secrets, for everything that leaves the run's private files. Pure.

Input: settings as JSON values, or the words of a command. Output: the same, with MASK for what may
hold a password or a key:

    environment, and tables of that kind    every value but those of LIBRARIES' own variables
    env_args                                every text
    URLs anywhere                           the part before @
    NAME=VALUE anywhere, with a name such
    as HF_TOKEN, api_key or password        the value, in a shell command or a URL's query too
    settings with such a name               the value

run.json (0600) keeps the values. Logs that W&B gets, the report, its recipe, --print-config and the
commands that a verb prints are made from the masked ones. A resumed run takes masked values from
its run.json (``restored``); anywhere else they are refused (``masking_problems``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlpost.config.flags import flag
from rlpost.config.keys import is_key, is_reference
from rlpost.config.tree import Config

MASK = "***"
LIBRARIES = ("NCCL_", "RCCL_", "GLOO_", "UCX_", "OMP_", "CUDA_", "TORCH", "PYTORCH_", "NVTE_")
"""Prefixes of variables that tune a library and hold no secrets."""
_ENVIRONMENTS = frozenset({"environment", "env"})
_ARGUMENTS = "env_args"
_SECRET_NAME = re.compile(
    r"(^|[_-])(api|access|private)[_-]?key$|secret|passw|credential|(^|_)(auth|api|access)_token$",
    re.I,
)
_TOKEN = re.compile(r"(^|[_-])token$", re.I)
_USERINFO = re.compile(r"(?<=://)[^/\s?#]+(?=@)")  # to the last @: passwords may have one
_ASSIGNED = re.compile(r"""(?<!\w)([A-Za-z_][\w-]*)=("[^"]*"|'[^']*'|[^\s&,;"'#]+)""")


def without_secrets(text: str) -> str:
    """Return a text whose URLs have no user and password, and whose assigned secrets are masked.

    >>> without_secrets("http://user:secret@host/x?api_key=s&n=1")
    'http://***@host/x?api_key=***&n=1'
    >>> without_secrets("export HF_TOKEN='s t' A=b")
    'export HF_TOKEN=*** A=b'
    """
    return _ASSIGNED.sub(_mask_assigned, _USERINFO.sub(MASK, text))


def _mask_assigned(assigned: re.Match[str]) -> str:
    name = assigned[1]
    is_secret = _SECRET_NAME.search(name) or _TOKEN.search(name) or is_key(name)
    return f"{name}={MASK}" if is_secret else assigned[0]


def masked(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the tables of a run.json without secrets."""
    return {
        table: {key: mask(key, value) for key, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for table, values in settings.items()
    }


def mask(key: str, value: object, *, hides_texts: bool = False) -> object:
    """Return the value of a setting without secrets.

    ``hides_texts``: the value is in a table whose texts are all masked.
    """
    if is_reference(value):
        return value  # the name of a key
    if isinstance(value, str):
        if hides_texts or _SECRET_NAME.search(key):
            is_tuning = key.startswith(LIBRARIES) and not is_key(key)
            return value if is_tuning or not value else MASK
        return without_secrets(value)
    hides_texts = hides_texts or key in _ENVIRONMENTS or key == _ARGUMENTS
    if isinstance(value, Mapping):
        return {name: mask(name, one, hides_texts=hides_texts) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [mask(key, one, hides_texts=hides_texts) for one in value]
    return value


def masked_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line without secrets.

    >>> masked_words(["--environment", "A=b", "--rm-url", "http://u:p@h"])
    ['--environment', 'A=***', '--rm-url', 'http://***@h']
    """
    shown, key = [], ""
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            key = name.removeprefix("--").replace("-", "_")
            shown.append(name + equals + _masked_word(key, value) if equals else word)
        else:
            shown.append(_masked_word(key, word))
    return shown


def _masked_word(key: str, word: str) -> str:
    if key in _ENVIRONMENTS:
        name, equals, value = word.partition("=")
        return f"{name}{equals}{mask(name, value, hides_texts=True)}"
    if key == _ARGUMENTS:
        try:
            return json.dumps(mask(key, json.loads(word)))
        except ValueError:  # several words of one JSON object
            return MASK
    return str(mask(key, word))


def restored(config: Config, earlier: Mapping[str, object]) -> Config:
    """Return settings with the values of a run's ``earlier`` settings where they are masked."""
    values = config.model_dump(mode="json")
    whole = _restored(values, earlier, masked(earlier))
    return config if whole == values else Config.model_validate(whole)


def _restored(value: object, original: object, hidden: object) -> object:
    if value == hidden:
        return original
    if isinstance(value, Mapping) and isinstance(original, Mapping) and isinstance(hidden, Mapping):
        return {
            name: _restored(one, original[name], hidden[name]) if name in original else one
            for name, one in value.items()
        }
    return value


def masking_problems(config: Config) -> list[str]:
    """Name the settings that hold MASK, which stands for a value that is not known here."""
    return [
        f"{flag(key)}: a part of it is masked ({MASK}), as in reports and printed commands; give its value, or "
        "resume the run that has it with --resume --run-folder RUN"
        for table in config.model_dump(mode="json").values()
        for key, value in table.items()
        if _is_masked(value)
    ]


def _is_masked(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_masked, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_masked, value))
    return isinstance(value, str) and (
        value == MASK or f"://{MASK}@" in value or f"={MASK}" in value
    )

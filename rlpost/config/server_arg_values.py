"""Convert values of SGLang's settings like its command line does, and check their ranges.

Input: a field of ServerArgs and its value from a recipe or a flag. Output: the typed value, or a
ValueError with the constraint and the remedy. ``none`` unsets a value if the field admits None and
has no choice of that name. Fields are those of the SGLang version that a run will use, known
without importing SGLang (``server_arg_table``).
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rlpost.errors import suggestion

NONE = "none"
POOL_WITHOUT_GPUS = 16_384
"""Tokens of the KV cache of an engine on a CPU, where ``max_total_tokens`` is not given."""

_MANY_CHOICES = 12
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T)")
_MULTIPLIERS = {
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "json": "JSON, a table or a list",
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A range of numbers and its description; bounds are included unless ``is_open``."""

    words: str
    low: float = -math.inf
    high: float = math.inf
    is_open: bool = False
    example: str = ""

    def holds(self, value: float) -> bool:
        return self.low < value < self.high if self.is_open else self.low <= value <= self.high


_OPEN_FRACTION = Limit("a fraction above 0 and below 1", 0.0, 1.0, is_open=True, example="0.7")
_FRACTION = Limit("a fraction above 0, at most 1", math.ulp(0.0), 1.0, example="0.8")
_POSITIVE = Limit("1 or more", 1)
_NOT_NEGATIVE = Limit("0 or more", 0)
_PORT = Limit("a port, 1 to 65535", 1, 65535, example="20000")

LIMITS: Mapping[str, Limit] = {
    # The fraction of GPU memory for weights and KV cache. 1 leaves nothing for activations; with
    # more than 1 the cache exceeds the memory, which causes a CUDA error minutes later.
    "mem_fraction_static": _OPEN_FRACTION,
    # kv_cache_hook.py raises unless 0 < ratio <= 1; a fraction of host memory cannot exceed 1.
    "swa_full_tokens_ratio": _FRACTION,
    "hicache_host_memory_fraction": _FRACTION,
    # Sizes of rank groups: SGLang divides by them.
    **dict.fromkeys(
        (
            "attn_cp_size",
            "dcp_size",
            "dp_size",
            "ep_size",
            "max_ep_size",
            "moe_dense_tp_size",
            "moe_dp_size",
            "pp_size",
        ),
        _POSITIVE,
    ),
    # validation_hook.check_server_args asserts these.
    **dict.fromkeys(
        (
            "detokenizer_worker_num",
            "gpu_id_step",
            "pp_max_micro_batch_size",
            "tokenizer_worker_num",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        ("base_gpu_id", "mm_io_worker_num", "mm_processor_worker_num", "prefill_decode_interval"),
        _NOT_NEGATIVE,
    ),
    "schedule_conservativeness": _NOT_NEGATIVE,
    # Capacities: with 0 or less no request is ever scheduled.
    **dict.fromkeys(
        (
            "context_length",
            "cuda_graph_bs_decode",
            "cuda_graph_bs_prefill",
            "cuda_graph_max_bs_decode",
            "cuda_graph_max_bs_prefill",
            "max_running_requests",
            "max_total_tokens",
            "page_size",
            "stream_interval",
        ),
        _POSITIVE,
    ),
    # 16 bits; serving_hook.py asserts it for grpc_port, the others fail when they are bound.
    **dict.fromkeys(
        (
            "disaggregation_bootstrap_port",
            "encoder_bootstrap_port",
            "engine_info_bootstrap_port",
            "gated_launch_port",
            "grpc_port",
            "smg_http_sidecar_port",
        ),
        _PORT,
    ),
}
"""Ranges that SGLang enforces only when an engine starts, or not at all."""


def typed_args(
    server_args: Mapping[str, object], table: ServerArgTable | None = None
) -> dict[str, object]:
    """Return the settings by SGLang's names with typed values.

    Invalid values are kept, and ``check`` reports them. An unset value is left out if SGLang's
    default is None.
    """
    table = table or server_arg_table()
    typed_settings: dict[str, object] = {}
    for key, value in server_args.items():
        name = table.name_of(key)
        arg = table.args.get(name)
        try:
            typed = value if arg is None else typed_value(name, arg, value)
        except ValueError:
            typed = value
        if typed is None and (arg is None or arg.default is None):
            typed_settings.pop(name, None)  # an earlier alias of the same field
        else:
            typed_settings[name] = typed
    return typed_settings


def typed_value(name: str, arg: ServerArg, value: object) -> object:
    """Return the value with the type of the field.

    Raises ValueError with the constraint and a remedy.
    """
    if arg.kind == OPAQUE:
        raise ValueError("a Python object, which text cannot express; leave it out")
    if value is None or (value == NONE and NONE not in arg.choices):
        if not arg.may_be_none:
            raise ValueError(f"cannot be unset; {_remedy(arg, None)}")
        return None
    if value is True and arg.const is not None:  # the flag without a value
        return arg.const
    if not arg.is_list or (arg.kind == "json" and isinstance(value, str)):
        return _checked(name, arg, value)
    if value is True and arg.may_be_empty:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    if not values and not arg.may_be_empty and arg.default != []:
        raise ValueError("at least one value; leave the flag out for none")
    return [_checked(name, arg, one) for one in values]


def _checked(name: str, arg: ServerArg, value: object) -> object:
    """Return one typed value after checking choices and limits."""
    limit = LIMITS.get(name)
    try:
        typed = _typed(arg, value)
        if isinstance(typed, float) and math.isnan(typed):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(_constraint(arg, limit, value)) from None
    if arg.choices and typed not in arg.choices:
        raise ValueError(_constraint(arg, limit, typed))
    if limit is not None and not limit.holds(typed):
        is_percentage = limit.high == 1.0 and typed > 1 and limit.holds(typed / 100)
        remedy = f"use {typed / 100:g}" if is_percentage else _remedy(arg, limit)
        raise ValueError(f"{limit.words}; {remedy}")
    return typed


def _constraint(arg: ServerArg, limit: Limit | None, value: object) -> str:
    if arg.choices:
        listed = ", ".join(map(_text, arg.choices[:_MANY_CHOICES]))
        if len(arg.choices) > _MANY_CHOICES:
            listed += f" and {len(arg.choices) - _MANY_CHOICES} more"
        return f"one of {listed}" + suggestion(_text(value), map(_text, arg.choices))
    words = _WORDS.get(arg.kind, "a value")
    if arg.suffixes:
        words += ", as 16384, 16k or 16Ki"
    if limit is not None:
        words = (
            f"{words}, {limit.words}" if arg.kind == "int" and limit is not _PORT else limit.words
        )
    return f"{words}; {_remedy(arg, limit)}"


def _remedy(arg: ServerArg, limit: Limit | None) -> str:
    if limit is not None and limit.example:
        return f"for instance {limit.example}"
    if arg.default in (None, [], ""):
        return "leave it out for SGLang's own choice" if arg.may_be_none else "leave it out"
    return f"leave it out for SGLang's default, {_text(arg.default)}"


def _typed(arg: ServerArg, value: Any) -> Any:
    """One value in the type of the field. Raises ValueError or TypeError."""
    if arg.kind == "any":
        return value
    if arg.kind == "json":
        return _json(value)
    if arg.kind == "bool":
        return _switch(value)
    if isinstance(value, bool | list | tuple | Mapping):
        raise TypeError(value)
    if arg.kind == "str":
        return value if isinstance(value, str) else str(value)
    if arg.kind == "float":
        return float(value)
    return _whole(value, arg.suffixes)


def _switch(value: object) -> bool:
    switches = {"true": True, "false": False, "1": True, "0": False}
    if str(value).lower() not in switches:
        raise ValueError(value)
    return switches[str(value).lower()]


def _json(value: object) -> object:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, Mapping | list):
        raise TypeError(value)
    return found


def _whole(value: Any, suffixes: bool) -> int:
    """A whole number; 16k and 16Ki as SGLang's ``human_readable_int`` reads them."""
    if isinstance(value, float):
        raise TypeError(value)
    match = _SUFFIXED.fullmatch(value) if suffixes and isinstance(value, str) else None
    if match is None:
        return int(value)
    number, suffix = match.groups()
    if suffix.endswith("i"):
        return int(number) * _MULTIPLIERS[suffix]  # decimals are refused here as they are by SGLang
    return int(Decimal(number) * _MULTIPLIERS[suffix])


def _text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


OPAQUE = "object"
COPY = Path(__file__).with_name("server_args.json")

RENAMED = {"cuda_graph_bs": "cuda_graph_bs_decode", "cuda_graph_max_bs": "cuda_graph_max_bs_decode"}
"""Names of older releases and recipes, and what 0.5.21 calls the same."""


@dataclass(frozen=True, slots=True)
class ServerArg:
    """The values that a field of ServerArgs accepts.

    ``kind`` is int, float, str, bool, json (a table or a list), any (several of these) or object (a
    Python object, which text cannot express). ``suffixes``: an int may be written 16k or 16Ki.
    ``const``: the value of the flag without an argument; None if it needs one.
    """

    kind: str = "any"
    is_list: bool = False
    may_be_none: bool = False
    may_be_empty: bool = False
    suffixes: bool = False
    choices: tuple[object, ...] = ()
    default: object = None
    const: object = None
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerArgTable:
    """``args`` by name; ``names`` are their aliases.

    ``source`` names the SGLang version in messages; ``is_complete`` is False for a version that has
    no table, so that it may have further settings.
    """

    source: str
    args: Mapping[str, ServerArg]
    names: Mapping[str, str]
    is_complete: bool = True

    def name_of(self, given: str) -> str:
        """Return the field for a name, alias or former name; the name itself if unknown."""
        if given in self.args:
            return given
        if RENAMED.get(given) in self.args:
            return RENAMED[given]
        return self.names.get(given, given)


@functools.cache
def server_arg_table() -> ServerArgTable:
    """Return the table of the installed SGLang, or of the pinned version if none is installed.

    ``server_args.json``, made by ``tools/make_server_args.py``, has the pinned version, and what
    differs in later supported ones. For any other version the newest table is used, and names that
    it lacks are accepted.
    """
    copy = json.loads(COPY.read_text())
    pinned, later = copy["sglang"], copy["later"]
    installed = _installed_version()
    released = re.sub(r"(\d+\.\d+\.\d+).*", r"\1", installed or pinned)  # without .post1
    is_complete = released in (pinned, *later)
    entries = copy["args"] | later.get(released if is_complete else max(later), {})
    args = {name: _parsed(entry) for name, entry in entries.items() if entry is not None}
    names = {alias: name for name, arg in args.items() for alias in arg.aliases}
    source = f"the installed SGLang {installed}" if installed else f"the pinned SGLang {pinned}"
    return ServerArgTable(source, args, names, is_complete)


def _parsed(entry: Mapping[str, object]) -> ServerArg:
    fields: dict[str, Any] = dict(entry)
    for name in ("choices", "aliases"):
        if name in fields:
            fields[name] = tuple(fields[name])
    return ServerArg(**fields)


def _installed_version() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None

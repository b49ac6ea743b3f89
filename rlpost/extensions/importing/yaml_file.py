"""Read a YAML file of NeMo-RL or verl with its ``defaults`` and its references.

Input: a file, and keys of a command line, which win. Output: values by dotted key, each with its
line. ``${a.b}``, ``${.b}`` and ``${mul:a,b}`` are resolved last; other resolvers are named. Tags are
refused, and anchors count for what they expand to.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import yaml

from rlpost.config.wording import near_path
from rlpost.errors import ConfigError
from rlpost.extensions.importing.peers.row import Entry, Unresolved
from rlpost.extensions.importing.text_file import read_text

MOST_KEYS, MOST_DEPTH, MOST_FILES, MOST_REFERENCES = 10_000, 40, 10, 20
BASE = Path(__file__).parent / "peers" / "nemo_rl_base.toml"
"""The values of ``BASE_STEM``, with their references."""
BASE_STEM = "grpo_math_1B"
"""The file of NeMo-RL that its recipes begin with, and its program without ``--config``."""
BASE_VALUES = "its values of NeMo-RL 7ea279a are taken"
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


@dataclass(slots=True)
class Values:
    """Values by dotted key, and a line for each file that is missing."""

    entries: dict[str, Entry] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_files: int = 0

    def put(self, key: str, entry: Entry) -> None:
        """Set a value; it replaces a table of that name, and a table replaces a value."""
        below = [other for other in self.entries if other.startswith(f"{key}.")]
        for other in below:
            del self.entries[other]
        parts = key.split(".")
        for size in range(1, len(parts)):
            self.entries.pop(".".join(parts[:size]), None)
        self.entries[key] = entry


def read_yaml(path: Path | None, overrides: Mapping[str, Entry] = MappingProxyType({})) -> Values:
    """Return the values of a YAML file and of the files that its ``defaults`` name.

    Args:
        path: the file; None is the base of NeMo-RL.
        overrides: keys of a command line. References see them.

    Raises ConfigError for a file that is no YAML mapping, holds tags, or grows too large.
    """
    values = Values()
    if path is None:
        _take_base(values)
    else:
        _read(path, values)
    for key, entry in overrides.items():
        values.put(key, entry)
    for key in list(values.entries):
        values.entries[key] = _resolved(key, values.entries)
    return values


def scalar(text: str) -> object:
    """Return a text as YAML and Hydra read it: ``1e-6`` is a number, ``null`` is None.

    >>> scalar("1e-6"), scalar("True"), scalar("[a, 2]"), scalar("'5'")
    (1e-06, True, ['a', 2], '5')
    """
    stripped = text.strip()
    if len(stripped) > 1 and stripped[0] == stripped[-1] and stripped[0] in "'\"":
        return stripped[1:-1]
    if stripped[:1] in "[{" and stripped:
        try:
            return _Numbers().of(yaml.safe_load(stripped))
        except (yaml.YAMLError, RecursionError, ConfigError):
            return text
    return _number(stripped)


def _number(text: str) -> object:
    if re.fullmatch(r"[-+]?\d{1,18}", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d{1,3})?", text):
        return float(text)
    words = {"true": True, "false": False, "null": None, "none": None, "~": None}
    return words.get(text.lower(), text)


@dataclass(slots=True)
class _Numbers:
    """Texts of a value as numbers; parts that anchors repeat count each time."""

    num_parts: int = 0

    def of(self, value: object, depth: int = 0) -> object:
        self.num_parts += 1
        if depth > MOST_DEPTH or self.num_parts > MOST_KEYS:
            raise ConfigError(
                f"a value has more than {MOST_KEYS:,} parts, or is nested more than {MOST_DEPTH} deep"
            )
        if isinstance(value, str):
            return _number(value)
        if isinstance(value, list):
            return [self.of(one, depth + 1) for one in value]
        if isinstance(value, Mapping):
            return {str(key): self.of(one, depth + 1) for key, one in value.items()}
        return value


def _read(path: Path, values: Values) -> None:
    shown = near_path(str(path))
    values.num_files += 1
    if values.num_files > MOST_FILES:
        raise ConfigError(f"{shown}: more than {MOST_FILES} files by 'defaults'")
    loader = yaml.SafeLoader(read_text(path))
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError("no table of keys and values; give a YAML file of NeMo-RL or verl")
        entries: list[tuple[str, Entry]] = []
        _flatten(loader, node, "", entries, 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}"
        raise ConfigError(
            f"{shown}{where}: {getattr(error, 'problem', None) or 'no YAML'}"
        ) from None
    except (RecursionError, ValueError):
        raise ConfigError(
            f"{shown}: nested too deeply, or with a number of too many digits"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{shown}, {error}") from None
    finally:
        loader.dispose()
    bases = dict(entries).get("defaults", Entry([])).value
    for base in bases if isinstance(bases, list) else [bases]:
        if not isinstance(base, str) or base == "_self_":
            continue
        file = path.parent / (base if base.endswith((".yaml", ".yml")) else f"{base}.yaml")
        if file.is_file():
            _read(file, values)
        elif file.stem == BASE_STEM:
            _take_base(values)
            values.problems.append(f"defaults: {base}: no such file; {BASE_VALUES}")
        else:
            raise ConfigError(
                f"{shown}: defaults: {base}: no such file, and it decides all other keys; copy it beside"
            )
    for key, entry in entries:
        if key != "defaults":
            values.put(key, entry)


def _take_base(values: Values) -> None:
    """Take the values that NeMo-RL's recipes begin with; the user's file does not give them."""
    for key, value in tomllib.loads(BASE.read_text()).items():
        values.put(key, Entry(None if value == "null" else value, is_default=True))


def _flatten(
    loader: yaml.SafeLoader,
    node: yaml.MappingNode,
    prefix: str,
    entries: list[tuple[str, Entry]],
    depth: int,
) -> None:
    if depth > MOST_DEPTH:
        raise ConfigError(f"line {node.start_mark.line + 1}: more than {MOST_DEPTH} tables deep")
    loader.flatten_mapping(node)
    for key_node, value in node.value:
        key = f"{prefix}{loader.construct_object(key_node)}"
        if (
            isinstance(value, yaml.MappingNode)
            and value.value
            and value.tag == "tag:yaml.org,2002:map"
        ):
            _flatten(loader, value, f"{key}.", entries, depth + 1)
            continue
        built = loader.construct_object(value, deep=True)
        is_plain = isinstance(value, yaml.ScalarNode) and value.style is None
        if isinstance(built, str) and is_plain:
            built = _number(built)
        elif not isinstance(built, str):
            built = _Numbers().of(built)
        entries.append((key, Entry(built, value.start_mark.line + 1)))
        if len(entries) > MOST_KEYS:
            raise ConfigError(f"more than {MOST_KEYS:,} keys")


def _resolved(key: str, entries: Mapping[str, Entry]) -> Entry:
    entry = entries[key]
    value: object = entry.value
    for _ in range(MOST_REFERENCES):
        if not isinstance(value, str) or "${" not in value:
            return replace(entry, value=value)
        match = _REFERENCE.search(value)
        if match is None:
            break
        found = _referenced(match[1].strip(), key, entries)
        if isinstance(found, Unresolved):
            return replace(entry, value=found)
        value = found if match[0] == value.strip() else value.replace(match[0], str(found), 1)
    return replace(entry, value=Unresolved(f"{entry.value} is not resolved; write the value"))


def _referenced(text: str, key: str, entries: Mapping[str, Entry]) -> object:
    name, colon, rest = text.partition(":")
    if colon and name in ("mul", "div", "add", "sub"):
        numbers = [_number(part.strip()) for part in rest.split(",")]
        if len(numbers) == 2 and all(type(one) in (int, float) for one in numbers):
            left, right = numbers
            assert isinstance(left, int | float) and isinstance(right, int | float)
            if name != "div" or right:
                result = {
                    "mul": left * right,
                    "add": left + right,
                    "sub": left - right,
                    "div": left / (right or 1),
                }[name]
                return int(result) if float(result).is_integer() else result
    if colon:
        return Unresolved(f"${{{text}}} is not resolved; write the value")
    if text.startswith("."):
        dots = len(text) - len(text.lstrip("."))
        text = ".".join([*key.split(".")[:-dots], text.lstrip(".")])
    if text not in entries:
        below = {one.removeprefix(f"{text}.") for one in entries if one.startswith(f"{text}.")}
        what = "is a table" if below else "is not given"
        return Unresolved(f"${{{text}}} {what}; write the value")
    return entries[text].value

"""Change each key of each family's config.json, as transformers' class lists them.

A key that changes transformers' logits changes the trainer's equally, or the configuration is
refused: the trainer reads every key that matters, also those that no list of ours names.

    python -m tests.contract.config_keys [KIND ...]    # every change, four minutes
"""

from __future__ import annotations

import copy
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contract.odd_configs import KINDS, Compared, compare_one, published_config

Key = tuple[str, ...]
NAMES = {"architectures", "model_type", "dtype", "transformers_version"}
"""What identifies the class, and the data type of all these models."""
WORDS = ("gelu", "softmax", "default", None)


def changes(value: object) -> list[object]:
    """Return other values of a key, of its type or null; empty for an object."""
    if isinstance(value, bool):
        return [not value, None]
    if isinstance(value, int):
        return [value + 1, 2 * value, value // 2, 0, None]
    if isinstance(value, float):
        return [2 * value + 0.25, value / 2, 0.0, None]
    if value is None:
        return [True, 2, 0.5]
    if isinstance(value, str):
        return [word for word in WORDS if word != value]
    if isinstance(value, list):
        ends = [[end] * len(value) for end in (value[0], value[-1])] if value else [[0], [1]]
        return [value[::-1], [], *ends]
    return []


def keys(hf: Mapping[str, Any], outer: Key = ()) -> Iterator[tuple[Key, object]]:
    """Iterate over the keys of a config.json, those of nested objects included, and their values."""
    for name, value in hf.items():
        if isinstance(value, dict):
            yield from keys(value, (*outer, name))
        elif name not in NAMES:
            yield (*outer, str(name)), value


def changed(hf: Mapping[str, Any], key: Key, value: object) -> dict[str, Any]:
    """Return a copy of a config.json with another value of a key."""
    copied = copy.deepcopy(dict(hf))
    inner = copied
    for name in key[:-1]:
        inner = inner[name]
    inner[key[-1]] = value
    return copied


def compare_keys(
    actor: Any, folder: str, *, every: bool, kinds: Sequence[str] = KINDS
) -> dict[tuple[str, str, str], Compared]:
    """Compare one change of each key, or ``every``; those of which transformers has no model are left out.

    Without ``every`` a kind and a key have the same change in each run.
    """
    found = {}
    for kind in kinds:
        base = published_config(kind)
        for key, value in keys(base):
            name = ".".join(key)
            others = changes(value)
            if not every and others:
                others = [others[zlib.crc32(f"{kind} {name}".encode()) % len(others)]]
            for other in others:
                path = Path(folder) / f"{kind}-{name}"
                compared = compare_one(actor, changed(base, key, other), path)
                if compared is not None:
                    found[kind, name, str(other)] = compared
    return found


def main(kinds: Sequence[str]) -> None:
    """Print the changes whose logits differ."""
    from tests.contract.actor_ranks import run_ranks
    from tests.contract.families import make_family
    from tests.settings import rank_config

    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            make_family(Path(folder), "qwen2.5")  # for the process groups alone
            settings = rank_config(folder, distributed_timeout_minutes=2)
            (found,) = run_ranks(compare_keys, 1, settings, folder=folder, every=True, kinds=[kind])
        print(kind, len(found), "compared")
        for change, compared in found.items():
            if compared.is_wrong:
                print(*change, compared.difference, *compared.differences)


if __name__ == "__main__":
    main(sys.argv[1:] or KINDS)

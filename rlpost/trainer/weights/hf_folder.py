"""What an exported Hugging Face folder has beside its weights. Standard library alone.

Input: the folder that a model came from. Output: its files that describe an export too, by an
allow-list, and the configuration of the exported weights. All else in the folder (other weights and
their indices, descriptions of quantised weights, adapters, states of trainers) describes the
original alone; readers would apply it to the export.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlpost.models.config_file import NESTED

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.*.json",  # variants for versions of transformers
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "tekken.json",
    "*.tiktoken",
    "*.model",  # of SentencePiece, and tiktoken.model of Kimi
    "tokenizer.model.*",
    "chat_template.*",
    "additional_chat_templates/*.jinja",
)
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
)
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
"""How images become tokens and pixels."""
NAMING_CODE = ("config.json", "tokenizer_config.json", *PROCESSOR_FILES)
"""Files whose ``auto_map`` names classes in Python files of the folder."""
ASSET_RECORD = ".rlpost-asset.json"
"""File of ``rlpost fetch`` in a folder: its repository and commit."""
QUANTISATION = ("quantization_config", "compression_config", "quantization")
"""Keys that describe quantised weights, to transformers, compressed-tensors and MLX."""
DTYPES = ("dtype", "torch_dtype")
"""transformers 5 prefers the first, older versions and engines read the second."""


def clean_config(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return config.json of weights in ``dtype`` that are not quantised, at every depth.

    >>> clean_config({"torch_dtype": "float16", "text_config": {"dtype": None}}, "float32")
    {'torch_dtype': 'float32', 'text_config': {'dtype': 'float32'}}
    """
    cleaned = _clean(config, dtype)
    text = cleaned.get(NESTED)
    places = [cleaned, text] if isinstance(text, Mapping) else [cleaned]
    says_dtype = any(key in place for place in places for key in DTYPES)
    return cleaned if says_dtype else cleaned | {"dtype": dtype}


def _clean(value: Any, dtype: str) -> Any:
    if isinstance(value, list):
        return [_clean(each, dtype) for each in value]
    if not isinstance(value, Mapping):
        return value
    return {
        key: dtype if key in DTYPES else _clean(each, dtype)
        for key, each in value.items()
        if key not in QUANTISATION
    }


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of the tokenizer and its chat templates. Raises OSError."""
    return [*_matching(folder, TOKENIZER_FILES), *_code(folder, ("tokenizer_config.json",))]


def processor_files(folder: Path) -> list[Path]:
    """Return the files that say how images become pixels and tokens. Raises OSError."""
    return [*_matching(folder, PROCESSOR_FILES), *_code(folder, PROCESSOR_FILES)]


def exported_files(folder: Path) -> list[Path]:
    """Return the files that an export of the folder's model has too. Raises OSError."""
    files = _matching(folder, (*MODEL_FILES, *PROCESSOR_FILES, *TOKENIZER_FILES))
    return [*files, *_code(folder, NAMING_CODE)]


def copy_files(files: list[Path], source: Path, target: Path) -> None:
    """Copy files of ``source`` to their places below ``target``. Raises OSError."""
    for file in files:
        copy = target / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _matching(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(paths)


def _code(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """The Python files that ``auto_map`` of these files names, and what they import of theirs."""
    waiting = [module for name in names for module in _modules_of(folder / name)]
    files: list[Path] = []
    while waiting:
        file = folder / f"{waiting.pop()}.py"
        if file.is_file() and file not in files:
            files.append(file)
            waiting += _relative_imports(file.read_bytes())
    return sorted(files)


def _modules_of(path: Path) -> Iterator[str]:
    """The modules that the ``auto_map`` of a JSON file names; not those of other repositories."""
    try:
        auto_map = json.loads(path.read_text()).get("auto_map")
    except (FileNotFoundError, ValueError, AttributeError):  # readers report a damaged file
        return
    values = list(auto_map.values()) if isinstance(auto_map, Mapping) else [auto_map]
    for value in values:
        for name in value if isinstance(value, list) else [value]:  # slow and fast tokenizer
            if isinstance(name, str) and re.fullmatch(r"\w+\.\w+", name):
                yield name.partition(".")[0]


def _relative_imports(code: bytes) -> list[str]:
    """The modules beside a Python file that it imports: ``from .x import y``, ``from . import x``."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):  # readers report it
        return []
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            modules += [node.module] if node.module else [alias.name for alias in node.names]
    return [module.partition(".")[0] for module in modules]


def name_base(folder: Path) -> tuple[str, str | None]:
    """Return the hub's name of a model and its commit, which users of an adapter need.

    Where neither ``rlpost fetch`` nor the hub's cache says it, the path and None.
    """
    try:
        record = json.loads((folder / ASSET_RECORD).read_text())
        return str(record["repository"]), str(record["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # CACHE/models--OWNER--NAME/snapshots/COMMIT
    cached, commit = folder.absolute().parent.parent.name, folder.name
    if folder.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/"), commit
    return str(folder), None

"""The configuration and the files of an export: an allow-list, and keys cleaned at every depth."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest

from rlpost.tasks.tokenizer import VOCABULARIES
from rlpost.trainer.weights.hf_folder import (
    ASSET_RECORD,
    DTYPES,
    QUANTISATION,
    clean_config,
    copy_files,
    exported_files,
    name_base,
    processor_files,
    tokenizer_files,
)

OTHER_KEYS = ("model_type", "rope_theta", "text_config", "layer_types", "architectures")


def random_config(dice: random.Random, depth: int = 0) -> Any:
    if depth == 4 or dice.random() < 0.2:
        return dice.choice([None, 1, "x", 0.5, True])
    if dice.random() < 0.2:
        return [random_config(dice, depth + 1) for _ in range(2)]
    keys = dice.sample((*OTHER_KEYS, *DTYPES, *QUANTISATION), 5)
    return {key: random_config(dice, depth + 1) for key in keys}


def leaves(value: Any, path: tuple[object, ...] = ()) -> dict[tuple[object, ...], Any]:
    if isinstance(value, dict):
        parts = [leaves(each, (*path, key)) for key, each in value.items()]
    elif isinstance(value, list):
        parts = [leaves(each, (*path, index)) for index, each in enumerate(value)]
    else:
        return {path: value}
    return {key: leaf for part in parts for key, leaf in part.items()}


def test_dtypes_and_quantisation_are_cleaned_at_every_depth_and_nothing_else_is() -> None:
    for seed in range(200):
        config = {"model_type": "x", "text_config": random_config(random.Random(seed))}
        before = copy.deepcopy(config)
        cleaned, found = clean_config(config, "float32"), {}
        assert config == before
        for path, value in leaves(cleaned).items():
            assert not {*path} & {*QUANTISATION}
            if {*path} & {*DTYPES}:
                assert path[-1] in DTYPES and value == "float32"
            else:
                found[path] = value
        kept = {*DTYPES, *QUANTISATION}
        assert found == {
            path: value for path, value in leaves(config).items() if not {*path} & kept
        }
        text = cleaned["text_config"]
        places = [cleaned, text] if isinstance(text, dict) else [cleaned]
        assert any(place.get(key) == "float32" for place in places for key in DTYPES)


@pytest.mark.parametrize("keys", [("dtype",), ("torch_dtype",), DTYPES, ()])
def test_each_name_of_the_dtype_that_the_base_has_is_set(keys: tuple[str, ...]) -> None:
    config = dict.fromkeys(keys)
    assert clean_config(config, "bfloat16") == dict.fromkeys(keys or ("dtype",), "bfloat16")


CODE = {
    "configuration_x.py": "import os\nfrom .util_x import a\nfrom . import deep_x\n",
    "util_x.py": "from .configuration_x import b\n",
    "deep_x.py": "from .missing import c\n",
    "tokenization_x.py": "not Python (",
    "modeling_x.py": "",
    "setup.py": "",
}


def test_every_file_by_which_a_tokenizer_is_known_is_exported(tmp_path: Path) -> None:
    """exo#1024: a folder of Kimi-K2 was copied without its tiktoken.model."""
    for name in VOCABULARIES:
        (tmp_path / name).touch()
    assert {file.name for file in tokenizer_files(tmp_path)} == {*VOCABULARIES}


def test_code_is_exported_if_auto_map_names_it_with_what_it_imports(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    for name, text in CODE.items():
        (source / name).write_text(text)
    hub = {"AutoModel": "org/repo--modeling_x.Model"}
    config = {"auto_map": {"AutoConfig": "configuration_x.Config", **hub}}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = {"auto_map": {"AutoTokenizer": ["tokenization_x.Tokenizer", None]}}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    names = {"configuration_x.py", "util_x.py", "deep_x.py", "tokenization_x.py"}
    files = exported_files(source)
    assert {file.name for file in files} == {*names, "config.json", "tokenizer_config.json"}
    of_tokenizer = {file.name for file in tokenizer_files(source)}
    assert of_tokenizer == {"tokenizer_config.json", "tokenization_x.py"}
    (source / "preprocessor_config.json").write_text("{}")
    assert [file.name for file in processor_files(source)] == ["preprocessor_config.json"]
    copy_files(files, source, target)
    assert {path.name: path.read_text() for path in target.glob("*.py")} == {
        name: CODE[name] for name in names
    }
    for text in ("", "[]", '{"auto_map": [1, "a"]}', '{"auto_map": "../x.y"}'):
        (source / "config.json").write_text(text)
        assert {file.suffix for file in exported_files(source)} == {".json", ".py"}


def test_a_base_is_named_as_the_hub_names_it(tmp_path: Path) -> None:
    commit = "0" * 40
    cached = tmp_path / "models--org--some-model/snapshots" / commit
    fetched = tmp_path / "model"
    for folder in (cached, fetched):
        folder.mkdir(parents=True)
    assert name_base(cached) == ("org/some-model", commit)
    assert name_base(fetched) == (str(fetched), None)
    record = {"repository": "org/model", "commit": commit, "files": {}}
    (fetched / ASSET_RECORD).write_text(json.dumps(record))
    assert name_base(fetched) == ("org/model", commit)

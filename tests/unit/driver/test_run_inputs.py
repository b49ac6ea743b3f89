"""Every file that decides results, replaced under its path, changes one digest and is named."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from rlpost.config import extensions
from rlpost.config.extensions import Extension, TextReward
from rlpost.config.load import load
from rlpost.config.tree import Config
from rlpost.driver.run_inputs import code_of, input_digests
from rlpost.durable.provenance import Provenance, changes

FILES = {
    "rewards/reward.py": "import helper\nfrom pkg.deep import x\ndef grade(**_): return 1.0\n",
    "rewards/helper.py": "from . import sibling\nimport numpy\n",
    "rewards/sibling.py": "A = 1\n",
    "rewards/pkg/__init__.py": "",
    "rewards/pkg/deep.py": "x = 1\n",
    "rewards/unrelated.py": "",
    "filter.py": "def keep(group): return True\n",
    "environment.py": "class Calculator: pass\n",
    "judge.toml": "template = 'x'\n",
    "held.jsonl": '{"input": "<image> <image>", "images": ["held.png", "gone.png"]}\n',
    "held.png": "pixels",
    "model/config.json": "{}",
    "model/tokenizer.json": "{}",
    "model/additional_chat_templates/tool_use.jinja": "x",
    "model/preprocessor_config.json": "{}",
    "model/model.safetensors": "",
}
NAMED_BY = {
    **dict.fromkeys(("rewards/reward.py", "rewards/helper.py"), "--custom-rm-path"),
    **dict.fromkeys(("rewards/sibling.py", "rewards/pkg/deep.py"), "--custom-rm-path"),
    "rewards/pkg/__init__.py": "--custom-rm-path",
    "filter.py": "--dynamic-sampling-filter-path",
    "environment.py": "--env",
    "judge.toml": "--judge",
    **dict.fromkeys(("held.jsonl", "held.png"), "evaluation set held"),
    "model/tokenizer.json": "the tokenizer in --hf-checkpoint",
    "model/additional_chat_templates/tool_use.jinja": "the tokenizer in --hf-checkpoint",
    "model/preprocessor_config.json": "the processor of images in --hf-checkpoint",
}
"""All others are weights, configuration, or not read."""


def config_of(root: Path) -> Config:
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    rollout = {
        "custom_rm_path": f"{root}/rewards/reward.py:grade",
        "dynamic_sampling_filter_path": f"{root}/filter.py:keep",
        "judge": str(root / "judge.toml"),
        "multimodal_keys": {"image": "images"},
    }
    return load(
        [],
        {
            "checkpoint": {"hf_checkpoint": str(root / "model")},
            "rollout": rollout,
            "eval": {"eval_prompt_data": ["held", f"{root}/held.jsonl@[0:1]"]},
            "env": {"env": [f"calc={root}/environment.py:Calculator"]},
        },
    ).config


@pytest.mark.parametrize("name", FILES)
def test_a_replaced_file_is_named_at_the_resume(tmp_path: Path, name: str) -> None:
    config = config_of(tmp_path)
    before = Provenance.of(config, {}, inputs=input_digests(config))
    before = Provenance.from_json(before.to_json())
    assert (
        changes(before, Provenance.of(config, {}, inputs=input_digests(config))).mathematics == ()
    )
    (tmp_path / name).write_text(FILES[name] + "\n")
    changed = changes(before, Provenance.of(config, {}, inputs=input_digests(config)))
    if name in NAMED_BY:
        (line,) = changed.mathematics
        assert line.startswith(f"content of {NAMED_BY[name]}") and " -> " in line
    else:
        assert changed.mathematics == () == changed.model


@pytest.mark.parametrize("name", ["", *NAMED_BY])
def test_a_file_that_is_replaced_at_another_place_is_named(tmp_path: Path, name: str) -> None:
    """A folder with a mended chat template and the same weights is a common one."""

    def at(folder: str) -> Provenance:
        config = config_of(tmp_path / folder)
        if name and folder == "moved":
            (tmp_path / folder / name).write_text(FILES[name] + "\n")
        return Provenance.of(config, {}, inputs=input_digests(config))

    lines = changes(at("here"), at("moved")).mathematics
    named = [line for line in lines if line.startswith("content of ")]
    assert len(named) == bool(name), named


def test_the_code_of_an_extension_of_another_package_is_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(tmp_path)
    code = tmp_path / "their_rewards.py"
    code.write_text("def score(text, label, metadata): return 1.0\n")
    theirs = Extension(name="theirs", text_rewards={"theirs": TextReward("their_rewards:score")})
    installed = (*extensions.extensions(), theirs)
    monkeypatch.setattr(extensions, "extensions", lambda: installed)
    before = Provenance.of(config, {}, inputs=input_digests(config))
    code.write_text("def score(text, label, metadata): return 0.0\n")
    (line,) = changes(before, Provenance.of(config, {}, inputs=input_digests(config))).mathematics
    assert line.startswith("content of extension theirs: ")


def test_code_is_found_by_file_and_by_module(tmp_path: Path, monkeypatch) -> None:
    config_of(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    names = ("helper", "pkg/__init__", "pkg/deep", "reward", "sibling")
    expected = sorted(tmp_path / f"rewards/{name}.py" for name in names)
    for word in (f"{tmp_path}/rewards/reward.py:grade", "rewards.reward.grade"):
        assert code_of(word) == expected
    assert code_of("rewards.reward:Class") == expected
    assert code_of("no.such.module") == []


@pytest.mark.parametrize("name", ["judge.toml", "held.jsonl", "environment.py"])
def test_an_input_that_cannot_be_read_is_not_a_changed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    config = config_of(tmp_path)
    before = Provenance.of(config, {}, inputs=input_digests(config))
    path_open, plain_open = io.open, open

    def fail(file: object, *more: object, **named: object) -> object:
        if file == tmp_path / name:
            raise OSError(5, "Input/output error")
        return path_open(file, *more, **named)  # type: ignore[call-overload]

    monkeypatch.setattr(io, "open", fail)  # of pathlib
    monkeypatch.setattr("builtins.open", fail)
    digests = input_digests(config)
    monkeypatch.setattr(io, "open", path_open)
    monkeypatch.setattr("builtins.open", plain_open)
    assert len(input_digests(config)) == len(digests) + 1
    assert changes(before, Provenance.of(config, {}, inputs=digests)).mathematics == ()

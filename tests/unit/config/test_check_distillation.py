"""Settings of distillation that are incomplete or contradict each other are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlpost.cli.engine_groups import group_folder_problems, vocabulary_problem
from rlpost.config import flags
from rlpost.config.checks.distillation import distillation_problems
from rlpost.config.load import dump, load, parse_dump, read_dump
from rlpost.errors import ConfigError
from tests.unit.cli.projects import MODEL, make_project

ON_SERVER = {"use_opd": True, "opd_teacher_url": "http://host:1"}
ON_ENGINES = {"use_opd": True, "opd_type": "sglang", "opd_teacher_engines": "teacher"}


@pytest.mark.parametrize("given", [{}, ON_SERVER, ON_ENGINES])
def test_a_teacher_that_is_complete_has_no_problems(given):
    assert distillation_problems(load([], {"distillation": given}).config) == []


def test_a_teacher_in_the_trainer_is_refused_with_the_remedy(tmp_path):
    """In slime's words, in a recipe, and in the record of an older run."""
    remedy = "use --opd-teacher-engines, or --opd-teacher-url"
    for words in (["--opd-type", "megatron"], ["--opd-teacher-load", "/t"],
                  ["--opd-teacher-hf-checkpoint", "/t"]):  # fmt: skip
        with pytest.raises(ConfigError, match=remedy):
            load([], flags.parse(flags.make_parser("rlpost", ""), words)[1])
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[distillation]\nopd_teacher_load = "/t"\n')
    with pytest.raises(ConfigError, match=f"unknown key 'opd_teacher_load'.*{remedy}"):
        load([recipe], {})
    older = json.loads(dump(load([], {"distillation": ON_SERVER}).config))
    older["distillation"] |= {"opd_type": "megatron", "opd_teacher_load": "/t"}
    config, gone = read_dump(json.dumps(older))
    assert config.distillation.use_opd and config.distillation.opd_type is None
    assert len(gone) == 2 and all(remedy in line for line in gone)
    with pytest.raises(
        ConfigError, match=r"--opd-type megatron: [^\n]*\n.*--opd-teacher-load /t: "
    ):
        parse_dump(json.dumps(older))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A recipe whose model has a tokenizer, and a teacher with two more layers."""
    folder = make_project(tmp_path)
    (folder / "model/tokenizer.json").write_text(tokenizer({"a": 0, "b": 1}))
    shutil.copytree(folder / "model", folder / "teacher")
    (folder / "teacher/config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": 4}))
    return folder


def tokenizer(vocab: dict[str, int], **more: int) -> str:
    added = [{"content": token, "id": number} for token, number in more.items()]
    return json.dumps({"model": {"vocab": vocab}, "added_tokens": added})


def checked(project: Path, **distillation: object) -> list[str]:
    tables = {
        "distillation": ON_ENGINES | distillation,
        "engines": {"teacher": {"model": str(project / "teacher")}},
    }
    config = load([project / "recipe.toml"], tables, base=project).config
    return list(group_folder_problems(config))


def test_a_teacher_of_another_size_is_accepted(project):
    assert checked(project) == []


def test_a_teacher_with_another_vocabulary_is_named_with_the_first_token_that_differs(project):
    (project / "teacher/tokenizer.json").write_text(tokenizer({"a": 0, "b": 2}))
    (problem,) = checked(project)
    assert "token 'b' has id 1" in problem and "needs a teacher with the same tokenizer" in problem


def test_a_teacher_with_fewer_columns_is_named(project):
    (project / "teacher/config.json").write_text(json.dumps(MODEL | {"vocab_size": 60}))
    (problem,) = checked(project)
    assert "vocab_size = 60 of the teacher is below 64" in problem


def test_tokens_that_one_folder_adds_are_compared_beside_equal_files(project):
    """As of Qwen2.5 and Qwen3, whose vocab.json is the same."""
    own, theirs = project / "model", project / "teacher"
    decoder = {"added_tokens_decoder": {"7": {"content": "<think>"}}}
    for folder in (own, theirs):
        (folder / "tokenizer.json").write_text(tokenizer({"a": 0, "b": 1}))
        (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    for folder, config in ((own, decoder), (theirs, {})):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "token '<think>' has id 7" in vocabulary_problem(own, theirs)
    assert vocabulary_problem(theirs, own) is None, "the teacher may have more tokens"
    for folder in (own, theirs):
        (folder / "tokenizer.json").unlink()
    assert vocabulary_problem(own, theirs) is None, "the teacher's folder does not name its tokens"
    (theirs / "added_tokens.json").write_text('{"<tool>": 7}')
    assert "token '<think>' has id 7" in vocabulary_problem(own, theirs)
    (theirs / "vocab.json").write_text('{"b": 0, "a": 1}')
    assert "vocab.json differs" in vocabulary_problem(own, theirs)


def test_vocabularies_are_compared_by_token_and_not_by_file(project):
    own, theirs = project / "model", project / "teacher"
    (own / "tokenizer.json").write_text(tokenizer({"a": 0, "b": 1}))
    (theirs / "tokenizer.json").write_text(tokenizer({"b": 1, "a": 0, "c": 2}))
    assert vocabulary_problem(own, theirs) is None, "the teacher may have more tokens"
    (own / "tokenizer.json").write_text(tokenizer({"a": 0, "b": 1}, end=3))
    assert "token 'end' has id 3" in vocabulary_problem(own, theirs)
    (theirs / "tokenizer.json").unlink()
    assert "no vocabulary file in common" in vocabulary_problem(own, theirs)


def test_more_tokens_than_the_vocabulary_has_are_named(project):
    (problem,) = checked(project, opd_form="loss", opd_top_k=1000)
    assert "--opd-top-k 1000 is more than vocab_size = 64" in problem

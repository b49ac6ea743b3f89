"""Settings of distillation that are incomplete or contradict each other are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from common.units import size_text
from rlpost.cli.check_settings import check, notes
from rlpost.cli.teacher_folder import vocabulary_problem
from rlpost.config.checks.distillation import distillation_problems
from rlpost.config.load import load
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.errors import ConfigError
from tests.unit.cli.projects import MODEL, make_project

IN_TRAINER = {"use_opd": True, "opd_type": "megatron", "opd_teacher_load": "/teacher"}
ON_SERVER = {"use_opd": True, "opd_type": "sglang", "opd_teacher_url": "http://host:1"}


def problems(distillation: dict[str, object], **groups: object) -> list[str]:
    config = load([], groups | {"distillation": distillation}).config
    return distillation_problems(config)


@pytest.mark.parametrize("given", [{}, IN_TRAINER, ON_SERVER])
def test_a_teacher_that_is_complete_has_no_problems(given):
    assert problems(given) == []


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


def checked(project: Path, **groups: object) -> list[str]:
    given = {"distillation": IN_TRAINER | {"opd_teacher_load": str(project / "teacher")}}
    config = load([project / "recipe.toml"], given | groups, base=project).config
    try:
        check(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_teacher_of_another_size_is_accepted(project):
    assert checked(project) == []


def test_the_memory_of_a_teacher_is_told(project):
    """Its weights in bfloat16: on a rank, and on a node of two ranks that each hold all of them."""
    given = {"distillation": IN_TRAINER | {"opd_teacher_load": str(project / "teacher")}}
    config = load([project / "recipe.toml"], given, base=project).config
    (note,) = [line for line in notes(config) if "teacher" in line]
    hf = json.loads((project / "teacher/config.json").read_text())
    each = 2 * hf_shape(hf).parameters.total
    assert f"{size_text(2 * each)} of host memory a node" in note
    assert f"{size_text(each)} on each GPU" in note


def test_a_teacher_with_another_vocabulary_is_named_with_the_first_token_that_differs(project):
    (project / "teacher/tokenizer.json").write_text(tokenizer({"a": 0, "b": 2}))
    (problem,) = checked(project)
    assert "token 'b' has id 1" in problem and "needs a teacher with the same tokenizer" in problem


def test_a_teacher_with_fewer_columns_is_named(project):
    (project / "teacher/config.json").write_text(json.dumps(MODEL | {"vocab_size": 60}))
    (problem,) = checked(project)
    assert "vocab_size = 60 of the teacher is below 64" in problem


def test_a_teacher_that_cannot_be_sharded_as_the_policy_is_is_named(project):
    odd = MODEL | {"num_hidden_layers": 3}
    (project / "teacher/config.json").write_text(json.dumps(odd))
    (problem,) = checked(project, perf={"pipeline_model_parallel_size": 2})
    assert "the teacher is sharded as the policy is" in problem and "--opd-type sglang" in problem


def test_a_folder_without_weights_is_named(project):
    (project / "teacher/model.safetensors").unlink()
    (problem,) = checked(project)
    assert "holds neither a torch_dist checkpoint nor *.safetensors" in problem


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
    more = {"opd_form": "loss", "opd_top_k": 1000}
    teacher = {"opd_teacher_load": str(project / "teacher")}
    config = load(
        [project / "recipe.toml"], {"distillation": IN_TRAINER | teacher | more}, base=project
    ).config
    with pytest.raises(ConfigError, match="--opd-top-k 1000 is more than vocab_size = 64"):
        check(config)

"""Records of passed checks: any change of the input asks for the check again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import common
import rlpost
from rlpost.cli import stack_check
from rlpost.cli.main import main
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.errors import DataError
from rlpost.tasks import passed_checks
from rlpost.tasks.passed_checks import MAX_RECORDS, PassedCheck, model_files
from rlpost.tasks.prompt_settings import check_prompts
from tests.image_model import noise
from tests.unit.cli.projects import make_project

FOLDER = passed_checks.cache_folder  # before a fixture replaces it
ROW = '{"input": "1+1="}\n'


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    """The folder of the records, which the first one creates."""
    folder = tmp_path / "caches/rlpost/passed_checks"
    monkeypatch.setattr(passed_checks, "cache_folder", lambda: folder)
    passed_checks._code.cache_clear()
    return folder


def passed(folder: Path, arguments: str = "a", name: str = "x") -> PassedCheck:
    return PassedCheck(name, arguments, lambda: model_files(folder))


@pytest.fixture
def model(tmp_path, caches) -> Path:
    """A model folder whose check is recorded."""
    folder = tmp_path / "model"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_text("weights")
    passed(folder).record()
    assert passed(folder).exists
    return folder


def change_content_but_neither_size_nor_time(folder: Path) -> None:
    path = folder / "tokenizer.json"
    times = path.stat()
    path.write_text("[]")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        change_content_but_neither_size_nor_time,
        lambda folder: (folder / "chat_template.jinja").touch(),
        lambda folder: (folder / "additional_chat_templates/tools.jinja").touch(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "tokenizer.json").rename(folder / "vocab.json"),
    ],
    ids=["content", "new file", "new template", "removed", "renamed"],
)
def test_any_change_of_a_file_asks_for_the_check_again(model, change):
    change(model)
    assert not passed(model).exists


def test_other_arguments_or_another_check_are_not_recorded_and_weights_do_not_count(model):
    (model / "model.safetensors").write_text("other weights")
    assert passed(model).exists
    assert not passed(model, arguments="b").exists
    assert not passed(model, name="y").exists


@pytest.mark.parametrize("file", ["rlpost/new_module.py", "site/transformers-9.9.dist-info"])
def test_another_version_of_rlpost_or_of_a_package_asks_again(model, tmp_path, monkeypatch, file):
    for name in ("rlpost", "site"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(passed_checks, "_SOURCES", (tmp_path / "rlpost",))
    monkeypatch.syspath_prepend(tmp_path / "site")
    passed_checks._code.cache_clear()
    passed(model).record()
    assert passed(model).exists
    (tmp_path / file).touch()
    passed_checks._code.cache_clear()
    assert not passed(model).exists


def test_input_that_changes_during_the_check_is_not_recorded(model):
    (model / "config.json").write_text("{}")
    begun = passed(model)
    (model / "config.json").write_text("[]")
    begun.record()
    assert not passed(model).exists
    (model / "config.json").write_text("{}")
    assert not passed(model).exists


def test_records_are_private_and_a_folder_that_others_can_enter_is_not_used(model, caches):
    (record,) = caches.iterdir()
    assert (caches.stat().st_mode & 0o777, record.stat().st_mode & 0o777) == (0o700, 0o600)
    caches.chmod(0o755)
    assert not passed(model).exists
    passed(model, arguments="b").record()
    assert list(caches.iterdir()) == [record]
    caches.chmod(0o700)
    record.unlink()
    record.mkdir()  # not a record
    assert not passed(model).exists


def test_the_oldest_records_are_removed(model, caches):
    (oldest,) = caches.iterdir()
    os.utime(oldest, (0, 0))
    for number in range(MAX_RECORDS - 1):
        (caches / str(number)).touch()
    passed(model, arguments="b").record()
    assert not oldest.exists() and passed(model, arguments="b").exists
    assert len(list(caches.iterdir())) == MAX_RECORDS


def test_without_a_usable_cache_folder_a_check_is_repeated(model, tmp_path, monkeypatch):
    monkeypatch.setattr(passed_checks, "cache_folder", lambda: tmp_path / "model/tokenizer.json/x")
    passed(model).record()
    assert not passed(model).exists


def test_the_folder_follows_the_base_directory_specification(monkeypatch):
    monkeypatch.setattr(passed_checks, "cache_folder", FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert passed_checks.cache_folder() == Path("/caches/rlpost/passed_checks")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert passed_checks.cache_folder() == Path("/home/me/.cache/rlpost/passed_checks")


def test_a_file_of_prompts_that_passed_is_not_parsed_again(tmp_path, caches, monkeypatch):
    parsed: list[str] = []

    def check(source: str, *arguments: object, **options: object) -> None:
        parsed.append(source)

    monkeypatch.setattr("rlpost.tasks.prompt_settings.check_prompt_file", check)
    path = tmp_path / "prompts.jsonl"
    path.write_text(ROW * 3)
    half, whole, texts = f"{path}@[0:1]", str(path), RolloutConfig(apply_chat_template=True)
    for source, settings in [(whole, RolloutConfig()), (half, RolloutConfig()), (whole, texts)]:
        check_prompts([source], settings)
        check_prompts([source], settings)
    assert parsed == [whole, half, whole]
    path.write_text(ROW * 4)
    check_prompts([whole], RolloutConfig(bad_prompts="skip"))
    check_prompts([whole], RolloutConfig(bad_prompts="skip"))
    assert parsed[3:] == [whole, whole], "skipped rows are reported each time"


def test_a_file_of_prompts_that_fails_fails_each_time(tmp_path, caches):
    path = tmp_path / "prompts.jsonl"
    path.write_text(ROW + "[]\n")
    for _ in range(2):
        with pytest.raises(DataError, match="line 2"):
            check_prompts([str(path)], RolloutConfig())


class NoProcess:
    """Stands for the process of the check and counts how often it is started."""

    started = 0
    output = '{"problems": [], "notes": []}'

    def __init__(self, *arguments: object, **options: object) -> None:
        type(self).started += 1
        self.stdin = open(os.devnull, "w")  # noqa: SIM115 - closed by the caller

    def communicate(self, timeout: float) -> tuple[str, None]:
        return self.output, None

    def poll(self) -> int:
        return 0

    kill = wait = poll


@pytest.fixture
def process(tmp_path, monkeypatch, caches) -> type[NoProcess]:
    made = type("Process", (NoProcess,), {})
    monkeypatch.setattr(stack_check.subprocess, "Popen", made)
    monkeypatch.setattr(stack_check, "_has_model", lambda config: True)
    monkeypatch.setattr(stack_check, "is_installed", lambda: True)
    make_project(tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return made


def test_check_starts_no_process_with_transformers_for_input_that_passed(process, capsys):
    for _ in range(2):
        assert main(["check", "recipe.toml"]) == 0
    assert process.started == 1
    assert main(["check", "recipe.toml", "--input-key", "prompt", "--seed", "7"]) == 0
    assert process.started == 2
    for file in ("model/tokenizer.json", "prompts.jsonl", "model/config.json"):
        before = process.started
        Path(file).write_text(Path(file).read_text() + "\n")
        assert main(["check", "recipe.toml"]) == 0
        assert process.started == before + 1, file


@pytest.mark.parametrize(
    "output",
    ['{"problems": ["p"], "notes": []}', '{"problems": [], "notes": ["n"]}', "killed"],
)
def test_a_check_with_a_problem_or_a_note_or_no_result_is_repeated(process, capsys, output):
    process.output = output
    for _ in range(2):
        main(["check", "recipe.toml"])
    assert process.started == 2


def test_a_family_of_another_package_is_checked_each_time(process, monkeypatch, capsys):
    """The digest holds that package's version, which stays while its author edits it."""
    monkeypatch.setattr(stack_check, "FAMILIES", {})
    for _ in range(2):
        main(["check", "recipe.toml"])
    assert process.started == 2


def test_a_record_is_about_the_whole_source_code():
    """Also after a move of the module."""
    roots = {Path(package.__file__).parent for package in (rlpost, common)}
    assert set(passed_checks._SOURCES) == roots


def test_prompts_are_checked_again_when_an_image_has_changed(tmp_path, caches):
    """Also if neither its size nor its time differs."""
    image, path = tmp_path / "a.png", tmp_path / "rows.jsonl"
    image.write_bytes(data := noise(40, 40))
    path.write_text('{"input": "<image>", "images": "a.png"}\n')
    rollout = RolloutConfig(multimodal_keys={"image": "images"}, apply_chat_template=True)
    check_prompts([str(path)], rollout)
    assert len(list(caches.iterdir())) == 1
    state = image.stat()
    image.write_bytes(bytes(len(data)))
    os.utime(image, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1: image 1: not an image"):
        check_prompts([str(path)], rollout)

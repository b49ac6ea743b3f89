"""The Hugging Face folder beside a checkpoint is complete or absent, and never ends a run."""

import asyncio
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

from common.modes import PRIVATE, USER_UMASK
from common.run_identity import settle_identity
from rlpost.config.checks.export_folder import MARKER, export_problems, folder_of, name_weights
from rlpost.config.groups.checkpoint import CheckpointConfig
from rlpost.driver.hf_export import HuggingFaceExport
from rlpost.errors import CheckpointError, Fenced


def writer(text, seen=()):
    async def write(folder):
        Path(folder, "config.json").write_text(text)
        for target in seen:
            assert not target.exists(), "it appears when it is whole"

    return write


def made_run(tmp_path, name="run"):
    run = tmp_path / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    return run


def export(template, step, write, *, run, **folders):
    settings = CheckpointConfig(
        save_hf=str(template), **{key: str(path) for key, path in folders.items()}
    )
    asyncio.run(HuggingFaceExport(settings, run).export(step, write))


def names(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "runs")


def test_the_name_of_an_export_contains_its_step():
    assert folder_of("/a/{step}/x-{rollout_id}", 7) == Path("/a/7/x-7")


def test_a_folder_appears_when_complete_and_follows_a_step_that_is_trained_again(tmp_path):
    template, target, run = f"{tmp_path}/hf-{{step}}", tmp_path / "hf-4", made_run(tmp_path)
    export(template, 4, writer("first", seen=[target]), run=run)
    export(template, 4, writer("again"), run=run)
    assert (target / "config.json").read_text() == "again"
    assert names(tmp_path) == ["hf-4"]


def test_a_template_without_a_step_is_one_folder_that_is_replaced(tmp_path):
    run = made_run(tmp_path)
    for text in ("first", "second"):
        export(tmp_path / "newest", 4, writer(text), run=run)
    assert (tmp_path / "newest/config.json").read_text() == "second"
    assert names(tmp_path) == ["newest"]


def test_a_run_whose_folder_was_moved_still_knows_its_export(tmp_path):
    export(tmp_path / "newest", 4, writer("first"), run=made_run(tmp_path))
    moved = tmp_path / "runs/moved"
    (tmp_path / "runs/run").rename(moved)
    export(tmp_path / "newest", 5, writer("second"), run=moved)
    assert (tmp_path / "newest/config.json").read_text() == "second"


@pytest.mark.parametrize(
    "error", [CheckpointError("no room"), OSError(28, "No space left on device")]
)
def test_a_failure_is_logged_and_leaves_no_partial_model(tmp_path, caplog, error):
    async def fail(folder):
        raise error

    run = made_run(tmp_path)
    export(f"{tmp_path}/hf-{{step}}", 4, fail, run=run)
    assert "are not exported" in caplog.text and not (tmp_path / "hf-4").exists()
    export(f"{tmp_path}/hf-{{step}}", 4, writer("later"), run=run)
    assert (tmp_path / "hf-4/config.json").exists()


@pytest.mark.parametrize("key", ["hf_checkpoint", "ref_load", "load", "save"])
@pytest.mark.parametrize("through", ["itself", "a link to it", "its parent"])
def test_folders_that_the_run_reads_or_saves_are_never_replaced(tmp_path, caplog, key, through):
    kept = tmp_path / "models" / "origin"
    kept.mkdir(parents=True)
    (kept / "model.safetensors").write_text("the only copy")
    (tmp_path / "link").symlink_to(kept)
    target = {"itself": kept, "a link to it": tmp_path / "link", "its parent": kept.parent}[through]
    export(target, 4, writer("new"), run=made_run(tmp_path), **{key: kept})
    assert (kept / "model.safetensors").read_text() == "the only copy"
    assert not (target / "config.json").exists()
    assert "--" + key.replace("_", "-") in caplog.text


def test_a_folder_with_other_files_is_left_alone(tmp_path, caplog):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    export(tmp_path / "mine", 4, writer("new"), run=made_run(tmp_path))
    assert names(tmp_path / "mine") == ["thesis.tex"]
    assert "not empty and no export of a run made it" in caplog.text


def test_a_foreign_file_in_the_export_is_kept(tmp_path, caplog):
    run = made_run(tmp_path)
    export(tmp_path / "newest", 4, writer("first"), run=run)
    (tmp_path / "newest/model.gguf").write_text("mine")
    export(tmp_path / "newest", 5, writer("second"), run=run)
    assert (tmp_path / "newest/model.gguf").read_text() == "mine" and "model.gguf" in caplog.text


def second_run(tmp_path, kind):
    """Return a run that is not the run "one", which has exported before."""
    if kind == "another run":
        return made_run(tmp_path, "two")
    return shutil.copytree(tmp_path / "runs/one", tmp_path / "runs/two")


@pytest.mark.parametrize("template", ["newest", "hf-{step}"])
@pytest.mark.parametrize("kind", ["another run", "a copy"])
def test_the_export_of_another_run_is_left_alone(tmp_path, caplog, template, kind):
    """At the check and at the export; its marker does not have the path of the run."""
    template, run = str(tmp_path / template), made_run(tmp_path, "one")
    export(template, 4, writer("theirs"), run=run)
    target, two = folder_of(template, 4), second_run(tmp_path, kind)
    settings, label = CheckpointConfig(save_hf=template), settle_identity(run).label
    (problem,) = export_problems(settings, two)
    assert f"--save-hf {template}: " in problem and f"another run, {label}" in problem
    assert export_problems(settings, run) == []
    export(template, 4, writer("ours"), run=two)
    assert (target / "config.json").read_text() == "theirs"
    assert f"export of another run, {label}" in caplog.text
    assert str(tmp_path) not in (target / MARKER).read_text()
    assert name_weights(target) == f"{label} step 4"


def test_a_step_that_the_run_does_not_reach_is_no_problem(tmp_path):
    template = f"{tmp_path}/hf-{{step}}"
    for name in ("hf-7", "hf-07", "hf-x", "hf-"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    settings = CheckpointConfig(save_hf=template)
    assert export_problems(settings, None, num_steps=6) == []
    (problem,) = export_problems(settings, None, num_steps=7)
    assert "hf-7: it is not empty and no export of a run made it" in problem


def test_a_reader_that_holds_files_does_not_stop_later_exports(tmp_path, monkeypatch):
    """As on NFS, where a held file stays as .nfs..., and the folder with it."""
    run, target, removals = made_run(tmp_path), tmp_path / "newest", []
    remove = shutil.rmtree

    def keep(folder, ignore_errors=False):
        removals.append(Path(folder))

    monkeypatch.setattr(shutil, "rmtree", keep)
    for step in (1, 2, 3, 4):
        export(target, step, writer(str(step)), run=run)
        assert (target / "config.json").read_text() == str(step)
    assert len({path for path in removals if path.exists()}) == 3
    monkeypatch.setattr(shutil, "rmtree", remove)
    export(target, 5, writer("5"), run=run)
    assert names(tmp_path) == ["newest"], "leftovers are removed once they can be"


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_an_export_has_the_modes_of_the_users_umask(tmp_path, monkeypatch, umask):
    """The processes of a job have 077. The setgid bit of a project's folder is inherited."""
    monkeypatch.setenv(USER_UMASK, f"{umask:03o}")
    project = tmp_path / "project"
    project.mkdir()
    project.chmod(0o2775)

    async def write(folder):
        private = os.open(f"{folder}/model.safetensors", os.O_CREAT | os.O_WRONLY, 0o600)
        os.close(private)
        Path(folder, "critic").mkdir(0o700)

    before = os.umask(PRIVATE)
    try:
        export(project / "hf/{step}", 4, write, run=made_run(tmp_path))
    finally:
        os.umask(before)
    for name in ("hf", "hf/4", "hf/4/critic"):
        assert (project / name).stat().st_mode & 0o7777 == 0o2777 & ~umask, name
    for name in ("model.safetensors", MARKER):
        assert (project / "hf/4" / name).stat().st_mode & 0o7777 == 0o666 & ~umask, name


def test_a_folder_that_appears_during_the_export_is_left_alone(tmp_path):
    target = tmp_path / "newest"

    async def write(folder):
        Path(folder, "config.json").write_text("new")
        target.mkdir()
        (target / "mine").write_text("x")

    export(target, 4, write, run=made_run(tmp_path))
    assert names(target) == ["mine"]


class Crashed(BaseException):
    """The process ends at this point."""


class CrashAt:
    """End the process before the n-th call, from 0, that renames or removes something."""

    def __init__(self, number, patch):
        self.left = number
        for module, name in ((os, "rename"), (shutil, "rmtree")):
            patch.setattr(module, name, partial(self.call, getattr(module, name)))

    def call(self, real, *arguments, **options):
        if self.left == 0:
            raise Crashed
        self.left -= 1
        return real(*arguments, **options)


def test_a_crash_at_any_instant_leaves_the_previous_export_or_the_new_one(tmp_path, monkeypatch):
    """The next export succeeds and leaves no other files."""
    outcomes = set()
    for number in range(20):
        folder = tmp_path / str(number)
        run, target = made_run(folder), folder / "newest"
        export(target, 1, writer("first"), run=run)
        crashed = False
        with monkeypatch.context() as patch:
            CrashAt(number, patch)
            try:
                export(target, 2, writer("second"), run=run)
            except Crashed:
                crashed = True
        found = [*folder.glob("newest/config.json"), *folder.glob(".newest.old-*/config.json")]
        assert found, number
        outcomes |= {path.read_text() for path in found}
        export(target, 3, writer("third"), run=run)
        assert (target / "config.json").read_text() == "third"
        assert names(folder) == ["newest"]
        if not crashed:
            break
    assert not crashed and number == 3 and outcomes == {"first", "second"}


def test_a_crash_between_the_two_renames_is_undone_first(tmp_path):
    """A later failing export must not leave the run without any export."""
    run, target = made_run(tmp_path), tmp_path / "newest"
    export(target, 1, writer("first"), run=run)
    target.rename(tmp_path / f".newest.old-{settle_identity(run).id}-x")

    async def fail(folder):
        raise CheckpointError("no room")

    export(target, 2, fail, run=run)
    assert (target / "config.json").read_text() == "first"


@pytest.mark.parametrize("when", ["before", "while"])
def test_an_older_attempt_does_not_overwrite_the_export_of_a_newer_one(tmp_path, when):
    run, target = made_run(tmp_path), tmp_path / "newest"
    export(target, 4, writer("newer"), run=run)
    is_fenced = when == "before"

    def check():
        if is_fenced:
            raise Fenced("another attempt")

    async def write(folder):
        nonlocal is_fenced
        is_fenced = True
        Path(folder, "config.json").write_text("older")

    exports = HuggingFaceExport(CheckpointConfig(save_hf=str(target)), run, check=check)
    with pytest.raises(Fenced):
        asyncio.run(exports.export(3, write))
    assert (target / "config.json").read_text() == "newer"


@pytest.mark.parametrize("when", ["resolve", "exists", "sync"])
def test_a_hanging_folder_is_named_and_not_waited_for(when, tmp_path, monkeypatch, caplog):
    """The first access included: the event loop goes on, and with it the run."""
    answers = threading.Event()

    class Hanging(type(tmp_path)):
        def resolve(self, strict=False):
            if when == "resolve":
                answers.wait(20)
            return self

        def exists(self):
            if when == "exists":
                answers.wait(20)
            return super().exists()

    settings = CheckpointConfig(save_hf=str(tmp_path / "newest"), save_deadline_s=0.2)
    exports = HuggingFaceExport(settings, made_run(tmp_path))
    module = "rlpost.driver.hf_export"
    monkeypatch.setattr(f"{module}.folder_of", lambda *_: Hanging(tmp_path / "newest"))
    if when == "sync":
        monkeypatch.setattr(f"{module}.sync", lambda path: answers.wait(20))
    try:
        asyncio.run(asyncio.wait_for(exports.export(4, writer("x")), 10))
    finally:
        answers.set()
    assert f"step 4 are not exported: {tmp_path}/newest hangs (no answer within 0 s)" in caplog.text

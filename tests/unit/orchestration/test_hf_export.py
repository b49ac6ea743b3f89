"""The Hugging Face folder beside a checkpoint: whole or not there, and never what ends a run."""

import asyncio
from pathlib import Path

import pytest

from rlpost.errors import CheckpointError
from rlpost.orchestration.hf_export import export, folder_of


def writer(text, seen=()):
    async def write(folder):
        Path(folder, "config.json").write_text(text)
        for target in seen:
            assert not target.exists(), "it appears when it is whole"

    return write


def test_the_step_stands_in_the_name(tmp_path):
    assert folder_of("/a/{step}/x-{rollout_id}", 7) == Path("/a/7/x-7")


def test_a_folder_appears_when_it_is_whole_and_is_not_written_twice(tmp_path):
    template, target = f"{tmp_path}/hf-{{step}}", tmp_path / "hf-4"
    asyncio.run(export(template, 4, writer("first", seen=[target])))
    asyncio.run(export(template, 4, writer("again")))
    assert (target / "config.json").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["hf-4"]


def test_a_template_without_a_step_is_one_folder_that_is_replaced(tmp_path):
    for text in ("first", "second"):
        asyncio.run(export(f"{tmp_path}/newest", 4, writer(text)))
    assert (tmp_path / "newest/config.json").read_text() == "second"
    assert [path.name for path in tmp_path.iterdir()] == ["newest"]


@pytest.mark.parametrize("error", [CheckpointError("no room"), OSError(28, "No space left on device")])
def test_a_failure_is_logged_and_leaves_nothing_that_looks_like_a_model(tmp_path, caplog, error):
    async def fail(folder):
        raise error

    asyncio.run(export(f"{tmp_path}/hf-{{step}}", 4, fail))
    assert "are not exported" in caplog.text and not (tmp_path / "hf-4").exists()
    asyncio.run(export(f"{tmp_path}/hf-{{step}}", 4, writer("later")))
    assert (tmp_path / "hf-4/config.json").exists()

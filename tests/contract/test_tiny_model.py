"""The tiny model is reproducible, readable by transformers and fit for tensor parallelism."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from rlpost.extensions.fetching.tiny_model import main
from tests.contract.conftest import ROOT

TOOL = [sys.executable, "-m", "rlpost.extensions.fetching.tiny_model"]
SHORT = ["--warmup-steps", "60"]


def test_the_tiny_model_is_made_once_and_reproducibly(tiny_model: Path, tmp_path: Path) -> None:
    """The same settings give the same bytes in two processes; a complete model is not written again."""
    before = {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()}
    said = subprocess.run(
        [*TOOL, "--out", str(tiny_model), *SHORT],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "already there" in said.stdout
    assert {path.name: path.stat().st_mtime_ns for path in tiny_model.iterdir()} == before
    two_steps = ["--data", str(tiny_model), "--warmup-steps", "2"]
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    assert main(["--out", str(ours), *two_steps]) == 0
    subprocess.run([*TOOL, "--out", str(theirs), *two_steps], cwd=ROOT, check=True)
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert set(before) - {path.name for path in theirs.iterdir()} == {
        "train.jsonl",
        "heldout.jsonl",
        "messages.jsonl",
    }


def test_transformers_reads_the_tiny_model_and_its_sizes_can_be_sharded(
    tiny_model: Path,
) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = (
        AutoConfig.from_pretrained(tiny_model),
        AutoTokenizer.from_pretrained(tiny_model),
    )
    assert config.tie_word_embeddings
    assert len(tokenizer) == config.vocab_size, "every id that can be sampled can be decoded"
    for parallel in (2, 4):
        sizes = (
            config.vocab_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.intermediate_size,
        )
        assert all(size % parallel == 0 for size in sizes)
    problem = json.loads((tiny_model / "train.jsonl").read_text().splitlines()[0])
    assert tokenizer.decode(tokenizer.encode(problem["prompt"])) == problem["prompt"]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|user|>1+1=<|assistant|>"
    assert len(tokenizer.encode(chat)) == 6

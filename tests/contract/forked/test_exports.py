"""Exports are read by transformers, SGLang and PEFT, and have what their weights need alone.

The base has files and keys that describe other weights: of another precision, quantised, adapters,
states of a trainer.
"""

from __future__ import annotations

import json
import shutil
from contextlib import redirect_stderr
from io import StringIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from rlpost.extensions.converting.convert import hf_to_torch_dist, torch_dist_to_hf
from tests.contract.actor_ranks import in_processes, run_ranks
from tests.contract.conftest import ROOT
from tests.contract.families import load_folder, make_family
from tests.contract.forked.forked_sglang import ForkedSglang
from tests.contract.lora_ranks import export_both_ways
from tests.contract.samples import STEPS
from tests.settings import rank_config

pytestmark = pytest.mark.timeout(300)
TRAPS = {
    "hf_quant_config.json": '{"quantization": {"quant_algo": "FP8"}}',
    "quantize_config.json": "{}",
    "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "x"}',
    "pytorch_model.bin.index.json": '{"weight_map": {"x": "x.bin"}}',
    "model.safetensors.index.fp32.json": "{}",
    "trainer_state.json": "{}",
    "modeling_unused.py": "",
    "requirements.txt": "x",
    "README.md": "x",
}
"""Files of the base that say nothing of an export."""
TOKENIZER = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
KEPT = {
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "x.tiktoken": "",
    "tokenizer.model.v3": "",
    "LICENSE.txt": "free",
    "NOTICE": "",
    "helpers_x.py": "MARK = 7\n",
    "configuration_x.py": "from transformers import Qwen3Config\nfrom .helpers_x import MARK\n"
    "class XConfig(Qwen3Config):\n    mark = MARK\n",
}
PATHS = ("merged", "converted")


def make_base(folder: Path) -> None:
    make_family(folder, "qwen3")
    for name in TOKENIZER:
        shutil.copy(ROOT / "assets/tiny" / name, folder)
    for name, text in (TRAPS | KEPT).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"dtype": "float16", "torch_dtype": None, "compression_config": {"bits": 4}}
    config["auto_map"] = {"AutoConfig": "configuration_x.XConfig"}
    path.write_text(json.dumps(config))


def convert_there_and_back(pipe: Connection, folder: Path) -> None:
    """Answer the exit codes and errors of the command's two directions."""
    base, kept = str(folder / "base"), str(folder / "kept")
    with redirect_stderr(StringIO()) as said:
        there = hf_to_torch_dist(["--hf-checkpoint", base, "--save", kept, "--bf16", "false"])
        words = ["--input-dir", kept, "--output-dir", str(folder / "converted")]
        back = torch_dist_to_hf([*words, "--origin-hf-dir", base, "--bf16", "false"])
    pipe.send((True, (there, back, said.getvalue())))


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    make_base(folder / "base")
    settings = rank_config(str(folder / "base"), lr=1e-2, lora_rank=4, lora_alpha=8.0)
    run_ranks(export_both_ways, 1, settings, steps=STEPS[:1], folder=str(folder))
    ((there, back, said),) = in_processes(convert_there_and_back, [(folder,)])
    assert (there, back) == (0, 0), said
    return folder


@pytest.mark.parametrize("name", PATHS)
def test_an_export_has_the_files_of_its_weights_alone(exports: Path, name: str) -> None:
    folder = exports / name
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    weights = {"model.safetensors", "config.json", "generation_config.json"}
    assert files == {*KEPT, *TOKENIZER, *weights}
    modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
    assert name == "merged" or len(modes) == 1, "safetensors writes files for their owner alone"


@pytest.mark.parametrize("name", PATHS)
def test_transformers_reads_an_export(exports: Path, name: str) -> None:
    import transformers

    folder = exports / name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tensors = load_folder(folder)
    state = model.state_dict()
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32} == {model.dtype}
    assert all(torch.equal(state[key], tensor) for key, tensor in tensors.items())
    if name == "converted":
        base = load_folder(exports / "base")
        assert all(torch.equal(base[key], tensor) for key, tensor in tensors.items())
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.mark == 7, "the code that auto_map names, and what it imports"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert {*tokenizer.chat_template} == {"default", "tool_use"}


@pytest.mark.parametrize("name", PATHS)
def test_sglang_reads_an_export_as_weights_that_are_not_quantised(
    forked: ForkedSglang, exports: Path, name: str
) -> None:
    assert forked.call(sglang_config, exports / name) == ("torch.float32", None)
    with pytest.raises(AssertionError, match="modelopt"):
        forked.call(sglang_config, exports / "base")


def sglang_config(folder: Path) -> tuple[str, str | None]:
    """Return dtype and quantisation that SGLang reads of a folder."""
    from sglang.srt.configs.model_config import ModelConfig

    config = ModelConfig(model_path=str(folder), dtype="auto")
    return str(config.hf_config.dtype), config.quantization


def test_peft_reads_adapters_whose_sum_with_the_base_is_the_merged_export(exports: Path) -> None:
    import peft
    import transformers

    folder = exports / "peft"
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    assert isinstance(config["lora_alpha"], int)
    base = transformers.AutoModelForCausalLM.from_pretrained(exports / "converted")
    whole = peft.PeftModel.from_pretrained(base, folder).merge_and_unload().state_dict()
    for key, tensor in load_folder(exports / "merged").items():
        assert torch.allclose(whole[key], tensor, rtol=0, atol=1e-6), key
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert {*tokenizer.chat_template} == {"default", "tool_use"}

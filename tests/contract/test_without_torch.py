"""transformers' classes imported without torch are those that are imported with it, also later."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

from rlpost.tasks.without_torch import DTYPES
from tests.contract.families import FAMILIES, VARIANTS, WITH_IMAGES, make_family_config

ROOT = Path(__file__).parents[2]
TEXT = "1 + 2 = <|end|>"
LOAD = """
import json, sys
from rlpost.tasks.tokenizer import hf_tokenizer
from rlpost.tasks.without_torch import load_hf_config

text, *folders = json.load(sys.stdin)
loaded = []
for folder in folders:
    tokenizer = hf_tokenizer(folder)
    kind = type(tokenizer).__qualname__
    config = load_hf_config(folder)
    loaded.append([kind, tokenizer.encode(text), type(config).__qualname__, config.to_dict()])
    assert "torch" not in sys.modules, folder
json.dump(loaded, sys.stdout)
"""
PLAIN = "from transformers import AutoConfig, AutoTokenizer"
DEFERRED = """
import importlib, sys
from rlpost.tasks.tokenizer import hf_tokenizer
from rlpost.tasks.without_torch import IMPORT_TORCH, imports_deferred
hf_tokenizer(FOLDER)
with imports_deferred():
    for name in IMPORT_TORCH:
        importlib.import_module(name)
assert "torch" not in sys.modules
"""
LATER = """
import importlib, json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, PreTrainedModel, WatermarkingConfig
from transformers.generation.configuration_utils import SynthIDTextWatermarkingConfig
from transformers.models.auto import auto_factory
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

class Remote(PreTrainedModel):
    def generate(self):
        return None

model = AutoModelForCausalLM.from_pretrained(FOLDER)
rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
frequencies, _ = ROPE_INIT_FUNCTIONS["linear"](transformers.LlamaConfig(rope_parameters=rope), "cpu")
watermarks = WatermarkingConfig(), SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1])
results = [
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False).tolist(),
    [type(one.construct_processor(64, "cpu")).__qualname__ for one in watermarks],
    list(map(str, auto_factory.add_generation_mixin_to_remote_model(Remote).__mro__)),
    frequencies.tolist(),
    str(transformers.AutoConfig.from_pretrained(FOLDER).dtype),
    transformers.AutoTokenizer.from_pretrained(FOLDER)("1", return_tensors="pt")["input_ids"].tolist(),
]
names = json.load(sys.stdin) or {
    name: [key for key in sorted(vars(module)) if not key.startswith("__")]
    for name, module in sys.modules.items()
    if name.split(".")[0] == "transformers" and type(module) is type(sys)
}
values = {
    f"{name}.{key}": str(getattr(value, "__qualname__", type(value)))
    for name, keys in names.items()
    for key in keys
    for value in [getattr(importlib.import_module(name), key)]
}
json.dump([names, values, results], sys.stdout)
"""


def run(code, given=None):
    result = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def without_dtypes(value):
    if isinstance(value, dict):
        return {key: without_dtypes(item) for key, item in value.items() if key not in DTYPES}
    return value


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_model):
    """The configuration of each family with each class that its tokenizer may name."""
    made = []
    for name in sorted({**FAMILIES, **VARIANTS, **WITH_IMAGES}):
        root = tmp_path_factory.mktemp("model")
        make_family_config(root, name)
        config = (root / "config.json").read_text()
        registered = TOKENIZER_MAPPING_NAMES.get(json.loads(config)["model_type"])
        for number, kind in enumerate(
            [None, "PreTrainedTokenizerFast", "Qwen2Tokenizer", registered]
        ):
            folder = root / str(number)
            folder.mkdir()
            (folder / "config.json").write_text(config)
            (folder / "tokenizer.json").write_bytes((tiny_model / "tokenizer.json").read_bytes())
            settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
            settings["tokenizer_class"] = kind
            if kind is None:
                del settings["tokenizer_class"]
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            made.append(str(folder))
    return made


def test_each_familys_tokenizer_and_configuration_load_without_torch_and_are_the_same(folders):
    found = run(LOAD, [TEXT, *folders])
    kinds = set()
    for folder, (kind, ids, config_kind, config) in zip(folders, found, strict=True):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = AutoConfig.from_pretrained(folder)
        assert (kind, ids) == (type(tokenizer).__qualname__, tokenizer.encode(TEXT)), folder
        assert config_kind == type(expected).__qualname__, folder
        as_json = json.loads(json.dumps(without_dtypes(expected.to_dict())))
        assert without_dtypes(config) == as_json, folder
        kinds.add(kind)
    assert len(kinds) > 2


def test_code_that_uses_torch_later_gets_the_same_names_and_results(tiny_model):
    later = f"FOLDER = {str(tiny_model)!r}\n"
    names, expected, results = run(later + PLAIN + LATER)
    _, values, later_results = run(later + DEFERRED + LATER, names)
    assert {name: value for name, value in expected.items() if values[name] != value} == {}
    assert later_results == results

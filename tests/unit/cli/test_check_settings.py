"""Errors about a model that are found before a job starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlpost.cli.check_settings import check
from rlpost.cli.main import main
from rlpost.config.load import load
from rlpost.durable.commit import checkpoint_name
from rlpost.errors import ConfigError
from tests.unit.cli.projects import MODEL, make_project


def problems(folder: Path, **groups) -> list[str]:
    config = load([folder / "recipe.toml"], groups, base=folder).config
    try:
        check(config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def write_model(folder: Path, **changes) -> None:
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | changes))


def test_an_option_of_the_model_that_is_not_supported_is_named(tmp_path):
    write_model(make_project(tmp_path), attention_bias=True)
    (problem,) = problems(tmp_path)
    assert "attention_bias=True is not supported" in problem


def test_an_option_of_the_model_that_engines_do_not_support_is_named(tmp_path):
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    write_model(make_project(tmp_path), **windows)
    (problem,) = problems(tmp_path)
    assert "window of 8 tokens, which SGLang ignores" in problem
    write_model(tmp_path, quantization_config={"quant_method": "mxfp4"})
    (problem,) = problems(tmp_path)
    assert "its weights are in MXFP4" in problem


def stated(folder, overrides=None, **arguments):
    """The problems with these MODEL_ARGS."""
    settings = {"model_args": arguments, "override_hf_config": overrides or {}}
    return problems(folder, checkpoint=settings)


def test_every_value_of_a_recipe_for_another_model_is_named(tmp_path):
    write_model(make_project(tmp_path), rope_theta=1e6, rms_norm_eps=1e-6)
    assert stated(tmp_path, num_layers=2, rotary_base=1000000) == []
    found = stated(tmp_path, num_layers=3, rotary_base=10000)
    assert [line.split()[0] for line in found] == ["--num-layers", "--rotary-base"]
    assert (
        "says 2; use --num-layers 2" in found[0]
        and "--override-hf-config rotary_base=10000" in found[1]
    )
    assert stated(tmp_path, {"rotary_base": 10000.0}, rotary_base="1e4") == []


def test_an_override_of_what_the_model_does_not_have_is_refused(tmp_path):
    write_model(make_project(tmp_path))
    (line,) = stated(tmp_path, {"moe_router_topk": 4, "norm_epsilon": 1e-5})
    assert "--override-hf-config moe_router_topk=4: the model has no such value" in line


def test_a_model_file_of_another_model_is_one_problem_with_one_remedy(tmp_path, capsys):
    """The remedy works: with it the same command finds no problem."""
    folder = make_project(tmp_path)
    recipe = folder / "recipe.toml"
    recipe.write_text(f"model = 'qwen3_4b'\n{recipe.read_text()}")
    words = ["check", str(recipe), "--hf-checkpoint", str(folder / "model")]
    words += ["--prompt-data", str(folder / "prompts.jsonl")]
    assert main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another model than jobs/models/qwen3_4b.json describes" in line
    assert "num_hidden_layers, hidden_size" in line and "use --model none to take" in line
    assert main([*words, "--model", "none"]) == 0


MIXTURE = {
    "architectures": ["Glm4MoeForCausalLM"],
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "tie_word_embeddings": False,
}
TRAINED = {"grpo": {"enable_mtp_training": True}}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({}, "this architecture has no layers for multi-token prediction here; use false"),
        (MIXTURE, "num_nextn_predict_layers = 0, and exactly one"),
        (
            MIXTURE | {"num_nextn_predict_layers": 2},
            "num_nextn_predict_layers = 2, and exactly one",
        ),
        (MIXTURE | {"num_nextn_predict_layers": 1}, "have no tensor model.layers.2.eh_proj.weight"),
    ],
)
def test_training_a_prediction_layer_that_model_or_weights_lack_is_refused(tmp_path, model, words):
    write_model(make_project(tmp_path), **model)
    assert problems(tmp_path) == []
    (problem,) = problems(tmp_path, **TRAINED)
    assert problem.startswith("--enable-mtp-training: ") and words in problem


def test_a_prediction_layer_with_weights_may_be_trained(tmp_path):
    write_model(make_project(tmp_path), **MIXTURE, num_nextn_predict_layers=1)
    index = {"metadata": {}, "weight_map": {"model.layers.2.eh_proj.weight": "model.safetensors"}}
    (tmp_path / "model/model.safetensors.index.json").write_text(json.dumps(index))
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.2.eh_proj.weight": entry}).encode()
    file = len(header).to_bytes(8, "little") + header
    (tmp_path / "model/model.safetensors").write_bytes(file)
    assert problems(tmp_path, **TRAINED) == []
    assert "--mtp-num-layers 3" in stated(tmp_path, mtp_num_layers=3)[0]


@pytest.mark.parametrize("files", [[], ["latest_checkpointed_iteration.txt"]])
def test_a_reference_that_is_no_checkpoint_is_named_with_the_tool_that_converts(tmp_path, files):
    make_project(tmp_path)
    (tmp_path / "reference").mkdir()
    for name in files:
        (tmp_path / "reference" / name).write_text("release")
    (problem,) = problems(tmp_path, checkpoint={"ref_load": "reference"})
    assert "--ref-load" in problem and "rlpost convert" in problem


@pytest.mark.parametrize(
    ("word", "part"), [("release", "release"), ("20", checkpoint_name(20)), (None, ".")]
)
def test_a_reference_is_found_by_its_tracker_file_or_in_the_folder_itself(tmp_path, word, part):
    make_project(tmp_path)
    made = tmp_path / "reference" / part
    made.mkdir(parents=True)
    (made / "metadata.json").write_text("{}")
    if word is not None:
        (tmp_path / "reference" / "latest_checkpointed_iteration.txt").write_text(word + "\n")
    assert problems(tmp_path, checkpoint={"ref_load": "reference"}) == []


def test_saving_into_a_folder_with_another_trainers_checkpoints_is_refused(tmp_path):
    """Checkpoints of Megatron-LM have the same names, so the save of that step would find one."""
    make_project(tmp_path)
    (tmp_path / "saved" / checkpoint_name(19)).mkdir(parents=True)
    (problem,) = problems(tmp_path, checkpoint={"save": "saved"})
    assert problem.startswith("--save ") and checkpoint_name(19) in problem
    (tmp_path / "saved" / checkpoint_name(19) / "MANIFEST.json").touch()
    assert problems(tmp_path, checkpoint={"save": "saved"}) == []


def test_an_exchange_that_the_attention_cannot_follow_is_refused_before_a_job(tmp_path):
    """From the table of attention backends, whatever GPUs the nodes have."""
    make_project(tmp_path)
    for given, said in (("all_gather", "has no packed rows"), ("a2a+p2p", "forms no groups")):
        found = problems(
            tmp_path,
            perf={"context_parallel_size": 2},
            megatron={"cp_comm_type": given},
        )
        assert any(f"--cp-comm-type {given}: " in line and said in line for line in found), found
    assert not any(
        "cp-comm-type" in line for line in problems(tmp_path, perf={"context_parallel_size": 2})
    )

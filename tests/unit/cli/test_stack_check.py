"""Odd models and prompts that only the installed transformers reveals, before a job starts."""

from __future__ import annotations

import json
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlpost.cli import row_check, stack_check
from rlpost.cli.main import main
from rlpost.cli.stack_check import StackCheck
from rlpost.config.load import load
from tests.unit.cli.projects import MODEL, make_project

QWEN3 = {key: value for key, value in MODEL.items() if key != "rope_theta"} | {
    "model_type": "qwen3",
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OVERRIDE = json.dumps({"rope_scaling": YARN | {"rope_theta": 1e4}})
LLAMA = QWEN3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def config(folder: Path, hf: dict[str, Any], **groups):
    make_project(folder)
    (folder / "model/config.json").write_text(json.dumps(hf))
    return load([folder / "recipe.toml"], groups, base=folder).config


def without(hf: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in hf.items() if key not in keys}


@pytest.mark.parametrize(
    "hf",
    [
        QWEN3,
        QWEN3 | {"rope_scaling": YARN | {"rope_theta": 1e4}},
        QWEN3 | {"rope_scaling": YARN, "rope_theta": 5e5},
        QWEN3 | {"num_key_value_heads": None},
        QWEN3 | {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        QWEN3 | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
        without(QWEN3, "dtype"),
        QWEN3 | {"dtype": "float32"},
        QWEN3 | {"eos_token_id": [1, 2]},
        QWEN3 | {"vocab_size": 101},
        QWEN3 | WINDOWS,
        LLAMA,
    ],
    ids=str,
)
def test_the_trainer_reads_an_odd_config_as_the_installed_transformers_does(tmp_path, hf):
    assert stack_check.model_problems(config(tmp_path, hf)) == ([], [])


@pytest.mark.parametrize(
    ("hf", "groups", "words"),
    [
        (
            QWEN3,
            {"sglang": {"sglang_json_model_override_args": OVERRIDE}},
            "rope.rope_type: the trainer has default, the engines yarn; write the value into "
            "config.json for both sides, without --sglang-json-model-override-args",
        ),
        (  # without a theta of its own SGLang takes 10000
            QWEN3 | {"rope_parameters": YARN | {"rope_theta": 5e5}},
            {"sglang": {"sglang_json_model_override_args": json.dumps({"rope_scaling": YARN})}},
            "rope.rope_theta: the trainer has 500000, the engines 10000",
        ),
        (
            QWEN3,
            {"checkpoint": {"override_hf_config": {"rotary_base": 5000}}},
            "rope.rope_theta: the trainer has 5000, the engines 10000; write the value into "
            "config.json instead of --override-hf-config rotary_base=5000",
        ),
        (
            QWEN3,
            {"sglang": {"sglang_json_model_override_args": '{"vocab_size": 96}'}},
            "vocab_size: the trainer has 64, the engines 96",
        ),
        (
            QWEN3 | {"sliding_window": None},
            {"sglang": {"sglang_json_model_override_args": '{"sliding_window": 8, "layer_types": null}'}},
            "sliding_window: the trainer has none in each layer, the engines 8 in each layer",
        ),
        (
            QWEN3,
            {"sglang": {"sglang_json_model_override_args": '{"eos_token_id": [1, 5]}'}},
            "eos_token_id: the trainer has 1, the engines 1 5",
        ),
        (
            QWEN3,
            {"sglang": {"sglang_json_model_override_args": "[1]"}},
            "--sglang-json-model-override-args [1]: must be a JSON object",
        ),
        (
            QWEN3,
            {"sglang": {"sglang_context_length": 1024}},
            "--sglang-context-length 1024: more than the 512 tokens of",
        ),
        (QWEN3 | {"head_dim": None}, {}, "refuses it: Validation error for field 'head_dim'"),
    ],
)  # fmt: skip
def test_a_value_that_differs_is_named_with_both_values_and_the_file(tmp_path, hf, groups, words):
    problems, notes = stack_check.model_problems(config(tmp_path, hf, **groups))
    assert notes == [] and any(words in line for line in problems), problems
    named = [line for line in problems if not line.startswith("--")]
    assert all(line.startswith(f"{tmp_path}/model/config.json: ") for line in named)


def test_the_end_token_of_a_class_of_transformers_is_named(tmp_path):
    """LlamaConfig has the end token 2, at which engines stop, if config.json has none."""
    made = config(tmp_path, without(LLAMA, "eos_token_id"))
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    ((problem,), _) = stack_check.model_problems(made)
    assert "eos_token_id: the trainer has 1 3, the engines 1 2 3" in problem


def test_a_model_type_that_only_engines_know_is_a_note(tmp_path):
    problems, (note,) = stack_check.model_problems(
        config(tmp_path, QWEN3 | {"model_type": "kimi_k2"})
    )
    assert problems == [] and "model_type 'kimi_k2' is not known to transformers here" in note


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{% if m.role != 'developer' %}{{ m.content }}{% endif %}{% endfor %}"
)


def chats(folder: Path, *rows: list[dict[str, str]], **rollout):
    text = "".join(json.dumps({"prompt": row, "label": "2"}) + "\n" for row in rows)
    made = config(folder, QWEN3, rollout={"apply_chat_template": True, **rollout})
    (folder / "prompts.jsonl").write_text(text)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "model/tokenizer_config.json").write_text(json.dumps(tokens))
    return made


def message(role: str, content: str = "1+1=") -> dict[str, str]:
    return {"role": role, "content": content}


GOOD = [message("user")]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([message("developer", "be brief"), message("user")], "leaves out message 1 (role 'developer')"),
        ([message("tool", "2")], "the chat template rejects the messages: no tools here"),
    ],
)  # fmt: skip
def test_a_prompt_that_the_template_refuses_is_named_with_its_line(tmp_path, row, words):
    """Also in one row of many, because its sequence of roles is rare."""
    made = chats(tmp_path, *[GOOD] * 700, row, *[GOOD] * 700)
    (problem,) = row_check.check_rows(made)[0]
    assert problem.startswith(f"--prompt-data: {tmp_path}/prompts.jsonl, line 701: ")
    assert words in problem
    skipping = chats(tmp_path / "skips", *[GOOD] * 3, row, bad_prompts="skip")
    assert row_check.check_rows(skipping)[0] == []


def test_the_template_of_older_processors_and_named_templates_are_read(tmp_path):
    made = chats(tmp_path, [message("tool")])
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast"}
    files = tmp_path / "model/tokenizer_config.json", tmp_path / "model/chat_template.json"
    files[0].write_text(json.dumps(tokens))
    assert "has no chat template" in row_check.check_rows(made)[0][0]
    files[1].write_text(json.dumps({"chat_template": TEMPLATE}))
    assert "no tools here" in row_check.check_rows(made)[0][0]
    files[1].unlink()
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "x"}]
    files[0].write_text(json.dumps(tokens | {"chat_template": named}))
    assert "no tools here" in row_check.check_rows(made)[0][0]


def test_a_tokenizer_of_another_model_is_named(tmp_path):
    made = config(tmp_path, QWEN3 | {"vocab_size": 1})
    (problem,) = row_check.check_rows(made)[0]
    assert "line 1: the tokenizer gives the id 1, and the model has vocab_size = 1" in problem


def test_special_tokens_in_messages_are_a_note_with_the_first_line_and_their_number(tmp_path):
    made = chats(tmp_path, GOOD, [message("user", "[END] x")], GOOD, [message("user", "x [END]")])
    core = json.loads((tmp_path / "model/tokenizer.json").read_text())
    token = {"id": 2, "content": "[END]", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    core["added_tokens"] = [token | flags]
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(core))
    problems, (note,) = row_check.check_rows(made)
    assert problems == []
    assert note.startswith(f"--prompt-data: {tmp_path}/prompts.jsonl, line 2: its text has '[END]'")
    assert "(2 rows)" in note


def test_the_longest_row_is_compared_with_the_models_context(tmp_path):
    made = chats(tmp_path, *[GOOD] * 200, [message("user", "1+1= " * 600)], *[GOOD] * 200)
    core = json.loads((tmp_path / "model/tokenizer.json").read_text())
    core["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(core))
    problems, (note,) = row_check.check_rows(made)
    assert problems == []
    assert "line 201: 2400 tokens leave none for an answer of the 506 that engines serve" in note
    limits = {"rollout_max_context_len": 512}
    limited = made.model_copy(update={"rollout": made.rollout.model_copy(update=limits)})
    assert row_check.check_rows(limited) == ([], [])


def test_a_supervised_row_is_shown_with_what_is_trained_of_it(tmp_path):
    made = config(tmp_path, QWEN3, grpo={"loss_type": "sft_loss"})
    core = json.loads((tmp_path / "model/tokenizer.json").read_text())
    core["model"]["vocab"] = {"[UNK]": 0, "<e>": 1, "ask": 2, "tell": 3}
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(core))
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>"}
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps(tokens))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ask", "label": "tell"}\n')
    problems, (shown, longest) = row_check.check_rows(made)
    assert problems == []
    assert (
        f"{tmp_path}/prompts.jsonl, line 1: trained is what ⟦ ⟧ enclose: 'ask⟦tell <e>⟧'" in shown
    )
    assert "the longest row that was tokenized, 3 tokens of the 512" in longest


@pytest.mark.slow
def test_check_and_submit_report_what_the_process_finds(tmp_path, monkeypatch, capsys):
    """The process gets no standard input on which a model folder could ask."""
    chats(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    given = ["recipe.toml", "--apply-chat-template", "--rollout-max-response-len", "64"]
    assert main(["check", *given]) == 0
    # a busy machine is told after 10 s what it waits for
    assert all(line.startswith("... ") for line in capsys.readouterr().err.splitlines())
    wrong = [*given, "--sglang-json-model-override-args", OVERRIDE]
    assert main(["check", *wrong]) == 2
    problem = "rope.rope_type: the trainer has default, the engines yarn"
    assert problem in capsys.readouterr().err
    monkeypatch.setattr(stack_check, "_has_model", lambda config: False)  # no third process
    monkeypatch.setattr(StackCheck, "finish", lambda self: ([problem], []))
    assert main(["submit", *wrong, "--local", "--container", "none"]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_transformers_one_note_says_when_the_job_checks(tmp_path, monkeypatch, capsys):
    make_project(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stack_check, "is_installed", lambda: False)
    assert main(["check", "recipe.toml"]) == 0
    assert "transformers is not installed here" in " ".join(capsys.readouterr().out.split())


DOUBLED = (
    "{% set ns = namespace(x='a' * 1024) %}"
    "{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
)
ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
SMALLER = """
import math, resource, sys, time
from rlpost.cli import stack_check
check_rows, stack_check.DATA_BYTES = stack_check.check_rows, 1 << 30
def limited(config):
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + {cpu_s}, 101))
    return check_rows(config)
stack_check.check_rows = limited
sys.exit(stack_check.main())
"""
"""The process of a check with smaller limits, so that the test takes neither. That of CPU time begins
after the imports, which take seconds.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "cpu_s", "what"),
    [(DOUBLED, 10, "1 GiB of memory"), (ENDLESS, 2, "100 s of CPU time")],
)
def test_a_template_that_takes_memory_or_never_ends_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, cpu_s: int, what: str
) -> None:
    """A slow machine alone is not: the limit is CPU time."""
    start = subprocess.Popen
    program = SMALLER.format(cpu_s=cpu_s)
    monkeypatch.setattr(
        subprocess, "Popen", lambda argv, **options: start([argv[0], "-c", program], **options)
    )
    monkeypatch.setattr(stack_check, "DEADLINE_S", 1200.0)
    settings = chats(tmp_path, GOOD)
    (tmp_path / "model/chat_template.jinja").write_text(template)
    check = StackCheck(settings)
    (problem,), notes = check.finish()
    folder = settings.checkpoint.hf_checkpoint
    assert problem == f"{folder}: its chat template or tokenizer took more than {what}"
    assert not notes
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10 < 2 << 30

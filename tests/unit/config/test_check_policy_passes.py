"""All passes of a policy compute the same policy: what makes them differ is refused but for SFT."""

from __future__ import annotations

import ast
import json
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.checks.policy_passes import DIFFERS, SAMPLES, pass_problems
from rlpost.config.flags import fields
from rlpost.config.load import load
from rlpost.config.megatron_options import CLASSES, OURS
from rlpost.config.model_arguments import NAMES
from rlpost.config.server_arg_values import COPY
from rlpost.config.sglang_variables import VARIABLES
from rlpost.config.tree import Config

SFT = {"loss_type": "sft_loss"}
HARMLESS = {
    "bias_dropout_fusion": "fuses an addition; the probability is 0",
    "inference_fuse_tp_communication": "of layers that use_inference_optimized_layers selects",
    "inference_rng_tracker": "of Megatron's inference engine, which is not used",
    "inference_sampling_seed": "of Megatron's inference engine",
    "moe_pad_expert_input_to_capacity": "needs moe_expert_capacity_factor",
    "moe_token_drop_policy": "needs moe_expert_capacity_factor",
    "moe_token_dropping": "needs moe_expert_capacity_factor",
}
"""Fields of Megatron-core whose words suggest that passes differ, and why they do not."""
OTHER: dict[str, Any] = {
    "debug_tensor_dump_input_file": "ids.npy",
    "dllm_algorithm": "LowConfidence",
    "forward_hooks": [{"name": "scale", "target_modules": ["model.norm"]}],
    "kt_weight_path": "/models/int4",
    "modelopt_quant": "fp8",
    "preferred_sampling_params": {"repetition_penalty": 1.05},
    "quantization": "fp8",
    "rl_quant_profile": "/models/profile.pt",
}
"""Values of the arguments of SGLang that are neither switches nor numbers."""
HARMLESS_ARGUMENTS = {
    "bf16_gemm_backend": "a kernel",
    "dllm_algorithm_config": "needs dllm_algorithm",
    "dllm_fdfo": "needs dllm_algorithm",
    "dsa_decode_backend": "a kernel of models that are not trained here",
    "dsa_paged_mqa_logits_backend": "a kernel of models that are not trained here",
    "dsa_prefill_backend": "a kernel of models that are not trained here",
    "dsv4_prefill_backend": "a kernel of models that are not trained here",
    "enable_custom_logit_processor": "for requests that name one; none does",
    "enable_int8_mamba_checkpoint": "the precision of cached states, as kv_cache_dtype that of the KV cache",
    "hisparse_config": "needs enable_hisparse",
    "int8_mamba_ckpt_size": "needs enable_int8_mamba_checkpoint",
    "json_model_override_args": "compared with the trainer's model by rlpost.cli.stack_check",
    "linear_attn_decode_backend": "a kernel",
    "linear_attn_prefill_backend": "a kernel",
    "linear_attn_verify_backend": "a kernel",
    "log_requests_level": "what the log has",
    "mlx_enable_sampling": "of another platform",
    "prefill_kv_cache_dequant_dtype": "the precision of a KV cache in FP4",
    "quantization_param_path": "scales of a KV cache in FP8",
    "random_seed": "of requests without a seed; the same for all weights",
    "sampling_backend": "a kernel",
    "sampling_defaults": "of chat endpoints; /generate reads no generation_config.json",
    "sampling_mask_max_tokens": "a bound on what is returned; an answer without masks is refused",
    "speculative_draft_model_quantization": "of the draft model, whose tokens the policy verifies",
    "speculative_use_rejection_sampling": "a way to verify drafted tokens that keeps the distribution",
    "strip_thinking_cache": "which tokens stay in the prefix cache",
}
"""Arguments of SGLang whose words suggest that answers or weights are not the policy's, and why they
are."""
SUSPECT_ARGUMENT = re.compile(
    r"sampl|log.?prob|temperature|top.p\b|penalt|truncat|reject|accept|think|spars|hook|quanti|override"
    r"|dllm|diffusion|dump_input|delete|random|stochastic|approx|logit|int4|int8|lossy|kt_weight"
    r"|modelopt_quant|quant_profile",
    re.I,
)
SUSPECT_VARIABLE = re.compile(
    r"SIMULATE|ORIGINAL|SANITIZE|PERTURB|SKIP_SOFTMAX|GREEDY_VERIFY|RANDOM|LOSSY|APPROX"
)
HARMLESS_VARIABLES = {
    "SGLANG_NGRAM_FORCE_GREEDY_VERIFY": "read by nothing",
    "SGLANG_SIMULATE_ACC_METHOD": "needs SGLANG_SIMULATE_ACC_LEN",
    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "needs SGLANG_SIMULATE_ACC_LEN",
    "SGLANG_KV_CANARY_PERTURB_TARGET_GROUP": "needs one of the probabilities",
    "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "needs one of the probabilities",
}
SUSPECT = re.compile(r"dropout|jitter|noise|random|stochastic|drop|capacity|inference|decod", re.I)


def config(**groups: Any) -> Config:
    return load([], groups).config


@pytest.mark.parametrize("name", DIFFERS)
def test_an_option_with_which_passes_differ_is_refused_with_every_loss_but_that_of_sft(
    name: str,
) -> None:
    for grpo in ({}, {"loss_type": "custom_loss"}):
        (problem,) = pass_problems(config(megatron={name: True}, grpo=grpo))
        flag = "--" + name.replace("_", "-")
        assert problem.startswith(f"{flag} true with --loss-type") and "leave it out" in problem
    assert pass_problems(config(megatron={name: True}, grpo=SFT)) == []
    assert pass_problems(config(megatron={name: False})) == []


@pytest.mark.parametrize("name", SAMPLES)
def test_an_engine_that_answers_otherwise_than_the_policy_is_refused(name: str) -> None:
    """mmcdermott/MEDS_EIC_AR#171: an engine cuts a long prompt, and says so in its log alone."""
    allowed, _ = SAMPLES[name]
    other = OTHER.get(name, not allowed if isinstance(allowed, bool) else 0.5)
    (problem,) = pass_problems(config(sglang={f"sglang_{name}": other}))
    flag = "--sglang-" + name.replace("_", "-")
    assert problem.startswith(f"{flag} ") and problem.endswith("; leave it out")
    for value in (allowed, None):
        assert (
            pass_problems(config(sglang={} if value is None else {f"sglang_{name}": value})) == []
        )
    assert pass_problems(config(sglang={f"sglang_{name}": other}, grpo=SFT)) == []
    for mode in ("debug_rollout_only", "debug_train_only"):
        assert pass_problems(config(sglang={f"sglang_{name}": other}, debug={mode: True})) == []


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_with_which_engines_answer_otherwise_is_refused_where_there_are_engines(
    name: str,
) -> None:
    """sgl-project/sglang#8375, huggingface/trl#4159: log-probs of another temperature."""
    given: dict[str, Any] = {"cluster": {"environment": {name: "1"}}}
    for grpo in ({}, SFT):
        problems = pass_problems(config(**given, grpo=grpo))
        generates = config(grpo=grpo).generates
        assert [one.partition(":")[0] for one in problems] == [
            f"--environment {name}=1"
        ] * generates
    assert pass_problems(config(**given, debug={"debug_train_only": True})) == []
    default, _ = VARIABLES[name]
    same = ["0", "False", "no"] if default is False else [str(default)] * (default is not None)
    for value in ("", *same):
        assert pass_problems(config(cluster={"environment": {name: value}})) == []
    for value in {"1", "0.5", "x"} | ({"0"} if default in (None, -1) else set()):
        assert pass_problems(config(cluster={"environment": {name: value}})) != []


def test_the_remedy_for_quantised_engines_is_not_what_the_user_has() -> None:
    """A folder in FP8 says itself how it is quantised."""
    (problem,) = pass_problems(config(sglang={"sglang_quantization": "fp8"}))
    assert problem.endswith("one in FP8 blocks, from its config.json; leave it out")


def test_dropout_of_adapters_is_for_sft() -> None:
    lora = {"lora_rank": 8, "lora_dropout": 0.1}
    (problem,) = pass_problems(config(lora=lora))
    assert problem.startswith("--lora-dropout 0.1 with --loss-type policy_loss")
    assert problem.endswith("use --lora-dropout 0")
    assert pass_problems(config(lora=lora, grpo=SFT)) == []
    assert pass_problems(config(lora=lora | {"lora_dropout": 0.0})) == []


def test_every_suspect_option_of_megatron_core_is_known() -> None:
    """By its name or description; a new version of Megatron-core adds rows."""
    spec = PathFinder.find_spec("megatron")
    if spec is None:
        pytest.skip("Megatron-core is not installed")
    (folder,) = spec.submodule_search_locations or ()
    source = (Path(folder) / "core" / CLASSES["TransformerConfig"]).read_text()
    suspects = set()
    for kind in ast.walk(ast.parse(source)):
        if not isinstance(kind, ast.ClassDef):
            continue
        for field, after in zip(kind.body, [*kind.body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                described = ast.unparse(after) if isinstance(after, ast.Expr) else ""
                first_sentence = described.partition(".")[0]
                if SUSPECT.search(f"{field.target.id} {first_sentence}"):
                    suspects.add(field.target.id)
    assert {"moe_input_jitter_eps", "hidden_dropout"} <= suspects
    known = {*DIFFERS, *HARMLESS, *OURS, *fields(), *NAMES}
    assert sorted(suspects - known) == []
    assert set(HARMLESS) <= suspects


def sglang_sources() -> Path:
    spec = PathFinder.find_spec("sglang")
    if spec is None:
        pytest.skip("SGLang is not installed")
    return Path(str(spec.origin)).parent / "srt"


def test_every_suspect_argument_of_sglang_is_known() -> None:
    """By its name or the first sentence of its help; a new version of SGLang adds rows."""
    arguments, suspects = set(), set()
    for file in (sglang_sources() / "arg_groups" / "fields").glob("*.py"):
        for kind in ast.parse(file.read_text()).body:
            if not isinstance(kind, ast.ClassDef):
                continue
            for field in kind.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    arguments.add(field.target.id)
                    words = f"{field.target.id} {first_sentence_of_help(field.annotation)}"
                    if SUSPECT_ARGUMENT.search(words):
                        suspects.add(field.target.id)
    later = json.loads(COPY.read_text())["later"].values()
    added = {name for table in later for name, said in table.items() if said is not None}
    suspects |= {name for name in added if SUSPECT_ARGUMENT.search(name)}
    assert set(SAMPLES) <= suspects and set(SAMPLES) <= arguments
    suspects = {name for name in suspects if not name.startswith("_")}  # no arguments
    assert sorted(suspects - {*SAMPLES, *HARMLESS_ARGUMENTS}) == []
    assert set(HARMLESS_ARGUMENTS) <= suspects


def first_sentence_of_help(annotation: ast.expr) -> str:
    """Of an argument of SGLang; empty if its help is no plain text."""
    for one in ast.walk(annotation):
        if isinstance(one, ast.keyword) and one.arg == "help":
            text = one.value.value if isinstance(one.value, ast.Constant) else ""
            return str(text).partition(". ")[0]
    return ""


def test_every_suspect_variable_of_sglang_is_known() -> None:
    source = (sglang_sources() / "environ.py").read_text()
    names = set(re.findall(r"^    (SGLANG_\w+) = ", source, re.M))
    defaults = dict(re.findall(r"^    (SGLANG_\w+) = Env\w+\((.+)\)$", source, re.M))
    for name, (default, _) in VARIABLES.items():
        assert ast.literal_eval(defaults[name]) == default
    assert set(VARIABLES) <= names and set(HARMLESS_VARIABLES) <= names
    suspects = {name for name in names if SUSPECT_VARIABLE.search(name)}
    assert suspects == {*VARIABLES, *HARMLESS_VARIABLES}

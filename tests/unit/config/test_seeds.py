"""Command lines of published GRPO recipes, flag for flag as their scripts pass them, mean here what
they mean there.

``tests/data/seeds/*.args`` holds the arrays of those scripts, as bash would read them. Each is
parsed by the real command line of ``python -m rlpost.train``, and each flag is looked up in the
resolved settings.
"""

import os
import subprocess
from pathlib import Path

import pytest

from rlpost.cli.command_line import make_parser
from rlpost.cli.secret_file import take_keys
from rlpost.config import flags
from rlpost.config.checks.layout import layout_problems
from rlpost.config.load import load
from rlpost.config.megatron_options import option_problems
from rlpost.config.model_arguments import NAMES, problems
from rlpost.engines.server_args import check_server_args

SEEDS = Path(__file__).parents[2] / "data/seeds"

FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
KEY = "0123456789abcdef0123456789abcdef01234567"
QWEN_MODEL = {
    "swiglu": True, "num_layers": 36, "hidden_size": 2560, "ffn_hidden_size": 9728, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 8, "use_rotary_position_embeddings": True,
    "disable_bias_linear": True, "normalization": "RMSNorm", "norm_epsilon": 1e-6, "rotary_base": 10000,
    "vocab_size": 151936, "kv_channels": 128, "qk_layernorm": True,
}  # fmt: skip
GLM_MODEL = {
    "swiglu": True, "num_layers": 40, "hidden_size": 4096, "ffn_hidden_size": 13696, "num_attention_heads": 32,
    "group_query_attention": True, "num_query_groups": 2, "use_rotary_position_embeddings": True,
    "no_rope_fusion": True, "disable_bias_linear": True, "add_qkv_bias": True, "normalization": "RMSNorm",
    "norm_epsilon": 1e-5, "rotary_base": 10000, "rotary_percent": 0.5, "rotary_interleaved": True,
    "vocab_size": 151552, "untie_embeddings_and_output_weights": True, "post_self_attn_layernorm": True,
    "post_mlp_layernorm": True,
}  # fmt: skip
GLM45_MODEL = {
    "num_layers": 92, "hidden_size": 5120, "ffn_hidden_size": 12288, "num_attention_heads": 96,
    "group_query_attention": True, "num_query_groups": 8, "kv_channels": 128, "add_qkv_bias": True,
    "qk_layernorm": True, "disable_bias_linear": True, "swiglu": True, "normalization": "RMSNorm",
    "use_rotary_position_embeddings": True, "rotary_base": 1000000, "rotary_percent": 0.5,
    "untie_embeddings_and_output_weights": True, "vocab_size": 151552, "num_experts": 160,
    "moe_layer_freq": (0,) * 3 + (1,) * 89, "moe_ffn_hidden_size": 1536, "moe_shared_expert_intermediate_size": 1536,
    "moe_router_topk": 8, "moe_router_topk_scaling_factor": 2.5, "moe_router_score_function": "sigmoid",
    "moe_router_pre_softmax": True, "moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": 0,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_router_dtype": "fp32",
    "moe_token_dispatcher_type": "alltoall", "moe_token_drop_policy": "probs", "moe_grouped_gemm": True,
    "moe_permute_fusion": True, "moe_aux_loss_coeff": 0,
}  # fmt: skip
COMMON = {
    "input_key": "prompt", "label_key": "label", "apply_chat_template": True, "rollout_shuffle": True,
    "prompt_data": ("/root/dapo-math-17k/dapo-math-17k.jsonl",), "rm_type": "deepscaler", "num_rollout": 3000,
    "rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_max_response_len": 8192, "balance_data": True,
    "save_interval": 20, "n_samples_per_eval_prompt": 16, "eval_max_response_len": 16384,
    "tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1, "recompute_granularity": "full",
    "recompute_method": "uniform", "recompute_num_layers": 1, "use_dynamic_batch_size": True,
    "advantage_estimator": "grpo", "use_kl_loss": True, "kl_loss_coef": 0.0, "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.0, "eps_clip": 0.2, "eps_clip_high": 0.28, "optimizer": "adam", "lr": 1e-6,
    "lr_decay_style": "constant", "weight_decay": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.98,
    "rollout_num_gpus_per_engine": 2,
}  # fmt: skip
MEANT = {
    "model-qwen3-4b": QWEN_MODEL,
    "model-glm4-9b": GLM_MODEL,
    "model-glm45-355b": GLM45_MODEL,
    "qwen3-4b": COMMON
    | {
        "actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "colocate": True, "hf_checkpoint": "/root/Qwen3-4B",
        "ref_load": "/root/Qwen3-4B_torch_dist", "load": "/root/Qwen3-4B_slime", "save": "/root/Qwen3-4B_slime",
        "rollout_temperature": 0.8, "num_steps_per_rollout": 1, "eval_interval": 5,
        "eval_prompt_data": ("/root/aime-2024/aime-2024.jsonl",), "eval_top_p": 0.7, "context_parallel_size": 1,
        "max_tokens_per_gpu": 9216, "sglang_mem_fraction_static": 0.7,
    },
    "qwen3-4b-decoupled": {
        "actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "sglang_server_concurrency": 160,
        "sglang_cuda_graph_bs": [1, 2, 4, 8, *range(16, 257, 8)],
    },
    "qwen3-4b-fp8": {"hf_checkpoint": "/root/Qwen3-4B-FP8"},
    "glm-z1-9b": COMMON
    | {
        "actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4,
        "hf_checkpoint": "/root/GLM-Z1-9B-0414", "ref_load": "/root/GLM-Z1-9B-0414_torch_dist",
        "load": "/root/GLM-Z1-9B-0414_slime", "save": "/root/GLM-Z1-9B-0414_slime", "rollout_temperature": 1.0,
        "global_batch_size": 256, "eval_interval": 20,
        "eval_prompt_data": ("aime", "/root/aime-2024/aime-2024.jsonl"), "eval_top_p": 1.0,
        "context_parallel_size": 2, "max_tokens_per_gpu": 4608,
    },
    "scaling-one-node": {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8},
    "glm45-355b": {
        "colocate": True, "actor_num_nodes": 8, "actor_num_gpus_per_node": 8, "num_gpus_per_node": 8,
        "tensor_model_parallel_size": 8, "sequence_parallel": True, "pipeline_model_parallel_size": 4,
        "context_parallel_size": 2, "expert_model_parallel_size": 16, "expert_tensor_parallel_size": 1,
        "sglang_mem_fraction_static": 0.8, "optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True,
        "overlap_grad_reduce": True, "use_precision_aware_optimizer": True,
    },
    "dynamic-sampling": {
        "rollout_batch_size": 32, "n_samples_per_prompt": 8, "over_sampling_batch_size": 64,
        "dynamic_sampling_filter_path": FILTER,
    },
    "partial-rollout": {
        "over_sampling_batch_size": 256, "rollout_batch_size": 128, "dynamic_sampling_filter_path": FILTER,
        "partial_rollout": True, "buffer_filter_path": "slime.rollout.filter_hub.buffer_filters.pop_first",
    },
    "wandb": {"use_wandb": True, "wandb_project": "slime-large-scale", "wandb_group": "glm45-355b"},
    "checkpoint": {"save": "/shared/checkpoints/model", "save_interval": 20, "async_save": True, "no_save_optim": True},
    "reward": {"custom_rm_path": "my_rewards.score"},
    "troubleshooting": {
        "distributed_timeout_minutes": 20, "global_batch_size": 256, "sglang_mem_fraction_static": 0.7,
        "max_tokens_per_gpu": 4608, "recompute_granularity": "full", "optimizer_cpu_offload": True,
        "balance_data": True, "rollout_batch_size": 64, "micro_batch_size": 1,
    },
}  # fmt: skip


def words_of(name):
    """The words of a file, as bash makes them out of an array."""
    script = f"words=(\n{(SEEDS / name).with_suffix('.args').read_text()}\n)\nprintf '%s\\0' \"${{words[@]}}\""
    environ = {**os.environ, "OVER_SAMPLING_BS": "64", "WANDB_KEY": KEY}
    done = subprocess.run(
        ["bash", "-fc", script], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def without(words, left_out):
    """Words less the flags ``left_out`` and their values."""
    kept, keeps = [], True
    for word in words:
        keeps = word not in left_out if word.startswith("--") else keeps
        kept += [word] if keeps else []
    return kept


def resolved(words):
    """Every setting that the words give, by its key, and the whole."""
    _, values = flags.parse(make_parser("python -m rlpost.train", ""), words)
    config = load([], values).config
    given = {}
    for group, entries in values.items():
        node = getattr(config, group)
        given |= {key: getattr(node, key) for key in entries}
    return given | given.pop("model_args", {}), config


def test_every_file_has_its_meanings():
    assert {path.stem for path in SEEDS.glob("*.args")} == MEANT.keys()


@pytest.mark.parametrize("name", MEANT)
def test_a_command_line_of_the_recipes_means_here_what_it_means_there(name):
    """Every flag is accepted and sets the key of its name, without a recipe, and nothing else is
    set.
    """
    environ = {}
    words = take_keys(words_of(name), environ)
    given, config = resolved(words)
    meant = MEANT[name]
    others = {key: value for key, value in given.items() if key not in NAMES}
    assert others == {key: value for key, value in meant.items() if key not in NAMES}
    arguments = {key: given[key] for key in given.keys() & NAMES}
    assert arguments.keys() == meant.keys() & NAMES and problems(arguments, meant) == []
    assert environ == ({"WANDB_API_KEY": KEY} if name == "wandb" else {})
    check_server_args(config.sglang.server_args)
    assert option_problems(config.megatron.options) == []


@pytest.mark.parametrize(
    ("model", "recipe", "num_nodes", "data_parallel_size"),
    [("model-qwen3-4b", "qwen3-4b-decoupled", 1, 2), ("model-glm4-9b", "glm-z1-9b", 1, 1)],
)
def test_a_whole_recipe_fits_the_nodes_that_it_needs(model, recipe, num_nodes, data_parallel_size):
    """Arrays one behind the other, as the scripts pass them; nobody says how many nodes the job
    has.
    """
    _, config = resolved([*words_of(model), *words_of(recipe)])
    assert (config.num_nodes, config.data_parallel_size) == (num_nodes, data_parallel_size)
    assert layout_problems(config) == []


def test_an_evaluation_set_without_a_name_has_that_of_its_file():
    _, config = resolved(["--eval-prompt-data", "/root/aime-2024/aime-2024.jsonl"])
    assert config.eval_sets == (("aime-2024", "/root/aime-2024/aime-2024.jsonl"),)


@pytest.mark.parametrize(
    ("words", "num_nodes"),
    [
        ([], 2),
        (["--rollout-num-gpus", "24"], 4),
        (["--actor-num-gpus-per-node", "6", "--rollout-num-gpus", "4"], 2),
        (["--rollout-num-gpus", "32", "--rollout-num-gpus-per-engine", "16"], 5),
        (["--colocate"], 1),
        (["--nodes", "3"], 3),
    ],
)
def test_engines_beyond_the_trainer_s_nodes_get_nodes_of_their_own(words, num_nodes):
    _, config = resolved([*words_of("scaling-one-node"), *words])
    assert config.num_nodes == num_nodes
    assert layout_problems(config) == []

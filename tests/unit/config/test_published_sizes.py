"""The planner counts as many parameters as the makers of each model publish, to their last digit.

``tests/contract/test_parameter_count.py`` compares small models of the same families with
transformers to the last parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rlpost.config.model_file import MODELS, read_model
from rlpost.config.plan.hf_shape import hf_shape
from rlpost.config.plan.shape import Shape


def total(shape: Shape) -> int:
    return shape.parameters.total


def embedding(shape: Shape) -> int:
    """The embedding and, where it is another matrix, the output layer."""
    return shape.vocab * shape.hidden * (1 if shape.tied else 2)


def without_embedding(shape: Shape) -> int:
    return total(shape) - embedding(shape)


def prediction_layer(shape: Shape) -> int:
    """The layer for multi-token prediction, without what it shares with the model."""
    return total(replace(shape, mtp=True)) - total(shape)


def with_prediction_layer(shape: Shape) -> int:
    """Layers and the one for multi-token prediction, without the embedding and the output layer."""
    return without_embedding(shape) + prediction_layer(shape)


def as_stored(shape: Shape) -> int:
    """With the layer for multi-token prediction and its copies of what it shares."""
    return total(shape) + prediction_layer(shape) + embedding(shape)


def experts_and_router(shape: Shape) -> int:
    """What gpt-oss' model card calls MLP: the experts and their router, with biases."""
    return shape.parameters.expert + sum(shape.sparse) * shape.num_experts * (shape.hidden + 1)


def active(shape: Shape) -> int:
    """Parameters that a token uses, all of them where there are no experts."""
    experts = shape.parameters.expert
    return total(shape) - experts + experts * shape.topk // shape.num_experts


HUB = "the hub's count of the elements of"
GLM45 = "arXiv 2508.06471, table 1: with the layer for multi-token prediction, without embeddings"
GPT_OSS = "gpt-oss model card, arXiv 2508.10925, table 1"
PUBLISHED: list[tuple[str, Callable[[Shape], int], float, int, str]] = [
    # model, what is counted, billions, decimals that are published, where
    ("deepseek_v3", total, 671, 0, "arXiv 2412.19437, abstract"),
    ("deepseek_v3", as_stored, 684.4898304, 7, f"{HUB} deepseek-ai/DeepSeek-V3 in BF16 and FP8"),
    ("kimi_k2", total, 1000, -3, "moonshotai/Kimi-K2-Instruct, model card: 1T"),
    ("kimi_k2", total, 1026.408, 3, f"{HUB} moonshotai/Kimi-K2-Instruct"),
    ("glm45_355b", with_prediction_layer, 355, 0, GLM45),
    ("glm47_flash", total, 30, 0, "zai-org/GLM-4.7-Flash, model card"),
    ("qwen3_next_80b_a3b", total, 80, 0, "Qwen/Qwen3-Next-80B-A3B-Instruct, model card"),
    ("qwen3_next_80b_a3b", without_embedding, 79, 0, "the same"),
    ("minimax_m2_230b", total, 230, -1, "MiniMaxAI/MiniMax-M2, model card"),
    ("gpt_oss_120b", total, 116.83, 2, GPT_OSS),
    ("gpt_oss_120b", experts_and_router, 114.71, 2, GPT_OSS),
    ("gpt_oss_120b", embedding, 1.16, 2, GPT_OSS),
    ("gpt_oss_20b", total, 20.91, 2, GPT_OSS),
    ("gpt_oss_20b", experts_and_router, 19.12, 2, GPT_OSS),
    ("gemma3_1b", embedding, 0.302, 3, "arXiv 2503.19786, table 1"),
    ("gemma3_1b", without_embedding, 0.698, 3, "the same"),
    ("qwen3_235b_a22b", total, 235, 0, "Qwen/Qwen3-235B-A22B, model card"),
    ("qwen3_235b_a22b", without_embedding, 234, 0, "the same"),
    ("qwen3_235b_a22b", active, 22, 0, "the same"),
    ("qwen3_30b_a3b", total, 30.5, 1, "Qwen/Qwen3-30B-A3B, model card"),
    ("qwen3_30b_a3b", without_embedding, 29.9, 1, "the same"),
    ("qwen3_4b", total, 4.0, 1, "Qwen/Qwen3-4B, model card"),
    ("qwen3_4b", without_embedding, 3.6, 1, "the same"),
    ("qwen1_5_moe_a2_7b", total, 14.3, 1, "Qwen/Qwen1.5-MoE-A2.7B, model card"),
    ("qwen1_5_moe_a2_7b", active, 2.7, 1, "the same"),
    ("llama3_1_8b", total, 8, 0, "arXiv 2407.21783, table 3"),
    ("llama3_1_70b", total, 70, -1, "the same"),
]


@pytest.mark.parametrize(
    ("model", "count", "billions", "decimals"),
    [pytest.param(*row[:4], id=f"{row[0]}-{row[1].__name__}") for row in PUBLISHED],
)
def test_parameters_are_those_that_are_published(model, count, billions, decimals):
    shape = hf_shape(read_model(MODELS / f"{model}.json"))
    assert round(count(shape) / 1e9, decimals) == billions


def test_ten_models_and_more_are_compared():
    assert len({model for model, *_ in PUBLISHED}) >= 10

"""SGLang's own loader, run from its source, on tensors of a layer for multi-token prediction.

A draft model needs compiled kernels, which do not run on a CPU (docs/engines.md); names and fan-out
can be checked.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from rlpost.engines.engine_client import SESSION_IS_OPEN, Selector
from rlpost.models.families import family
from tests.contract.cuda.library_source import Source

MODEL = "sglang/srt/models/glm4_moe.py"
UPDATER = "sglang/srt/managers/scheduler_components/weight_updater.py"
LAYERS, EXPERTS = 92, 4
DENSE_ALONE = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
DRAFT = {
    "model.eh_proj.weight",
    "model.enorm.weight",
    "model.hnorm.weight",
    "model.shared_head.norm.weight",
    *(f"model.decoder.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(
        f"model.decoder.self_attn.{name}"
        for name in ("qkv_proj.weight", "qkv_proj.bias", "o_proj.weight")
    ),
    *(f"model.decoder.self_attn.{name}_norm.weight" for name in "qk"),
    *(f"model.decoder.mlp.gate.{name}" for name in ("weight", "e_score_correction_bias")),
    *(f"model.decoder.mlp.shared_experts.{name}_proj.weight" for name in ("gate_up", "down")),
    *(f"model.decoder.mlp.experts.{name}_weight" for name in ("w13", "w2")),
}
"""Parameters of ``Glm4MoeForCausalLMNextN``.

Embedding and output layer are left out: it takes them from the policy.
"""


def sent(layer: int) -> list[str]:
    """Return the names that the trainer sends for a sparse layer."""
    names = []
    for rule in family("Glm4MoeForCausalLM").rules:
        if "{layer}" not in rule.megatron or rule.megatron.endswith(
            tuple(f"layers.{{layer}}.{x}" for x in DENSE_ALONE)
        ):
            continue
        for expert in range(EXPERTS if "{expert}" in rule.megatron else 1):
            names += [
                hf.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                for hf in rule.hugging_face
            ]
    return names


def loaded(source: Source, names: list[str], *, is_nextn: bool) -> dict[str, set[Any]]:
    """Map each parameter that SGLang fills to those tensors of ``names`` that fill it."""
    filled: dict[str, set[Any]] = {}

    class Parameter:
        def __init__(self, name: str) -> None:
            self.name = name

        def weight_loader(self, parameter: Any, tensor: str, *more: Any, **shard: Any) -> None:
            filled.setdefault(self.name, set()).add(tensor)

    mapping = source.run(
        "sglang/srt/layers/moe/fused_moe_triton/layer.py", "FusedMoE.make_expert_params_mapping"
    )
    moe = SimpleNamespace(
        make_expert_params_mapping=lambda **sizes: mapping.__func__(None, **sizes)
    )
    load = source.run(
        MODEL,
        "Glm4MoeForCausalLM.load_weights",
        FusedMoE=moe,
        logger=logging,
        default_weight_loader=None,
    )
    model = SimpleNamespace(
        config=SimpleNamespace(
            num_hidden_layers=LAYERS, num_nextn_predict_layers=1, n_routed_experts=EXPERTS
        ),
        num_fused_shared_experts=0,
    )
    target = {name.replace("model.decoder.", f"model.layers.{LAYERS}.") for name in DRAFT}
    parameters = {name: Parameter(name) for name in (DRAFT if is_nextn else DRAFT | target)}
    load(model, [(name, name) for name in names], is_nextn=is_nextn, params_dict=parameters)
    return filled


def test_each_tensor_of_the_layer_fills_its_parameter_of_the_draft_model():
    names = sent(LAYERS)
    filled = loaded(Source(), names, is_nextn=True)
    assert filled.keys() == DRAFT
    assert {tensor for tensors in filled.values() for tensor in tensors} == set(names)


@pytest.mark.parametrize(("layer", "is_nextn"), [(LAYERS, False), (LAYERS - 1, True)])
def test_policy_and_draft_model_ignore_each_others_tensors(layer, is_nextn):
    """Every engine gets every bucket, also an engine without a draft model."""
    assert loaded(Source(), sent(layer), is_nextn=is_nextn) == {}


def test_the_draft_model_shares_embedding_and_output_layer_with_the_policy():
    copies = [
        f"model.layers.{LAYERS}.{name}"
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    ]
    assert loaded(Source(), copies, is_nextn=True) == {}
    shares = Source().lines(MODEL, "Glm4MoeForCausalLM.set_embed_and_head")
    assert (
        "self.model.embed_tokens.weight = embed" in shares
        and "self.lm_head.weight = head" in shares
    )


def test_a_selector_includes_the_draft_model_or_leaves_it_out():
    source = Source()
    roles = source.run(UPDATER, "_parse_runner_selector")
    select = source.run(
        UPDATER, "SchedulerWeightUpdaterManager._select_runners", _parse_runner_selector=roles
    )
    runners = SimpleNamespace(
        tp_worker=SimpleNamespace(weight_update_runners=lambda: [("target", 1)]),
        draft_worker=SimpleNamespace(weight_update_runners=lambda: [("draft", 2)]),
    )
    selected = [select(runners, selector) for selector in get_args(Selector)]
    assert selected == [[("target", 1), ("draft", 2)], [("target", 1)]]


def test_a_second_session_is_refused_with_the_message_that_the_client_expects():
    source = Source()
    begin = source.run(
        UPDATER,
        "SchedulerWeightUpdaterManager.begin_weight_update",
        BeginWeightUpdateReqOutput=SimpleNamespace,
    )
    refused = begin(SimpleNamespace(_session=object()), None)
    assert not refused.success and SESSION_IS_OPEN in refused.message


def test_a_loader_with_other_names_is_detected():
    changed = Source.with_change(MODEL, '                "eh_proj",\n', '                "join",\n')
    assert loaded(changed, sent(LAYERS), is_nextn=True).keys() != DRAFT

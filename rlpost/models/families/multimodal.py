"""Models that are published with images, trained as text, and some with images.

The language model is one of the other families. In the folder its keys are nested
(``rlpost.models.config_file``), the names of its weights have another prefix, and the weights of
the encoder of images and of what joins both are carried: an export has them unchanged, and no
update sends them, so an engine that released its memory or started with random weights lacks them;
text needs none. ``Family.vision`` says whether the trainer runs the encoder. Names:
``conversion_mapping.py`` and the models of transformers 5.12.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlpost.models.families import deepseek, gemma, glm, llama, qwen, qwen_hybrid
from rlpost.models.family import Family, Vision
from rlpost.models.names import Layout, Rule, of_all_experts, renamed

LANGUAGE = "model.language_model."
"""Prefix of the language model's weights since transformers 4.52."""
OLDER_PREFIXES = ("language_model.model.", "language_model.lm_head.")
"""Of the language model before transformers 4.52, and of its output layer."""
OLDER = ("vision_tower.", "multi_modal_projector.")
"""Prefixes of the weights beside ``language_model.model.``, the older names."""


def _published(
    text: Family,
    models: str,
    *,
    prefixes: tuple[str, str] = (LANGUAGE, "lm_head."),
    carried: tuple[str, ...] = ("model.visual.",),
    rules: tuple[Rule, ...] | None = None,
    defaults: Mapping[str, object] | None = None,
    tied_by_default: bool = False,
    refused: tuple[str, ...] = (),
    vision: Vision | None = None,
) -> Family:
    """Return the family of a model with images.

    Args:
        text: the family of its language model.
        models: for the page of ``text``.
        prefixes: of the language model's weights, ``model.`` in ``text``, and of its output layer,
            ``lm_head.`` in ``text``.
        carried: prefixes of the weights that are not trained.
        rules: those of published folders, which store experts in another way than ``text``.
        defaults: keys that ``text_config`` may leave out, sizes included.
        tied_by_default: whether the output layer is the embedding where the file does not say.
        refused: more keys that must be absent or false.
        vision: the encoder of images, if the trainer runs it.
    """

    language, head = prefixes
    names = {"model.": language, "lm_head.": head}

    def prefixed(each: tuple[Rule, ...]) -> tuple[Rule, ...]:
        return tuple(
            replace(rule, hugging_face=tuple(renamed(name, names) for name in rule.hugging_face))
            for rule in each
        )

    return replace(
        text,
        rules=prefixed(rules or text.rules),
        other_rules=prefixed(text.rules) if rules else (),
        renamed=names,
        models=models,
        carried=carried,
        vision=vision,
        defaults={**text.defaults, **(defaults or {})},
        tied_by_default=tied_by_default,
        refused=(*text.refused, *refused),
        adapters=False,
    )


def _stacked(rules: tuple[Rule, ...], first: Layout, second: Layout) -> tuple[Rule, ...]:
    """Return the rules of a folder with all experts of a layer in one tensor."""
    return (
        *(rule for rule in rules if "{expert}" not in rule.megatron),
        of_all_experts("linear_fc1.weight", "gate_up_proj", first),
        of_all_experts("linear_fc2.weight", "down_proj", second),
    )


_GEMMA3 = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
"""transformers' defaults of ``Gemma3TextConfig``, which the published files leave out."""


def _tower(name: str, kind: str, *, has_deep_features: bool = False) -> Vision:
    """The encoder in transformers' package ``name``, whose classes begin with ``kind``."""
    return Vision(f"{name}.modeling_{name}.{kind}VisionModel", has_deep_features)


def _glm_tower(name: str, kind: str) -> Vision:
    """The same for the encoder of GLM-V, and positions in chunks."""
    return replace(_tower(name, kind), interleaved_mrope=False, layers="glm")


_MOE_3 = qwen.FAMILIES["Qwen3MoeForCausalLM"]
_MOE_3_5 = qwen_hybrid.FAMILIES["Qwen3_5MoeForCausalLM"]

FAMILIES: dict[str, Family] = {
    "Qwen3_5ForConditionalGeneration": _published(
        qwen_hybrid.FAMILIES["Qwen3_5ForCausalLM"],
        "dense models as published",
        vision=_tower("qwen3_5", "Qwen3_5"),
    ),
    "Qwen3_5MoeForConditionalGeneration": _published(
        _MOE_3_5,
        "35B-A3B and larger ones as published",
        rules=_stacked(_MOE_3_5.rules, "fused_gated", "plain"),
        vision=_tower("qwen3_5_moe", "Qwen3_5Moe"),
    ),
    "Qwen3VLForConditionalGeneration": _published(
        qwen.FAMILIES["Qwen3ForCausalLM"],
        "Qwen3-VL 2B to 32B",
        vision=_tower("qwen3_vl", "Qwen3VL", has_deep_features=True),
    ),
    "Qwen3VLMoeForConditionalGeneration": _published(
        _MOE_3,
        "Qwen3-VL 30B-A3B, 235B-A22B",
        rules=_stacked(_MOE_3.rules, "transposed_gated", "transposed"),
        vision=_tower("qwen3_vl_moe", "Qwen3VLMoe", has_deep_features=True),
    ),
    "Qwen2_5_VLForConditionalGeneration": _published(
        qwen.FAMILIES["Qwen2ForCausalLM"],
        "Qwen2.5-VL 3B to 72B",
        prefixes=("model.", "lm_head."),
        carried=("visual.",),
        vision=Vision(
            "qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel",
            prefix="visual.",
            interleaved_mrope=False,
            layers="gated",
        ),
        defaults={"max_window_layers": 80},
    ),
    "Glm4vForConditionalGeneration": _published(
        glm.FAMILIES["Glm4ForCausalLM"],
        "GLM-4.1V-9B, GLM-4.6V-Flash",
        vision=_glm_tower("glm4v", "Glm4v"),
    ),
    "Glm4vMoeForConditionalGeneration": _published(
        glm.FAMILIES["Glm4MoeForCausalLM"],
        "GLM-4.5V, GLM-4.6V",
        vision=_glm_tower("glm4v_moe", "Glm4vMoe"),
    ),
    "Gemma3ForConditionalGeneration": _published(
        gemma.FAMILIES["Gemma3ForCausalLM"],
        "Gemma-3 4B, 12B, 27B",
        prefixes=OLDER_PREFIXES,
        carried=OLDER,
        defaults=_GEMMA3,
        tied_by_default=True,
        # transformers applies it in the language model alone, engines also in the whole
        refused=("final_logit_softcapping",),
    ),
    "Mistral3ForConditionalGeneration": _published(
        llama.FAMILIES["MistralForCausalLM"],
        "Mistral-Small-3.1 and 3.2",
        prefixes=OLDER_PREFIXES,
        carried=OLDER,
    ),
    "KimiK25ForConditionalGeneration": _published(
        deepseek.FAMILIES["DeepseekV3ForCausalLM"],
        "Kimi-K2.5, K2.6 in bfloat16 or FP8 blocks",
        prefixes=OLDER_PREFIXES,
        carried=("vision_tower.", "mm_projector."),
    ),
}
WITH_ADAPTERS = (
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
"""Families whose adapters are tested with images."""
FAMILIES |= {name: replace(FAMILIES[name], adapters=True) for name in WITH_ADAPTERS}

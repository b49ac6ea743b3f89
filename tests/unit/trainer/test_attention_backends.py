"""The table of attention backends: published models, GPUs, layouts and options."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rlpost.config.plan.architecture import head_dim
from rlpost.models.families import family
from rlpost.trainer.attention_backends import (
    BEST_GPU,
    FLASH,
    FUSED,
    OF_ENGINE,
    P2P,
    RULES,
    UNFUSED,
    VARLEN,
    Attention,
    Choice,
    Gpu,
    Options,
    attention_of,
    backends,
    choose,
)
from tests.unit.config.test_models import PUBLISHED

QWEN3 = Attention(32, 8, 128, 128)
GEMMA3 = Attention(16, 8, 256, 256, has_window=True)
GPT_OSS = Attention(64, 8, 64, 64, has_window=True, has_sinks=True)
DEEPSEEK = Attention(128, 128, 192, 128)
GLM_FLASH = Attention(20, 20, 256, 256)
A100, L40S, H100, B200, RTX = (
    Gpu(capability) for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
)
TORCH = frozenset[str]()


def with_flash_attention(gpu: Gpu) -> Gpu:
    return replace(gpu, has_flash_attention=True)


# (model, GPU) -> backends of TransformerEngine that may be chosen; none: torch's FlashAttention.
# With flash-attn the second set.
TABLE = {
    (QWEN3, A100): (TORCH, {FLASH}),
    (QWEN3, L40S): (TORCH, {FLASH}),
    (QWEN3, H100): ({FUSED}, {FLASH, FUSED}),
    (QWEN3, B200): ({FUSED}, {FLASH, FUSED}),
    (QWEN3, RTX): (TORCH, {FLASH}),
    (GEMMA3, A100): (TORCH, {FLASH}),
    (GEMMA3, L40S): (TORCH, TORCH),
    (GEMMA3, H100): ({FUSED}, {FLASH, FUSED}),
    (GEMMA3, B200): (TORCH, {FLASH}),
    (GEMMA3, RTX): (TORCH, {FLASH}),
    (DEEPSEEK, A100): (TORCH, TORCH),
    (DEEPSEEK, H100): ({FUSED}, {FUSED}),
    (DEEPSEEK, B200): ({FUSED}, {FUSED}),
    (DEEPSEEK, RTX): (TORCH, TORCH),
    (GLM_FLASH, H100): ({FUSED}, {FLASH, FUSED}),
    (GLM_FLASH, B200): (TORCH, {FLASH}),
    **{(GPT_OSS, gpu): (TORCH, TORCH) for gpu in (A100, L40S, H100, B200, RTX)},
}  # fmt: skip


@pytest.mark.parametrize(("case", "expected"), TABLE.items())
def test_models_on_gpus(case, expected):
    model, gpu = case
    for one, wanted in zip((gpu, with_flash_attention(gpu)), expected, strict=True):
        choice = choose(model, one, with_engine=True)
        assert isinstance(choice, Choice) and choice.backends == wanted
        assert bool(choice.reason) == (not wanted)
        assert VARLEN in backends(model, one)


@pytest.mark.parametrize(
    ("model", "context", "expected"),
    [
        (QWEN3, 2, P2P),
        (QWEN3, 16, P2P),  # does not divide the 8 groups
        (DEEPSEEK, 4, P2P),
        (GEMMA3, 4, "a2a"),
        (GEMMA3, 16, None),
        (GPT_OSS, 2, None),
    ],
)
def test_the_exchange_of_context_parallelism(model, context, expected):
    """a2a for windows where it divides the heads; None: this package gathers keys and values."""
    choice = choose(replace(model, context=context), H100, with_engine=True)
    assert isinstance(choice, Choice)
    assert (choice.cp_comm_type, choice.is_of_engine) == (expected, expected is not None)


@pytest.mark.parametrize("gpu", [A100, H100, B200])
@pytest.mark.parametrize("model", [QWEN3, GEMMA3, GPT_OSS])
def test_keys_that_sequences_share_are_attended_by_the_same_kernels(model, gpu):
    """But for windows in cuDNN; torch's FlashAttention is always possible."""
    shared = replace(model, shares_rows=True)
    for one in (gpu, with_flash_attention(gpu)):
        choice, separate = (choose(each, one, with_engine=True) for each in (shared, model))
        assert isinstance(choice, Choice) and isinstance(separate, Choice)
        assert choice.backends == separate.backends - ({FUSED} if model.has_window else set())
        assert VARLEN in backends(shared, one)


def test_context_parallelism_rules_out_keys_that_sequences_share():
    shared = replace(QWEN3, shares_rows=True, context=2)
    assert not backends(shared, with_flash_attention(H100)) & OF_ENGINE


def test_without_context_parallelism_there_is_no_exchange():
    choice = choose(GEMMA3, H100, with_engine=True, options=Options(cp_comm_type="all_gather"))
    assert isinstance(choice, Choice) and choice.is_of_engine and choice.cp_comm_type is None


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (QWEN3, Options("all_gather"), "--cp-comm-type all_gather: .* has no packed rows.*leave it"),
        (QWEN3, Options("a2a+p2p"), r"--cp-comm-type a2a\+p2p: .*forms no groups"),
        (QWEN3, Options(["p2p"] * 4), "the trainer forms no groups"),
        (replace(QWEN3, context=16), Options("a2a"), "--context-parallel-size divides"),
        (GEMMA3, Options("p2p"), "only --cp-comm-type a2a has sliding windows"),
        (DEEPSEEK, Options("a2a"), "only --cp-comm-type p2p has values of another width"),
        (GPT_OSS, Options("a2a"), "no attention sinks in packed rows"),
        (QWEN3, Options(backend="unfused"), "--attention-backend unfused: .*no context parallelism"),
        (GPT_OSS, Options(backend="fused"), "--attention-backend fused: .*sinks.*leave it out"),
    ],
)  # fmt: skip
def test_an_option_that_the_engine_cannot_follow_is_refused(model, options, said):
    sharded = replace(model, context=max(model.context, 2))
    refused = choose(sharded, BEST_GPU, with_engine=True, options=options)
    assert isinstance(refused, str) and re.search(said, refused), refused


def test_options_select_a_backend():
    gpu = with_flash_attention(H100)
    for backend, expected in {"flash": {FLASH}, "fused": {FUSED}, "unfused": {UNFUSED}}.items():
        choice = choose(QWEN3, gpu, with_engine=True, options=Options(backend=backend))
        assert isinstance(choice, Choice) and choice.backends == expected
    # FlashAttention without flash-attn is torch's
    assert not choose(QWEN3, H100, with_engine=True, options=Options(backend="flash")).backends


@pytest.mark.parametrize("with_engine", [False, True])
def test_the_model_decides_between_both_attentions_and_no_option(with_engine):
    local = Options(backend="local")
    refused = choose(QWEN3, H100, with_engine=with_engine, options=local)
    assert isinstance(refused, str) and refused.endswith("leave it out"), refused


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        (QWEN3, Gpu((7, 5)), "sm75: FlashAttention needs a GPU of compute capability 8.0 or more"),
        (replace(QWEN3, value_width=320), H100, r"heads of 128 and 320.*at most 256.*--bf16 false"),
        (replace(QWEN3, key_width=208), L40S, "no heads of 200 to 224"),
    ],
)
@pytest.mark.parametrize("with_engine", [False, True])
def test_what_no_kernel_computes_is_refused(model, gpu, said, with_engine):
    refused = choose(model, gpu, with_engine=with_engine)
    assert isinstance(refused, str) and re.search(said, refused), refused


def test_float32_and_a_cpu_need_no_kernel():
    wide = replace(GPT_OSS, key_width=320, is_16_bit=False)
    for gpu in (Gpu((7, 5)), H100):
        choice = choose(wide, gpu, with_engine=True)
        assert isinstance(choice, Choice) and not choice.is_of_engine
    assert choose(replace(QWEN3, value_width=320), None, with_engine=False) == Choice()


def test_rules_that_hold_for_the_best_gpu_hold_for_all():
    """So a settings check without a GPU refuses nothing that some GPU computes."""
    gpus = [
        Gpu((major, minor), has)
        for major in (7, 8, 9, 10, 12)
        for minor in (0, 6, 9)
        for has in (False, True)
    ]
    models = [QWEN3, GEMMA3, GPT_OSS, GLM_FLASH, replace(QWEN3, key_width=264, value_width=264)]
    for model in (*models, *(replace(one, context=2) for one in models)):
        left = backends(model, BEST_GPU, cp_comm_type="a2a")
        assert all(backends(model, gpu, cp_comm_type="a2a") <= left for gpu in gpus)


def test_each_rule_rules_something_out():
    assert all(rule.rules_out and rule.reason for rule in RULES)
    assert len({rule.reason for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_a_path_at_every_layout(name):
    hf = PUBLISHED[name]
    known = family(hf["architectures"][0])
    hf = known.resolved(hf)
    for context in (1, 2, 8):
        attention = attention_of(
            hf, known.fields(hf), head_dim=head_dim(hf), tensor=1, context=context
        )
        for gpu in (None, A100, L40S, H100, B200, RTX):
            assert isinstance(choose(attention, gpu, with_engine=gpu is not None), Choice)

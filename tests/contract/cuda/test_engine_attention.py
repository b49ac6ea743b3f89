"""The table of attention backends equals TransformerEngine's own functions.

``get_attention_backend`` and the checks of ``attn_forward_func_with_cp`` run from its source, for
the GPU, model and layout of each case. cuDNN's part is C++ and stands here as read in
fused_attn.cpp of 2.11.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from packaging.version import Version

from rlpost.trainer import model
from rlpost.trainer.attention_backends import (
    ALL_GATHER,
    FLASH,
    FUSED,
    OF_ENGINE,
    UNFUSED,
    Attention,
    Choice,
    Gpu,
    backends,
)
from rlpost.trainer.model import ENGINE_VARIABLES
from tests.contract import families
from tests.contract.cuda.conftest import run
from tests.contract.cuda.engine_source import engine_source
from tests.contract.cuda.library_source import Source

FOLDER = "transformer_engine/pytorch/attention/dot_product_attention"
BACKENDS = f"{FOLDER}/backends.py"
UTILS, CONTEXT = f"{FOLDER}/utils.py", f"{FOLDER}/context_parallel.py"
GPUS = [
    Gpu(capability, has_flash_attention=has)
    for capability in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0))
    for has in (False, True)
]
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256), (128, 64), (60, 60), (264, 264))
ARBITRARY = "F16_arbitrary_seqlen"
CAUSAL, BOTTOM_RIGHT = "padding_causal", "padding_causal_bottom_right"
EXCHANGES = ("p2p", "a2a", ALL_GATHER)


def cases() -> list[Attention]:
    flags = (False, True)
    return [
        Attention(
            16, 8, *widths, has_window=window, has_sinks=sinks, context=context, is_16_bit=b16,
            shares_rows=shares,
        )
        for widths, window, sinks, context, b16, shares in itertools.product(
            WIDTHS, flags, flags, (1, 2), flags, flags
        )
    ]  # fmt: skip


@pytest.fixture(scope="module")
def source() -> Source:
    return engine_source()


class AnyName:
    """Stands for an enumeration: a name is its own value."""

    def __class_getitem__(cls, name: Any) -> Any:
        return name


def cudnn(is_training: bool, *asked: Any, gpu: Gpu) -> str:
    """``nvte_get_fused_attn_backend`` for bfloat16, packed rows and both masks.

    The mask that is aligned to the last key needs max_seqlen_q <= max_seqlen_kv.
    """
    assert is_training and asked[4] in (CAUSAL, BOTTOM_RIGHT) and asked[9] <= asked[10]
    key_width, value_width = asked[11:13]
    sm = 10 * gpu.capability[0] + gpu.capability[1]
    fits = (
        (key_width <= 128 and value_width <= 128)
        or (key_width <= 256 and value_width <= 256 and sm == 90)
        or (key_width == 192 and value_width == 128 and sm >= 100)
    )
    is_known_bug = (
        sm == 90
        and key_width >= 128
        and value_width >= 128
        and (key_width, value_width) != (192, 128)
        and key_width != value_width
    )
    eight = key_width % 8 == 0 and value_width % 8 == 0
    return ARBITRARY if fits and eight and not is_known_bug and sm >= 90 else "No_Backend"


def choice_on(source: Source, gpu: Gpu) -> Callable[[SimpleNamespace], tuple[Any, ...]]:
    """``get_attention_backend`` on a GPU."""
    flash = SimpleNamespace(
        is_installed=gpu.has_flash_attention,
        v3_is_installed=False,
        version=Version("2.8.3"),
        fa3_version=Version("0"),
        warning_printed=True,
        v3_warning_printed=True,
        v2_3_plus=True,
        v2_4_1_plus=True,
    )
    return source.run(
        UTILS,
        "get_attention_backend",
        os=os,
        torch=torch,
        logging=logging,
        AttentionLogging=SimpleNamespace(
            _log_level=logging.CRITICAL, _stream_handler=logging.NullHandler()
        ),
        get_device_compute_capability=lambda: gpu.capability,
        get_cudnn_version=lambda: (9, 20, 0),
        te=SimpleNamespace(__version__="2.11.0"),
        FlashAttentionUtils=flash,
        fields=lambda _: (),
        PkgVersion=Version,
        Float8Tensor=type("Float8Tensor", (), {}),
        get_qkv_format=lambda *_: ("thd", "thd", "thd"),
        check_set_window_size=lambda *_: (-1, 0),
        tex=SimpleNamespace(get_fused_attn_backend=lambda *given: cudnn(*given, gpu=gpu)),
        TE_DType=AnyName,
        QKVLayout=AnyName,
        AttnBiasType=AnyName,
        AttnMaskType=AnyName,
        SoftmaxType=AnyName,
        FusedAttnBackend=AnyName,
        int=lambda value: 1 if value == ARBITRARY else int(value),
        _NVTE_FLASH_ATTN=1,
    )


def available(
    choose: Callable[[SimpleNamespace], tuple[Any, ...]], asked: Attention, exchange: str
) -> frozenset[str]:
    """The backends that ``get_attention_backend`` calls available."""
    parameters = dict(
        qkv_type=torch.Tensor,
        qkv_dtype=torch.bfloat16 if asked.is_16_bit else torch.float32,
        qkv_layout="thd_thd_thd",
        num_heads=asked.heads,
        num_gqa_groups=asked.groups,
        max_seqlen_q=4096,
        max_seqlen_kv=4096,
        head_dim_qk=asked.key_width,
        head_dim_v=asked.value_width,
        attn_mask_type=BOTTOM_RIGHT if asked.shares_rows else CAUSAL,
        window_size=(127, 0) if asked.has_window else (-1, 0),
        core_attention_bias_type="no_bias",
        core_attention_bias_shape=None,
        attention_dropout=0.0,
        context_parallel=asked.context > 1,
        cp_comm_type=exchange,
        is_training=True,
        softmax_type="learnable" if asked.has_sinks else "vanilla",
    )
    absent = dict.fromkeys(
        ("batch_size", "alibi_slopes_shape", "core_attention_bias_requires_grad", "pad_between_seqs",
         "deterministic", "fp8", "fp8_meta", "inference_params", "return_max_logit", "cuda_graph")
    )  # fmt: skip
    answer = choose(SimpleNamespace(**parameters, **absent, num_splits=1))
    names = itertools.compress((FLASH, FUSED, UNFUSED), answer[-1])
    return frozenset(names)


def passes(attend: Callable[..., Any], asked: Attention, exchange: str, backend: str) -> bool:
    """Whether the checks of ``attn_forward_func_with_cp`` pass."""
    key, value = (torch.empty(2, 1, width) for width in (asked.key_width, asked.value_width))
    given = dict.fromkeys(
        (
            "max_seqlen_q",
            "max_seqlen_kv",
            "dropout_p",
            "cp_global_ranks",
            "cp_stream",
            "attn_bias",
            "quantizers",
        )
    )
    bounds = torch.zeros(2)
    cumulative = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    try:
        attend(
            True,
            key,
            key,
            value,
            qkv_format="thd",
            attn_mask_type=CAUSAL,
            cp_comm_type=exchange,
            cp_group=object(),
            window_size=(127, 0) if asked.has_window else (-1, 0),
            softmax_type="learnable" if asked.has_sinks else "vanilla",
            use_fused_attention=backend == FUSED,
            **given,
            **dict.fromkeys(cumulative, bounds),
        )
    except AssertionError:
        return False
    return exchange != ALL_GATHER  # a check of AttnFuncWithCPAndKVAllGather


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_the_table_leaves_the_backends_that_the_engine_has(source, gpu):
    """For each width, window, sinks, dtype and exchange, on this GPU."""
    assert 'assert qkv_format != "thd"' in source.text(CONTEXT)
    names = ("AttnFuncWithCPAndKVP2P", "AttnFuncWithCPAndKVAllGather", "AttnFuncWithCPAndQKVOA2A")
    choose = choice_on(source, gpu)
    attend = source.run(
        CONTEXT,
        "attn_forward_func_with_cp",
        dist_group_type=object,
        **dict.fromkeys(names, MagicMock()),
    )
    for asked in cases():
        for exchange in EXCHANGES if asked.context > 1 else ("p2p",):
            engine = available(choose, asked, exchange)
            if asked.context > 1:
                engine = frozenset(one for one in engine if passes(attend, asked, exchange, one))
            if asked.shares_rows:  # what this package leaves out, as read in the kernels
                engine -= {UNFUSED, FUSED} if asked.has_window else {UNFUSED}
            ours = backends(asked, gpu, cp_comm_type=exchange) & OF_ENGINE
            assert ours == engine, (asked, exchange)


def test_heads_that_an_all_to_all_cannot_divide_are_ruled_out_as_by_the_engine(source):
    text = source.text(CONTEXT)
    assert "% cp_size == 0" in text and "divisible by" in text
    odd = replace(cases()[0], heads=3, groups=3, context=2, is_16_bit=True)
    assert not backends(odd, GPUS[-1], cp_comm_type="a2a") & OF_ENGINE


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``shared_rows`` prints for Qwen3."""
    folder = tmp_path_factory.mktemp("shared") / "qwen3"
    families.make_family_config(folder, "qwen3")
    return run("tests.contract.cuda.shared_rows", str(folder), with_engine=True)


def test_sequences_that_share_rows_reach_the_engine_with_separate_bounds(shared):
    """The keys of a sequence are all its tokens, its queries those with rows of its own."""
    given, samples = shared["arguments"], shared["samples"]
    assert (given["qkv_format"], given["attn_mask_type"]) == ("thd", BOTTOM_RIGHT)
    assert given["dtypes"] == ["torch.int32"] * 2
    assert given["value"] == given["key"]
    queries, keys = (
        [list(map(int, given[rows][start:end])) for start, end in itertools.pairwise(given[bounds])]
        for rows, bounds in (("query", "cu_seqlens_q"), ("key", "cu_seqlens_kv"))
    )
    padding = len(queries) - len(samples)
    assert padding in (0, 1) and keys[len(samples) :] == queries[len(samples) :]
    assert keys[: len(samples)] == samples
    for sample, own in zip(samples, queries, strict=False):
        assert sample[-len(own) :] == own
    assert len(given["query"]) < 0.7 * len(given["key"])
    assert given["max_seqlen_q"] == given["max_seqlen_kv"] >= max(map(len, samples))
    assert given["cu_seqlens_q_padded"] is None and given["cu_seqlens_kv_padded"] is None


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (Gpu((8, 0), has_flash_attention=True), {FLASH}),
        (Gpu((9, 0)), {FUSED}),
        (Gpu((10, 0)), {FUSED}),
        (Gpu((9, 0), has_flash_attention=True), {FLASH, FUSED}),
    ],
    ids=["sm80 with flash-attn", "sm90", "sm100", "sm90 with flash-attn"],
)
def test_the_engine_selects_a_backend_for_sequences_that_share_rows(source, gpu, expected):
    asked = replace(cases()[0], key_width=128, value_width=128, is_16_bit=True, shares_rows=True)
    assert available(choice_on(source, gpu), asked, "p2p") - {UNFUSED} == expected


def test_the_engine_looks_for_flash_attention_by_distribution_and_keeps_it(source):
    """``device.has_flash_attention`` reads what these lines leave."""
    text, names = source.text(BACKENDS), source.text(UTILS)
    assert 'get_pkg_version("flash-attn")' in text and 'get_pkg_version("flash-attn-3")' in text
    assert "FlashAttentionUtils as fa_utils" in text and "fa_utils.is_installed = True" in text
    assert "is_installed = False" in names and "v3_is_installed = False" in names


def test_the_variables_that_allow_a_backend_are_read_in_each_choice(source):
    chosen = source.text(UTILS).partition("def get_attention_backend")[2]
    for variable in ENGINE_VARIABLES.values():
        assert f'os.getenv("{variable}", "1")' in chosen


def test_the_engine_may_use_the_chosen_backends_alone_while_megatron_finds_none_set(monkeypatch):
    """Also with a second model, or a second stage, in the process."""
    monkeypatch.setattr(model, "_allowed_backends", set())
    for variable in ENGINE_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    allowed = []
    for chosen in ((), (FUSED,), (FUSED,), (FLASH,)):
        with model._restrict_engine(Choice(frozenset(chosen))):
            assert not os.environ.keys() & set(ENGINE_VARIABLES.values())
            os.environ |= dict.fromkeys(ENGINE_VARIABLES.values(), "1")  # Megatron's "auto"
        allowed.append([os.environ[variable] for variable in ENGINE_VARIABLES.values()])
        if not chosen:  # a model without the engine's attention changes nothing
            for variable in ENGINE_VARIABLES.values():
                monkeypatch.delenv(variable)
    assert allowed == [["1"] * 3, ["0", "1", "0"], ["0", "1", "0"], ["1", "1", "0"]]

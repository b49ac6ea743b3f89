"""The context of the engines: the longest request that they serve in full, and what exceeds it. Pure.

Input: a ``Config`` and the model's ``config.json``. Output: problems, where an engine would reject
every request, and notes, where it would reject or shorten the longest ones. A rejected request ends
the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from common.fleet_name import POLICY
from rlpost.config.engine_groups import group_config
from rlpost.config.eval_sets import eval_sets, set_settings
from rlpost.config.server_arg_values import POOL_WITHOUT_GPUS
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.models.model_types import HfConfig

UNREAD_TOKENS = 6
"""Engines read no longer input than the context less 7 tokens (``max_req_input_len`` in SGLang's
``managers/tp_worker.py``, 0.5.21: context - 1 - 5, exclusive), and end an answer at 2 less than the
context without a word (``init_req_max_new_tokens`` in ``managers/scheduler.py``)."""
DRAFTING = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""Algorithms of speculative decoding that keep room for drafts (``is_eagle``)."""
DRAFT_TOKENS = 64
"""Of an algorithm whose sizes SGLang chooses or adapts: it keeps room for the most steps and one."""
DIFFUSION_BLOCK = 256
"""The most that a diffusion model has by default."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Limits of one kind of requests, in tokens, and the flags that set them."""

    flags: str  # prefix of the flags: --rollout or --eval
    response: int
    prompt: int | None
    context: int | None
    context_flag: str = "--rollout-max-context-len"


def longest_request(server_args: Mapping[str, object], hf: HfConfig) -> int | None:
    """Return the tokens of a request with its answer that engines serve in full.

    An input below it is accepted, also one that goes on after an abort. None if it is not known.
    ``server_args``: of the engines.
    """
    context, pool = engine_context(server_args, hf), pool_tokens(server_args)
    unread = UNREAD_TOKENS + _block_tokens(server_args, hf)
    # An input may fill its last page with one token, and a page is kept (``max_new_tokens_for_memory``).
    bounds = [] if pool is None else [max(0, pool - max(unread, 2 * _page_size(server_args)))]
    if context is not None:
        bounds.append(context - max(unread, _reserved(server_args)))
    return min(bounds, default=None)


def pool_tokens(server_args: Mapping[str, object]) -> int | None:
    """Return the tokens of the KV cache, whole pages; None where the free memory decides.

    It bounds a request as the context does (``get_worker_info``).
    """
    tokens = server_args.get("max_total_tokens")
    return tokens - tokens % _page_size(server_args) if isinstance(tokens, int) else None


def with_pool(config: Config, *, has_gpus: bool) -> Config:
    """Return the settings with the size of the KV cache that engines without GPUs have.

    The smallest of the policy's and of those that evaluate it. A run whose driver has no GPU on its
    node is taken for one without GPUs. The settings are for bounds of requests, not for engines.
    """
    if has_gpus or not config.rollout_num_gpus:
        return config
    names = {POLICY, *(name for name in config.engines.started if name == config.eval.eval_engines)}
    sizes = {pool_tokens(group_config(config, name).sglang.server_args) for name in names}
    smallest = min(size or POOL_WITHOUT_GPUS for size in sizes)
    if smallest == pool_tokens(config.sglang.server_args):
        return config
    tokens = {"sglang_max_total_tokens": smallest}
    return config.model_copy(update={"sglang": config.sglang.model_copy(update=tokens)})


def _page_size(server_args: Mapping[str, object]) -> int:
    size = server_args.get("page_size")
    return size if isinstance(size, int) and size > 0 else 1


def _block_tokens(server_args: Mapping[str, object], hf: HfConfig) -> int:
    """Tokens of a block of a diffusion model, by which inputs must be shorter (``dllm/config.py``)."""
    if not server_args.get("dllm_algorithm"):
        return 0
    return int(hf.get("canvas_length") or DIFFUSION_BLOCK)


def _reserved(server_args: Mapping[str, object]) -> int:
    """Tokens that the engines keep for drafts (``compute_num_reserved_tokens``, 0.5.21)."""
    if str(server_args.get("speculative_algorithm") or "").upper() not in DRAFTING:
        return 0
    names = ("eagle_topk", "num_steps", "num_draft_tokens")
    sizes = [server_args.get(f"speculative_{name}") for name in names]
    topk, steps, drafts = (size if isinstance(size, int) else None for size in sizes)
    if topk is None or steps is None or server_args.get("speculative_adaptive"):
        return max(DRAFT_TOKENS, drafts or 0)
    return max(topk * steps, drafts or 0)


def engine_context(server_args: Mapping[str, object], hf: HfConfig) -> int | None:
    """Return the context of the engines in tokens; None if it is not known.

    As ``get_context_length`` in SGLang (``utils/hf_transformers/common.py``, 0.5.21), which reads
    ``rope_parameters`` as transformers resolves them: those of Llama-3 and YaRN have a context
    before the scaling, and nested ones, as Gemma-3 has, no factor.
    """
    context_length = server_args.get("context_length")
    if isinstance(context_length, int):
        return context_length
    positions = hf.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    scaling = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    is_included = "original_max_position_embeddings" in scaling
    is_included |= (scaling.get("rope_type") or scaling.get("type")) in ("llama3", "yarn")
    is_included |= "rope_local_base_freq" in hf or "full_attention" in scaling
    return positions if is_included else int(scaling.get("factor", 1) * positions)


def context_problems(config: Config, hf: HfConfig) -> list[str]:
    """Responses that leave no token of the context for a prompt."""
    context = longest_request(config.sglang.server_args, hf)
    if context is None:
        return []
    problems = []
    for one in _lengths(config):
        if one.context is not None and one.context > context:
            problems.append(
                f"{one.context_flag} {one.context} is more than the {context} tokens that engines "
                f"serve in full of {_source(config, hf)}; use {one.context_flag} {context}"
            )
        elif one.context is None and one.response >= context:
            problems.append(
                f"{one.flags}-max-response-len {one.response} leaves no token for a prompt in the "
                f"{context} tokens that engines serve in full of {_source(config, hf)}; use a smaller "
                f"value, or --rollout-max-context-len {context}, which bounds prompt and response "
                "together"
            )
    return problems


def context_notes(config: Config, hf: HfConfig) -> list[str]:
    """Prompts of the permitted length whose response exceeds the context."""
    context = longest_request(config.sglang.server_args, hf)
    if context is None:
        return []
    return [
        f"{one.flags}-max-response-len {one.response} with prompts of up to {one.prompt} tokens exceeds "
        f"the {context} tokens that engines serve in full of {_source(config, hf)}; the answer to a "
        f"prompt of more than {context - one.response} tokens is shortened, or rejected, which ends "
        f"the run; use --rollout-max-context-len {context}, or a prompt limit of {context - one.response}"
        for one in _lengths(config)
        if one.context is None and one.prompt and one.prompt + one.response > context > one.response
    ]


def _lengths(config: Config) -> list[RequestLengths]:
    """The limits of training and of each evaluation set whose requests the run builds itself."""
    rollout, evaluation = config.rollout, config.eval
    # An environment's gateway bounds its requests; a custom function chooses its own.
    if not config.generates or config.answers_are_episodes or rollout.custom_generate_function_path:
        return []
    request_lengths = [
        RequestLengths(
            "--rollout",
            rollout.rollout_max_response_len,
            rollout.rollout_max_prompt_len,
            rollout.rollout_max_context_len,
        )
    ]
    if evaluation.eval_interval is None:
        return request_lengths
    try:
        sets = eval_sets(evaluation)
    except ConfigError:  # reported by another check
        return request_lengths
    for one in sets:
        if one.custom_generate_function_path:
            continue
        limits = set_settings(one, evaluation, rollout)
        longest = one.max_response_len or evaluation.eval_max_response_len
        if longest is None:
            continue  # that of training
        lengths = RequestLengths(
            "--eval", longest, limits.rollout_max_prompt_len, limits.rollout_max_context_len
        )
        if evaluation.eval_max_context_len is not None:
            lengths = replace(lengths, context_flag="--eval-max-context-len")
        if lengths not in request_lengths:
            request_lengths.append(lengths)
    return request_lengths


def _source(config: Config, hf: HfConfig) -> str:
    server_args = config.sglang.server_args
    context, pool = engine_context(server_args, hf), pool_tokens(server_args)
    if pool is not None and (context is None or pool < context):
        default = " (the default without GPUs)" if pool == POOL_WITHOUT_GPUS else ""
        return f"--sglang-max-total-tokens {pool}{default}"
    if "context_length" in server_args:
        return f"--sglang-context-length {context}"
    return f"the model's context of {context} (max_position_embeddings in config.json)"

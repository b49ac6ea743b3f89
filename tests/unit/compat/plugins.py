"""Plug-ins as users of slime write them, without any knowledge of rlpost."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.rm_hub import async_rm
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

TOOL_MARK = "?"


async def search(args, sample: Sample, sampling_params) -> Sample:
    """Generate turns until the model asks for no tool; send the engine text, not ids."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens, sample.loss_mask, sample.tool_calls = list(prompt_ids), [], 0
    for _ in range(3):
        params = {**sampling_params, "stop": [TOOL_MARK]}
        output = await post(
            url, {"text": sample.prompt + sample.response, "sampling_params": params}
        )
        meta = output["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        ids = [token for _, token, _ in meta["output_token_logprobs"]]
        log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
        sample.append_response_tokens(
            args, tokens=ids, log_probs=log_probs, meta_info=meta, text=output["text"]
        )
        if not output["text"].endswith(TOOL_MARK):
            break
        found = "[42]"
        observation = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        sample.append_response_tokens(args, tokens=observation, trainable=False, text=found)
        sample.tool_calls += 1
    sample.metadata["turns"] = sample.tool_calls + 1
    return sample


async def reads_routes(args, sample, sampling_params):
    """Request the experts that the engine chose, as slime's own rollout does."""
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    payload = {
        "text": sample.prompt,
        "sampling_params": sampling_params,
        "return_routed_experts": True,
    }
    output = await post(url, payload)
    meta = output["meta_info"]
    ids = [token for _, token, _ in meta["output_token_logprobs"]]
    sample.tokens = [*sample.prompt.encode(), *ids]
    experts = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    sample.rollout_routed_experts = experts.reshape(len(sample.tokens) - 1, 5, 2)
    sample.routes_shape = list(sample.rollout_routed_experts.shape)
    sample.response, sample.response_length = output["text"], len(ids)
    sample.rollout_log_probs = [log_prob for log_prob, _, _ in meta["output_token_logprobs"]]
    sample.status = Sample.Status.COMPLETED
    return sample


async def without_logprobs(args, sample, sampling_params, evaluation=False):
    """Fill a sample field by field, as older plug-ins do, and request no log-probs."""
    state = GenerateState(args)
    output = await post(
        f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate",
        {
            "input_ids": state.tokenizer(sample.prompt)["input_ids"],
            "sampling_params": sampling_params,
        },
    )
    ids = state.tokenizer.encode(output["text"])
    sample.tokens = [*state.tokenizer.encode(sample.prompt), *ids]
    sample.response, sample.response_length = output["text"], len(ids)
    sample.status = Sample.Status.COMPLETED
    sample.metadata["evaluation"] = evaluation
    return sample


async def rewarded_itself(args, sample, sampling_params):
    """Return two samples of one answer, each with a reward."""
    first = await search(args, sample, sampling_params)
    second = Sample.from_dict(first.to_dict())
    first.reward, second.reward = 0.25, {"score": 0.75, "why": "longer"}
    second.remove_sample = True
    return [first, second]


def in_a_thread(args, sample, sampling_params):
    """A synchronous generate function."""
    return asyncio.run(_nothing(sample))


async def _nothing(sample):
    sample.status = Sample.Status.ABORTED
    return sample


def no_sample(args, sample, sampling_params):
    return sample.prompt


async def tool_reward(args, sample, **kwargs):
    """Return an object from which --reward-key selects one value, as in ReTool."""
    if not isinstance(sample, Sample):
        raise TypeError("not a sample")
    result = compute_score(sample.prompt + sample.response, sample.label, strict_box_verify=True)
    if result["score"] < 0:
        result["score"] += 0.1 * getattr(sample, "tool_calls", 0)
    return result


_connections = None


async def judged_together(args, samples, **kwargs):
    """A reward model that keeps connections from its first call, bound to that event loop."""
    global _connections
    if _connections is None:
        _connections = asyncio.Semaphore(1)
        _connections.loop = asyncio.get_running_loop()
    assert _connections.loop is asyncio.get_running_loop(), "another event loop"
    lengths = await asyncio.gather(*(_length(sample) for sample in samples))
    return [length / max(lengths) for length in lengths]


async def _length(sample):
    await asyncio.sleep(0)
    return sample.effective_response_length


async def by_type(args, sample, **kwargs):
    return await async_rm(args, sample) + 10 * sample.group_index


def from_object(args, sample):
    return float(sample.response in sample.label["target"])


def wants_images(args, sample):
    return float(bool(sample.multimodal_inputs))


def wants_a_setting(args, sample):
    return args.rolout_batch_size


def lacks_a_package(args, sample):
    import nowhere_at_all

    return nowhere_at_all.score(sample.response)


def adds_up_wrongly(args, sample):
    return sample.response + 1


def nonzero_std(args, samples: list[Sample], **kwargs):
    """The filter of slime's guides, with torch."""
    import torch

    rewards = [sample.reward for sample in samples]
    return torch.tensor(rewards, dtype=torch.float).std() > 0.0


def keeps_hard_ones(args, samples, **kwargs):
    hard = all(sample.metadata["level"] > 1 and sample.prompt for sample in samples)
    values = [sample.get_reward_value(args) for sample in samples]
    return DynamicFilterOutput(
        keep=hard, reason=f"easy_{values[0]}", keep_when_insufficient=values[0] > 0
    )


def newest_first(args, rollout_id, buffer, num_samples):
    """Take the groups that began last; drop those that began before rollout 2."""
    buffer[:] = [group for group in buffer if group[0].metadata.get("start_rollout_id", 9) >= 2]
    buffer.sort(key=lambda group: -group[0].metadata.get("start_rollout_id", 9))
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def of_nowhere(args, rollout_id, buffer, num_samples):
    return [[Sample(group_index=99)]]


def post_process(args, samples, **kwargs):
    """Return raw rewards and rewards to train on, as slime documents the flag."""
    raw = [sample.get_reward_value(args) for sample in samples]
    return raw, [
        2.0 * reward + sample.response_length for reward, sample in zip(raw, samples, strict=True)
    ]


def post_process_wrongly(args, samples):
    return [sample.reward for sample in samples]


def post_process_to_nan(args, samples):
    return [float("nan")] * len(samples), [0.0] * len(samples)


def post_process_to_rows(args, samples):
    import torch

    rows = torch.zeros(len(samples), 2)
    return rows, rows

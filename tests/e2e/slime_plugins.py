"""Functions written for slime, in the style of its examples, that the settings of a test run name."""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

from rlpost.rollout.examples.calculator import result

DIGITS = list("0123456789")
MAX_TURNS = 5


def two_of_three(args, samples, **kwargs):
    """Drop every third group."""
    keep = samples[0].group_index % 3 != 0 and len(samples) == args.n_samples_per_prompt
    return DynamicFilterOutput(keep=keep, reason=None if keep else "third")


async def generate(args, sample, sampling_params, evaluation=False):
    """Call the calculator at every digit, which the tiny model writes often."""
    assert not evaluation, "the evaluation has a separate function"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tool_calls = 0
    for turn in range(MAX_TURNS):
        remaining = args.rollout_max_response_len - sample.response_length
        if remaining == 0:
            sample.status = Sample.Status.TRUNCATED
            break
        stop = DIGITS if turn < MAX_TURNS - 1 else None
        params = {**sampling_params, "max_new_tokens": remaining, "stop": stop}
        # Names of unused tokens have digits, at which an engine would stop.
        params["skip_special_tokens"] = True
        output = await post(
            url, {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
        )
        meta = output["meta_info"]
        sample.append_response_tokens(
            args,
            tokens=[token for _, token, *_ in meta["output_token_logprobs"]],
            log_probs=[log_prob for log_prob, *_ in meta["output_token_logprobs"]],
            meta_info=meta,
            text=output["text"],
        )
        if meta["finish_reason"].get("matched") not in DIGITS:
            break
        output_text = result(sample.prompt + sample.response[:-1])
        ids = state.tokenizer(output_text, add_special_tokens=False)["input_ids"]
        ids = ids[: args.rollout_max_response_len - sample.response_length]
        sample.append_response_tokens(args, tokens=ids, trainable=False, text=output_text)
        sample.tool_calls += bool(ids)
    return sample


async def reward_func(args, sample, **kwargs):
    """Return an object as ReTool does: whether the answer is right, and the number of tool calls."""
    if not isinstance(sample, Sample):
        raise TypeError("expected a Sample")
    answer = sample.response.split("<")[0].strip()
    return {"score": float(answer == sample.label), "calls": getattr(sample, "tool_calls", None)}

"""All fields of requests: what has an effect, what has none, and what is refused. Pure.

A field that is not in these tables is refused: it would otherwise be ignored without a word. They
hold the fields of the three APIs and the extensions of SGLang and vLLM, which harnesses of open
models send. Fields that the readers of requests check themselves are in ``read``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpost.agents.chat_messages import BadRequest

_SAMPLING = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
    }
)
"""The policy samples with those of the run, under which its log-probs are computed."""
_ANY_API = frozenset(
    {
        *("model", "stream", "user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_control", "cache_salt", "extra_key"),
        *("rid", "request_id", "session_id", "priority", "betas", "context_management"),
    }
)
"""Accounting, caches and scheduling; they do not change an answer."""
_THINKING = frozenset({"reasoning_effort", "reasoning", "verbosity", "thinking", "output_config"})
"""How much to think and to write; the header names them as without effect."""
_CONSTRAINTS = (
    *("logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "stop_regex", "bad_words"),
    *("regex", "ebnf", "json_schema", "structured_outputs", "custom_logit_processor"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids"),
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{field: (0, False, {}, []) for field in _CONSTRAINTS},
    "parallel_tool_calls": (True,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "chat_template_kwargs": ({},),
    "best_of": (1,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "background": (False,),
    "functions": ([],),
    "include": ([], ["reasoning.encrypted_content"]),
}
"""Fields that would change an answer, and the values with which they do not. Fields of the APIs
that are in no table, such as ``audio`` and ``previous_response_id``, have no such value.
"""


@dataclass(frozen=True)
class Fields:
    """The fields of one API that its reader reads."""

    read: frozenset[str]

    def check(self, body: Mapping[str, object]) -> tuple[str, ...]:
        """Return the fields without effect.

        Raises:
            BadRequest: a field is not known, or would change the answer.
        """
        fields = {field: value for field, value in body.items() if value is not None}
        for field, value in fields.items():
            if field in self.read or field in _SAMPLING | _ANY_API | _THINKING:
                continue
            # Types are compared too, for 0 == False.
            neutral = [(type(each), each) for each in _NEUTRAL.get(field, ())]
            if (type(value), value) not in neutral:
                remedy = "leave it out"
                if neutral:
                    remedy += f" or send {neutral[0][1]!r}"
                raise BadRequest(
                    f"{field} is not supported, because it is unknown or would change the answer; "
                    f"{remedy}",
                    param=field,
                )
        return tuple(sorted(fields.keys() & (_SAMPLING | _THINKING)))


CHAT = Fields(
    frozenset(
        {
            *("messages", "tools", "tool_choice", "n", "max_tokens", "max_completion_tokens"),
            *("stop", "logprobs", "stream_options", "response_format", "top_logprobs"),
        }
    )
)
RESPONSES = Fields(
    frozenset(
        {
            *("input", "instructions", "tools", "tool_choice", "max_output_tokens", "text"),
            *("top_logprobs", "stream_options"),
        }
    )
)
MESSAGES = Fields(
    frozenset({"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences"})
)

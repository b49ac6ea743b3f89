"""All fields of requests: what has an effect, what has none, and what is refused. Pure.

A field that is not in these tables is refused: it would otherwise be ignored without a word. They
hold the fields of the three APIs, the extensions of SGLang and vLLM, which harnesses of open models
send, and what real programs send beside them (tests/unit/agents/recorded.jsonl). An empty list or object
has no effect in any field. Fields that the readers of requests check themselves are in ``read``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlpost.extensions.agents.chat_messages import BadRequest
from rlpost.extensions.agents.tool_search import is_run_by_client

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
        *("rid", "request_id", "session_id", "priority", "betas"),
        *("client_metadata", "diagnostics", "usage", "inference_geo", "prediction"),
    }
)
"""Accounting, caches and scheduling; they do not change an answer."""
_THINKING = frozenset({"reasoning_effort", "reasoning", "verbosity", "thinking", "output_config"})
"""How much to think and to write; the header names them as without effect."""
_CONTEXT = "context_management"
"""Asks a server to shorten the conversation: Anthropic's edits, OpenAI's compaction. The policy reads
what was sent, so the header names it as without effect.
"""
_CONSTRAINTS = (
    *("logit_bias", "min_tokens", "ignore_eos", "stop_token_ids", "stop_regex", "bad_words"),
    *("regex", "ebnf", "json_schema", "structured_outputs", "custom_logit_processor"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "allowed_token_ids"),
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **{field: (0, False) for field in _CONSTRAINTS},
    "parallel_tool_calls": (True,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "skip_special_tokens": (True,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "best_of": (1,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "truncation": ("disabled",),
    "background": (False,),
    "include": (["reasoning.encrypted_content"],),
}
"""Fields that would change an answer, and the values with which they do not. Fields of the APIs
that are in no table, such as ``audio``, have no such value.
"""
_REMEDIES = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "output_format": "ask for the format in a message",
}
"""Of fields that the APIs had before."""
_SERVER_TOOLS = (
    *("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "mcp"),
    *("image_generation", "tool_search"),
)
"""Kinds of tools that a server runs, without their dates."""


def server_tools(tools: Sequence[object]) -> tuple[str, ...]:
    """Return the kinds of those tools that a server would run, which the model must not see.

    Raises:
        BadRequest: all are. A program that asks for nothing else takes the answer for a result.
    """
    kinds = [kind for tool in tools if (kind := server_tool(tool)) is not None]
    if kinds and len(kinds) == len(tools):
        raise BadRequest(
            f"tools has only {', '.join(kinds)}, which the server would run; the gateway runs no "
            "tools: leave them out",
            param="tools",
        )
    return tuple(sorted(set(kinds)))


def server_tool(tool: object) -> str | None:
    """Return the kind of a tool that a server would run; None for another tool."""
    if is_run_by_client(tool):
        return None
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return next((each for each in _SERVER_TOOLS if str(kind).startswith(each)), None)


def shortens_context(given: object) -> bool:
    """Whether ``context_management`` asks for more than to keep everything, as Claude Code does."""
    edits = given.get("edits", given) if isinstance(given, Mapping) else given
    if not isinstance(edits, list):
        return bool(edits)
    return not all(isinstance(each, Mapping) and each.get("keep") == "all" for each in edits)


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
            if field in self.read or field in _SAMPLING | _ANY_API | _THINKING | {_CONTEXT}:
                continue
            if value == [] or value == {}:
                continue
            # Types are compared too, for 0 == False.
            neutral = [(type(each), each) for each in _NEUTRAL.get(field, ())]
            if (type(value), value) not in neutral:
                remedy = _REMEDIES.get(field, "leave it out")
                if neutral:
                    remedy += f" or send {neutral[0][1]!r}"
                raise BadRequest(
                    f"{field} is not supported, because it is unknown or would change the answer; "
                    f"{remedy}",
                    param=field,
                )
        ignored = fields.keys() & (_SAMPLING | _THINKING)
        if shortens_context(fields.get(_CONTEXT)):
            ignored.add(_CONTEXT)
        return tuple(sorted(ignored))


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
            *("top_logprobs", "stream_options", "previous_response_id"),
        }
    )
)
MESSAGES = Fields(
    frozenset(
        {"messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "thread"}
    )
)

"""Tokenizers for tests, with chat templates that behave like those of Qwen3 and GLM-4.5.

Markers, ends of turns, and the rules for tool calls, tool outputs and reasoning (left out before
the last user message) are the same; the text around the tools is shorter. The vocabulary is a
byte-level BPE trained on a few lines, so that most texts have many tokenisations.

Real templates are those that the package trl brings along; the property tests run on them too.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

QWEN = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\nCall one with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set last = namespace(query=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set last.query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if loop.index0 > last.query and (loop.last or reasoning) %}
{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') }}
{%- else %}{{- m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{%- if not loop.first or m.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

GLM = """
{{- '[gMASK]<sop>' }}
{%- if tools %}
{{- '<|system|>\\nTools:' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\nCall one with <tool_call>NAME\\n<arg_key>K</arg_key>\\n<arg_value>V</arg_value>' }}
{{- '\\n</tool_call>' }}
{%- endif %}
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<|user|>\\n' + m.content }}
{%- elif m.role == 'system' %}{{- '<|system|>\\n' + m.content }}
{%- elif m.role == 'assistant' %}
{%- set reasoning = m.reasoning_content if m.reasoning_content is string else '' %}
{{- '<|assistant|>\\n<think>' }}
{%- if loop.index0 > last.user %}{{- reasoning.strip() }}{%- endif %}
{{- '</think>' }}
{%- if m.content.strip() %}{{- '\\n' + m.content.strip() }}{%- endif %}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson }}{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""

TEMPLATES = {"qwen": QWEN, "glm": GLM}
SPECIAL = {
    "qwen": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "glm": [
        *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>"),
        *("<|user|>", "<|assistant|>", "<|observation|>"),
    ],
}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>"]
MARKS += ["<arg_value>", "</arg_value>", "<tool_response>", "</tool_response>"]
STOPS = {"qwen": ["<|im_end|>", "<|endoftext|>"]}
STOPS["xml"], SPECIAL["xml"] = STOPS["qwen"], SPECIAL["qwen"]
STOPS["glm"] = ["<|endoftext|>", "<|user|>", "<|observation|>"]
CORPUS = [
    "The weather in Paris is fine, and the answer is 42. Let me think about it first.",
    '{"name": "weather", "arguments": {"city": "Paris", "days": 3}}',
    "Search the file, then write the result; the tool returned an error, so try it again.",
]


def write_model(folder: Path, kind: str, template: str | None = None) -> str:
    """Write a tokenizer of ``kind`` to ``folder``, and return the folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens(SPECIAL[kind])
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=template or TEMPLATES[kind],
        additional_special_tokens=SPECIAL[kind],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


REAL = {"qwen3": "qwen", "qwen3_6": "xml", "glm4moe": "glm"}
"""Templates of trl on which the property tests run, and their kind."""


def real_template(name: str) -> str:
    """Return the chat template NAME.jinja of the installed trl."""
    found = importlib.util.find_spec("trl")  # not imported: it loads torch
    assert found is not None and found.origin is not None, "pip install trl"
    return (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text()

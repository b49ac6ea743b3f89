"""Tokenize a sample of the rows of each prompt file as the run will, before a job starts.

Input: the settings of a run. Output: one line for the first problem of each file, and notes: the
longest row against the model's context, a supervised row with what is trained of it, and special
tokens in the text of messages. Imports transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from common.units import counted
from rlpost.config.checks.context_length import engine_context, longest_request
from rlpost.config.eval_sets import eval_sets, set_settings
from rlpost.config.groups.rollout import RolloutConfig
from rlpost.config.tree import Config
from rlpost.errors import ConfigError, DataError
from rlpost.models.config_file import read_config
from rlpost.tasks.examples import ExampleTokenizer, tokenizer_class
from rlpost.tasks.prompt_settings import prompt_set
from rlpost.tasks.prompts import value_of
from rlpost.tasks.rows import Rows
from rlpost.tasks.tokenizer import PromptTokenizer
from rlpost.types import Prompt

RENDERED = 64
"""Rows of a file that are rendered: the first, and others at equal distances."""
SEARCHED = 2048
"""First rows of a file in which each new sequence of roles is rendered as well, up to RENDERED."""
LONGEST = 4
"""Rows of a file that are rendered because they have the most bytes."""
SHOWN = 120
"""Characters shown of each part of a supervised row."""
UNLIMITED = {"rollout_max_prompt_len": None, "rollout_max_context_len": None}


@dataclass(frozen=True, slots=True)
class _Sample:
    """The tokenized rows of a file: places, prompts and lengths of whole rows, by position."""

    rows: Rows
    prompts: Mapping[int, Prompt]
    lengths: Mapping[int, int]


def check_rows(config: Config) -> tuple[list[str], list[str]]:
    """Return the first problem of each prompt file, and notes on its rows."""
    applies = {"apply_chat_template": config.applies_chat_template}
    run, folder = config.rollout.model_copy(update=applies), config.checkpoint.hf_checkpoint
    kind = tokenizer_class(config)
    sources: list[tuple[str, Sequence[str], RolloutConfig, type[PromptTokenizer]]] = [
        ("--prompt-data", run.prompt_data, run, kind)
    ]
    for one in eval_sets(config.eval):
        settings = set_settings(one, config.eval, run)
        sources.append((f"--eval-prompt-data {one.name}", [one.path], settings, PromptTokenizer))
    problems, notes = [], []
    for flag, files, settings, make in sources:
        try:
            tokenizer = make(
                folder,
                apply_chat_template=settings.apply_chat_template,
                template_kwargs=settings.apply_chat_template_kwargs,
            )
        except ConfigError as error:
            return str(error).splitlines(), []  # the same for each file
        for file in files:
            try:
                sample = _tokenize_sample(file, config, settings, tokenizer)
                notes += [f"{flag}: {note}" for note in _notes(sample, config, settings, tokenizer)]
            except DataError as error:
                problems.append(f"{flag}: {error}")
    return problems, notes


def _tokenize_sample(
    file: str, config: Config, settings: RolloutConfig, tokenizer: PromptTokenizer
) -> _Sample:
    """Tokenize a sample of the rows of a file.

    Raises:
        DataError: a row of the sample is bad; with ``--bad-prompts skip`` all of them are.
    """
    unlimited = settings.model_copy(update=UNLIMITED)
    prompts = prompt_set([file], config, unlimited, tokenizer, skip_bad=False)
    rows = prompts.fields.rows(file)
    tokenized, lengths, errors = dict[int, Prompt](), dict[int, int](), []
    positions = sample_of(rows, settings.input_key)
    for position in positions:
        try:
            prompt = prompts.prompt(position, position)
            assert prompt is not None, "nothing is skipped"
            tokenized[position] = prompt
            lengths[position] = len(prompt.token_ids)
            if isinstance(tokenizer, ExampleTokenizer):
                lengths[position] = len(tokenizer.whole(prompt))
        except DataError as error:
            errors.append(error)
    if errors and (settings.bad_prompts != "skip" or len(errors) == len(positions)):
        raise errors[0]
    return _Sample(rows, tokenized, lengths)


def sample_of(rows: Rows, key: str) -> list[int]:
    """Return the positions of the rows to render, in order."""
    step = max(1, len(rows) // RENDERED)
    chosen = set(range(0, len(rows), step)[:RENDERED])
    chosen |= set(sorted(range(len(rows)), key=rows.num_bytes)[-LONGEST:])
    seen: set[tuple[str, ...]] = set()
    for position in range(min(len(rows), SEARCHED)):
        try:
            roles = tuple(_roles(value_of(rows.row(position), key)))
        except DataError:
            continue  # ``check_prompts`` reports it
        if roles not in seen and len(seen) < RENDERED:
            seen.add(roles)
            chosen.add(position)
    return sorted(chosen)


def _roles(messages: object) -> Iterator[str]:
    """Yield the role of each message; of alternating roles only the first two."""
    dicts = [one for one in messages if isinstance(one, dict)] if isinstance(messages, list) else []
    roles = [str(one.get("role")) for one in dicts]
    for index, role in enumerate(roles):
        if index < 2 or role != roles[index - 2]:
            yield role


def _notes(
    sample: _Sample, config: Config, settings: RolloutConfig, tokenizer: PromptTokenizer
) -> Iterator[str]:
    """Yield notes on the rows of a file."""
    if isinstance(tokenizer, ExampleTokenizer):
        position = min(sample.prompts)
        text = tokenizer.marked(sample.prompts[position], most=SHOWN)
        yield f"{sample.rows.where(position)}: trained is what \u27e6 \u27e7 enclose: {text!r}"
    note = _length_note(
        sample, config, settings, is_trained=isinstance(tokenizer, ExampleTokenizer)
    )
    if note is not None:
        yield note
    if settings.apply_chat_template:
        note = _special_note(sample.rows, settings.input_key, tokenizer)
        if note is not None:
            yield note


def _length_note(
    sample: _Sample, config: Config, settings: RolloutConfig, *, is_trained: bool
) -> str | None:
    """Compare the longest row with the model's context; None if there is nothing to say."""
    hf = read_config(config.checkpoint.hf_checkpoint)
    context = engine_context(config.sglang.server_args, hf)
    longest = longest_request(config.sglang.server_args, hf)
    position = max(sample.lengths, key=lambda one: sample.lengths[one])
    length, where = sample.lengths[position], sample.rows.where(position)
    if context is None or longest is None:
        return None
    limit = settings.rollout_max_context_len
    if is_trained:
        skips = "" if limit is None else f"; rows of more than {limit} are skipped"
        if length > context and (limit is None or limit > context):
            skips = (
                f"; add --rollout-max-context-len {context} to skip what the model was not made for"
            )
        return (
            f"{where}: the longest row that was tokenized, {length} tokens of the {context} of the "
            f"model's context{skips}"
        )
    is_skipped = limit is not None or length > (settings.rollout_max_prompt_len or length)
    if is_skipped or length < longest:
        return None
    return (
        f"{where}: {length} tokens leave none for an answer of the {longest} that engines serve in "
        f"full (the model's context has {context}), and an engine that rejects the request ends the "
        f"run; add --rollout-max-context-len {longest} to skip such rows"
    )


def _special_note(rows: Rows, key: str, tokenizer: PromptTokenizer) -> str | None:
    """Return a note on special tokens in the text of messages; None if no row has any.

    All rows are searched, most of them as bytes.
    """
    tokens = [
        text
        for text, number in tokenizer.special_tokens.items()
        if len(text) > 1 and tokenizer.encode(text) == (number,)
    ]
    if not tokens:
        return None
    spellings = {form for text in tokens for form in (text, json.dumps(text)[1:-1])}
    pattern = re.compile(b"|".join(re.escape(form.encode()) for form in sorted(spellings)))
    first, count = None, 0
    for position in range(len(rows)):
        if not pattern.search(rows.line(position)):
            continue
        try:
            text = "\n".join(_texts(value_of(rows.row(position), key)))
        except DataError:
            continue
        present = next((token for token in tokens if token in text), None)
        if present is not None:
            first, count = first or (position, present), count + 1
    if first is None:
        return None
    return (
        f"{rows.where(first[0])}: its text has {first[1]!r}, which becomes this special token in the prompt, so the "
        f"text can end its message and begin another ({counted(count, 'row')}); remove it unless that is intended"
    )


def _texts(content: object) -> Iterator[str]:
    """Yield the texts of a prompt."""
    if isinstance(content, str):
        yield content
    for message in content if isinstance(content, list) else []:
        if isinstance(message, dict):
            yield str(message.get("content"))

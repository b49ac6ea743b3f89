"""Read prompts from files and reject invalid rows.

Input: files (JSON Lines or Parquet, whole or sliced), the keys of prompt, label, metadata and
tools, and whether to skip invalid rows. Output: ``Prompt``s by position; a skipped one is None, and
counted. ``check_prompt_file`` reads all rows once and needs no tokenizer.
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeGuard

from rlpost.columns import IntColumn
from rlpost.errors import DataError, ImageError
from rlpost.images.processor import ImageProcessor
from rlpost.tasks.messages import Content, content_of, from_text, without_nulls
from rlpost.tasks.number_text import number_text
from rlpost.tasks.prompt_images import (
    VIDEO_KEYS,
    PromptImages,
    check_images,
    check_no_video,
    with_parts,
)
from rlpost.tasks.reward.registry import label_keys
from rlpost.tasks.rows import FileChanged, Rows
from rlpost.tasks.tokenizer import Tools
from rlpost.tasks.vocabulary import unknown_id
from rlpost.types import ImageSpan, Prompt

logger = logging.getLogger(__name__)

Tokenize = Callable[[Content, Tools | None], tuple[str, tuple[int, ...]]]
_MISSING = object()
WholeRow = Callable[[Prompt], Sequence[int]]

BAD, LONG = "rollout/bad_prompts", "rollout/long_prompts"
NO_RESPONSE = (
    "has no response to train on; set --label-key, or end its messages with an assistant message"
)
LIMITS = "--rollout-max-prompt-len or --rollout-max-context-len"
"""The flags that limit a prompt's length (``rlpost.tasks.prompt_settings.longest_prompt``), for
messages.
"""


@dataclass(frozen=True, slots=True)
class PromptFields:
    """The keys of a row, and what its label is for.

    ``KEY.SUBKEY`` is a key of an object. Without ``metadata_key`` all keys except those of prompt
    and label are metadata. ``rm_type`` is the reward by name that grades the answers, unless a row
    names another; None if a function, a server or an environment does. ``trains_label``: the label
    is the response that is trained. ``flag_prefix`` begins the flags that name the keys of prompt
    and label: ``--eval-`` for evaluation. ``image_key`` is that of the images; None for text alone.
    """

    input_key: str
    label_key: str | None = None
    metadata_key: str | None = None
    tool_key: str | None = None
    image_key: str | None = None
    rm_type: str | None = None
    trains_label: bool = False
    flag_prefix: str = "--"

    @property
    def columns(self) -> list[str] | None:
        """The keys to read, or None for all."""
        if self.metadata_key is None:
            return None
        keys = (
            self.input_key,
            self.label_key,
            self.metadata_key,
            self.tool_key,
            self.image_key,
        )
        named = [key for key in keys if key is not None]
        named += VIDEO_KEYS if self.image_key is not None else ()
        return [*named, *(key.partition(".")[0] for key in named if "." in key)]

    @property
    def columns_with_bytes(self) -> list[str]:
        """The columns of a Parquet file in which bytes are an image or a video."""
        keys = [] if self.image_key is None else [self.image_key, self.input_key]
        # Those of a video are read over, unless they would be metadata.
        keys += VIDEO_KEYS if keys and self.metadata_key is not None else ()
        return [key.partition(".")[0] for key in keys]

    def rows(self, source: str | Path) -> Rows:
        """Return the rows of a file. Raises DataError if it cannot be read."""
        return Rows(source, columns=self.columns, with_bytes=self.columns_with_bytes)


@dataclass(frozen=True, slots=True)
class Row:
    """A valid row."""

    content: Content
    label: str | None
    metadata: dict[str, object]
    tools: Tools | None
    images: tuple[object, ...] = ()
    """The source of each part of type image in the content, in order."""


def check_prompt_file(
    source: str | Path,
    fields: PromptFields,
    *,
    apply_chat_template: bool = True,
    skip_bad: bool = False,
    processor: ImageProcessor | None = None,
    needs_images: bool = False,
) -> int:
    """Read every row as a run would and return the number of valid rows.

    Images are decoded; ``processor`` is that of the model. With ``needs_images`` and an image key,
    a file in which no row has an image is an error, as a misspelled key would be.

    Raises:
        DataError: a row is invalid (file, line, problem, remedy); with ``skip_bad``, all rows are.
    """
    rows = fields.rows(source)
    first_error: DataError | None = None
    num_bad = num_images = 0
    for position in range(len(rows)):
        try:
            row = parse(rows.row(position), rows.where(position), fields)
            if not apply_chat_template and (row.tools or not isinstance(row.content, str)):
                what = (
                    f"{fields.tool_key!r} has tools"
                    if row.tools
                    else f"{fields.input_key!r} is a list of messages"
                )
                raise DataError(f"{rows.where(position)}: {what}; add --apply-chat-template")
            try:
                check_images(row.images, rows.path.parent, processor)
                num_images += len(row.images)
            except ImageError as error:
                raise DataError(f"{rows.where(position)}: {error}") from error
        except FileChanged:
            raise
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{error} (--bad-prompts skip skips such lines)") from error
            first_error = first_error or error
            num_bad += 1
    if num_bad == len(rows):
        raise DataError(
            f"{source}: none of {len(rows)} rows is a valid prompt; the first: {first_error}"
        )
    if needs_images and fields.image_key is not None and not num_images:
        raise DataError(
            f'{source}: no row has an image under --multimodal-keys {{"image": "{fields.image_key}"}}; name '
            "the key of its images, or leave the flag out to train on text"
        )
    if num_bad:
        logger.warning(
            "%s: %d of %d rows are invalid and are skipped; the first: %s",
            source,
            num_bad,
            len(rows),
            first_error,
        )
    return len(rows) - num_bad


class PromptSet:
    """The prompts of one or more files, one file after the other, by position."""

    def __init__(
        self,
        sources: str | Path | Sequence[str | Path],
        *,
        tokenize: Tokenize,
        fields: PromptFields,
        max_prompt_len: int | None = None,
        skip_bad: bool = False,
        vocab_size: int | None = None,
        whole: WholeRow | None = None,
        max_len: int | None = None,
        images: PromptImages | None = None,
    ) -> None:
        """
        Args:
            max_prompt_len: in tokens, with all tokens of images.
            vocab_size: number of ids that the model knows; None if it is not known.
            whole: returns the ids of a prompt and its response in the data (``ExampleTokenizer``).
            max_len: of those ids, in tokens.
            images: reads the images of rows; None without ``fields.image_key``.
        """
        files = [sources] if isinstance(sources, str | Path) else list(sources)
        self._files = [fields.rows(file) for file in files]
        self._starts = list(accumulate((len(file) for file in self._files), initial=0))
        self._tokenize = tokenize
        self._fields = fields
        self._max_prompt_len = max_prompt_len
        self._skip_bad = skip_bad
        self._vocab_size = vocab_size
        self._whole, self._max_len = whole, max_len
        self._images = images
        self._skipped: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def fields(self) -> PromptFields:
        """The keys of a row."""
        return self._fields

    @property
    def sizes(self) -> tuple[int, ...]:
        """Rows of each file."""
        return tuple(len(file) for file in self._files)

    def prompt(self, position: int, prompt_id: int) -> Prompt | None:
        """Return the prompt at ``position``, from 0, with the id ``prompt_id``; None to skip it.

        Raises:
            DataError: the row is bad and bad rows are not skipped; the message names file and line.
        """
        which = bisect_right(self._starts, position) - 1
        file, at = self._files[which], position - self._starts[which]
        where = file.where(at)
        try:
            row = parse(file.row(at), where, self._fields)
            try:
                prompt, num_tokens = self._tokenized(row, prompt_id, file.path.parent)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        except DataError as error:
            if not self._skip_bad or isinstance(error, FileChanged):
                raise
            self._skip(BAD, str(error))
            return None
        lengths = ((len(prompt.token_ids), self._max_prompt_len), (num_tokens, self._max_len))
        for length, limit in lengths:
            if limit is not None and length > limit:
                self._skip(LONG, f"{where}: {length} tokens, more than {limit} ({LIMITS})")
                return None
        return prompt

    def _tokenized(self, row: Row, prompt_id: int, folder: Path) -> tuple[Prompt, int]:
        """Return a row's prompt, and the number of its tokens with those of a response in the data.

        Paths of images are relative to ``folder``.

        Raises:
            DataError: the tokenizer refuses the row, the model has no such token, or an image cannot
                be used.
        """
        text, ids = self._tokenize(row.content, row.tools)
        token_ids, images = IntColumn(ids), tuple[ImageSpan, ...]()
        if self._images is not None:
            token_ids, images = self._images.expanded(ids, row.images, folder)
        prompt = Prompt(
            prompt_id=prompt_id,
            text=text,
            token_ids=token_ids,
            label=row.label,
            metadata=row.metadata,
            images=images,
        )
        whole = prompt.token_ids if self._whole is None else self._whole(prompt)
        unknown = unknown_id(whole, self._vocab_size)
        if unknown is not None:
            raise DataError(
                f"the tokenizer gives the id {unknown}, and the model has vocab_size = {self._vocab_size}; "
                "use the tokenizer of this model"
            )
        return prompt, len(whole)

    def read_images(self, position: int) -> None:
        """Store the images of a row, if it is a good one. Raises OSError if they cannot be written."""
        if self._images is None:
            return
        which = bisect_right(self._starts, position) - 1
        file, at = self._files[which], position - self._starts[which]
        with suppress(DataError):  # reported when the prompt is taken
            row = parse(file.row(at), file.where(at), self._fields)
            self._images.read_all(row.images, file.path.parent)

    def all(self) -> list[Prompt]:
        """Return every prompt that is not skipped, with its position as its id.

        Raises:
            DataError: a row is bad and bad rows are not skipped, or all rows are skipped.
        """
        found = [self.prompt(position, position) for position in range(len(self))]
        kept = [prompt for prompt in found if prompt is not None]
        if not kept:
            names = ", ".join(str(file.path) for file in self._files)
            raise DataError(f"{names}: all {len(self)} rows are bad or longer than {LIMITS} allows")
        return kept

    def counters(self) -> Mapping[str, float]:
        """Return the number of prompts skipped since the last call, by metric name."""
        found = {name: float(self._skipped[name]) for name in (BAD, LONG)}
        self._skipped.clear()
        return found

    def _skip(self, metric: str, why: str) -> None:
        self._skipped[metric] += 1
        logger.debug("skipped: %s", why)


def parse(raw: Mapping[str, object], where: str, fields: PromptFields) -> Row:
    """Parse a row. Raises DataError, whose message begins with ``where``."""
    content = content_of(
        _value(raw, fields.input_key, where, f"{fields.flag_prefix}input-key"),
        f"{where}: {fields.input_key!r}",
        takes_images=fields.image_key is not None,
    )
    images: tuple[object, ...] = ()
    if fields.image_key is not None:
        check_no_video(raw, content, where)
        content, images = with_parts(content, value_of(raw, fields.image_key), where)
        # the bytes of images are not metadata
        raw = without(raw, fields.image_key)
        raw = without(raw, fields.input_key) if images else raw
    label = None if fields.label_key is None else _label(raw, where, fields)
    if fields.metadata_key is None:
        metadata = {
            key: value
            for key, value in raw.items()
            if key not in (fields.input_key, fields.label_key)
        }
    else:
        metadata = from_text(_value(raw, fields.metadata_key, where, "--metadata-key"))
        metadata = {} if metadata is None else metadata  # null in a Parquet column
        if not isinstance(metadata, dict):
            raise DataError(
                f"{where}: {fields.metadata_key!r} is {type(metadata).__name__}; it must be an object"
            )
    if label is not None:
        _check_label(label, metadata, where, fields)
    if isinstance(label, dict):  # the label is text; the metadata keeps the object for rewards
        metadata = {**metadata, str(fields.label_key): label}
        label = label_text(label)
    if fields.trains_label:
        _check_response(content, label, where)
    tools = _tools(raw, where, fields.tool_key)
    if tools is not None:  # for a generate function that runs them
        metadata = {**metadata, str(fields.tool_key): tools}
    return Row(content, label, metadata, tools, images)


def label_text(label: Mapping[str, object]) -> str:
    """Return the text of a label that is an object."""
    return json.dumps(label, ensure_ascii=False, default=str)


def _label(raw: Mapping[str, object], where: str, fields: PromptFields) -> str | dict[str, object]:
    key, flag = str(fields.label_key), f"{fields.flag_prefix}label-key"
    others = [name for name in raw if name != fields.input_key]
    if not others and value_of(raw, key, _MISSING) is _MISSING:
        raise DataError(f"{where}: no key {key!r} beside the prompt; set {flag} none")
    label = _value(raw, key, where, flag)
    if isinstance(label, bool) or not isinstance(label, str | int | float | dict):
        kind = type(label).__name__
        raise DataError(
            f"{where}: {key!r} is {kind}; the label must be a string, a number or an object"
        )
    try:
        if isinstance(label, dict):
            json.dumps(label, allow_nan=False, default=str)
        return number_text(label) if isinstance(label, int | float) else label
    except ValueError:
        raise DataError(
            f"{where}: {key!r} has a number that is NaN or infinite, as a missing value becomes in a column of "
            "numbers; give the label, or remove the row"
        ) from None


def _check_label(
    label: str | dict[str, object], metadata: Mapping[str, object], where: str, fields: PromptFields
) -> None:
    """Raise DataError for a label that its use makes meaningless: blank, or an object as text."""
    use, key = _use_as_text(metadata, fields), fields.label_key
    if use is None:
        return
    if isinstance(label, dict):
        names = ", ".join(map(repr, label)) or "none"
        example = "ground_truth" if "ground_truth" in label else next(iter(label), "NAME")
        raise DataError(
            f"{where}: {key!r} is an object with the keys {names}, and {use}; use --label-key {key}.{example}"
        )
    if not label.strip():
        raise DataError(f"{where}: {key!r} is blank, and {use}; give it, or remove the row")


def _use_as_text(metadata: Mapping[str, object], fields: PromptFields) -> str | None:
    """Return what the text of a label is for; None if nothing reads it as text."""
    if fields.trains_label:
        return "it is the response that is trained"
    if fields.rm_type is None:
        return None
    named = metadata.get("rm_type")
    name = named.strip() if isinstance(named, str) and named.strip() else fields.rm_type
    instead = label_keys(name)
    if instead is None or any(metadata.get(key) for key in instead):
        return None
    return f"the reward {name!r} compares its text"


def _tools(raw: Mapping[str, object], where: str, key: str | None) -> Tools | None:
    """Return a prompt's tools, or None if the key is missing or empty."""
    tools = None if key is None else from_text(value_of(raw, key))
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(
            f"{where}: {key!r} must be a list of OpenAI function schemas (--tool-key), got {tools!r:.200}"
        )
    return [without_nulls(tool) for tool in tools]


def _value(raw: Mapping[str, object], key: str, where: str, flag: str) -> object:
    value = value_of(raw, key, _MISSING)
    if value is _MISSING:
        raise DataError(
            f"{where}: no key {key!r}; it has {', '.join(map(repr, raw)) or 'none'}. Set {flag} to one of them"
        )
    return value


def _check_response(content: Content, label: str | None, where: str) -> None:
    """Raise DataError unless a row has exactly one response to train on."""
    if label is None and not is_conversation(content):
        raise DataError(f"{where}: the row {NO_RESPONSE}")
    if label is not None and is_conversation(content):
        raise DataError(
            f"{where}: the messages end with an assistant message, and the row has a label: two responses; leave "
            "--label-key out, or remove the last message"
        )


def is_conversation(content: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """Whether content is a list of messages of which the last one is the assistant's."""
    return isinstance(content, list) and bool(content) and content[-1].get("role") == "assistant"


def value_of(entries: Mapping[str, object], key: str, default: object = None) -> object:
    """Return the value of a key, or of ``KEY.SUBKEY`` in an object or its JSON text."""
    if key in entries:
        return entries[key]
    outer, _, inner = key.partition(".")
    nested = from_text(entries.get(outer))
    return value_of(nested, inner, default) if inner and isinstance(nested, dict) else default


def without(entries: Mapping[str, object], key: str) -> Mapping[str, object]:
    """Return the entries without what ``value_of`` returns for a key."""
    if key in entries:
        return {name: value for name, value in entries.items() if name != key}
    outer, _, inner = key.partition(".")
    nested = from_text(entries.get(outer))
    if not inner or not isinstance(nested, dict):
        return entries
    kept = without(nested, inner)
    is_text = isinstance(entries[outer], str)
    return {**entries, outer: json.dumps(kept, ensure_ascii=False) if is_text else kept}

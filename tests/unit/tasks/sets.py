"""Small prompt files, and a tokenizer with one id per character."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def letters(content: Any, tools: Any = None) -> tuple[str, tuple[int, ...]]:
    text = (
        content if isinstance(content, str) else "".join(message["content"] for message in content)
    )
    text += "" if tools is None else f"[{len(tools)} tools]"
    return text, tuple(ord(letter) for letter in text)


def write(path: Path, *lines: object) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def numbered(path: Path, size: int, prefix: str = "") -> Path:
    return write(path, *({"input": f"{prefix}{i}"} for i in range(size)))


def write_parquet(
    path: Path, rows: Sequence[dict[str, Any]], row_group_size: int = 2, *, schema: Any = None
) -> Path:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(list(rows), schema=schema)
    parquet.write_table(table, path, row_group_size=row_group_size)
    return path


def byte_tokenizer(
    folder: Path,
    template: str,
    *,
    special: Sequence[str] = ("<|end|>", "<|user|>", "<|assistant|>"),
    added: Sequence[str] = ("<think>", "</think>"),
    merges: Sequence[tuple[str, str]] = (),
) -> Any:
    """Save a tokenizer of bytes and marks; the first special token ends an answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *map("".join, merges)]
    vocab = {entry: number for number, entry in enumerate(entries)}
    core = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special))
    core.add_tokens(list(added))
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special[0], chat_template=template
    )
    made.save_pretrained(folder)
    return made

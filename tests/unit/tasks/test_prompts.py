"""Prompt files: errors name file, line and remedy; valid rows are read by position."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlpost.config.groups.rollout import RolloutConfig
from rlpost.errors import ConfigError, DataError
from rlpost.extensions.slime.sample import label_of
from rlpost.tasks.prompt_settings import check_prompts, longest_prompt
from rlpost.tasks.prompts import PromptFields, PromptSet, check_prompt_file, parse
from rlpost.tasks.rows import Rows
from tests.unit.tasks.sets import letters, numbered, write, write_parquet

GOOD = {"prompt": "Q", "label": "A"}
FIELDS = PromptFields("prompt", "label")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('{"prompt": "Q", ', "not JSON"),
        ("[1, 2]", "list instead of a JSON object"),
        (
            {"question": "Q", "label": "A"},
            "no key 'prompt'; it has 'question', 'label'. Set --input-key",
        ),
        ({"prompt": "Q"}, "no key 'label'"),
        ({"prompt": 7, "label": "A"}, "'prompt' is int"),
        ({"prompt": "", "label": "A"}, "'prompt' is empty"),
        ({"prompt": " \n", "label": "A"}, "'prompt' is blank"),
        ({"prompt": [{"role": "user", "content": " "}], "label": "A"}, "no message has text"),
        ('{"prompt": "Q", "label": "A", "label": "B"}', "the key 'label' occurs twice"),
        ('{"prompt": "Q", "label": NaN}', "'label' has a number that is NaN or infinite"),
        ('{"prompt": "Q", "label": 1e999}', "'label' has a number that is NaN or infinite"),
        ('{"prompt": "Q", "label": {"a": [Infinity]}}', "'label' has a number that is NaN or"),
        ({"prompt": [], "label": "A"}, "'prompt' is list"),
        ({"prompt": [{"role": "user"}], "label": "A"}, "'role' and 'content'"),
        ({"prompt": "Q", "label": ["A"]}, "'label' is list"),
        ({"prompt": "Q", "label": True}, "'label' is bool"),
        (r'{"prompt": "1\ud83d5", "label": "A"}', r"\ud83d is half of a surrogate pair"),
        (
            r'{"prompt": "Q", "label": "A", "note": ["\uDE00"]}',
            r"\ude00 is half of a surrogate pair",
        ),
        (
            {"prompt": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[1"}}]}]},
            "the arguments of a tool call must be a JSON object or its text, got '[1'",
        ),
    ],
)
def test_a_broken_line_is_named_with_file_and_line(
    tmp_path: Path, line: object, wanted: str
) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, "", line, GOOD)
    with pytest.raises(DataError) as error:
        check_prompt_file(path, FIELDS)
    assert f"{path}, line 3" in str(error.value)
    assert wanted in str(error.value)


def test_messages_without_a_chat_template_are_refused_only_then(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "Q"}], "label": "A"})
    assert check_prompt_file(path, FIELDS) == 1
    with pytest.raises(DataError, match=r"line 1.*--apply-chat-template"):
        check_prompt_file(path, FIELDS, apply_chat_template=False)


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match="no prompts"):
        check_prompt_file(path, FIELDS)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl.*No such file"):
        check_prompt_file(tmp_path / "nowhere.jsonl", FIELDS)


def test_every_position_is_its_line_despite_blank_lines_and_non_ascii_text(
    tmp_path: Path,
) -> None:
    texts = ["eins", "zwei größer", "三", "four"]
    path = tmp_path / "p.jsonl"
    path.write_text(
        "\n\n".join(
            json.dumps({"prompt": t, "label": i}, ensure_ascii=False) for i, t in enumerate(texts)
        )
    )
    prompts = PromptSet(path, tokenize=letters, fields=FIELDS)
    assert check_prompt_file(path, FIELDS) == len(prompts) == 4
    for position in (3, 0, 2, 1):
        prompt = prompts.prompt(position, prompt_id=position + 40)
        assert (prompt.prompt_id, prompt.text, prompt.label) == (
            position + 40,
            texts[position],
            str(position),
        )
        assert prompt.token_ids == letters(texts[position])[1]


def test_the_other_keys_of_a_line_are_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {**GOOD, "source": "book", "page": 3})
    prompt = PromptSet(path, tokenize=letters, fields=FIELDS).prompt(0, 0)
    assert prompt.metadata == {"source": "book", "page": 3}


def test_the_check_imports_nothing_heavy(tmp_path: Path) -> None:
    """The check runs on a login node."""
    path = write(tmp_path / "p.jsonl", GOOD)
    program = (
        "import sys; from rlpost.tasks.prompts import PromptFields, check_prompt_file;"
        "import rlpost.tasks.prompt_settings;"
        f"check_prompt_file({str(path)!r}, PromptFields('prompt', 'label'));"
        "heavy = {'torch', 'transformers', 'ray', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_bad_line_can_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "p.jsonl", GOOD, "{", GOOD)
    assert check_prompt_file(path, FIELDS, skip_bad=True) == 2
    assert (
        f"1 of 3 rows are invalid and are skipped; the first: {path}, line 2: not JSON"
        in caplog.text
    )
    with pytest.raises(DataError, match=r"line 2: .*\(--bad-prompts skip skips such lines\)"):
        check_prompt_file(path, FIELDS)
    with pytest.raises(DataError, match="none of 1 rows is a valid prompt"):
        check_prompt_file(f"{path}@[1:2]", FIELDS, skip_bad=True)


@pytest.mark.parametrize(
    ("ends", "wanted"),
    [
        ("1:3", "12"),
        (":2", "01"),
        ("3:", "34"),
        ("-2:", "34"),
        (":-3", "01"),
        (":", "01234"),
        ("0:99", "01234"),
    ],
)
def test_a_slice_of_a_file_is_as_in_python(tmp_path: Path, ends: str, wanted: str) -> None:
    prompts = PromptSet(
        f"{numbered(tmp_path / 'p.jsonl', 5)}@[{ends}]",
        tokenize=letters,
        fields=PromptFields("input"),
    )
    assert "".join(prompt.text for prompt in prompts.all()) == wanted


def test_an_invalid_or_empty_slice_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "p.jsonl", 5)
    with pytest.raises(DataError, match=r"PATH@\[A:B\]"):
        PromptSet(f"{path}@[x]", tokenize=letters, fields=PromptFields("input"))
    with pytest.raises(DataError, match=r"no prompts in .*@\[7:9\], which has 5 rows"):
        PromptSet(f"{path}@[7:9]", tokenize=letters, fields=PromptFields("input"))
    write(path, *(path.read_text().splitlines()[:4]), "{")
    with pytest.raises(DataError, match="line 5"):
        PromptSet(f"{path}@[3:]", tokenize=letters, fields=PromptFields("input")).all()


def test_metadata_and_tools_have_their_own_keys(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {**GOOD, "extra": {"rm_type": "f1"}, "tools": tools, "page": 3},
        {**GOOD, "extra": "{}", "tools": None},
    ]
    rows.append({**GOOD, "extra": None})
    fields = PromptFields("prompt", "label", "extra", "tools")
    first, second, third = PromptSet(
        write(tmp_path / "p.jsonl", *rows), tokenize=letters, fields=fields
    ).all()
    assert (first.text, first.metadata) == ("Q[1 tools]", {"rm_type": "f1", "tools": tools})
    assert (second.text, second.metadata) == ("Q", {}) == (third.text, third.metadata)
    for wrong, wanted in (
        ({**GOOD, "extra": []}, "'extra' is list"),
        ({**GOOD, "extra": {}, "tools": "x"}, "--tool-key"),
    ):
        with pytest.raises(DataError, match=f"line 1: .*{wanted}"):
            check_prompt_file(write(tmp_path / "q.jsonl", wrong), fields)


def test_tools_without_the_chat_template_are_reported_by_the_check(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    path, fields = (
        write(tmp_path / "p.jsonl", GOOD, {**GOOD, "tools": tools}),
        PromptFields("prompt", tool_key="tools"),
    )
    assert check_prompt_file(path, fields) == 2
    with pytest.raises(DataError, match="line 2: 'tools' has tools; add --apply-chat-template"):
        check_prompt_file(path, fields, apply_chat_template=False)


def test_openai_messages_are_supported(tmp_path: Path) -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}], "name": None},
        {"role": "tool", "content": "3"},
    ]
    seen = []

    def tokenize(content, tools):
        seen.append(content)
        return letters(content)

    PromptSet(
        write(tmp_path / "p.jsonl", {"input": messages}),
        tokenize=tokenize,
        fields=PromptFields("input"),
    ).all()
    assert seen == [
        [
            {"role": "user", "content": "one two"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function"}]},
            {"role": "tool", "content": "3"},
        ]
    ]
    picture = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
    with pytest.raises(DataError, match="a message with images, which --multimodal-keys"):
        check_prompt_file(write(tmp_path / "q.jsonl", {"input": picture}), PromptFields("input"))


def test_whole_surrogate_pairs_and_korean_are_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl", r'{"prompt": "\ud83d\ude00", "label": "A"}', {**GOOD, "x": "한"}
    )
    (first, _) = PromptSet(path, tokenize=letters, fields=FIELDS).all()
    assert first.text == "\U0001f600"


def test_arguments_of_tool_calls_may_be_json_text_as_in_openais_api(tmp_path: Path) -> None:
    def message(arguments: object) -> dict[str, object]:
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    for given, parsed in (('{"city": "Paris"}', {"city": "Paris"}), ("", {}), ({"a": 1}, {"a": 1})):
        row = parse({"prompt": [message(given)]}, "here", PromptFields("prompt"))
        assert row.content == [message(parsed)]


def test_bytes_in_parquet_are_text_in_utf_8(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [{"prompt": "é".encode(), "label": "A"}])
    (prompt,) = PromptSet(path, tokenize=letters, fields=FIELDS).all()
    assert prompt.text == "é"
    rows = [{"prompt": b"a", "label": "A"}, {"prompt": b"\xff", "label": "A"}]
    path = write_parquet(tmp_path / "q.parquet", rows)
    with pytest.raises(DataError, match=r"q\.parquet, row 2: a column of bytes is not UTF-8"):
        check_prompt_file(path, FIELDS)


def test_parquet_gives_the_same_prompts_as_json_lines(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"größer {i}"}],
            "label": i / 2,
            "extra": {"page": i},
        }
        for i in range(7)
    ]
    one = PromptSet(write(tmp_path / "p.jsonl", *rows), tokenize=letters, fields=FIELDS)
    for group in (1, 3, 100):
        path = write_parquet(tmp_path / f"{group}.parquet", rows, group)
        assert PromptSet(path, tokenize=letters, fields=FIELDS).all() == one.all()
        assert check_prompt_file(path, FIELDS) == 7
    assert PromptSet(
        [f"{path}@[5:]", tmp_path / "p.jsonl"], tokenize=letters, fields=FIELDS
    ).sizes == (2, 7)


def test_a_bad_parquet_row_and_a_file_that_is_not_parquet_are_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "p.parquet", [GOOD, {"prompt": "", "label": "A"}])
    with pytest.raises(DataError, match=r"p\.parquet, row 2: 'prompt' is empty"):
        check_prompt_file(path, FIELDS)
    with pytest.raises(DataError, match=r"q\.parquet: not a Parquet file"):
        check_prompt_file(write(tmp_path / "q.parquet", GOOD), FIELDS)


def test_the_check_of_settings_reads_every_file_and_counts_the_weights(tmp_path: Path) -> None:
    paths = tuple(str(numbered(tmp_path / f"{name}.jsonl", 2)) for name in "ab")
    check_prompts(paths, RolloutConfig(prompt_data=paths, prompt_data_weights=(1, 2)))
    with pytest.raises(ConfigError, match="1 weights for 2 --prompt-data"):
        check_prompts(paths, RolloutConfig(prompt_data=paths, prompt_data_weights=(1,)))
    Path(paths[1]).write_text("{")
    with pytest.raises(DataError, match=r"b\.jsonl, line 1"):
        check_prompts(paths, RolloutConfig(prompt_data=paths))
    with pytest.raises(DataError, match="none of 1 rows"):
        check_prompts(paths, RolloutConfig(prompt_data=paths, bad_prompts="skip"))


def repeated(kind: str, texts: Any) -> Any:
    """An Arrow array of ``kind`` that holds all ``texts``, nested ones in one row or 30."""
    import pyarrow as pa

    count = len(texts)
    keys = pa.array([str(number) for number in range(count)])
    messages = pa.StructArray.from_arrays([texts], ["content"])
    ends = pa.array(range(0, count + 1, count // 30), pa.int32())
    starts, sizes = ends[:-1], [count // 30] * 30
    return {
        "texts": lambda: texts,
        "one list": lambda: pa.ListArray.from_arrays([0, count], messages),
        "lists": lambda: pa.ListArray.from_arrays(ends, messages),
        "large lists": lambda: pa.LargeListArray.from_arrays(ends.cast(pa.int64()), messages),
        "lists of one size": lambda: pa.FixedSizeListArray.from_arrays(texts, count // 30),
        "list views": lambda: pa.ListViewArray.from_arrays(starts, sizes, texts),
        "large list views": lambda: pa.LargeListViewArray.from_arrays(starts, sizes, texts),
        "values of maps": lambda: pa.MapArray.from_arrays(ends, keys, texts),
        "keys of maps": lambda: pa.MapArray.from_arrays(ends, texts, keys),
        "maps in lists": lambda: pa.ListArray.from_arrays(
            pa.array([0, 30]), pa.MapArray.from_arrays(ends, keys, texts)
        ),
    }[kind]()


KINDS = (
    *("texts", "one list", "lists", "large lists", "lists of one size", "list views"),
    *("large list views", "values of maps", "keys of maps", "maps in lists"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "count"), [(1 << 19, 2010), (4 << 20, 30)])
def test_a_small_parquet_file_that_repeats_a_long_value_fills_neither_disk_nor_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, count: int, kind: str
) -> None:
    """A dictionary of one long value and many references to it, also within one batch of rows."""
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "bomb.parquet"
    values = repeated(kind, pyarrow.DictionaryArray.from_arrays([0] * count, ["x" * size]))
    # with its schema, from which Arrow restores the kinds of lists
    parquet.write_table(pyarrow.table({"prompt": values}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    monkeypatch.setattr("rlpost.tasks.rows.MIN_BOUND", 80 << 20)
    of_arrow = pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    before = pyarrow.default_memory_pool()
    pyarrow.set_memory_pool(of_arrow)
    tracemalloc.start()
    with pytest.raises(DataError, match=r"become more than 83,886,080 bytes .* JSON Lines"):
        check_prompt_file(path, FIELDS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    pyarrow.set_memory_pool(before)
    assert peak < 80 << 20  # of Python; a batch beyond the bound is not converted
    assert of_arrow.max_memory() < 80 << 20  # nor copied by Arrow


MEASURE = """
import json, os, resource, sys
from rlpost.tasks.cursor import PromptCursor
from rlpost.tasks.prompts import PromptFields, PromptSet
if sys.argv[1].endswith("parquet"):
    import pyarrow.parquet
letters = lambda content, tools: (content, (1,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
prompts = PromptSet(sys.argv[1], tokenize=letters, fields=PromptFields("input"))
got = PromptCursor(prompts, shuffle=True, seed=1).take(200)
assert all(prompt.text == "x" * len(prompt.text) for prompt in got)
print(len(prompts), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("jsonl", 100), ("parquet", 80)])
def test_a_large_file_is_not_loaded(tmp_path: Path, kind: str, size: int) -> None:
    """Memory grows by row offsets and a buffer, not by the file's size. ``size`` is in MB."""
    path, row = tmp_path / f"large.{kind}", {"input": "x" * 9980}
    if kind == "jsonl":
        with path.open("w") as file:
            for _ in range(size // 10):
                file.write((json.dumps(row) + "\n") * 1000)
    else:
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.Table.from_pylist([row] * 1000)
        with parquet.ParquetWriter(
            path, table.schema, compression=None, use_dictionary=False
        ) as writer:
            for _ in range(size // 10):
                writer.write_table(table)
    assert path.stat().st_size > 0.9 * size * 10**6
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    count, grown = map(int, done.stdout.split())
    assert count == size * 100
    assert grown < size * 10**6 / 3, f"{grown / 10**6:.0f} MB for a file of {size} MB"


@pytest.mark.parametrize(
    ("prompt", "context", "longest"),
    [(None, None, None), (7, None, 7), (None, 10, 9), (7, 10, 7), (12, 10, 9)],
)
def test_a_prompt_leaves_at_least_one_token_for_an_answer(
    prompt: int | None, context: int | None, longest: int | None
) -> None:
    """An answer without a token can be neither trained nor given a weight version."""
    assert (
        longest_prompt(
            RolloutConfig(rollout_max_prompt_len=prompt, rollout_max_context_len=context)
        )
        == longest
    )


def test_a_full_disk_for_the_rows_of_parquet_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "p.parquet", [GOOD])
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda: open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(
        DataError, match=rf"{path}: .* has not enough space for its rows as text; set TMPDIR"
    ):
        PromptSet(path, tokenize=letters, fields=PromptFields("input"))


@pytest.mark.parametrize("metadata_key", [None, "extra"])
def test_a_label_that_is_an_object_is_its_text_and_stays_an_object_in_the_metadata(
    tmp_path, metadata_key
):
    label = {"target": ["größer", 7]}
    path = write(tmp_path / "p.jsonl", {"prompt": "Q", "label": label, "extra": {"level": 1}})
    fields = PromptFields("prompt", "label", metadata_key)
    (prompt,) = PromptSet(path, tokenize=lambda text, tools: (text, (1,)), fields=fields).all()
    assert json.loads(prompt.label) == label and "größer" in prompt.label
    assert prompt.metadata["label"] == label
    assert label_of(prompt) == label, "what a function of slime sees"


def test_an_object_that_a_reward_would_compare_as_text_is_refused_with_the_key_to_name(
    tmp_path,
) -> None:
    """As verl's data has it."""
    verl = {"prompt": "Q", "reward_model": {"style": "rule", "ground_truth": "4"}}
    whole = PromptFields("prompt", "reward_model", rm_type="boxed_math")
    path = write_parquet(tmp_path / "p.parquet", [verl])
    for source in (path, write(tmp_path / "p.jsonl", verl)):
        with pytest.raises(DataError, match=r" 1: .* use --label-key reward_model\.ground_truth"):
            check_prompt_file(source, whole)
        for metadata_key in (None, "reward_model"):
            named = PromptFields(
                "prompt", "reward_model.ground_truth", metadata_key, rm_type="math"
            )
            (prompt,) = PromptSet(source, tokenize=letters, fields=named).all()
            assert prompt.label == "4"
    other = {**verl, "rm_type": "ifeval"}
    for fields, row in ((PromptFields("prompt", "reward_model"), verl), (whole, other)):
        assert check_prompt_file(write(tmp_path / "q.jsonl", row), fields) == 1


@pytest.mark.parametrize(
    ("row", "is_bad"),
    [
        ({"label": ""}, True),
        ({"label": "", "rm_type": "f1"}, True),
        ({"label": "", "rm_type": "gpqa"}, True),
        ({"label": "", "rm_type": "gpqa", "correct_letter": "B"}, False),
        ({"label": "", "rm_type": "ifeval"}, False),
    ],
)
def test_a_blank_label_is_bad_only_where_a_reward_compares_it(tmp_path, row, is_bad) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "Q", **row})
    assert check_prompt_file(path, FIELDS) == 1
    fields = PromptFields("prompt", "label", rm_type="exact_match")
    if is_bad:
        with pytest.raises(DataError, match="line 1: 'label' is blank, and the reward"):
            check_prompt_file(path, fields)
    else:
        assert check_prompt_file(path, fields) == 1


def test_messages_may_be_json_text_and_other_text_stays_text(tmp_path) -> None:
    messages = [{"role": "user", "content": "Q"}]
    texts = [json.dumps(messages), "[1, 2]", "[x]", json.dumps([{"a": 1}])]
    rows = [parse({"prompt": text}, "here", PromptFields("prompt")) for text in texts]
    assert [row.content for row in rows] == [messages, *texts[1:]]


def test_columns_of_one_name_are_refused_unless_none_is_read(tmp_path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table(
        [["Q"], ["A"], ["B"], ["{}"]], names=["prompt", "label", "label", "extra"]
    )
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(DataError, match=r"p\.parquet: two columns are called 'label'"):
        check_prompt_file(tmp_path / "p.parquet", FIELDS)
    (prompt,) = PromptSet(
        tmp_path / "p.parquet", tokenize=letters, fields=PromptFields("prompt", None, "extra")
    ).all()
    assert prompt.text == "Q"


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_a_pointer_of_git_lfs_is_named_with_its_remedy(tmp_path, name) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 3\n"
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=rf"{name}: is a pointer of git LFS .* `git lfs pull` in"):
        check_prompt_file(tmp_path / name, FIELDS)


def test_a_json_array_and_a_url_are_named_with_their_remedy(tmp_path) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps([GOOD, GOOD], indent=1))
    with pytest.raises(DataError, match=r"line 1: the file is one JSON array .* jq -c '\.\[\]'"):
        check_prompt_file(path, FIELDS)
    with pytest.raises(DataError, match=r"s3://bucket/p\.parquet: is a URL, .* download it"):
        check_prompt_file("s3://bucket/p.parquet", FIELDS)


class TestAFileThatChanges:
    """A row is one of the file that was indexed, or the file is named as changed."""

    @pytest.fixture
    def rows(self, tmp_path) -> Rows:
        return Rows(numbered(tmp_path / "p.jsonl", 5))

    def test_equal_lengths_rewritten_in_place(self, rows) -> None:
        assert rows.row(0) == {"input": "0"}
        text = rows.path.read_text()
        later(rows.path, lambda path: path.write_text("".join(reversed(text.splitlines(True)))))
        with pytest.raises(DataError, match=rf"{rows.path}: the file changed while the run reads"):
            rows.row(4)
        later(rows.path, lambda path: path.write_text(text))
        assert rows.row(4) == {"input": "4"}

    def test_appended(self, rows) -> None:
        with rows.path.open("a") as file:
            file.write("{}\n")
        with pytest.raises(DataError, match="the file changed while the run reads it"):
            rows.row(0)

    def test_changed_rows_are_not_skipped_as_bad_ones(self, tmp_path) -> None:
        path = numbered(tmp_path / "p.jsonl", 5)
        prompts = PromptSet(path, tokenize=letters, skip_bad=True, fields=PromptFields("input"))
        path.write_text("")
        with pytest.raises(DataError, match="the file changed while the run reads it"):
            prompts.prompt(0, 0)

    def test_touched(self, rows) -> None:
        later(rows.path, Path.touch)
        assert [rows.row(number)["input"] for number in range(5)] == list("01234")

    def test_replaced_on_nfs(self, rows, monkeypatch) -> None:
        """The first read of a replaced file fails with ESTALE there."""
        stale = [OSError(errno.ESTALE, "Stale file handle")]

        def pread(*place):
            if stale:
                raise stale.pop()
            return real(*place)

        real = os.pread
        monkeypatch.setattr(os, "pread", pread)
        content = rows.path.read_text()
        rows.path.unlink()
        rows.path.write_text(content)
        assert rows.row(3) == {"input": "3"}
        stale.append(OSError(errno.ESTALE, "Stale file handle"))
        rows.path.write_text(content.replace("3", "7"))
        with pytest.raises(DataError, match="the file changed while the run reads it"):
            rows.row(3)
        stale.append(OSError(errno.EIO, "Input/output error"))
        with pytest.raises(OSError, match=r"p\.jsonl") as error:
            rows.row(3)
        assert error.value.filename == str(rows.path)

    def test_read_by_threads(self, rows) -> None:
        def read(number: int) -> object:
            if number % 10 == 0:
                later(rows.path, Path.touch)
            return rows.row(number % 5)["input"]

        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(read, range(200))) == [str(number % 5) for number in range(200)]


def later(path: Path, act) -> None:
    """Change a file; its time of the last write changes too, however coarse the clock is."""
    before = path.stat().st_mtime_ns
    act(path)
    os.utime(path, ns=(before + 10**9, before + 10**9))

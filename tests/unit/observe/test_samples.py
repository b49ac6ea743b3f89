"""Answers that are kept for people: few, telling, readable, each step once."""

import asyncio
import threading

from rlpost.observe.samples import FILE_NAME, FIXED_NAME, MAX_LINES, SampleWriter, chosen, cut
from rlpost.observe.writer import MetricsWriter, read_metrics
from rlpost.types import Sample, SampleGroup, ScoredSample


def group(prompt_id, rewards):
    samples = [
        ScoredSample(
            Sample(prompt_id, n, (104, 105), (n,), (-0.5,), f"answer {n}", "stop", 0, label="x"),
            reward,
        )
        for n, reward in enumerate(rewards)
    ]
    return SampleGroup(prompt_id, tuple(samples))


def decode(ids):
    return "".join(map(chr, ids))


def test_best_and_worst_of_the_first_group_that_differs_are_kept():
    kept = chosen([group(1, (1.0, 1.0)), group(2, (0.5, 0.0, 1.0)), group(3, (0.0, 1.0))], decode)
    found = [(one["prompt_id"], one["answer"], one["reward"]) for one in kept]
    assert found == [(2, "answer 2", 1.0), (2, "answer 1", 0.0)]
    assert kept[0]["prompt"] == "hi"


def test_where_no_group_differs_one_answer_is_kept():
    assert [one["answer"] for one in chosen([group(1, (0.0, 0.0))], decode)] == ["answer 0"]


def test_a_long_answer_keeps_its_beginning_and_its_end():
    text = cut("a" * 500 + "b" * 500, 100)
    assert text.startswith("a" * 50 + "\n[... 900") and text.endswith("b" * 50)
    assert cut("short", 100) == "short"


def test_a_long_run_keeps_a_bounded_number_of_steps_and_a_resume_keeps_each_once(tmp_path):
    writer = SampleWriter(tmp_path, num_steps=3 * MAX_LINES, decode=decode)
    for step in range(1, 31):
        writer.write(step, [group(step, (0.0, 1.0))])
    asyncio.run(writer.begin(20))
    for step in range(21, 31):
        writer.write(step, [group(step, (0.0, 1.0))])
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path / "samples.jsonl")] == list(
        range(1, 31, 3)
    )


async def test_answers_of_evaluations_are_kept_by_set_and_a_resume_keeps_each_step_once(tmp_path):
    has_started, may_write = threading.Event(), threading.Event()

    def hold_the_first_write():
        if not has_started.is_set():
            has_started.set()
            may_write.wait()

    writer = SampleWriter(tmp_path, num_steps=40, decode=decode, check=hold_the_first_write)
    for step in (0, 20):
        writer.write_evaluated(step, {"b": [group(0, (1.0,))], "a": [group(0, (0.5, 1.0))]})
    writer.write_evaluated(21, {})
    has_started.wait()
    resumed = asyncio.create_task(writer.begin(19))
    while not (tmp_path / FILE_NAME).exists():  # the other file is done
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    may_write.set()
    await resumed
    writer.write_evaluated(20, {"a": [group(0, (0.25,))]})
    writer.close()
    found = [
        (line["step"], one["set"], one["reward"], one["prompt"])
        for line in read_metrics(tmp_path / FIXED_NAME)
        for one in line["samples"]
    ]
    assert found == [(0, "a", 0.5, "hi"), (0, "b", 1.0, "hi"), (20, "a", 0.25, "hi")]


def test_the_writer_of_metrics_shows_the_groups_of_a_step(tmp_path):
    shown = []
    MetricsWriter(tmp_path / "m", show=lambda step, groups: shown.append((step, groups))).show(
        3, ["g"]
    )
    MetricsWriter(tmp_path / "m").show(3, ["g"])
    assert shown == [(3, ["g"])]


def test_answers_that_cannot_be_written_end_no_run(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("rlpost.durable.run_files.RETRY_AFTER_S", ())
    writer = SampleWriter(tmp_path / "gone", num_steps=3, decode=decode)
    writer.write(1, [group(1, (0.0, 1.0))])
    writer.close()
    assert (
        "samples.jsonl" in caplog.text
        and "No such file or directory; put the folder back" in caplog.text
    )
    assert "1 writes are lost: their steps are missing from it" in caplog.text

"""The page of a run: everything is on it, nothing of the run can act on it, and half a run has one
as well.
"""

import json
import math
import re
import threading
from html.parser import HTMLParser

import pytest

from common.run_folder import RunFolder
from rlpost.config.load import load, parse_dump
from rlpost.extensions.watching.report.compare import compare_page
from rlpost.extensions.watching.report.html import PAGE_POINTS
from rlpost.extensions.watching.report.page import report_page
from rlpost.extensions.watching.report.panels import drawn_names
from rlpost.extensions.watching.report.run_facts import (
    RecipeSetting,
    compared,
    network_table,
    read_facts,
)
from rlpost.extensions.watching.report.write import recipe, write_report
from rlpost.observe import reporter
from rlpost.observe.reporter import Reporter, try_to_write_report
from tests.unit.watching.report.runs import EARLY_ERROR, HOSTILE, make_failed_run, make_run

VOID = {"meta", "link", "input", "br", "img"}


class Reader(HTMLParser):
    """Elements, their attributes and their text; asserts that every element is closed where it
    should be.
    """

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "seven-b")


@pytest.fixture(scope="module")
def page(run):
    return write_report(run).read_text()


def test_everything_a_person_asks_for_is_on_the_page(page):
    read = Reader(page)
    text = " ".join(read.text)
    titles = {attrs["aria-label"] for tag, attrs in read.elements if tag == "svg"}
    assert titles >= {"Reward", "Answer length", "Entropy", "KL", "Throughput", "Phases of a step"}
    for word in (
        "240 / 240",
        "attempts, 2 preempted",
        "preempted: SIGUSR2",
        "mlx5_0,mlx5_1",
        "rlpost requeue",
        "done",
    ):
        assert word in text, word
    marks = [
        attrs["class"] for tag, attrs in read.elements if attrs.get("class", "").startswith("mark")
    ]
    assert (
        marks.count("mark preempted"),
        marks.count("mark committed"),
        marks.count("mark done"),
    ) == (2, 14, 1)
    assert "rollout.num_rollout" in text and "What is" in text


def test_the_page_brings_all_it_needs(page):
    """No element names another file, and the policy forbids what an element could not be seen to
    do.
    """
    for tag, attrs in Reader(page).elements:
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            allowed = ("#", "data:,") + (("../attempts/",) if tag == "a" else ())
            assert attrs.get(name, "#").startswith(allowed), (tag, attrs)
    assert "@import" not in page and "url(" not in page
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)[1]
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


def test_what_a_model_says_stays_text(page):
    read = Reader(page)
    assert HOSTILE in read.text
    assert not [tag for tag, attrs in read.elements if tag == "img" or "onerror" in attrs]
    assert sum(tag == "script" for tag, _ in read.elements) == 1


def test_a_plot_has_the_values_of_the_metrics(run, page):
    plots = {
        a["aria-label"]: json.loads(a["data-plot"])
        for tag, a in Reader(page).elements
        if "data-plot" in a
    }
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    curves = {curve["label"]: curve["points"] for curve in plots["Reward"]["curves"]}
    assert curves["aime"] == [
        [line["step"], pytest.approx(line["eval/aime/reward_mean"], rel=1e-4)]
        for line in lines
        if "eval/aime/reward_mean" in line
    ]
    saved = {curve["label"]: curve["points"] for curve in plots["Checkpoint"]["curves"]}
    assert saved["that training waited"] == [[step, 1.5] for step in range(1, 241, 20)]
    assert {curve["label"] for curve in plots["Memory"]["curves"]} == {
        "engine",
        "actor",
        "actor on its GPU, at most",
    }
    assert {"Model FLOPs utilisation", "Weight sync", "Memory in use", "Throughput"} <= plots.keys()
    spike = max(plots["Gradient norm"]["curves"][0]["points"], key=lambda point: point[1])
    assert spike[0] == 61


def plots_of(read):
    found = (attrs for _, attrs in read.elements if "data-plot" in attrs)
    return {attrs["aria-label"]: json.loads(attrs["data-plot"]) for attrs in found}


def test_every_metric_is_drawn_and_no_value_is_dropped(tmp_path):
    """Those of plugins too; NaN and infinity are marked at their steps."""
    run = make_run(tmp_path / "run", num_steps=40, preempted_at=())
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        line |= {"plugin/depth": 2.0 * line["step"], "plugin/never": math.nan}
        if line["step"] in (7, 8):
            line |= {"train/loss": math.nan, "train/grad_norm": math.inf}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = Reader(report_page(read_facts(run)))
    plots = plots_of(read)
    assert plots["Loss"]["curves"][0]["lost"] == [[7.0, "NaN"], [8.0, "NaN"]]
    assert plots["Gradient norm"]["curves"][0]["lost"] == [[7.0, "∞"], [8.0, "∞"]]
    assert len(plots["plugin/never"]["curves"][0]["lost"]) == 41
    assert plots["plugin/depth"]["curves"][0]["points"][3] == [3, 6]
    assert [curve["label"] for curve in plots["pass@k: aime"]["curves"]] == ["pass@8"]
    text = " ".join(read.text)
    assert "custom: 2 more" in text and "Loss" in text
    drawn = drawn_names(lines) | {name for name in plots if "/" in name}
    assert {name for line in lines for name in line} - {"step"} <= drawn


def test_a_page_of_many_steps_attempts_and_metrics_stays_small(tmp_path):
    """The points of all curves have a limit together."""
    run = make_run(tmp_path / "run", num_steps=1200, preempted_at=tuple(range(6, 1200, 6)))
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        line |= {f"plugin/{n}": float(n * line["step"]) for n in range(60)}
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = report_page(read_facts(run))
    read = Reader(page)
    assert len(page) < 2e6
    plots = plots_of(read)
    points = sum(len(curve["points"]) for plot in plots.values() for curve in plot["curves"])
    assert points <= PAGE_POINTS
    text = " ".join(read.text)
    assert "all 200 attempts" in text and "preempted: SIGUSR2" in text
    sections = [attrs["id"] for tag, attrs in read.elements if tag == "section"]
    assert sections[:2] == ["plots", "time"]


def test_an_attempt_that_fails_before_its_first_step_has_a_page(tmp_path):
    run = make_run(tmp_path / "run", num_steps=1, preempted_at=())
    run.metrics.unlink()
    told = [json.loads(line) for line in run.ledger.path.read_text().splitlines()]
    verdict = {**told[-1], "verdict": "failed", "cause": "no answer of the trainer", "answer": 1}
    begun = [one for one in told if one["event"] in ("submitted", "attempt", "started")]
    run.ledger.path.write_text("".join(json.dumps(one) + "\n" for one in [*begun, verdict]))
    (run.attempts / "0/driver.log").write_text("\n".join(f"line {n} <b>" for n in range(500)))
    read = Reader(report_page(read_facts(run)))
    text = " ".join(read.text)
    assert "Failure of attempt 0" in text and "no answer of the trainer" in text
    assert "line 499 <b>" in text and "line 440" in text and "line 439" not in text
    assert "20000 open files, 65535 wanted" in text
    assert {"../attempts/0/driver.log", "../attempts/0/agent-n01.log"} <= {
        attrs.get("href") for tag, attrs in read.elements if tag == "a"
    }
    run.ledger.append("attempt", attempt=1)
    assert "Failure of attempt" not in report_page(read_facts(run))


def test_the_answers_to_one_prompt_are_shown_over_time(tmp_path):
    run = make_run(tmp_path / "run", num_steps=20, preempted_at=())
    answer = {"set": "aime", "prompt_id": 0, "prompt": "How many?", "num_tokens": 3, "label": "4"}
    told = [
        {"step": step, "samples": [{**answer, "answer": f"said at {step}", "reward": step / 20}]}
        for step in (0, 20)
    ]
    (run.report / "eval_samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    text = " ".join(Reader(report_page(read_facts(run))).text)
    assert "aime: How many?" in text
    assert text.index("said at 0") < text.index("said at 20")


def test_what_is_left_and_lost_are_tiles(tmp_path):
    run = make_run(tmp_path / "run", num_steps=40, preempted_at=(20,))
    lines = run.metrics.read_text().splitlines()[:31]
    run.metrics.write_text("\n".join(lines) + "\n")
    told = [json.loads(line) for line in run.ledger.path.read_text().splitlines()][:-2]
    for one in told:
        if one["event"] == "started" and one["attempt"] == "1":
            one["again"] = {"steps": 3, "step_s": 285.0}
    run.ledger.path.write_text("".join(json.dumps(one) + "\n" for one in told))
    text = " ".join(" ".join(Reader(report_page(read_facts(run))).text).split())
    assert "3 steps lost and trained again" in text
    assert re.search(r"1\d min \d+ s left at 8\d\.?\d* s a step|1\d min \d+ s left at 9\d", text)
    assert "goodput" in text and "GPU hours" in text


def test_settings_stand_beside_their_defaults_and_keys_are_left_out():
    found = compared(
        {
            "rollout": {"num_rollout": 9},
            "cluster": {"environment": {"HF_TOKEN": "secret", "A": "b"}},
        }
    )
    assert RecipeSetting("rollout.num_rollout", "9", "1") in found
    assert "secret" not in str(found) and '"A": "b"' in str(found)


def test_the_recipe_beside_the_page_comes_to_the_same_settings(run, page):
    loaded = load([run.report / "recipe.toml"], {}).config
    assert loaded == parse_dump(run.run_json.read_text())
    assert "rollout_max_response_len" not in (run.report / "recipe.toml").read_text(), (
        "what has its default is left out"
    )
    assert recipe([RecipeSetting("a.b", "null", "1")]) == ""


@pytest.mark.parametrize("torn", ["", '{"torn', "[]", "null"])
def test_half_a_run_has_a_page(tmp_path, torn):
    run = RunFolder(tmp_path / "half")
    (run.attempts / "0").mkdir(parents=True)
    (run.attempts / "latest").symlink_to("0")
    run.report.mkdir()
    for name in (
        "run.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "attempts/0/preflight.json",
        "report/samples.jsonl",
    ):
        (run.root / name).write_text(torn)
    Reader(report_page(read_facts(run)))


def test_records_of_another_shape_are_left_out(tmp_path):
    run = make_run(tmp_path / "run", num_steps=8)
    odd = [{"step": 1, "samples": None}, {"step": 2, "samples": [{"answer": "none"}, 3]}]
    (run.report / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in odd))
    hosts = {"n01": None, "n02": {"checks": [None, {"name": "only"}]}, "n03": {"checks": None}}
    (run.attempts / "0/preflight.json").write_text(json.dumps({"hosts": hosts}))
    with run.ledger.path.open("a") as file:
        file.write('{"time": "2026-11-23T10:00:00", "event": "committed", "step": 9}\n')
    facts = read_facts(run)
    assert facts.samples == () and not [check for check in facts.checks if check.attempt == "0"]
    assert all(entry.get("step") != 9 for entry in facts.events)
    assert "No answers are recorded yet." in report_page(facts)


def test_half_a_letter_in_a_label_is_a_question_mark(tmp_path):
    """As JSON may hold it: the page is still a file."""
    run = make_run(tmp_path / "run", num_steps=1, preempted_at=())
    sample = {"prompt_id": 1, "answer": "a", "label": "smile \ud83d", "reward": 1.0}
    (run.report / "samples.jsonl").write_text(json.dumps({"step": 1, "samples": [sample]}) + "\n")
    assert "label smile ?" in write_report(run).read_text()


def test_a_run_that_was_done_and_is_submitted_again_is_not_done(tmp_path):
    run = make_run(tmp_path / "run", num_steps=20, preempted_at=())
    assert 'badge good">done' in report_page(read_facts(run))
    for event in ("submitted", "attempt", "started", "ready"):
        run.ledger.append(event, attempt="1", nodes=[], step=20)
    assert 'badge good">training' in report_page(read_facts(run))


def test_a_report_that_cannot_be_written_does_not_end_a_run(tmp_path, caplog):
    (tmp_path / "report").write_text("a file where the folder should be")
    try_to_write_report(RunFolder(tmp_path))
    assert "no report of the extension watching this time" in caplog.text


def test_a_page_that_hangs_in_storage_does_not_keep_a_run_from_its_end(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(reporter, "PATIENCE_S", 0.01)
    with reporter._writing:
        try_to_write_report(RunFolder(tmp_path))
    assert "still being written" in caplog.text


def test_a_page_is_written_beside_the_training_and_all_who_ask_before_it_ends_get_one_more(
    tmp_path, monkeypatch
):
    writers, may_end, begun = [], threading.Event(), threading.Event()

    def write(run):
        writers.append(threading.current_thread().name)
        begun.set()
        assert may_end.wait(10)

    monkeypatch.setattr("rlpost.extensions.watching.report.write.write_report", write)
    reports = Reporter(RunFolder(tmp_path))
    reports.ask()
    assert begun.wait(10)
    for _ in range(5):
        reports.ask()
    assert len(writers) == 1
    may_end.set()
    thread = next((one for one in threading.enumerate() if one.name == "report"), None)
    if thread is not None:
        thread.join(10)
    try_to_write_report(RunFolder(tmp_path))
    assert writers == ["report", "report", "MainThread"]


def test_recorded_groups_are_shown_where_no_answers_were_kept(tmp_path):
    sample = {
        "prompt_id": 3,
        "text": "forty-two",
        "response_ids": [1, 2],
        "finish_reason": "stop",
        "label": "42",
    }
    group = {
        "prompt_id": 3,
        "samples": [
            {"sample": sample | {"index": index}, "reward": reward}
            for index, reward in (
                (0, 0.5),
                (1, 0.0),
                (2, 1.0),
                (2, 1.0),
            )  # the last has two samples
        ],
    }
    for number in (1, 12):
        (tmp_path / f"r{number}.jsonl").write_text(json.dumps(group) + "\n{torn\n")
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.run_json.write_text(
        json.dumps({"debug": {"save_debug_rollout_data": str(tmp_path / "r{rollout_id}.jsonl")}})
    )
    found = read_facts(run).samples
    assert [(one["step"], one["reward"], one["num_tokens"]) for one in found] == [
        (12, 1.0, 4),
        (12, 0.0, 2),
        (1, 1.0, 4),
        (1, 0.0, 2),
    ]
    assert {one["answer"] for one in found} == {"forty-two", "forty-two\nforty-two"}


def test_the_network_of_a_node_is_the_block_below_its_title():
    log = "08:00:00.100 INFO agent[a] network of this node\nx  1\ny  2\n08:00:00.200 INFO agent[a] preflight\nhost\n"
    assert network_table(log) == "x  1\ny  2"
    assert network_table("08:00:00.200 INFO agent[a] preflight\nhost\n") == ""


def test_runs_are_compared_by_one_curve_each_and_by_the_settings_that_differ(run, tmp_path):
    other = make_run(tmp_path / "other", num_steps=100, preempted_at=(), seed=1)
    read = Reader(compare_page([read_facts(run), read_facts(other)]))
    plots = {
        attrs["aria-label"]: json.loads(attrs["data-plot"])
        for tag, attrs in read.elements
        if "data-plot" in attrs
    }
    for title, plot in plots.items():
        assert [curve["label"] for curve in plot["curves"]] == ["seven-b", "other"], title
    assert max(x for x, _ in plots["Entropy"]["curves"][1]["points"]) == 100
    text = " ".join(read.text)
    assert "rollout.num_rollout" in text and "cluster.job_name" not in text


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = [
        make_run(tmp_path / folder / "same", num_steps=3, preempted_at=()) for folder in ("a", "b")
    ]
    read = Reader(compare_page([read_facts(run) for run in runs]))
    assert str(tmp_path / "a/same") in read.text and str(tmp_path / "b/same") in read.text


def test_a_run_that_failed_early_has_the_line_of_the_error_and_the_log_once(tmp_path):
    """Not the wrapper of the agent and the log within a sentence, nor in the table of attempts."""
    html = report_page(read_facts(make_failed_run(tmp_path / "a")))
    read = Reader(html)
    text = "".join(read.text)
    assert text.count(EARLY_ERROR) >= 3 and "its last lines" not in text
    assert text.count("ray::Worker.call()") == 1
    assert 'aria-label="Reward"' not in html

"""Prometheus names by its conventions; the alert rules and the dashboard of jobs/monitoring, checked
for syntax and for names that exist, and by promtool where it is installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlpost.extensions.tracking.prometheus import COUNTERS, LAST_STEP, all_names, prometheus_name
from rlpost.observe.metric_names import METRICS

FOLDER = Path(__file__).parents[3] / "jobs/monitoring"
KNOWN = {*all_names().values(), LAST_STEP, "rlpost_step", "rlpost_run_info"}
NAME = re.compile(r"\brlpost_[a-z0-9_]+")
DURATION = re.compile(r"\d+[smhd]")
PAIRS = {")": "(", "]": "[", "}": "{"}


def alerts() -> list[dict[str, object]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, object]:
    return json.loads((FOLDER / "grafana.json").read_text())


def queries() -> Iterator[str]:
    yield from (str(rule["expr"]) for rule in alerts())
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (note["expr"] for note in dashboard()["annotations"]["list"])
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("time/step_s", ("rlpost_time_step_seconds", 1.0, {})),
        ("time/tokens_per_s", ("rlpost_time_tokens_per_second", 1.0, {})),
        ("time/tokens_per_s_per_gpu", ("rlpost_time_tokens_per_second_per_gpu", 1.0, {})),
        ("perf/mfu_frac", ("rlpost_perf_mfu_ratio", 1.0, {})),
        ("perf/train_tflops_per_gpu", ("rlpost_perf_train_flops_per_second_per_gpu", 1e12, {})),
        ("memory/engine_gb", ("rlpost_memory_engine_bytes", 1e9, {})),
        ("sync/weights_bytes", ("rlpost_sync_weights_bytes", 1.0, {})),
        ("run/num_preemptions", ("rlpost_run_preemptions_total", 1.0, {})),
        ("eval/aime/truncated_frac", ("rlpost_eval_truncated_ratio", 1.0, {"set": "aime"})),
        ("train/my_own_s", ("rlpost_train_my_own_s", 1.0, {})),  # custom: its unit is unknown
    ],
)
def test_a_name_has_its_base_unit(name, expected):
    assert prometheus_name(name) == expected


def test_no_declared_metric_keeps_another_unit_and_no_two_share_a_name():
    names = all_names()
    assert len(set(names.values())) == len(names)
    for name, shown in names.items():
        assert not re.search(r"_(s|gb|frac|ms|percent|count|sum|bucket)$", shown), shown
        assert shown.endswith("_total") == (name in COUNTERS), shown
    units = {metric.name: metric.unit for metric in METRICS}
    for name, unit in units.items():
        if unit == "s":
            assert "_seconds" in names[name]


def test_rules_and_dashboard_ask_for_metrics_that_exist():
    for query in queries():
        unknown = set(NAME.findall(query)) - KNOWN
        assert not unknown, f"{query}: {unknown}"


def test_queries_are_balanced_and_durations_are_durations():
    for query in queries():
        opened: list[str] = []
        for mark in re.sub(r'"[^"]*"', "", query):
            if mark in PAIRS.values():
                opened.append(mark)
            elif mark in PAIRS:
                assert opened and opened.pop() == PAIRS[mark], query
        assert not opened, query
        assert all(DURATION.fullmatch(text) for text in re.findall(r"\[([^\]]*)\]", query)), query


def test_each_alert_has_what_a_person_needs():
    names = [rule["alert"] for rule in alerts()]
    assert len(set(names)) == len(names)
    for rule in alerts():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert "for" not in rule or DURATION.fullmatch(rule["for"])


def test_panels_of_the_dashboard_do_not_overlap():
    cells: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        own = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


RULE_TESTS = """\
rule_files: [alerts.yml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'rlpost_last_step_timestamp_seconds{run="r"}', values: '0x60'}
      - {series: 'rlpost_time_step_seconds{run="r"}', values: '30x60'}
      - {series: 'rlpost_train_loss{run="r"}', values: '0.1x9 LOSS'}
      - {series: 'rlpost_train_grad_norm{run="r"}', values: '1x60'}
      - {series: 'rlpost_run_engine_restarts_total{run="r"}', values: '0x9 1+1x50'}
    alert_rule_test:
      - {eval_time: 14m, alertname: RlpostNoStep, exp_alerts: []}
      - {eval_time: 5m, alertname: RlpostNotFinite, exp_alerts: []}
      - {eval_time: 5m, alertname: RlpostEngineRestarts, exp_alerts: []}
    promql_expr_test:
      - expr: 'count(ALERTS{alertstate="firing", alertname="RlpostNoStep"})'
        eval_time: 30m
        exp_samples: [{labels: '{}', value: 1}]
      - expr: 'count(ALERTS{alertstate="firing", alertname="RlpostNotFinite"})'
        eval_time: 30m
        exp_samples: [{labels: '{}', value: 1}]
      - expr: 'count(ALERTS{alertstate="firing", alertname="RlpostEngineRestarts"})'
        eval_time: 30m
        exp_samples: [{labels: '{}', value: 1}]
"""


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool: apt install prometheus")
def test_promtool_accepts_the_rules_and_they_fire(tmp_path):
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    (tmp_path / "tests.yml").write_text(RULE_TESTS.replace("LOSS", "NaN " * 50))
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "tests.yml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

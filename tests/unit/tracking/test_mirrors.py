"""TensorBoard and Prometheus: read back with TensorBoard's own reader, scraped over HTTP and parsed
by Prometheus's own parser.
"""

import json
import selectors
import socket
import struct
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from common.cluster import Cluster
from common.run_identity import settle_identity
from rlpost.config.tree import Config
from rlpost.errors import ConfigError
from rlpost.extensions.tracking.prometheus import MAX_CLIENTS, PrometheusServer, unique_names
from rlpost.observe.mirrors import mirrors
from rlpost.observe.writer import MetricsWriter, read_metrics
from tests.ports import free_port

TOKEN = "t0ken" * 8


def config(**observe):
    return Config.model_validate({"observe": observe})


def cluster(attempt_dir):
    return Cluster("127.0.0.1:1", str(attempt_dir), (), port_base=1, port_count=1)


def attempt(folder, settings, steps, *, offset=0.0):
    """Write these steps as the driver of one attempt: it first removes the lines of later steps."""
    with mirrors(settings, folder, cluster(folder)) as also:
        writer = MetricsWriter(folder / "metrics.jsonl", also=also)
        writer.rewind(steps[0] - 1)
        for step in steps:
            writer.write(step, {"reward/mean": step / 8 + offset, "train/loss": -0.5})


def scrape(port, token=TOKEN, path="/metrics"):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=10) as response:
        return response.read().decode()


def test_tensorboards_own_reader_finds_every_step_once_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = config(use_tensorboard=True)
    attempt(tmp_path, settings, range(0, 7), offset=0.5)
    attempt(tmp_path, settings, range(4, 9))
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert found.Tags()["scalars"] == ["reward/mean", "train/loss"]
    values = [(event.step, event.value) for event in found.Scalars("reward/mean")]
    assert values == [
        (line["step"], line["reward/mean"]) for line in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert [step for step, _ in values] == list(range(9))


def test_runs_that_share_a_tensorboard_folder_do_not_hide_each_others_steps(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    settings = config(use_tensorboard=True, tensorboard_dir=str(tmp_path / "shared"))
    for parent, steps in (("a", range(4)), ("b", range(2)), ("a", range(3, 5))):
        run = tmp_path / parent / "tiny"
        run.mkdir(parents=True, exist_ok=True)
        attempt(run, settings, steps)
    found = EventMultiplexer().AddRunsFromDirectory(str(tmp_path / "shared")).Reload()
    labels = [settle_identity(tmp_path / parent / "tiny").label for parent in ("a", "b")]
    assert sorted(found.Runs()) == sorted(labels)
    for label, count in zip(labels, (5, 2), strict=True):
        steps = [event.step for event in found.Scalars(label, "reward/mean")]
        assert steps == list(range(count))


def test_prometheus_reads_the_newest_line_and_only_with_the_token():
    parser = pytest.importorskip("prometheus_client.parser")
    about = {"attempt": "2", "job": "4711", "model": "tiny", "version": "1"}
    server = PrometheusServer("127.0.0.1", 0, token=TOKEN, run='a "run"', about=about)
    try:
        assert "last_step" not in scrape(server.port)
        server.write(6, {"reward/mean": 0.1})
        server.write(
            7,
            {
                "reward/mean": 0.25,
                "eval/aime/pass@8": 0.5,
                "eval/math/pass@8": 0.75,
                "train/my-own": 1.0,
                "memory/actor_gb": 61.0,
                "run/num_attempts": 3,
            },
        )
        families = {
            family.name: family
            for family in parser.text_string_to_metric_families(scrape(server.port))
        }
        samples = {
            (sample.name, sample.labels.get("set")): (sample.value, sample.labels["run"])
            for family in families.values()
            for sample in family.samples
        }
        (info,) = families["rlpost_run_info"].samples
        assert info.labels == {"run": 'a "run"', **about}
        del samples["rlpost_run_info", None]
        written_at, _ = samples.pop(("rlpost_last_step_timestamp_seconds", None))
        assert abs(time.time() - written_at) < 600
        assert families["rlpost_run_attempts"].type == "counter"
        assert samples == {
            ("rlpost_memory_actor_bytes", None): (61e9, 'a "run"'),
            ("rlpost_run_attempts_total", None): (3.0, 'a "run"'),
            ("rlpost_step", None): (7.0, 'a "run"'),
            ("rlpost_reward_mean", None): (0.25, 'a "run"'),
            ("rlpost_eval_pass_at_8", "aime"): (0.5, 'a "run"'),
            ("rlpost_eval_pass_at_8", "math"): (0.75, 'a "run"'),
            ("rlpost_train_my_own", None): (1.0, 'a "run"'),
        }
        described = families["rlpost_reward_mean"].documentation
        assert described == "mean reward of a response, over prompts"
        for token, path, code in (
            (None, "/metrics", 401),
            ("wrong", "/metrics", 401),
            (TOKEN, "/", 404),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                scrape(server.port, token, path)
            assert refused.value.code == code
    finally:
        server.close()
    with pytest.raises(urllib.error.URLError):
        scrape(server.port)


def test_clients_without_the_token_fill_neither_the_log_nor_the_places(caplog, capfd):
    pytest.importorskip("prometheus_client")
    server = PrometheusServer("127.0.0.1", 0, token=TOKEN, run="a")
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    try:
        for _ in range(20):  # each goes away while it is answered
            with socket.create_connection(("127.0.0.1", server.port)) as rude:
                rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                rude.sendall(b"GET /metrics HTTP/1.1\r\n" * 10)
        assert "rlpost_run_info" in scrape(server.port)
    finally:
        for connection in idle:
            connection.close()
        server.close()
    assert not capfd.readouterr().err and not [one for one in caplog.records if one.exc_info]


def test_the_file_of_targets_follows_the_attempts_and_is_empty_after_the_last(tmp_path):
    pytest.importorskip("prometheus_client")
    path = tmp_path / "prometheus.json"
    first = PrometheusServer("127.0.0.1", 0, token=TOKEN, run="a", targets=path)
    second = PrometheusServer("0.0.0.0", 0, token=TOKEN, run="a", targets=path)
    (found,) = json.loads(path.read_text())
    assert found == {
        "targets": [f"{socket.gethostname()}:{second.port}"],
        "labels": {"run": "a"},
    }
    first.close()  # a late end of the attempt before changes nothing
    assert json.loads(path.read_text()) == [found]
    second.close()
    assert json.loads(path.read_text()) == []


def readable(sockets: list[socket.socket], timeout_s: float) -> list[Any]:
    """Return the sockets that can be read; select() knows no descriptor above 1023."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ)
        return [key.fileobj for key, _ in selector.select(timeout_s)]


def test_connections_up_to_the_limit_are_kept_and_one_more_ends_the_oldest():
    pytest.importorskip("prometheus_client")
    server = PrometheusServer("127.0.0.1", 0, token=TOKEN, run="a")
    address = ("127.0.0.1", server.port)
    clients = [socket.create_connection(address) for _ in range(MAX_CLIENTS - 1)]
    try:
        scrape(server.port)  # accepted after all of these
        assert readable(clients, 0.1) == []
        clients += [socket.create_connection(address) for _ in range(2)]
        assert readable(clients, 2.0) == [clients[0]]
    finally:
        for connection in clients:
            connection.close()
        server.close()


def test_a_port_that_is_taken_is_an_error_of_the_settings():
    pytest.importorskip("prometheus_client")
    first = PrometheusServer("127.0.0.1", 0, token=TOKEN, run="a")
    try:
        with pytest.raises(ConfigError, match=f"port {first.port}.*--prometheus-port"):
            PrometheusServer("127.0.0.1", first.port, token=TOKEN, run="b")
    finally:
        first.close()


@pytest.mark.parametrize(
    ("word", "package"), [("tensorboard", "tensorboard"), ("prometheus", "prometheus_client")]
)
def test_a_missing_package_is_named_with_its_setting(tmp_path, monkeypatch, word, package):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.compat.proto", None)
    (tmp_path / "secret").write_text(TOKEN)
    opened = mirrors(config(**{f"use_{word}": True}), tmp_path, cluster(tmp_path))
    with pytest.raises(ConfigError, match=f"--use-{word}.*pip install"), opened:
        pass


def test_where_all_are_off_nobody_is_asked(tmp_path):
    with mirrors(config(), tmp_path, cluster(tmp_path)) as also:
        assert also is None
    assert list(tmp_path.iterdir()) == []


def test_the_job_serves_at_its_last_port_with_its_secret(tmp_path):
    pytest.importorskip("prometheus_client")
    port = free_port()
    (tmp_path / "secret").write_text(TOKEN + "\n")
    job = Cluster("127.0.0.1:1", str(tmp_path), (), port_base=port - 99, port_count=100)
    with mirrors(config(use_prometheus=True), tmp_path, job) as also:
        MetricsWriter(tmp_path / "m", also=also, always={"run/num_attempts": 3}).write(
            1, {"reward/mean": 0.5}
        )
        page = scrape(port)
    assert f'rlpost_run_attempts_total{{run="{tmp_path.name}"}} 3.0' in page
    assert read_metrics(tmp_path / "m") == [{"step": 1, "reward/mean": 0.5, "run/num_attempts": 3}]


ODD_NAMES = ["a.b", "a_b", "a-b", "a b", "é", "run", "run_info", "last_step_timestamp_seconds"]
ODD_NAMES += ["reward/mean", "reward_mean", "reward.mean", "time/step_s", "time_step_seconds"]
ODD_NAMES += ["eval/a.b/x", "eval/a_b/x", "eval/a_b/x.y", "eval/a_b/x_y", "run/num_attempts"]


def test_no_two_metrics_have_one_prometheus_name_and_declared_ones_keep_theirs():
    parser = pytest.importorskip("prometheus_client.parser")
    server = PrometheusServer("127.0.0.1", 0, token=TOKEN, run="r")
    try:
        server.write(1, {name: float(number) for number, name in enumerate(ODD_NAMES)})
        families = list(parser.text_string_to_metric_families(scrape(server.port)))
    finally:
        server.close()
    samples = [
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in families
        for sample in family.samples
    ]
    assert len({sample[:2] for sample in samples}) == len(samples)
    assert len({family.name for family in families}) == len(families)
    assert {sample[2] for sample in samples} >= {float(n) for n in range(len(ODD_NAMES))}
    values = {name: value for name, _, value in samples}
    assert values["rlpost_reward_mean"] == ODD_NAMES.index("reward/mean")
    assert values["rlpost_time_step_seconds"] == ODD_NAMES.index("time/step_s")
    assert unique_names(reversed(ODD_NAMES)) == unique_names(ODD_NAMES)


def test_a_value_that_is_no_number_costs_no_other_one(tmp_path, caplog):
    """In a line of TensorBoard, and in the page of Prometheus."""
    pytest.importorskip("tensorboard", reason="pip install -e '.[tensorboard]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    odd = {"text": "1.5", "none": None, "list": [1], "nan": float("nan"), "reward/mean": 0.5}
    with mirrors(config(use_tensorboard=True), tmp_path, cluster(tmp_path)) as also:
        also(1, odd)
        also(2, odd)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["nan", "reward/mean"]
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert sorted(line.split(" is ")[0] for line in warnings) == [
        "metric list",
        "metric none",
        "metric text",
    ]

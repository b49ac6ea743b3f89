"""The fleet's files: private, atomic, and tolerant of files that other hosts left incomplete."""

import json
import os
import stat

import pytest

from rlpost.extensions.fleet.fleet_folder import FleetError, FleetFolder, settings_digest
from rlpost.extensions.fleet.records import (
    EngineRecord,
    EngineState,
    Lease,
    LeaseState,
    Orders,
    RecordError,
    parse_engine,
    parse_lease,
    parse_orders,
)

ENGINE = EngineRecord("7_0", "a1", EngineState.READY, 3, url="http://[fe80::1]:9000")
LEASE = Lease("0", 4, version=2, weights="/r/w", engines={"7_0": "serves"}, time=1.5)


@pytest.fixture
def folder(tmp_path):
    made = FleetFolder(tmp_path)
    made.create()
    return made


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_can_read_the_secret_or_join(tmp_path):
    old = os.umask(0)
    try:
        folder = FleetFolder(tmp_path)
        folder.create()
        folder.write_engine(ENGINE)
    finally:
        os.umask(old)
    assert mode(folder.root) == mode(folder.root / "engines") == 0o700
    assert mode(folder.root / "secret") == mode(folder.engine_path("7_0")) == 0o600


def test_the_secret_is_made_once(folder):
    secret = folder.secret()
    folder.create()
    assert folder.secret() == secret and len(secret) == 64


def test_a_secret_that_others_can_read_is_refused(folder):
    (folder.root / "secret").chmod(0o640)
    with pytest.raises(FleetError, match=r"mode 0640.*chmod 600"):
        folder.secret()


def test_without_a_secret_the_message_names_the_command_that_makes_it(tmp_path):
    for group, words in (("policy", ""), ("judge", "--group judge ")):
        with pytest.raises(FleetError, match=f"rlpost fleet {tmp_path} {words}--engines N"):
            FleetFolder(tmp_path, group).secret()


def test_a_group_has_a_folder_of_its_own(folder):
    judge = FleetFolder(folder.run, "judge")
    assert judge.root.name == "fleet-judge" and not judge.exists()
    judge.create()
    assert judge.secret() != folder.secret() and not judge.engines()


def test_records_survive_a_round_trip(folder):
    folder.write_engine(ENGINE)
    folder.write_lease(LEASE)
    assert folder.engines() == [ENGINE] and folder.engine("7_0") == ENGINE
    assert folder.lease() == LEASE
    assert folder.engine("7_1") is None


def test_without_files_there_is_nothing(tmp_path):
    folder = FleetFolder(tmp_path)
    assert not folder.exists() and folder.engines() == [] and folder.lease() is None
    assert folder.orders() == Orders()


def test_a_broken_file_is_reported_once_and_does_not_hide_the_others(folder, caplog):
    folder.write_engine(ENGINE)
    folder.engine_path("7_1").write_text("{")
    (folder.root / "engines" / ".7_2.json.abc").write_text("half")
    assert folder.engines() == folder.engines() == [ENGINE]
    assert len(caplog.records) == 1 and "7_1.json is not used" in caplog.text


def test_a_record_under_the_name_of_another_engine_is_not_used(folder):
    folder.engine_path("8_0").write_text(ENGINE.to_json())
    assert folder.engines() == []


def test_orders_accumulate(folder):
    folder.order(drain=["7_0"])
    folder.order(drain=["7_1", "7_0"])
    assert folder.order(stop=True) == Orders(("7_0", "7_1"), stop=True)
    assert folder.orders().says_leave("9_9")
    assert folder.order(stop=False) == Orders(("7_0", "7_1"))
    assert folder.orders().says_leave("7_1") and not folder.orders().says_leave("9_9")


def test_the_files_of_an_engine_are_removed_together(folder):
    folder.write_engine(ENGINE)
    folder.stop_path("7_0").write_text("")
    folder.remove_engine("7_0")
    folder.remove_engine("7_0")
    assert folder.engines() == [] and not folder.stop_path("7_0").exists()


def without(name, **changed):
    raw = json.loads(ENGINE.to_json()) | changed
    return json.dumps({key: value for key, value in raw.items() if key != name})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        (without("beat"), "beat: missing"),
        (without("", beat=True), "beat: True: .*valid integer"),
        (without("", beat=-1), "beat: -1"),
        (without("", state="happy"), "state: 'happy'"),
        (without("", engine="../../etc"), "engine: '../../etc': .*pattern"),
        (without("", url="http://n1:80/x?y"), r"url: 'http://n1:80/x\?y'"),
        (without("", url="https://evil"), "url:"),
        (without("", url=""), "url: empty, but the state is ready"),
        (without("", num_gpus=0), "num_gpus: 0: .*greater than or equal to 1"),
        (without("", host="a\nb"), "host: .*not one line of printable text"),
    ],
)
def test_an_engine_record_is_checked(text, problem):
    with pytest.raises(RecordError, match=problem):
        parse_engine(text)


@pytest.mark.parametrize(
    ("parse", "text", "problem"),
    [
        (parse_lease, '{"attempt": "0", "beat": 1}', "state, weights: missing"),
        (parse_lease, LEASE.to_json().replace("1.5", '"now"'), "time: 'now'"),
        (parse_lease, LEASE.to_json().replace('"serves"', "1"), "engines.7_0: 1: .*valid string"),
        (parse_orders, '{"drain": "7_0"}', "drain: '7_0': .*valid array"),
        (parse_orders, '{"stop": 1}', "stop: 1: .*valid boolean"),
    ],
)
def test_lease_and_orders_are_checked(parse, text, problem):
    with pytest.raises(RecordError, match=problem):
        parse(text)


def test_the_lease_says_that_the_run_has_ended(folder):
    folder.write_lease(Lease("0", 1, LeaseState.ENDED))
    assert folder.lease().state is LeaseState.ENDED


def test_the_digest_covers_only_settings_of_servers():
    settings = {
        "model": {"name": "a"},
        "sglang": {"server_args": {"context_length": 5}},
        "checkpoint": {"hf_checkpoint": "/m", "save": "/s"},
        "optimizer": {"lr": 1},
    }
    same = settings | {"optimizer": {"lr": 2}, "checkpoint": {"hf_checkpoint": "/m", "save": "/t"}}
    assert settings_digest(settings) == settings_digest(same)
    for changed in (
        settings | {"sglang": {"server_args": {"context_length": 6}}},
        settings | {"checkpoint": {"hf_checkpoint": "/other"}},
    ):
        assert settings_digest(settings) != settings_digest(changed)


def test_a_setting_of_the_driver_alone_does_not_restart_servers():
    def digest(**sglang):
        return settings_digest({"sglang": {"sglang_server_concurrency": 8, **sglang}, "model": {}})

    assert digest() == digest(sglang_server_concurrency=9, rollout_health_check_timeout=3.0)
    assert digest() != digest(sglang_attention_backend="fa3")

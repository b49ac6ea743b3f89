"""Servers that are too old are named with what they lack; optional features are detected."""

import logging

import pytest

from rlpost.errors import RolloutError
from rlpost.rollout.features import FEATURES, NEWEST, OLDEST, check_servers, has, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.5.21", (0, 5, 21)),
        ("0.5.10.post1", (0, 5, 10)),
        ("0.5.22.dev3+gabc", (0, 5, 22)),
        ("0.5.17rc0", (0, 5, 17)),
        ("main", None),
        ("None", None),
    ],
)
def test_versions_are_parsed_as_packages_write_them(text, version):
    assert parse_version(text) == version


def test_a_server_has_the_features_of_its_version_and_earlier_ones():
    assert not has("0.5.22", "checksum without CUDA") and has("0.5.23", "checksum without CUDA")
    assert not has("0.5.20", "update sessions") and has("0.5.21", "update sessions")
    assert has("0.6.0", "update sessions")
    assert has("unreadable", "weight updates") and not has("unreadable", "updates amid answers")
    assert all(OLDEST <= known.since <= NEWEST for known in FEATURES.values())


def test_every_server_that_is_too_old_is_named_with_what_is_missing():
    versions = {"http://a": "0.5.16", "http://b": "0.5.18", "http://c": "0.5.23"}
    with pytest.raises(RolloutError) as error:
        check_servers(versions, needed=["weight updates", "updates amid answers"])
    first, second = str(error.value).splitlines()
    assert first == "engine http://a runs SGLang 0.5.16; 0.5.17 or newer is needed"
    assert second.startswith(
        "engine http://b runs SGLang 0.5.18, which lacks answers that wait in the engine"
    )
    assert second.endswith("from 0.5.21 on")


def test_an_untested_newer_version_is_used_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_servers(
            {"http://a": "0.7.0", "http://b": "main", "http://c": "0.5.21"},
            needed=["weight updates"],
        )
    newer, unreadable = (record.message for record in caplog.records)
    assert "http://a runs SGLang 0.7.0" in newer and "0.5.23" in newer
    assert "http://b" in unreadable

"""Servers that are too old are named with what they lack; optional features are detected."""

import logging

import pytest

from rlpost.errors import RolloutError
from rlpost.rollout.features import (
    NEWEST,
    OLDEST,
    UPDATES_AMID_ANSWERS,
    check_servers,
    has_updates_amid_answers,
    parse_version,
)


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
    assert not has_updates_amid_answers("0.5.20") and has_updates_amid_answers("0.5.21")
    assert has_updates_amid_answers("0.6.0") and not has_updates_amid_answers("unreadable")
    assert OLDEST <= UPDATES_AMID_ANSWERS <= NEWEST


def test_every_server_that_is_too_old_is_named():
    versions = {"http://a": "0.5.16", "http://b": "0.5.17", "http://c": "0.4.9"}
    with pytest.raises(RolloutError) as error:
        check_servers(versions)
    first, second = str(error.value).splitlines()
    assert first == "engine http://a runs SGLang 0.5.16; 0.5.17 or newer is needed"
    assert second.startswith("engine http://c runs SGLang 0.4.9; ")


def test_an_untested_newer_version_is_used_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        check_servers({"http://a": "0.7.0", "http://b": "main", "http://c": "0.5.21"})
    newer, unreadable = (record.message for record in caplog.records)
    assert "http://a runs SGLang 0.7.0" in newer and "0.5.23" in newer
    assert "http://b" in unreadable

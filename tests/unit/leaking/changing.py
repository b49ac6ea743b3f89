"""A module whose fixture and whose first test change the environment."""

import os

import pytest


@pytest.fixture(scope="module", autouse=True)
def variable_of_module():
    os.environ["LEAK_OF_MODULE"] = "set"


def test_first():
    assert os.environ["LEAK_GIVEN"] == "given" and os.environ["LEAK_REMOVED"] == "given"
    os.environ["LEAK_OF_TEST"] = "set"
    os.environ["LEAK_GIVEN"] = "changed"
    del os.environ["LEAK_REMOVED"]


def test_second():
    assert os.environ["LEAK_OF_MODULE"] == "set", "its module has not ended"
    assert "LEAK_OF_TEST" not in os.environ
    assert os.environ["LEAK_GIVEN"] == "given" and os.environ["LEAK_REMOVED"] == "given"

"""Processes that the fork server of the ranks starts."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import pytest
import torch

from tests.contract.actor_ranks import PRELOADED, in_processes

NAME = "RLPOST_RANKS_TEST"


def variable(pipe: Connection) -> None:
    pipe.send((True, os.environ.get(NAME)))


def modules(pipe: Connection) -> None:
    pipe.send((True, set(sys.modules)))


def test_a_rank_has_the_environment_of_its_start_not_that_of_the_first_one(monkeypatch):
    monkeypatch.delenv(NAME, raising=False)
    assert in_processes(variable, [()]) == [None]
    monkeypatch.setenv(NAME, "second")
    assert in_processes(variable, [()]) == ["second"]
    monkeypatch.delenv(NAME)
    assert in_processes(variable, [()]) == [None]


@pytest.mark.skipif(torch.version.cuda is not None, reason="with CUDA each rank is spawned")
def test_a_rank_starts_with_what_it_would_import():
    """The fork server only leaves out a module that it cannot import."""
    (present,) = in_processes(modules, [()])
    assert set(PRELOADED) <= present

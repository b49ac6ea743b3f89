"""A background save may end in another thread at any point of a call."""

from __future__ import annotations

from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from rlpost.trainer import saves
from rlpost.trainer.rank import Rank
from rlpost.trainer.saves import RunningSave, Saves
from tests.settings import rank_config
from tests.unit.interleaved import run_interleaved

SETTINGS = rank_config("", save_deadline_s=1.0)


def finished_part() -> SimpleNamespace:
    return SimpleNamespace(
        is_running=False,
        must_stay=False,
        wait=lambda: None,
        join=lambda: None,
        wait_copied=lambda **options: None,
    )


class Critic:
    """Its saves have nothing to write, so each is done at once."""

    def __init__(self) -> None:
        self.num_steps = 0

    def start_save(self, folder: object, step: int, residence: object) -> object:
        return finished_part()

    def set_save_buffer(self, num_bytes: int, residence: object) -> None:
        pass

    def train_step(self, batch: object, values: object, returns: object) -> dict[str, float]:
        self.num_steps += 1
        return {}


class CriticAlone(Rank):
    """A rank that trains and saves nothing but a critic."""

    def build(self) -> None:
        pass

    def save(self) -> None:
        self.saves.finish_leniently()
        self.saves.add(self.critic.start_save("folder", 1, None))
        self.saves.run(in_background=True)

    def __init__(self) -> None:
        super().__init__(SETTINGS, SimpleNamespace(check_layout=lambda settings: None))  # type: ignore[arg-type]
        self.critic: Any = Critic()
        self.saves = RunningSave(SETTINGS)


@pytest.mark.parametrize("method", ["train_critic", "save_is_done"])
def test_a_critics_save_may_end_at_any_point_of_a_call(method: str) -> None:
    rank = CriticAlone()
    given = (None, None, ()) if method == "train_critic" else ()
    call = partial(getattr(rank, method), *given)
    within = Rank.train_critic if method == "train_critic" else RunningSave.is_done
    for after in count():
        rank.save()
        if not run_interleaved(call, rank.save_is_done, within=within, after=after):
            break
    assert after > 10
    assert rank.critic.num_steps == (after + 1 if method == "train_critic" else 0)


@pytest.mark.parametrize("method", ["is_done", "wait_copied", "finish"])
def test_a_policys_save_may_end_at_any_point_of_a_call(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = SimpleNamespace(start=lambda *given, **options: finished_part())
    monkeypatch.setattr(saves, "Saver", lambda *given, **options: saver)
    memory: Any = SimpleNamespace(resident=None, lock=None)
    running = Saves(SETTINGS, (), None, memory, None)  # type: ignore[arg-type]
    for after in count():
        running.start("folder", SimpleNamespace(step=1), in_background=True)  # type: ignore[arg-type]
        if not run_interleaved(
            getattr(running, method), running.finish, within=getattr(Saves, method), after=after
        ):
            break
    assert after > 10
    assert running.is_done()

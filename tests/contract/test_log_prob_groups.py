"""Passes that only compute log-probs have their own micro-batches."""

import pytest

from tests.contract.actor_ranks import logprobs_in_groups, run_ranks
from tests.contract.families import make_family
from tests.contract.samples import STEPS
from tests.settings import rank_config


@pytest.mark.timeout(300)
def test_log_probs_do_not_depend_on_the_groups_they_are_computed_in(tmp_path):
    """The result has the form of the training micro-batches, whatever the groups; in float32."""
    make_family(tmp_path, "qwen3")
    (found,) = run_ranks(
        logprobs_in_groups,
        1,
        rank_config(str(tmp_path)),
        samples=STEPS[0],
        groups=[(7, 0, 3), (1, 6, 2, 5, 4)],
    )
    plain, grouped = found
    assert [list(map(len, one)) for one in plain] == [list(map(len, one)) for one in grouped]
    flat = [[value for one in each for sample in one for value in sample] for each in found]
    assert flat[0] == pytest.approx(flat[1], abs=1e-5)

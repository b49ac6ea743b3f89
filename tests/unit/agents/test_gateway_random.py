"""Token identity in random conversations: the trained tokens are those that were sampled.

By default 300 conversations are run; RLPOST_CONVERSATIONS=10000 runs all (about two minutes).
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter

import pytest

from rlpost.extensions.agents.chat_template import ChatTemplate
from rlpost.extensions.agents.episode import OpenEpisode
from rlpost.extensions.agents.policy import EpisodeLimits, Policy
from rlpost.rollout.sampling import SamplingParams
from rlpost.types import Prompt
from tests.unit.agents.chat_models import REAL, STOPS, TEMPLATES, real_template, write_model
from tests.unit.agents.harness import Harness, Writer
from tests.unit.agents.sampled import ROUTES, SampledTokens, check

NUM = int(os.environ.get("RLPOST_CONVERSATIONS", "300"))
KINDS = {kind: (kind, text) for kind, text in TEMPLATES.items()}
KINDS |= {name: (kind, real_template(name)) for name, kind in REAL.items()}


@pytest.fixture(scope="module", params=sorted(KINDS))
def policy(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Policy]:
    kind, text = KINDS[request.param]
    folder = write_model(tmp_path_factory.mktemp(request.param), kind, text)
    return kind, Policy(ChatTemplate(folder))


async def converse(kind: str, policy: Policy, seed: int) -> Counter[str]:
    """Run and check one episode; return counts of its trajectories, turns and ends of answers."""
    draw = random.Random(seed)
    engine = SampledTokens(
        policy.template,
        Writer(kind, draw, opens_thinking=True),
        # mostly the usual end-of-turn token
        [STOPS[kind][-1 if kind == "glm" else 0]] * 8 + STOPS[kind],
        draw,
        abort_share=draw.choice([0.0, 0.3]),
        routes=draw.choice([None, ROUTES]),
    )
    episode = OpenEpisode(
        Prompt(seed, "", ()),
        SamplingParams(max_new_tokens=140, max_context_len=2500),
        index=0,
        connection=engine,  # type: ignore[arg-type]
        policy=policy,
        url="http://127.0.0.1",
        api_key="sk-rlpost-0-0123456789",
        limits=EpisodeLimits(max_tokens=2500),
    )
    harness = Harness(episode, draw)
    await harness.talk(draw.randint(1, 8))
    trajectories = episode.trajectories()
    check(trajectories, engine)
    assert episode.num_tokens == len(engine.tokens)
    counts = Counter(trajectories=len(trajectories), turns=episode.num_requests)
    return counts + Counter(harness.ended_by)


def test_every_sampled_token_is_trained_once_after_the_tokens_its_engine_read(
    policy: tuple[str, Policy],
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(-(-NUM // len(KINDS))):
        counts += asyncio.run(converse(*policy, seed))
    print(dict(counts))
    # the random harness must exercise all kinds of answers
    assert min(counts[kind] for kind in ("trajectories", "stop", "length", "tool_calls")) > 20
    assert counts["turns"] > 1.1 * counts["trajectories"]

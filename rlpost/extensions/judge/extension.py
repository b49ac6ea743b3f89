"""The row of rewards from a language model."""

from rlpost.config.extensions import Extension, NamedReward, Verb

EXTENSION = Extension(
    name="judge",
    rewards={
        "judge": NamedReward(
            "rlpost.extensions.judge.reward:judge_reward",
            "rlpost.extensions.judge.reward:check_judge",
            needs="--judge, and --judge-url or --judge-engines",
        )
    },
    verbs={
        "judge-agreement": Verb(
            "rlpost.extensions.judge.agreement:main",
            "how often a judge agrees with labels of people (--min-agreement)",
            after="journal",
        )
    },
    moved={
        "rlpost.tasks.judge": "rlpost.extensions.judge",
    },
)

"""The row of rewards from a language model."""

from rlpost.config.extensions import Extension, NamedReward, Verb

EXTENSION = Extension(
    name="judge",
    rewards={
        "judge": NamedReward(
            "rlpost.tasks.judge.reward:judge_reward",
            "rlpost.tasks.judge.reward:check_judge",
            needs="--judge, and --judge-url or --judge-engines",
        )
    },
    verbs={
        "judge-agreement": Verb(
            "rlpost.cli.judge_agreement:main",
            "how often a judge agrees with labels of people (--min-agreement)",
            after="compare",
        )
    },
)

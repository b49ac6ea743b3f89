"""The row of evaluations."""

from rlpost.config.extensions import Extension, Verb

EXTENSION = Extension(
    name="evaluating",
    verbs={
        "evaluate": Verb(
            "rlpost.extensions.evaluating.evaluate_verb:main",
            "evaluate a model or a step of a run: pass@k, intervals, answers",
            takes_settings=True,
            after="fleet",
        )
    },
    moved={
        "rlpost.cli.evaluate": "rlpost.extensions.evaluating.evaluate_verb",
        **{
            f"rlpost.observe.evaluation_answers.{name}": f"rlpost.extensions.evaluating.set_results.{name}"
            for name in ("Estimate", "SetResult", "estimate", "read_results", "result_of")
        },
    },
)

"""The row of rewards by name."""

from rlpost.config.extensions import Extension, TextReward

_PACKAGE = "rlpost.extensions.rewards"

EXTENSION = Extension(
    name="rewards",
    text_rewards={
        "deepscaler": TextReward(
            f"{_PACKAGE}.deepscaler:deepscaler",
            in_box=f"{_PACKAGE}.deepscaler:answer_equals",
            isolated=True,
        ),
        "dapo": TextReward(
            f"{_PACKAGE}.dapo:dapo",
            in_box=f"{_PACKAGE}.dapo:same_number",
            parts={"graded_answer": f"{_PACKAGE}.dapo:graded_answer"},
        ),
        "math": TextReward(
            f"{_PACKAGE}.mathverify:math", in_box=f"{_PACKAGE}.mathverify:boxed_math", isolated=True
        ),
        "gsm8k": TextReward(f"{_PACKAGE}.gsm8k:gsm8k", in_box=f"{_PACKAGE}.gsm8k:number_in_box"),
        "gpqa": TextReward(
            f"{_PACKAGE}.gpqa:gpqa", label_keys=("correct_letter", "correct_answer", "answer_text")
        ),
        "f1": TextReward(f"{_PACKAGE}.f1:f1", parts={"words": f"{_PACKAGE}.f1:words"}),
        "ifeval": TextReward(f"{_PACKAGE}.ifeval:ifeval", isolated=True, label_keys=None),
        "random": TextReward(f"{_PACKAGE}.toss:toss", label_keys=None),
    },
    moved={
        **{
            f"rlpost.reward.{name}": f"rlpost.extensions.rewards.{name}"
            for name in ("dapo", "deepscaler", "f1", "gpqa", "gsm8k", "ifeval", "mathverify")
        },
        **{
            f"rlpost.tasks.reward.{name}": f"rlpost.extensions.rewards.{name}"
            for name in (
                "dapo",
                "deepscaler",
                "f1",
                "gpqa",
                "gsm8k",
                "ifeval",
                "mathverify",
                "answer_form",
            )
        },
        **{
            f"rlpost.tasks.reward.answer_extraction.{name}": f"rlpost.extensions.rewards.answer_form.{name}"
            for name in ("answer_after_thinking", "has_box")
        },
        "rlpost.tasks.reward.registry.toss": "rlpost.extensions.rewards.toss.toss",
    },
)

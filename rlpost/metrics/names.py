"""The names of ``metrics.jsonl``: each declared once, with its unit and what it means. Pure.

Comes in: a name as it stands in a line. Goes out: its declaration, or None; Markdown for ``docs/metrics.md``. A name is
``area/name`` with the unit at its end where it has one; SET stands for the name of an evaluation set, K for a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: ``unit`` is empty for a plain number."""

    name: str
    unit: str
    meaning: str

    @property
    def area(self) -> str:
        """What stands before the first slash; ``eval`` for every set."""
        return self.name.split("/")[0]


_AREAS = {
    "reward": "What the reward function said of the rollout, before any penalty.",
    "rollout": "The answers of the rollout, and how prompts went on their way to training.",
    "train": "The last optimizer step of the rollout: means over the tokens that are trained, over all ranks.",
    "eval": "Held-out prompts, each set by its name.",
    "time": "Seconds of the driver's clock, and what follows from them.",
    "perf": "How well the trainer uses its GPUs.",
    "sync": "The newest update of the engines' weights.",
    "checkpoint": "What was saved since the line before.",
    "memory": "At the end of the step; of the actors and engines that of the fullest. GB are 10^9 bytes.",
    "run": "The run as a whole.",
}
METRICS = tuple(
    Metric(*row)
    for row in (
        ("reward/mean", "", "mean over all answers"),
        ("reward/std", "", "standard deviation over all answers"),
        ("rollout/zero_std_groups", "groups", "groups whose answers all have the same reward: they teach GRPO nothing"),
        ("rollout/response_length_mean", "tokens", "mean length of an answer"),
        ("rollout/response_length_max", "tokens", "longest answer"),
        ("rollout/truncated_frac", "share", "answers that the length limit cut off"),
        ("rollout/repetitive_frac", "share", "answers that end in the same words over and over"),
        ("rollout/num_tokens", "tokens", "of all answers"),
        ("rollout/staleness_mean", "versions", "how far behind the trained policy the first token was written; mean"),
        ("rollout/staleness_max", "versions", "the same, of the oldest group"),
        ("rollout/num_filtered", "groups", "complete, but not wanted by the filter"),
        ("rollout/num_aborted", "groups", "cut off while they were generated, because the batch was full"),
        ("rollout/num_continued", "groups", "begun before and gone on with"),
        ("rollout/wasted_tokens", "tokens", "generated and thrown away; not what a preemption cuts off"),
        ("rollout/num_held", "groups", "complete, waiting for their training"),
        ("rollout/num_unfinished", "groups", "fetched and not complete"),
        ("rollout/reward_timeouts", "answers", "that the reward function did not score in time"),
        ("rollout/reward_errors", "answers", "on which the reward function failed"),
        ("rollout/reward_lost", "answers", "left out, because what grades them was away or killed"),
        ("rollout/answers_lost", "answers", "left out, because the answer function raised GradingLost"),
        ("rollout/num_regenerated", "groups", "generated again, because too few of their answers had a reward"),
        ("rollout/bad_prompts", "prompts", "skipped, because their line cannot be used"),
        ("rollout/long_prompts", "prompts", "skipped, because they are longer than the settings allow (docs/data.md)"),
        ("train/loss", "", "what is minimised, regularisers included"),
        ("train/pg_loss", "", "the policy-gradient part"),
        ("train/entropy", "nats", "of the policy"),
        ("train/ppo_kl", "nats", "old policy against the one that is trained, first-order estimate"),
        ("train/ratio", "", "probability under the trained policy over that under the old"),
        ("train/ratio_max", "", "its maximum"),
        ("train/clip_frac", "share", "tokens whose ratio was clipped"),
        ("train/clip_frac_low", "share", "clipped from below"),
        ("train/clip_frac_high", "share", "clipped from above"),
        ("train/dual_clip_frac", "share", "tokens at the bound of dual clipping"),
        ("train/ref_kl", "nats", "policy against the reference, in the loss"),
        ("train/reward_kl", "nats", "policy against the reference, in the reward"),
        ("train/rollout_logprob_abs_diff", "nats", "trainer against engine: mean absolute difference of log-probs"),
        ("train/rollout_ratio", "", "trainer's probability over the engine's"),
        ("train/rollout_ratio_max", "", "its maximum"),
        ("train/rollout_kl", "nats", "engine against trainer, first-order estimate"),
        ("train/rollout_k3", "nats", "the same, k3 estimate"),
        ("train/tis_weight", "", "weight that corrects for engine against trainer"),
        ("train/tis_clip_frac", "share", "tokens whose weight was cut"),
        ("train/grad_norm", "", "norm of the gradient before clipping"),
        ("train/lr", "", "learning rate"),
        ("eval/SET/reward_mean", "", "mean over all answers"),
        ("eval/SET/response_length_mean", "tokens", "mean length of an answer"),
        ("eval/SET/truncated_frac", "share", "answers that the length limit cut off"),
        ("eval/SET/pass@K", "share", "chance that one of K answers is right (reward of at least 1)"),
        ("time/step_s", "s", "the whole step without evaluation and checkpoint"),
        ("time/generate_s", "s", "waiting for answers"),
        ("time/train_s", "s", "optimizer steps, with the passes that compute log-probs"),
        ("time/sync_s", "s", "weights to the engines"),
        ("time/journal_s", "s", "writing the journal, within time/generate_s"),
        ("time/eval_s", "s", "evaluation"),
        ("time/tokens_per_s", "tokens/s", "tokens of all answers over time/step_s"),
        ("time/tokens_per_s_per_gpu", "tokens/s", "the same for each GPU, of trainer and engines"),
        ("time/trainer_waits_frac", "share", "of the step in which the trainer does not train"),
        ("time/generation_waited_frac", "share", "of the step in which nothing is done but waiting for answers"),
        (
            "perf/train_tflops_per_gpu",
            "TFLOP/s",
            "operations of the model, over time/train_s; recomputation not counted",
        ),
        ("perf/mfu_frac", "share", "the same over what the GPU can do in bfloat16, where that is known"),
        ("sync/weights_bytes", "bytes", "of all weights as they travel; with mode delta of the files written"),
        ("sync/changed_frac", "share", "of the elements of all weights that were written, with mode delta"),
        ("sync/update_s", "s", "from the pause of the engines until they go on"),
        (
            "checkpoint/blocking_s",
            "s",
            "that training waited when it was saved; a wait of the next optimizer step is a span of the trace",
        ),
        ("checkpoint/total_s", "s", "until the checkpoint was committed"),
        ("checkpoint/written_bytes", "bytes", "of all its files"),
        ("memory/driver_gb", "GB", "resident, of the driver with its graders and the router"),
        ("memory/actor_gb", "GB", "resident, of an actor"),
        ("memory/actor_gpu_peak_gb", "GB", "most that an actor's tensors took since the line before"),
        ("memory/actor_gpu_reserved_gb", "GB", "most that torch's allocator held of it"),
        ("memory/engine_gb", "GB", "resident, of an engine with all its processes; shared pages count for each"),
        ("memory/gpu_used_frac", "share", "of a GPU, by whomever"),
        ("memory/host_used_frac", "share", "of a machine, by whomever"),
        ("run/num_attempts", "attempts", "starts of the job so far"),
        ("run/num_preemptions", "preemptions", "so far"),
    )
)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace("SET", "[^/]+").replace("@K", r"@\d+"))


_PATTERNS = [(_pattern(metric.name), metric) for metric in METRICS]


def declared(name: str) -> Metric | None:
    """The declaration of a name; None for one that is not ours, such as a plugin's.

    >>> declared("eval/aime/pass@8").unit
    'share'
    """
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)


def undeclared(names: set[str]) -> list[str]:
    """Those of ``names`` that nobody declared; ``step`` is no metric."""
    return sorted(name for name in names if name != "step" and declared(name) is None)


def reference() -> str:
    """All metrics as a Markdown page."""
    lines = [
        "# Metrics",
        "",
        "<!-- Written by tools/make_docs.py from rlpost/metrics/names.py; change it there. -->",
        "",
        "`RUN/metrics.jsonl` holds one line a step: the step and the numbers below, as far as the run has them. Step 0",
        "is the evaluation before training. Every step stands there once and in order, whatever happens to the run: a",
        "resume first cuts off the lines beyond the step that it begins from. W&B gets the same lines under the same",
        "names. `rlpost report` and `rlpost compare RUN RUN` draw them; see [seeing.md](seeing.md).",
    ]
    for area, text in _AREAS.items():
        lines += ["", f"## {area}", "", text, "", "| name | unit | |", "|---|---|---|"]
        lines += [f"| `{m.name}` | {m.unit} | {m.meaning} |" for m in METRICS if m.area == area]
    return "\n".join(lines) + "\n"

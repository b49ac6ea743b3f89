"""The metrics of ``metrics.jsonl``: names, units and meanings. Pure.

Input: a metric name. Output: its declaration, or None. ``tools/pages/metrics.py`` prints them.
A name is ``area/name``, with the unit as a suffix where it has one. SET stands for the name of an
evaluation set, LABEL for the label of an environment, GROUP
for that of a group of engines, K for a number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric; ``unit`` is empty for a plain number."""

    name: str
    unit: str
    meaning: str

    @property
    def area(self) -> str:
        """The part before the first slash; ``eval`` for every set."""
        return self.name.split("/")[0]


_ROWS = (
    ("reward/mean", "", "mean reward of a response, over prompts"),
    ("reward/std", "", "standard deviation of the rewards of all responses"),
    ("reward/shaped_mean", "", "the same as reward/mean after overlong punishment and shaping"),
    ("rollout/zero_std_groups", "groups", "groups whose rewards are all equal: no GRPO gradient"),
    ("rollout/response_length_mean", "tokens",
     "mean length of a response, over prompts; tokens of tools included"),
    ("rollout/response_length_max", "tokens", "maximum response length"),
    ("rollout/truncated_frac", "share",
     "responses that a length limit ended (their last sample), over prompts"),
    ("rollout/repetitive_frac", "share",
     "responses that end in a repetition loop (docs/actor.md), over prompts"),
    ("rollout/routes_bytes_per_token", "bytes",
     "with --use-rollout-routing-replay: memory of the engine's routes per token of prompt and response"),
    ("rollout/routes_unknown_frac", "share",
     "tokens whose experts no engine returned, so that the trainer chooses them"),
    ("rollout/sampling_mask_size", "tokens",
     "with --use-rollout-sampling-mask: ids that a response token was sampled from, mean"),
    ("rollout/num_tokens", "tokens", "tokens of all responses"),
    ("rollout/staleness_mean", "versions",
     "weight versions between a group's first token and its training, mean"),
    ("rollout/staleness_max", "versions", "the same, maximum over groups"),
    ("rollout/num_filtered", "groups", "complete groups that the filter rejected"),
    ("rollout/num_aborted", "groups",
     "groups aborted during generation because the batch was full"),
    ("rollout/num_continued", "groups", "groups started in an earlier step and resumed"),
    ("rollout/wasted_tokens", "tokens",
     "tokens generated and discarded, except those lost to a preemption"),
    ("rollout/num_held", "groups", "complete groups waiting to be trained"),
    ("rollout/num_unfinished", "groups",
     "groups whose prompt was fetched and that are not complete"),
    ("rollout/reward_timeouts", "responses", "responses whose grading timed out"),
    ("rollout/reward_errors", "responses",
     "responses on which the reward function raised an exception"),
    ("rollout/reward_lost", "responses", "dropped because the grader was unreachable or killed"),
    ("rollout/judge_requests", "requests", "with --rm-type judge: requests to the judge"),
    ("rollout/judge_refused", "verdicts", "that the judge declined; they give no reward"),
    ("rollout/judge_unparsable", "verdicts",
     "that do not follow the judge's grammar; they give no reward"),
    ("rollout/judge_flipped", "pairs", "in which the judge chose the same position in both orders"),
    ("rollout/judge_forged", "questions",
     "about a response with special tokens of the judge, which it gets as plain text"),
    ("rollout/answers_lost", "responses",
     "dropped because the generate function raised GradingLost"),
    ("rollout/num_regenerated", "groups",
     "groups generated again because too few of their responses had a reward"),
    ("rollout/bad_prompts", "prompts", "skipped because their line is invalid"),
    ("rollout/long_prompts", "prompts",
     "skipped because they exceed the maximum length (docs/data.md)"),
    ("env/episodes_failed", "episodes",
     "attempts that failed for reasons outside the answer: errors, lost sandboxes, timeouts"),
    ("env/episodes_masked", "episodes", "left out of their group after the last attempt"),
    ("env/episodes_timed_out", "episodes", "attempts that exceeded --env-timeout-s"),
    ("env/task_tokens", "tokens", "sampled tokens of episodes that are trained"),
    ("env/side_tokens", "tokens", "those beside the task, left out (--env-train-side-requests)"),
    ("env/LABEL/episodes", "episodes", "trained episodes of an environment"),
    ("env/LABEL/reward_mean", "", "mean reward of its episodes, over prompts"),
    ("env/LABEL/turns_mean", "turns", "mean turns of the model in an episode"),
    ("env/LABEL/tokens_mean", "tokens", "mean tokens of an episode, those of tools included"),
    ("train/loss", "",
     "total loss, including KL and entropy terms; near 0 where the advantages add up to 0"),
    ("train/mtp_loss", "nats",
     "cross-entropy of the token after next, --enable-mtp-training; not in train/loss"),
    ("train/pg_loss", "", "policy-gradient loss"),
    ("train/entropy", "nats", "entropy of the policy"),
    ("train/ppo_kl", "nats", "KL divergence of the trained policy from the old one, k1 estimate"),
    ("train/ratio", "", "probability ratio of the trained policy to the old one"),
    ("train/ratio_max", "", "maximum of that ratio"),
    ("train/clip_frac", "share", "tokens with a clipped ratio"),
    ("train/clip_frac_low", "share", "tokens clipped at the lower bound"),
    ("train/clip_frac_high", "share", "tokens clipped at the upper bound"),
    ("train/dual_clip_frac", "share", "tokens at the dual-clip bound"),
    ("train/ref_kl", "nats", "KL divergence from the reference, in the loss"),
    ("train/reward_kl", "nats", "KL divergence from the reference, in the reward"),
    ("train/opd_reverse_kl", "nats",
     "reverse KL divergence from the teacher: mean of log p - log q over trained tokens"),
    ("train/rollout_logprob_abs_diff", "nats",
     "mean absolute difference between trainer and engine log-probs"),
    ("train/rollout_ratio", "", "probability ratio of trainer to engine"),
    ("train/rollout_ratio_max", "", "maximum of that ratio"),
    ("train/rollout_kl", "nats", "KL divergence between engine and trainer, k1 estimate"),
    ("train/rollout_k3", "nats", "the same, k3 estimate"),
    ("train/tis_weight", "", "importance weight between engine and trainer"),
    ("train/opsm_masked_frac", "share", "tokens that off-policy sequence masking left out"),
    ("train/tis_clip_frac", "share", "tokens whose weight was truncated or masked"),
    ("train/routing_replayed_frac", "share",
     "with routing replay: tokens whose experts were given, over all layers"),
    ("train/routing_diff_frac", "share",
     "of these, tokens for which the trainer would have chosen other experts"),
    ("train/routing_diff_frac@K", "share", "the same for layer K, counted from 0"),
    ("train/expert_load_max", "",
     "mixture of experts: tokens of a layer's busiest expert over the mean of its experts, maximum over layers"),
    ("train/expert_load_mean", "", "the same, mean over layers"),
    ("train/shared_tokens_frac", "share",
     "with --share-prefix: tokens that are computed for another sample of their micro-batch"),
    ("train/groups_of_several_prompts", "groups",
     "with --share-prefix: groups whose answers begin with different prompts, of which only equal tokens are shared"),
    ("train/grad_norm", "", "gradient norm before clipping"),
    ("train/value_loss", "", "critic: loss, half the clipped squared error of the values"),
    ("train/value_clip_frac", "share", "critic: tokens whose clipped error is the larger one"),
    ("train/value_mean", "", "critic: mean value over the trained tokens, before the update"),
    ("train/return_mean", "", "critic: mean return, the target of the values"),
    ("train/value_explained_var", "share",
     "critic: part of the variance of the returns that the values explain; below 0: worse than their mean"),
    ("train/critic_grad_norm", "", "critic: gradient norm before clipping"),
    ("train/critic_lr", "", "critic: learning rate"),
    ("train/lr", "", "learning rate"),
    ("eval/SET/reward_mean", "", "mean reward of a response, over prompts"),
    ("eval/SET/response_length_mean", "tokens",
     "mean length of a response, over prompts; tokens of tools included"),
    ("eval/SET/truncated_frac", "share",
     "responses that a length limit ended (their last sample), over prompts"),
    ("eval/SET/pass@K", "share",
     "probability that at least one of K responses is correct (reward >= 1)"),
    ("eval/SET/env/LABEL/reward", "", "mean reward of one environment, with --env"),
    ("eval/SET/env/LABEL/turns", "turns", "mean turns of the model in its episodes"),
    ("time/step_s", "s", "the whole step, without evaluation and checkpoint"),
    ("time/generate_s", "s", "waiting for responses"),
    ("time/train_s", "s", "optimizer steps, including the forward passes for log-probs"),
    ("time/sync_s", "s", "weight update of the engines"),
    ("time/journal_s", "s", "journal writes, part of time/generate_s"),
    ("time/eval_s", "s", "evaluation; with --eval-engines, until the weights for them are written"),
    ("time/eval_beside_s", "s", "evaluation on --eval-engines, while later steps train"),
    ("time/tokens_per_s", "tokens/s", "tokens of all responses / time/step_s"),
    ("time/tokens_per_s_per_gpu", "tokens/s", "the same per GPU of trainer and engines"),
    ("time/trainer_waits_frac", "share", "fraction of the step in which the trainer is idle"),
    ("time/generation_waited_frac", "share", "fraction of the step that only waits for responses"),
    ("perf/train_tflops_per_gpu", "TFLOP/s",
     "model FLOPs / time/train_s; recomputation not counted"),
    ("perf/mfu_frac", "share",
     "model FLOPs utilization: the same / the GPU's bfloat16 peak, where known"),
    ("perf/straggler_peer_max", "",
     "slowest rank's time for its own passes / the fastest rank's, for the same work"),
    ("perf/straggler_own_max", "", "maximum over ranks of that time / the rank's own best"),
    ("perf/straggler_rank", "", "the slowest rank"),
    ("perf/straggler_node_peer@K", "",
     "mean time of the ranks of host K, counted from 0 by rank, / that of the fastest host"),
    ("perf/straggler_node_own@K", "", "the same / the host's own best"),
    ("engines/tokens_in_flight_max", "tokens", "most tokens to come of all requests in flight"),
    ("engines/imbalance", "", "tokens of the busiest engine / the mean of all engines"),
    ("engines/prefix_hit_frac", "share", "tokens of prompts and earlier turns found in a KV cache"),
    ("engines/conversations_moved", "", "conversations that went on at another engine"),
    ("engines/slowest_pace", "", "tokens a second of the slowest engine / the median engine's"),
    ("sync/weights_bytes", "bytes",
     "bytes of all weights sent; with mode adapter, of the files written"),
    ("sync/update_s", "s",
     "from pausing the engines until they resume: generation stalls; with slices, the plan after a "
     "connection and a second attempt with all weights are included; see goodput, updating"),
    ("checkpoint/blocking_s", "s",
     "time that saving blocked training; a wait of the next optimizer step is a trace span"),
    ("checkpoint/total_s", "s", "from the start of saving until the commit"),
    ("checkpoint/written_bytes", "bytes", "size of all its files"),
    ("driver/loop_lag_s", "s",
     "longest delay of the driver's event loop since the previous line (docs/scale.md)"),
    ("driver/num_tasks", "", "tasks of the driver's event loop at the end of the step"),
    ("memory/driver_gb", "GB", "resident memory of the driver, with its graders"),
    ("memory/actor_gb", "GB", "resident memory of an actor"),
    ("memory/actor_gpu_peak_gb", "GB",
     "peak GPU memory allocated by an actor since the previous line"),
    ("memory/actor_gpu_reserved_gb", "GB", "peak GPU memory reserved by torch's allocator"),
    ("memory/engine_gb", "GB",
     "resident memory of all processes of an engine; shared pages count in each"),
    ("memory/gpu_used_frac", "share", "used memory of a GPU, all processes"),
    ("memory/host_used_frac", "share", "used memory of a host, all processes"),
    ("engines/GROUP/busy_frac", "share",
     "time in which an engine of [engines.GROUP] had a request, mean of its engines"),
    ("engines/GROUP/num_requests", "requests",
     "to a group of [engines.GROUP], a teacher or a reward model, in the step; replies of the cache included"),
    ("engines/GROUP/num_retries", "requests",
     "of these sent again, because an engine failed, was busy or was lost"),
    ("engines/GROUP/cache_hit_frac", "share",
     "requests whose reply was in the cache, or for which an equal one was in flight"),
    ("engines/GROUP/request_s", "s", "mean time of a request on its engine"),
    ("run/num_attempts", "attempts", "job starts so far"),
    ("run/num_preemptions", "preemptions", "preemptions so far"),
    ("run/num_engine_restarts", "engines",
     "engines of the run that died or hung and serve again, so far"),
)  # fmt: skip
METRICS = tuple(Metric(*row) for row in _ROWS)


def _pattern(name: str) -> re.Pattern[str]:
    words = {"SET": "[^/]+", "LABEL": "[^/]+", "GROUP": "[^/]+", "@K": r"@\d+"}
    pattern = re.escape(name)
    for word, matches in words.items():
        pattern = pattern.replace(word, matches)
    return re.compile(pattern)


_PATTERNS = [(_pattern(metric.name), metric) for metric in METRICS]


def declared(name: str) -> Metric | None:
    """The declaration of a name; None for an undeclared one, such as a plugin's.

    >>> declared("eval/aime/pass@8").unit
    'share'
    """
    return next((metric for pattern, metric in _PATTERNS if pattern.fullmatch(name)), None)

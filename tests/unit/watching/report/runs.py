"""Run folders as a report finds them: any number of steps, preempted and brought back."""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common.run_folder import RunFolder, create_run_folder
from rlpost.config.load import dump, load
from rlpost.durable.commit import checkpoint_name

BEGIN = datetime(2026, 11, 2, 8, 0, tzinfo=UTC)
STEP_S = 95.0
HOSTILE = '</script><img src=http://example.com/x onerror=alert(1)><b>bold</b> & "quoted"'


def make_run(
    root: Path,
    *,
    num_steps: int = 240,
    preempted_at: tuple[int, ...] = (70, 150),
    lost_at: tuple[int, ...] = (),
    seed: int = 0,
    **settings: object,
) -> RunFolder:
    """A finished run on two nodes, with an answer of HOSTILE text in it.

    ``lost_at``: steps of ``preempted_at`` at which a node was lost instead.
    """
    values = {"rollout": {"num_rollout": num_steps}, "cluster": {"nodes": 2, "job_name": "seven-b"}}
    values["rollout"] |= settings
    run = create_run_folder(root, dump(load([], values).config))
    rng = random.Random(seed)
    lines = [_line(step, num_steps, rng) for step in range(num_steps + 1)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _write_ledger(run, num_steps, preempted_at, lost_at)
    samples = [{"step": n, "samples": _samples(n, num_steps, rng)} for n in range(1, num_steps + 1)]
    (run.report / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    for _ in range(len(preempted_at) + 1):
        attempt = run.new_attempt()
        checks = [
            ("gpus", "OK", "8 of 8"),
            ("nofile", "WARN", "20000 open files, 65535 wanted"),
            ("hcas", "OK", "8 up"),
        ]
        named = [dict(zip(("name", "level", "found"), check, strict=True)) for check in checks]
        hosts = {f"n0{n}": {"level": "WARN", "checks": named} for n in (1, 2)}
        (attempt / "preflight.json").write_text(json.dumps({"hosts": hosts}))
        for host in hosts:
            table = "socket_ifname   bond0\nnode_ip         10.2.0.4\nrdma            ib\nib_hca          mlx5_0,mlx5_1"
            text = f"08:00:01.000 INFO agent[{host}] network of this node\n{table}\n08:00:02.000 INFO agent preflight\n"
            (attempt / f"agent-{host}.log").write_text(text)
    return run


EARLY_ERROR = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.38 GiB."
EARLY_LOG = f"""\
2026-11-02 08:05:10.020 INFO starting from /models/Qwen3-4B
2026-11-02 08:05:12.310 INFO starting 8 actor ranks and 4 engines
2026-11-02 08:06:40.551 ERROR actor-3 failed:
ray::Worker.call() (pid=7120, ip=10.2.0.4)
  File "/code/rlpost/trainer/model.py", line 92, in build
    model = wrapped(layers)
{EARLY_ERROR}
2026-11-02 08:06:41.102 INFO the report: report/report.html
"""


def make_failed_run(root: Path) -> RunFolder:
    """A run on two nodes whose only attempt failed before its first step."""
    run = make_run(root, num_steps=60, preempted_at=())
    run.metrics.unlink()
    (run.report / "samples.jsonl").unlink()
    (run.attempts / "0/driver.log").write_text(EARLY_LOG)
    cause = "the driver ended with exit code 1; its last lines:\n" + EARLY_LOG.strip()
    moment = BEGIN
    events = []
    for seconds, event, details in (
        (0, "submitted", {"job_id": "4711", "nodes": 2}),
        (240, "attempt", {"attempt": 0, "job_id": "4711", "nodes": "n[01-02]", "num_nodes": 2}),
        (25, "started", {"attempt": "0", "step": 0, "nodes": ["n01", "n02"]}),
        (95, "verdict", {"attempt": 0, "verdict": "failed", "cause": cause, "answer": 1}),
    ):
        moment += timedelta(seconds=seconds)
        events.append(
            {"time": moment.isoformat(timespec="milliseconds"), "event": event, **details}
        )
    events[-1]["reason"] = "not requeued: failures: 4, and max_failures is 3"
    run.ledger.path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def _line(step: int, num_steps: int, rng: random.Random) -> dict[str, float]:
    done = step / num_steps
    line: dict[str, float] = {"step": step}
    if step % 20 == 0:
        line |= {
            "eval/aime/reward_mean": 0.12 + 0.5 * (1 - math.exp(-3 * done)),
            "time/eval_s": 30 + rng.random(),
        }
        line |= {
            "eval/math500/reward_mean": 0.41 + 0.42 * (1 - math.exp(-4 * done)),
            "eval/aime/pass@8": 0.4,
        }
    if step == 0:
        return line
    times = {
        "generate": 55 + 12 * done + rng.gauss(0, 4),
        "train": 28 + rng.gauss(0, 1),
        "sync": 3 + rng.random(),
    }
    total = sum(times.values()) + 1
    length = 900 + 1900 * done + rng.gauss(0, 60)
    return line | {
        "reward/mean": min(1.0, 0.2 + 0.55 * (1 - math.exp(-3 * done)) + rng.gauss(0, 0.035)),
        "reward/std": 0.4,
        "rollout/response_length_mean": length,
        "rollout/response_length_max": min(8192.0, length * 2.6 + rng.gauss(0, 200)),
        "rollout/truncated_frac": max(0.0, 0.02 + 0.05 * done + rng.gauss(0, 0.006)),
        "rollout/zero_std_groups": 30 + 20 * done + rng.randint(-6, 6),
        "rollout/num_filtered": rng.randint(4, 18),
        "train/entropy": 0.62 * math.exp(-2 * done) + 0.18 + rng.gauss(0, 0.012),
        "train/ppo_kl": abs(rng.gauss(0, 2e-4)),
        "train/ref_kl": 0.08 * done + abs(rng.gauss(0, 0.003)),
        "train/loss": rng.gauss(0, 0.01),
        "train/pg_loss": rng.gauss(0, 0.01),
        "train/clip_frac_low": 0.003 + rng.random() * 0.001,
        "train/clip_frac_high": 0.006 + rng.random() * 0.002,
        "train/rollout_logprob_abs_diff": 0.011 + rng.random() * 0.002,
        "train/grad_norm": 0.4
        + 0.3 * math.exp(-4 * done)
        + abs(rng.gauss(0, 0.05))
        + (2.0 if step == 61 else 0.0),
        "train/lr": 1e-6 * min(1.0, step / 10),
        **{f"time/{name}_s": value for name, value in times.items()},
        "time/step_s": total,
        "time/tokens_per_s": 512 * length / total,
        "time/tokens_per_s_per_gpu": 32 * length / total,
        "perf/mfu_frac": 0.36,
        "sync/update_s": times["sync"],
        "memory/actor_gb": 61.0,
        "memory/actor_gpu_peak_gb": 70.0 + done,
        "memory/engine_gb": 24.0,
        "memory/gpu_used_frac": 0.93,
        "memory/host_used_frac": 0.4,
        **({"checkpoint/blocking_s": 1.5, "checkpoint/total_s": 40.0} if step % 20 == 1 else {}),
    }


def _write_ledger(
    run: RunFolder, num_steps: int, preempted_at: tuple[int, ...], lost_at: tuple[int, ...]
) -> None:
    clock, saved, events = BEGIN, 0, []

    def say(after_s: float, event: str, **details: object) -> None:
        nonlocal clock
        clock += timedelta(seconds=after_s)
        events.append({"time": clock.isoformat(timespec="milliseconds"), "event": event, **details})

    say(0, "submitted", job_id="4711", nodes=2)
    for attempt, last in enumerate((*preempted_at, num_steps)):
        say(
            900 if attempt else 240,
            "attempt",
            attempt=attempt,
            job_id="4711",
            nodes="n[01-02]",
            image=None,
        )
        say(25, "started", attempt=str(attempt), step=saved, nodes=["n01", "n02"])
        say(180, "ready", attempt=str(attempt), step=saved)
        for step in range(saved + 1, last + 1):
            clock += timedelta(seconds=STEP_S)
            if step % 20 == 0 or step == last:
                say(0, "committed", step=step, checkpoint=checkpoint_name(step), blocking_s=1.5)
                saved = step
        if last in lost_at:
            cause = "n02 is gone: no heartbeat for 30 s"
            said = {"answer": "again", "reason": "", "exclude": []}
            say(35, "verdict", attempt=attempt, verdict="failed", cause=cause, **said)
        elif last < num_steps:
            say(5, "preempted", reason="SIGUSR2 from the batch script")
            say(
                20,
                "verdict",
                attempt=attempt,
                verdict="requeue",
                cause="preempted",
                answer="again",
                reason="",
                exclude=[],
            )
    say(2, "done", step=num_steps, weights="ab" * 32)
    say(
        9,
        "verdict",
        attempt=len(preempted_at),
        verdict="done",
        cause="the driver ended with 0",
        answer=0,
        reason="",
    )
    run.ledger.path.write_text("".join(json.dumps(event) + "\n" for event in events))


def _samples(step: int, num_steps: int, rng: random.Random) -> list[dict[str, object]]:
    a, b = rng.randint(2, 40), rng.randint(2, 40)
    prompt = f"What is {a} * {b}? Think step by step and put the answer into \\boxed{{}}."
    right = f"I split it: {a} * {b} = {a} * {b // 10 * 10} + {a} * {b % 10}, which is \\boxed{{{a * b}}}."
    wrong = HOSTILE if step == num_steps else f"It is about {a * b + 3}, I think. " * 12
    common = {"prompt_id": step * 8, "prompt": prompt, "label": str(a * b)}
    return [
        common | {"answer": right, "reward": 1.0, "num_tokens": 61, "finish": "stop"},
        common | {"answer": wrong, "reward": 0.0, "num_tokens": 8192, "finish": "length"},
    ]

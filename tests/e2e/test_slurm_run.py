"""A whole run on two nodes of a real Slurm: Megatron-core with TP=2 and DP=2, two SGLang engines behind a router."""

import re
import stat

from tests.e2e.runs import NUM_STEPS, evaluations


def test_the_run_ends_done_with_every_step_once(undisturbed):
    assert undisturbed.verdict(0) == "done"
    assert [line["step"] for line in undisturbed.metrics] == list(range(NUM_STEPS + 1))
    assert set(evaluations(undisturbed.metrics)) == {0, 12, 24}
    events = [entry["event"] for entry in undisturbed.ledger if entry["event"] != "committed"]
    assert sorted(events[:2]) == ["attempt", "submitted"]  # a job may begin before sbatch has returned
    assert events[2:] == ["started", "ready", "done", "verdict"]


def test_both_nodes_meet_on_the_routable_interface(undisturbed):
    agent = undisturbed.log(0, "agent-n01.log")
    for node, ip in (("n01", "10.77.0.11"), ("n02", "10.77.0.12")):
        assert re.search(rf"{node}\s+{re.escape(ip)}\s+eth0", agent), agent
    assert undisturbed.events("started")[0]["nodes"] == ["n01", "n02"]


def test_four_ranks_train_and_an_engine_on_each_node_generates(undisturbed):
    attempt = undisturbed.folder / "attempts/0"
    assert len(list(attempt.glob("actor-*.log"))) == 4
    for index, ip in enumerate(("10.77.0.11", "10.77.0.12")):
        server = (attempt / f"engine-{index}-server.log").read_text()
        assert "POST /generate" in server
        assert f"http://{ip}:" in (attempt / f"engine-{index}.log").read_text()


def test_after_every_step_both_engines_have_the_step_s_version(undisturbed):
    seen = re.findall(r"policy version (\d+) on 2 engines", undisturbed.log(0))
    assert [int(version) for version in seen] == list(range(NUM_STEPS + 1))


def test_trainer_and_engines_agree_on_the_log_probs_of_what_was_generated(undisturbed):
    """The engines compute them while generating, the trainer when training: the same weights, two programs."""
    for line in undisturbed.metrics[1:]:
        assert line["train/rollout_logprob_abs_diff"] < 1e-4


def test_the_run_folder_is_private_and_the_secret_stands_in_one_file_only(undisturbed):
    folder = undisturbed.folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secret = (folder / "attempts/0/secret").read_bytes().strip()
    holders = [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert [path.name for path in holders] == ["secret"]


def test_nothing_of_the_run_is_left_on_the_nodes(undisturbed):
    for node in ("n01", "n02"):
        found = undisturbed.lab.run(node, ["ps", "-eo", "args="]).stdout.splitlines()
        left = [line for line in found if not re.search(r"node_init\.py|slurmd|^ps ", line)]
        assert not left

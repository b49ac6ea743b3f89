"""Plug-ins of slime work through our interfaces, called as a run calls them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlpost.algorithm.plugin import foreign_adapters
from rlpost.config.plugin_settings import settings_of
from rlpost.config.tree import Config
from rlpost.driver.generation import evaluation_rollout
from rlpost.durable.group_records import sample_from, sample_record
from rlpost.engines.connection import Connection, RunEngines
from rlpost.engines.routes import RouteFormat
from rlpost.errors import ConfigError, RolloutError
from rlpost.extensions.slime import engines
from rlpost.extensions.slime.arguments import Arguments
from rlpost.extensions.slime.filters import SlimeGrader
from rlpost.extensions.slime.generate import _sampling_mask
from rlpost.extensions.slime.sample import shown
from rlpost.rollout.filters import buffer_filter, generate_function, group_filter
from rlpost.rollout.generate import GroupWriter
from rlpost.rollout.sampling import SamplingParams
from rlpost.tasks.reward import grader as grading
from rlpost.tasks.reward.given import GivenRewards
from rlpost.tasks.reward.grader import InlineGrader, make_grader
from rlpost.tasks.reward.reward_number import reward_number
from rlpost.types import Prompt, Sample, SampleGroup, ScoredSample, Unfinished
from tests.unit.engines.test_routes import FORM, Mixture, versions
from tests.unit.rollout.fake_engine import KEY, FakeEngine, generated, serving

PLUGINS = Path(__file__).with_name("plugins.py")
PROMPT = Prompt(3, "Q", (81,), label="42", metadata={"level": 2})
SAMPLING = SamplingParams(max_new_tokens=20, stop_token_ids=(1,))


class Bytes:
    """A fake of a transformers tokenizer with one id per byte."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return bytes(token_ids).decode()


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_tokenizer", lambda path: Bytes())
    monkeypatch.setattr(engines.SingletonMeta, "_made", {})


def settings(**rollout: Any) -> Config:
    rollout = {"n_samples_per_prompt": 2, "reward_workers": 1, **rollout}
    return Config.model_validate({"rollout": rollout, "checkpoint": {"hf_checkpoint": "model"}})


def plugin(name: str) -> str:
    return f"{PLUGINS}:{name}"


def answer(text: str, *, index: int = 0, version: int = 4, **more: Any) -> Sample:
    ids = tuple(text.encode())
    made = Sample(3, index, (81,), ids, (-1.0,) * len(ids), text, "stop", version, label="42")
    return replace(made, **more)


def writing(
    engine: FakeEngine,
    name: str,
    *,
    n: int = 1,
    evaluation: bool = False,
    routes: RouteFormat | None = None,
    **rollout: Any,
) -> Any:
    """Return the group that a generate function writes."""
    config = settings(**rollout)

    async def whole() -> Any:
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4), routes=routes) as connection,
        ):
            args = Arguments(settings_of(config))
            args.connected(engine.url, KEY)
            function = generate_function(plugin(name), args, evaluation=evaluation)
            score = InlineGrader(lambda text, label, metadata: 1.0)
            grader = GivenRewards(score, config.rollout)
            writer = GroupWriter(connection, SAMPLING, n=n, grader=grader, function=function)
            return await writer.write(Unfinished(PROMPT))

    return asyncio.run(whole())


def says(
    *texts: str, version: str = "2", reason: str = "stop"
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    left = list(texts)

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        text = left.pop(0)
        return generated(list(text.encode()), version=version, text=text, reason=reason)

    return reply


def graded(name: str, *samples: Sample, prompt: Prompt = PROMPT, **rollout: Any) -> Any:
    async def run() -> Any:
        grader = make_grader(settings(custom_rm_path=plugin(name), **rollout))
        try:
            return [await grader.grade(prompt, samples) for _ in range(2)][-1]
        finally:
            await grader.close()

    return asyncio.run(run())


def test_a_search_in_several_turns_has_mask_logprobs_version_and_extra_fields() -> None:
    engine = FakeEngine(answer=says("a?", "bc", version="7"))
    group = writing(engine, "search")
    (scored,) = group.samples
    sample = scored.sample
    assert bytes(sample.response_ids) == b"a?[42]bc" and sample.text == "a?[42]bc"
    assert sample.mask == (1, 1, 0, 0, 0, 0, 1, 1)
    assert sample.rollout_logprobs == (-0.5, -1.0, 0.0, 0.0, 0.0, 0.0, -0.5, -1.0)
    assert (sample.prompt_ids, sample.policy_version, sample.version_spans) == ((81,), 7, ())
    assert sample.extra == {"tool_calls": 1, "metadata": {"level": 2, "turns": 2}}
    assert [bytes(body["input_ids"]) for body in engine.bodies] == [b"Q", b"Qa?[42]"]
    params = engine.bodies[0]["sampling_params"]
    assert (params["stop"], params["no_stop_trim"], params["stop_token_ids"]) == (["?"], True, [1])
    assert params["sampling_seed"] != engine.bodies[1]["sampling_params"]["sampling_seed"]
    assert sample_from(sample_record(sample)) == sample, "a checkpoint keeps all of it"


def test_tokens_from_new_weights_have_their_own_version() -> None:
    texts = iter([("a?", "2"), ("bc", "3")])

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        text, version = next(texts)
        return generated(list(text.encode()), version=version, text=text)

    (scored,) = writing(FakeEngine(answer=reply), "search").samples
    assert scored.sample.version_spans == ((2, 6), (3, 2))
    assert (scored.sample.oldest_version, scored.sample.policy_version) == (2, 3)


def test_the_routes_of_a_search_are_those_of_the_first_request_that_read_a_token() -> None:
    """The trainer routes the tool's output itself, although the second request read it."""
    (scored,) = writing(
        Mixture(("a?", "stop", 2), ("bc", "stop", 3)), "search", routes=FORM
    ).samples
    assert bytes(scored.sample.response_ids) == b"a?[42]bc"
    assert versions(scored.sample) == [2, 2, 3, None, None, None, None, 3]
    assert shown(PROMPT, scored.sample, siblings=2).rollout_routed_experts.shape == (8, 3, 2)


def test_a_function_that_asks_for_routes_reads_them_as_from_slimes_engines() -> None:
    (scored,) = writing(Mixture(("abc", "stop", 2)), "reads_routes", routes=FORM).samples
    # prompt and answer without the last token, all layers
    assert scored.sample.extra["routes_shape"] == [
        3,
        5,
        2,
    ]
    assert versions(scored.sample) == [2, 2, 2]
    with pytest.raises(ConfigError, match="needs --use-rollout-routing-replay true"):
        writing(Mixture(("abc", "stop", 2)), "reads_routes")


def test_an_answer_aborted_for_new_weights_is_resumed_within_one_post() -> None:
    replies = iter([("ab", "abort", "2"), ("cd", "stop", "3")])

    def reply(body: dict[str, Any]) -> dict[str, Any]:
        text, reason, version = next(replies)
        return generated(list(text.encode()), version=version, text=text, reason=reason)

    engine = FakeEngine(answer=reply)
    (scored,) = writing(engine, "search").samples
    assert scored.sample.text == "abcd"
    assert scored.sample.version_spans == ((2, 2), (3, 2))
    assert bytes(engine.bodies[1]["input_ids"]) == b"Qab"


@pytest.mark.parametrize("evaluation", [False, True])
def test_logprobs_that_a_plugin_did_not_request_are_those_of_the_engine(evaluation: bool) -> None:
    (scored,) = writing(
        FakeEngine(answer=says("xyz")), "without_logprobs", evaluation=evaluation
    ).samples
    assert scored.sample.rollout_logprobs == (-0.5, -1.0, -1.5)
    assert scored.sample.extra["metadata"]["evaluation"] is evaluation


def test_several_samples_of_an_answer_keep_the_rewards_that_the_function_gave() -> None:
    group = writing(FakeEngine(answer=says("ab")), "rewarded_itself", reward_key="score")
    assert group.rewards == (0.25, 0.75)
    assert [each.sample.index for each in group.samples] == [0, 0]
    assert [sum(each.sample.mask) for each in group.samples] == [2, 0], (
        "remove_sample leaves it out of the loss"
    )
    with pytest.raises(
        ConfigError, match="--reward-key is not set: a reward is an object with the keys score, why"
    ):
        writing(FakeEngine(answer=says("ab")), "rewarded_itself")


def test_a_halted_rollout_restarts_the_answer() -> None:
    """In a preemption the engine is aborted, the plug-in returns ABORTED; nothing is trained."""
    engine = FakeEngine()

    async def whole() -> Any:
        async with (
            serving(engine),
            Connection(RunEngines.of([engine.url], KEY, capacity=4)) as connection,
        ):
            args = Arguments(settings_of(settings()))
            args.connected(engine.url, KEY)
            function = generate_function(plugin("search"), args)
            grader = InlineGrader(lambda text, label, metadata: 1.0)
            writer = GroupWriter(connection, SAMPLING, n=1, grader=grader, function=function)
            connection.halted = True
            return await writer.write(Unfinished(PROMPT))

    assert asyncio.run(whole()) == Unfinished(PROMPT)


def test_an_answer_that_a_plugin_always_gives_up_ends_the_run() -> None:
    with pytest.raises(RolloutError, match="status ABORTED 4 times for prompt 3, but no engine"):
        writing(FakeEngine(), "in_a_thread")


def test_a_result_that_is_not_a_sample_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"returned 'Q' for prompt 3; it must return a Sample or a list"
    ):
        writing(FakeEngine(), "no_sample")


def test_an_unsupported_payload_is_refused() -> None:
    with pytest.raises(ConfigError, match="image_data is not supported"):
        engines.request_params({"input_ids": [1], "image_data": ["x"]})


def test_a_post_to_a_tool_is_retried_and_does_not_carry_the_key_of_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "PAUSE_S", 0.0)
    seen: list[Any] = []

    async def whole() -> Any:
        from aiohttp import web

        async def found(request: web.Request) -> web.Response:
            seen.append(request.headers.get("Authorization"))
            return web.json_response({"found": 1}, status=200 if len(seen) > 2 else 503)

        router = FakeEngine()
        app = web.Application()
        app.router.add_post("/search", found)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        try:
            async with (
                serving(router),
                Connection(RunEngines.of([router.url], KEY, capacity=4)) as connection,
            ):
                with engines.reachable(engines.Engines(connection, Bytes(), PROMPT, 0)):
                    return await engines.post(f"http://{host}:{port}/search", {"query": "x"})
        finally:
            await runner.cleanup()

    assert asyncio.run(whole()) == {"found": 1}
    assert seen == [None] * 3


def test_the_reward_key_selects_a_value_of_an_object() -> None:
    right, wrong = answer(r"\boxed{42}"), answer(r"\boxed{41}", index=1, extra={"tool_calls": 3})
    assert graded("tool_reward", right, wrong, reward_key="score") == [1.0, pytest.approx(-0.7)]
    with pytest.raises(
        ConfigError,
        match=r"--reward-key acct: a reward is an object with the keys score, acc, pred",
    ):
        graded("tool_reward", right, reward_key="acct")


def test_evaluation_has_its_own_reward_key() -> None:
    config = Config.model_validate(
        {
            "rollout": {"reward_key": "score", "custom_rm_path": plugin("tool_reward")},
            "eval": {"eval_reward_key": "acc"},
            "checkpoint": {"hf_checkpoint": "model"},
        }
    )
    own = evaluation_rollout(config, config.rollout)
    assert own.reward_key == "acc" and config.rollout.reward_key == "score"
    assert settings_of(config)["eval_reward_key"] == "acc"
    wrong = answer(r"\boxed{41}")
    keys = [
        graded("tool_reward", wrong, reward_key=each.reward_key) for each in (config.rollout, own)
    ]
    assert keys == [[-1.0], [0.0]]
    without = config.model_copy(update={"eval": type(config.eval)()})
    assert evaluation_rollout(without, config.rollout) is config.rollout
    assert settings_of(without)["eval_reward_key"] == "score"


def test_values_of_a_reward_are_combined_by_their_weights() -> None:
    right, wrong = answer(r"\boxed{42}"), answer(r"\boxed{41}", index=1, extra={"tool_calls": 3})
    given = {"reward_weights": {"score": 2.0, "acc": -0.5}}
    assert graded("tool_reward", right, wrong, **given) == [1.5, pytest.approx(-1.4)]
    with pytest.raises(ConfigError, match=r"--reward-weights acct: a reward is an object with the"):
        graded("tool_reward", right, reward_weights={"acct": 1.0})
    with pytest.raises(ConfigError, match=r"--reward-weights: a reward is 0.5; the function must"):
        reward_number(0.5, None, {"score": 1.0})


def test_an_async_reward_of_all_answers_keeps_its_event_loop() -> None:
    given = answer("abcd"), answer("ab", index=1, loss_mask=(1, 0))
    assert graded("judged_together", *given, group_rm=True) == [1.0, 0.25]


def test_a_reward_of_slime_may_call_the_rewards_by_name() -> None:
    assert graded("by_type", answer("42"), answer("41", index=1), rm_type="exact_match") == [
        31.0,
        30.0,
    ]


def test_a_label_that_is_an_object_reaches_a_reward_as_an_object() -> None:
    prompt = replace(
        PROMPT, label='{"target": ["x"]}', metadata={"reward_model": {"target": ["x"]}}
    )
    assert graded("from_object", answer("x"), answer("y", index=1), prompt=prompt) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wants_images", "sample.multimodal_inputs: functions of slime get no images"),
        (
            "wants_a_setting",
            "args.rolout_batch_size: this run has no such setting; did you mean 'rollout_batch_size'",
        ),
        ("lacks_a_package", "ModuleNotFoundError: No module named 'nowhere_at_all'"),
        ("nonzero_std", "add --group-rm, or use"),
    ],
)
def test_a_reward_that_uses_an_unsupported_attribute_ends_the_run_at_once(
    name: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        graded(name, answer("a"))


def test_a_reward_that_always_raises_a_type_error_is_an_error_of_the_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One answer may cause a TypeError; if all do, a restart cannot help."""
    monkeypatch.setattr(grading, "MAX_FAILURES_IN_A_ROW", 4)
    with pytest.raises(ConfigError, match=r"4 consecutive gradings failed.*TypeError"):
        graded("adds_up_wrongly", *(answer("a", index=index) for index in range(2)))


def group(*rewards: float) -> SampleGroup:
    return SampleGroup(
        3, tuple(ScoredSample(answer("a", index=at), reward) for at, reward in enumerate(rewards))
    )


def filtering(name: str, **rollout: Any) -> Callable[[SampleGroup], bool]:
    """Return a filter after a grading, in which it has seen the prompt."""
    config = settings(**rollout)
    wanted = group_filter(plugin(name), Arguments(settings_of(config)))
    inline = InlineGrader(lambda text, label, metadata: 1.0)
    asyncio.run(foreign_adapters().grader(inline, wanted).grade(PROMPT, [answer("a")]))
    return wanted


def test_a_filter_may_return_a_tensor() -> None:
    pytest.importorskip("torch")
    assert filtering("nonzero_std")(group(0.0, 1.0)) is True
    assert filtering("nonzero_std")(group(1.0, 1.0)) is False


def test_a_filter_reads_prompt_and_metadata_and_may_keep_a_group_as_a_fallback() -> None:
    wanted = filtering("keeps_hard_ones", reward_key="score")
    assert wanted(group(0.5, 0.0)) is True
    assert wanted.keep_when_insufficient is True
    wanted = filtering("keeps_hard_ones")
    asyncio.run(_show(wanted, replace(PROMPT, metadata={"level": 1})))
    assert wanted(group(0.0, 1.0)) is False
    assert wanted.keep_when_insufficient is False


async def _show(wanted: Any, prompt: Prompt) -> None:
    inline = InlineGrader(lambda text, label, metadata: 1.0)
    await SlimeGrader(inline, wanted).grade(prompt, [answer("a")])


@pytest.mark.parametrize(
    ("name", "kept"), [("check_reward_nonzero_std", True), ("pop_first", None)]
)
def test_filters_of_slime_itself_can_be_called_by_a_plugin(
    name: str, kept: bool | None, tmp_path: Path
) -> None:
    module = {"pop_first": "slime.rollout.data_source"}.get(
        name, "slime.rollout.filter_hub.dynamic_sampling_filters"
    )
    (tmp_path / "mine.py").write_text(f"from {module} import {name} as mine\n")
    args = Arguments(settings_of(settings()))
    if kept is None:
        waiting = [Unfinished(replace(PROMPT, prompt_id=at)) for at in (5, 6)]
        assert buffer_filter(f"{tmp_path}/mine.py:mine", args)(waiting, 1) == [waiting[0]]
    else:
        wanted = group_filter(f"{tmp_path}/mine.py:mine", args)
        assert (wanted(group(0.0, 1.0)), wanted(group(1.0, 1.0))) == (True, False)


def test_a_buffer_filter_sees_when_a_group_began_and_chooses_among_waiting_groups() -> None:
    waiting = [
        Unfinished(
            replace(PROMPT, prompt_id=at), (answer("a", version=version, finish_reason="abort"),)
        )
        for at, version in ((10, 1), (11, 2), (12, 3), (13, 2))
    ]
    first = buffer_filter(plugin("newest_first"), Arguments(settings_of(settings())))
    assert [entry.prompt.prompt_id for entry in first(waiting, 2)] == [12, 11]
    assert first(waiting, 9) == [waiting[2], waiting[1], waiting[3]]
    with pytest.raises(ConfigError, match="must return a list of groups"):
        buffer_filter(plugin("of_nowhere"), Arguments(settings_of(settings())))(waiting, 1)


def test_a_resumed_answer_names_the_rollout_of_its_first_token() -> None:
    """``start_rollout_id`` is set for rewards and filters as for buffer filters.

    It is absent when one rollout generated the whole answer.
    """
    one = Sample(3, 0, (81,), (5, 6), (-1.0, -1.0), "x", "stop", 4)
    resumed = replace(one, version_spans=((2, 1), (4, 1)))
    assert shown(PROMPT, resumed, siblings=2).metadata == {"level": 2, "start_rollout_id": 2}
    assert shown(PROMPT, one, siblings=2).metadata == {"level": 2}
    assert "start_rollout_id" not in PROMPT.metadata


def test_settings_have_slimes_names_and_cannot_be_changed() -> None:
    config = settings(rollout_batch_size=4, prompt_data=["a.jsonl"], rollout_stop=["x"])
    args = Arguments(settings_of(config))
    assert (args.n_samples_per_prompt, args.rollout_batch_size, args.global_batch_size) == (2, 4, 8)
    assert (args.prompt_data, args.rollout_stop, args.hf_checkpoint) == ("a.jsonl", ["x"], "model")
    args.mine = 1
    args.rollout_batch_size = 4  # the present value
    assert (args.mine, getattr(args, "unheard_of", "none")) == (1, "none")
    with pytest.raises(
        ConfigError, match="a function cannot change a setting; start with --rollout-batch-size"
    ):
        args.rollout_batch_size = 5
    with pytest.raises(
        AttributeError, match=r"args\.sglang_router_ip: only generate functions reach the engines"
    ):
        _ = args.sglang_router_ip
    args.connected("http://10.0.0.1:3000", KEY)
    assert (args.sglang_router_ip, args.sglang_router_port) == ("10.0.0.1", 3000)
    assert KEY not in repr(args)


@pytest.mark.parametrize("kind", ["async ", ""])
@pytest.mark.parametrize("fault", ["None + 1", "__import__('nowhere_at_all')"])
async def test_errors_in_a_custom_function_are_errors_of_the_settings(
    tmp_path: Path, kind: str, fault: str
) -> None:
    """The error has file and line, also for functions with our own interface."""
    (tmp_path / "mine.py").write_text(
        f"def drop(group):\n    return {fault}\n\n{kind}def answer(builder, prompt, sampling):\n    {fault}\n"
    )
    with pytest.raises(
        ConfigError, match=r"mine.py:drop: \w+Error: .*mine.py, line 2\); correct the function"
    ):
        group_filter(f"{tmp_path}/mine.py:drop")(group(1.0))
    function = generate_function(f"{tmp_path}/mine.py:answer")
    with pytest.raises(ConfigError, match=r"mine.py:answer: \w+Error: .*mine.py, line 5"):
        await function(None, PROMPT, SAMPLING)


def test_a_sampling_mask_is_converted_to_slimes_two_lists_and_back() -> None:
    sets = ((5, 9), (), (7,))
    masked = replace(answer("abc"), sampling_mask=sets)
    made = shown(PROMPT, masked, siblings=2)
    assert made.rollout_top_p_token_ids == [5, 9, 7]
    assert made.rollout_top_p_token_offsets == [0, 2, 2, 3]
    assert _sampling_mask(made, 3, "it") == masked.sampling_mask
    assert _sampling_mask(shown(PROMPT, answer("abc"), siblings=2), 3, "it") is None
    with pytest.raises(ConfigError, match=r"it has 3 sets with 3 ids in .* and 4 tokens"):
        _sampling_mask(made, 4, "it")

"""Two images of one size have the same tokens: whatever is kept or compared by tokens tells them apart.

Each case is given a pair that differs in its images alone, drawn at random, and must not take one
for the other; the control is the pair of equals.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlpost.algorithm.shared_prefix import FEWEST, has_one_prompt, shared_lengths
from rlpost.columns import IntColumn
from rlpost.config.groups.grpo import GrpoConfig
from rlpost.driver.batches import rollout_samples
from rlpost.durable.group_records import (
    BASE64,
    backlog_from,
    backlog_json,
    group_from,
    group_record,
    sample_from,
    sample_record,
)
from rlpost.durable.journal_format import prompt_digest
from rlpost.errors import ConfigError
from rlpost.extensions.judge.reward import JudgeReward
from rlpost.extensions.supervised.tokenizer import SupervisedTokenizer
from rlpost.observe.samples import chosen
from rlpost.rollout.answer_log import request_digest
from rlpost.rollout.teacher import TeacherServer
from rlpost.trainer import mtp, routes
from rlpost.types import (
    Backlog,
    ImageSpan,
    Prompt,
    Sample,
    SampleGroup,
    ScoredSample,
    TrainSample,
    Unfinished,
)

PROMPT, ANSWER = 40, 4
IDS = list(range(100, 100 + PROMPT))


def spans(draw: st.DrawFn) -> tuple[ImageSpan, ...]:
    """Images of a prompt, apart from each other."""
    images, start = [], draw(st.integers(1, 12))
    while start < PROMPT - 4 and len(images) < 3:
        rows = draw(st.sampled_from([2, 4]))
        grid = (1, rows, 4)
        images.append(ImageSpan(draw(st.sampled_from(["aa", "bb", "cc"])), start, rows, grid))
        start += rows + draw(st.integers(2, 12))
    return tuple(images)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[tuple[ImageSpan, ...], tuple[ImageSpan, ...]]:
    one, other = spans(draw), spans(draw)
    if draw(st.booleans()):  # one other file at the same place
        which = draw(st.integers(0, len(one) - 1))
        other = (*one[:which], replace(one[which], hash="dd"), *one[which + 1 :])
    elif draw(st.booleans()):
        other = ()
    assume(one != other)
    return one, other


def prompt(images: tuple[ImageSpan, ...]) -> Prompt:
    return Prompt(7, "text", IDS, images=images)


def sample(images: tuple[ImageSpan, ...]) -> Sample:
    return Sample(7, 0, IDS, [1] * ANSWER, [-0.5] * ANSWER, "answer", "stop", 3, images=images)


def trained(images: tuple[ImageSpan, ...]) -> TrainSample:
    return TrainSample(
        IDS + [1] * ANSWER, PROMPT, [1] * ANSWER, [-0.5] * ANSWER, 1.0, images=images
    )


def group(*images: tuple[ImageSpan, ...]) -> SampleGroup:
    samples = (ScoredSample(replace(sample(each), index=at), 0.5) for at, each in enumerate(images))
    return SampleGroup(7, tuple(samples))


DIGESTS = {
    "recorded answer": lambda images: request_digest(IntColumn(IDS), {"top_p": 1.0}, images),
    "prompt of the journal": lambda images: prompt_digest(prompt(images)),
    "routes of the trainer": lambda images: routes._key(trained(images)),
    "answers of the report": lambda images: json.dumps(chosen([group(images)], str)),
    "record of a sample": lambda images: json.dumps(sample_record(sample(images))),
    "backlog": lambda images: "".join(backlog_json(Backlog(unfinished=(Unfinished(prompt(images)),)))),
}  # fmt: skip


@pytest.mark.parametrize("name", DIGESTS)
@given(pairs())
@settings(max_examples=60, deadline=None)
def test_what_is_kept_by_tokens_is_kept_by_images(name, images):
    one, other = images
    digest = DIGESTS[name]
    assert digest(one) == digest(tuple(one))
    if name == "answers of the report":  # names files, not places
        assume([span.hash for span in one] != [span.hash for span in other])
    assert digest(one) != digest(other)


@given(pairs())
@settings(deadline=None)
def test_no_row_of_another_image_is_shared_and_no_image_is_cut(images):
    one, other = images
    assert shared_lengths([trained(one), trained(one)])[1] == PROMPT + ANSWER - 1
    (_, count) = shared_lengths([trained(one), trained(other)])
    different = [span.start for span in set(one) ^ set(other)]
    assert count <= min(different)
    assert count in (0, min(different)) and (count == 0) == (min(different) < FEWEST)
    assert not any(span.start < count < span.end for span in (*one, *other))


@given(pairs())
@settings(deadline=None)
def test_a_group_of_two_images_is_not_of_one_prompt(images):
    assert has_one_prompt(group(images[0], images[0]))
    assert not has_one_prompt(group(*images))


def test_an_image_at_the_end_of_the_shared_tokens_is_left_whole():
    """The sample after ends inside an image: nothing of the image is shared."""
    span = ImageSpan("aa", 20, 8, (1, 8, 4))
    long = trained((span,))
    short = replace(long, token_ids=IDS[:26], prompt_length=22)
    assert shared_lengths([long, short]) == [0, 20]


@given(pairs())
@settings(deadline=None)
def test_images_survive_every_record_bit_for_bit(images):
    for each in images:
        whole = group(each, each)
        assert group_from(json.loads(json.dumps(group_record(whole, BASE64)))) == whole
        assert group_from(json.loads(json.dumps(group_record(whole)))) == whole
        # a reference to an answer that is stored elsewhere
        answers = {scored.sample.index: [scored.sample] for scored in whole.samples}
        assert group_from(group_record(whole, BASE64, answers), BASE64, answers) == whole
        swapped = group(images[1], images[0])
        kept = {scored.sample.index: [scored.sample] for scored in group(*images).samples}
        changed = [replace(old.sample, images=new.sample.images) for old, new in zip(
            group(*images).samples, swapped.samples, strict=True)]  # fmt: skip
        referring = SampleGroup(7, tuple(
            ScoredSample(replace(kept[one.index][0], images=one.images), 0.5) for one in changed
        ))  # fmt: skip
        record = json.loads(json.dumps(group_record(referring, BASE64, kept)))
        assert all("answer" in scored for scored in record["samples"])
        assert group_from(record, BASE64, kept) == referring
        begun = Unfinished(prompt(each), (sample(each),))
        assert backlog_from(
            json.loads("".join(backlog_json(Backlog(unfinished=(begun,)))))
        ) == Backlog(unfinished=(begun,))


def test_a_backlog_names_the_images_of_all_its_prompts():
    one, other = (ImageSpan("aa", 5, 4, (1, 4, 4)),), (ImageSpan("bb", 5, 4, (1, 4, 4)),)
    backlog = Backlog(finished=(group(one),), unfinished=(Unfinished(prompt(other)),))
    assert backlog.images == {"aa", "bb"} and Backlog().images == frozenset()
    later = Backlog(unfinished=(Unfinished(prompt(()), (sample(one), sample(other))),))
    assert later.images == {"aa", "bb"}, "of answers in progress, too"


def test_a_record_without_images_is_as_before():
    assert "images" not in sample_record(sample(()))
    assert sample_from(sample_record(sample(()))).images == ()
    old = request_digest(IntColumn(IDS), {"top_p": 1.0})
    assert old == request_digest(IntColumn(IDS), {"top_p": 1.0}, ())


def test_each_training_sample_has_the_images_of_its_answer():
    one, other = (ImageSpan("aa", 5, 4, (1, 4, 4)),), (ImageSpan("bb", 5, 4, (1, 4, 4)),)
    samples = rollout_samples([group(one, other)], GrpoConfig())
    assert [each.images for each in samples] == [one, other]
    (shifted,) = mtp.shifted((samples[0],))
    assert [(span.hash, span.start) for span in shifted.images] == [("aa", 4)]


BLIND = {
    "judge": lambda images: asyncio.run(JudgeReward(SimpleNamespace(file=SimpleNamespace(
        compares_answers=False))).rewards(prompt(images), [sample(images)])),
    "teacher": lambda images: asyncio.run(
        TeacherServer(SimpleNamespace(where="here")).score(sample(images))
    ),
    "supervised": lambda images: SupervisedTokenizer.group(SimpleNamespace(), prompt(images)),
}  # fmt: skip


@pytest.mark.parametrize("name", BLIND)
def test_what_reads_text_alone_refuses_a_prompt_with_images(name):
    """Also where metadata of a row names a judge, which no setting does."""
    with pytest.raises(ConfigError, match=r"1 images, and .* reads text alone"):
        BLIND[name]((ImageSpan("aa", 5, 4, (1, 4, 4)),))


def test_every_type_that_has_tokens_has_images():
    """A new type with ids and without images would be the next blind place."""
    import rlpost.types as module

    for kind in vars(module).values():
        names = (
            {each.name for each in fields(kind)} if hasattr(kind, "__dataclass_fields__") else set()
        )
        if names & {"token_ids", "prompt_ids"}:
            assert "images" in names, kind

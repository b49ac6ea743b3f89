"""The objective of a token: correction, KL, entropy and custom functions, at every micro-batching."""

import itertools
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpost.algorithm.advantage import AnswerGroup, custom_advantages, estimate
from rlpost.algorithm.correction import correction_weights, log_ratio_at, mismatch
from rlpost.algorithm.kl import estimate_kl, kl_values
from rlpost.algorithm.loss import token_weights
from rlpost.algorithm.objective import POLICY_LOSSES, Tokens, loss_function, policy_objective
from rlpost.algorithm.plugin import load_function
from rlpost.columns import RunColumn
from rlpost.errors import ConfigError
from rlpost.types import Sample, SampleGroup, ScoredSample
from tests.settings import loss_settings

LENGTHS = (3, 1, 5, 2)


def tokens_of(samples, *, lengths=LENGTHS, seed=0, requires_grad=False):
    """The tokens of some samples of a batch whose numbers are random but always the same."""
    source = torch.Generator().manual_seed(seed)
    whole = [torch.randn(5, sum(lengths), generator=source) for _ in range(2)]
    index = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    chosen = torch.cat([(index == sample).nonzero()[:, 0] for sample in samples])
    logprobs, old, rollout, ref, _ = (-3 - 0.3 * row[chosen] for row in whole[0])
    _, mask = torch.unique(index[chosen], return_inverse=True)
    loss_mask = (whole[1][0][chosen] > -1).float()

    def sums(values):
        return torch.zeros(len(samples)).index_add(0, mask, values * loss_mask)[mask]

    return Tokens(
        logprobs=logprobs.requires_grad_(requires_grad),
        entropy=whole[1][1][chosen].abs(),
        old_logprobs=old,
        rollout_logprobs=rollout,
        ref_logprobs=ref,
        advantages=whole[1][2][index[chosen]],
        loss_mask=loss_mask,
        sample_lengths=sums(torch.ones(len(chosen))).long(),
        sample_sums=sums,
    )


def total(parts, options):
    """The loss of a global batch that is split into parts."""
    whole = tokens_of(range(len(LENGTHS)))
    counts = dict(num_samples=len(LENGTHS), num_tokens=int(whole.loss_mask.sum()))
    result = 0.0
    for samples in parts:
        tokens = tokens_of(samples)
        weights = token_weights(
            tokens.sample_lengths, **counts, per_token=options.calculate_per_token_loss
        )
        result += (policy_objective(tokens, options)[0] * weights * tokens.loss_mask).sum().item()
    return result


@settings(deadline=None, max_examples=30)
@given(
    surrogate=st.sampled_from(sorted(POLICY_LOSSES)),
    level=st.sampled_from(["token", "sequence", "geometric"]),
    mode=st.sampled_from(["truncate", "mask", "reject"]),
    order=st.permutations(range(len(LENGTHS))),
    cuts=st.sets(st.integers(1, len(LENGTHS) - 1)),
    per_token=st.booleans(),
)
def test_the_loss_does_not_depend_on_micro_batching(surrogate, level, mode, order, cuts, per_token):
    options = loss_settings(
        policy_loss=surrogate, use_tis=True, tis_level=level, tis_mode=mode, tis_clip=1.3, tis_clip_low=0.7,
        use_opsm=True, opsm_delta=0.1, use_unbiased_kl=True,
        kl_loss_coef=0.2, use_kl_loss=True, entropy_coef=0.1, eps_clip_c=3.0, calculate_per_token_loss=per_token,
    )  # fmt: skip
    edges = [0, *sorted(cuts), len(LENGTHS)]
    parts = [order[a:b] for a, b in itertools.pairwise(edges)]
    assert total(parts, options) == pytest.approx(
        total([range(len(LENGTHS))], options), rel=1e-5, abs=1e-6
    )


def test_weights_at_the_bounds_equal_numbers_computed_by_hand():
    log_ratio = torch.log(torch.tensor([0.2, 0.8, 1.5, 4.0]))
    weight = lambda mode: correction_weights(log_ratio, mode=mode, low=0.5, high=2.0)[0].tolist()  # noqa: E731
    assert weight("truncate") == pytest.approx([0.5, 0.8, 1.5, 2.0])
    assert weight("mask") == pytest.approx([0.0, 0.8, 1.5, 0.0])
    assert weight("reject") == [0.0, 1.0, 1.0, 0.0]
    _, stats = correction_weights(log_ratio, mode="mask", low=0.5, high=2.0)
    assert stats["tis_clip_frac"].tolist() == [1.0, 0.0, 0.0, 1.0]


def test_levels_are_the_token_its_sequences_product_and_its_geometric_mean():
    tokens = tokens_of([0, 2])
    log_ratio = tokens.old_logprobs - tokens.rollout_logprobs
    levels = {
        level: log_ratio_at(level, log_ratio, tokens.sample_sums, tokens.sample_lengths)
        for level in ("token", "sequence", "geometric")
    }
    first = tokens.loss_mask[:3] * log_ratio[:3]
    assert torch.equal(levels["token"], log_ratio)
    assert levels["sequence"][:3].tolist() == pytest.approx([first.sum().item()] * 3)
    assert levels["geometric"][0].item() == pytest.approx(
        (first.sum() / tokens.loss_mask[:3].sum()).item()
    )


def test_the_correction_makes_the_gradient_that_of_the_trainers_own_policy():
    """Over all tokens of a small vocabulary: the expectation under the engines of w x gradient is
    that under the trainer, when nothing is clipped.
    """
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, -1.0, 2.0])
    trainer, engine = logits.log_softmax(0), torch.tensor([0.1, -0.7, 1.1, 0.0]).log_softmax(0)
    weight, _ = correction_weights((trainer - engine).detach(), mode="truncate", low=0.0, high=1e6)
    (ours,) = torch.autograd.grad(
        (engine.exp() * weight * rewards * trainer).sum(), logits, retain_graph=True
    )
    (expected,) = torch.autograd.grad((trainer.exp() * rewards).sum(), logits)
    assert torch.allclose(ours, expected, atol=1e-6)


def test_the_mismatch_is_estimated_at_what_the_engines_sampled():
    """Over all tokens of a small vocabulary, against torch's own kl_div."""
    trainer = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64).log_softmax(0)
    engine = torch.tensor([0.1, -0.7, 1.1, 0.0], dtype=torch.float64).log_softmax(0)
    exact = torch.nn.functional.kl_div(trainer, engine, log_target=True, reduction="sum").item()
    found = mismatch(trainer, engine)
    mean = lambda name: (engine.exp() * found[name]).sum().item()  # noqa: E731
    assert mean("rollout_kl") == pytest.approx(exact)
    assert mean("rollout_k3") == pytest.approx(exact)
    assert mean("rollout_ratio") == pytest.approx(1.0)


def test_gradients_flow_through_the_current_log_probs_only():
    tokens = tokens_of(range(4), requires_grad=True)
    options = loss_settings(use_tis=True, kl_loss_coef=0.5, use_kl_loss=True)
    loss, stats = policy_objective(tokens, options)
    loss.sum().backward()
    assert tokens.logprobs.grad.abs().sum() > 0
    assert not any(value.requires_grad for value in stats.values())
    assert {
        "ppo_kl",
        "clip_frac_low",
        "clip_frac_high",
        "entropy",
        "ref_kl",
        "tis_weight",
        "pg_loss",
    } <= stats.keys()


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_the_divergence_of_an_array_is_that_of_a_tensor(kind):
    ours, reference = torch.tensor([(-1.0, -1.3), (-4.0, -0.1), (-0.2, -0.2), (-19.0, -0.5)]).T
    expected = estimate_kl(ours, reference, kind).tolist()
    assert kl_values((ours - reference).double().numpy(), kind) == pytest.approx(
        expected, rel=1e-5, abs=1e-6
    )


def test_the_divergence_of_an_array_has_the_bits_of_pythons_own_arithmetic():
    """What a resumed run computes in another process, on another processor, must be the same."""
    difference = (
        torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 8
    )
    clipped = [min(max(d, -20.0), 20.0) for d in difference.tolist()]
    k3 = [math.exp(-d) + d - 1 for d in clipped]
    expected = {
        "k1": clipped,
        "k2": [d * d / 2 for d in clipped],
        "k3": k3,
        "low_var_kl": [min(value, 10.0) for value in k3],
    }
    assert {kind: kl_values(difference.numpy(), kind).tolist() for kind in expected} == expected


def test_a_penalty_in_the_reward_is_summed_where_samples_are_compared():
    masks, penalties = [RunColumn.of((1, 1))] * 2, [(0.25, 0.25), (0.0, 0.0)]
    group = AnswerGroup([1.0, 0.0], masks, [2, 2], penalties)
    centred = estimate("grpo", [group], normalize_std=False, gamma=1.0)
    assert centred == [pytest.approx((0.25, -0.25))]


PLUGIN = """
def loss(tokens, settings):
    per_token = -tokens.advantages * tokens.logprobs
    return per_token, {"my_mean": tokens.logprobs.detach(), "my_max": tokens.entropy.detach()}

def advantages(groups, penalties):
    assert penalties is None
    return [[r - max(g.rewards) for r in g.rewards] for g in groups]

def charged(groups, penalties):
    return [[r - sum(p + (0.5,)) for r, p in zip(g.rewards, of)] for g, of in zip(groups, penalties)]

def by_token(groups, penalties):
    return [[[r] * 7 for r in g.rewards] for g in groups]

def too_few(groups, penalties):
    return [[0.0] for g in groups]
"""


@pytest.fixture
def plugin(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    return f"{tmp_path}/mine.py"


def group(*rewards):
    samples = [Sample(0, i, (1,), (2, 3), (0.0, 0.0), "", "stop", 0) for i in range(len(rewards))]
    return SampleGroup(0, tuple(map(ScoredSample, samples, rewards)))


def test_a_custom_loss_is_loaded_from_a_file(plugin):
    options = loss_settings(loss_type="custom_loss", custom_loss_function_path=f"{plugin}:loss")
    tokens = tokens_of(range(4))
    loss, stats = loss_function(options)(tokens, options)
    assert torch.equal(loss, -tokens.advantages * tokens.logprobs)
    assert set(stats) == {"my_mean", "my_max"}


def test_custom_advantages_are_checked(plugin):
    assert custom_advantages(f"{plugin}:advantages", [group(1.0, 0.0), group(2.0)], None) == [
        (0.0, -1.0),
        (0.0,),
    ]
    assert custom_advantages(f"{plugin}:charged", [group(1.0)], [[[0.25, 0.0]]]) == [(0.25,)]
    with pytest.raises(
        ConfigError,
        match=r"got 7 advantages for a response of 2 tokens; return one number, or one for each token$",
    ):
        custom_advantages(f"{plugin}:by_token", [group(1.0)], None)
    with pytest.raises(
        ConfigError, match=r"got \[1\] .* for \[2\] samples; return one for each sample$"
    ):
        custom_advantages(f"{plugin}:too_few", [group(1.0, 0.0)], None)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        ("np.array([g.rewards for g in groups])", ((1.0, 0.0),)),
        ("[[np.full(2, r) for r in g.rewards] for g in groups]", (((1.0, 1.0), (0.0, 0.0)),)),
        ("torch.tensor([g.rewards for g in groups])", ((1.0, 0.0),)),
        (
            "[torch.tensor([[r, r] for r in g.rewards]) for g in groups]",
            (((1.0, 1.0), (0.0, 0.0)),),
        ),
    ],
)
def test_custom_advantages_may_be_arrays_and_tensors(tmp_path, words, made):
    file = tmp_path / "arrays.py"
    file.write_text(
        f"import numpy as np, torch\ndef advantages(groups, penalties):\n    return {words}\n"
    )
    assert tuple(custom_advantages(f"{file}:advantages", [group(1.0, 0.0)], None)) == made


@pytest.mark.parametrize("words", ["None", "[0.5, 0.5]", "[[None, None]]", "[['high', 'low']]"])
def test_advantages_that_are_not_numbers_are_reported(tmp_path, words):
    file = tmp_path / "none.py"
    file.write_text(f"def advantages(groups, penalties):\n    return {words}\n")
    with pytest.raises(
        ConfigError,
        match=r"custom_advantage_function_path = .*none.py:advantages: got .*return for "
        "each group a list with a number, or a list of numbers, for each sample$",
    ):
        custom_advantages(f"{file}:advantages", [group(1.0, 0.0)], None)


@pytest.mark.parametrize("words", ["math.nan", "-math.inf", "1e39", "[0.5, math.nan]"])
def test_advantages_that_are_not_finite_are_refused_with_function_and_sample(tmp_path, words):
    file = tmp_path / "mine.py"
    file.write_text(
        f"import math\ndef advantages(groups, penalties):\n    return [[0.5, {words}]]\n"
    )
    with pytest.raises(ConfigError, match=r"mine.py:advantages: got .* for sample 1 of prompt 0; "):
        custom_advantages(f"{file}:advantages", [group(1.0, 0.0)], None)


def test_an_error_in_a_custom_function_is_an_error_of_the_settings(tmp_path):
    """Starting again cannot help; the line is that of the user's file, also when torch raises
    it.
    """
    file = tmp_path / "wrong.py"
    file.write_text(
        "import torch\ndef loss(tokens, settings):\n    return torch.add(tokens.logprobs, '1'), {}\n"
        "def advantages(groups, penalties):\n    import nowhere_at_all\n"
    )
    options = loss_settings(loss_type="custom_loss", custom_loss_function_path=f"{file}:loss")
    with pytest.raises(
        ConfigError,
        match=r"custom_loss_function_path = .*wrong.py:loss: TypeError.*wrong.py, line 3\)",
    ):
        loss_function(options)(tokens_of(range(4)), options)
    with pytest.raises(
        ConfigError,
        match=r"custom_advantage_function_path = .*: ModuleNotFoundError: .*wrong.py, line 5\); correct the",
    ):
        custom_advantages(f"{file}:advantages", [group(1.0, 0.0)], None)


def test_a_missing_function_is_reported_with_the_existing_ones(plugin):
    with pytest.raises(
        ConfigError,
        match="has no function lost; it has loss, advantages, charged, by_token, too_few",
    ):
        load_function(f"{plugin}:lost", key="custom_loss_function_path")
    with pytest.raises(
        ConfigError, match=r"custom_loss_function_path = nowhere\.loss: cannot be imported"
    ):
        load_function("nowhere.loss", key="custom_loss_function_path")
    with pytest.raises(ConfigError, match=r"^custom_advantage_function_path = "):
        custom_advantages("nowhere.advantages", [], None)
    assert load_function("math.fsum", key="x") is math.fsum


def test_supervised_loss_is_the_negative_log_likelihood():
    options = loss_settings(loss_type="sft_loss")
    tokens = tokens_of(range(4))
    assert torch.equal(loss_function(options)(tokens, options)[0], -tokens.logprobs)


LOSS = torch.zeros(3)


@pytest.mark.parametrize(
    ("stats", "words"),
    [
        ({"a.b": LOSS, "a_b": LOSS}, "'a.b' and 'a_b' become one metric"),
        ({"loss": LOSS}, "train/loss is a metric of the trainer"),
        ({"grad/norm": LOSS}, "'grad_norm' and 'grad/norm' become one metric"),
        ({"a b": LOSS}, "'a b' needs a name of letters"),
        ({"x" * 101: LOSS}, "needs a name of letters"),
        ({3: LOSS}, "the statistic 3 needs a name"),
        ({"a": 0.5}, "'a' needs a tensor with one number per token"),
        ({"a": "text"}, "'a' needs a tensor"),
        ({"a": torch.zeros(2)}, "'a' needs a tensor"),
        ({"a": LOSS, "b/c": LOSS, "d_max": LOSS}, None),
    ],
)
def test_a_statistic_that_is_no_metric_is_refused_with_the_name_of_its_function(
    stats, words, tmp_path
):
    file = tmp_path / "odd.py"
    file.write_text("def odd(tokens, settings): return tokens\n")
    options = loss_settings(loss_type="custom_loss", custom_loss_function_path=f"{file}:odd")
    loss = loss_function(options)
    if words is None:
        assert loss((LOSS, stats), options)[1] is stats
        return
    with pytest.raises(ConfigError, match=rf"odd\.py:odd: .*{re.escape(words)}"):
        loss((LOSS, stats), options)

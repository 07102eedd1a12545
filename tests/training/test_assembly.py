from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import chain
from typing import get_args

import numpy as np
import pytest

from asyncrl.errors import ConfigError, StalenessError
from asyncrl.learning.advantages import Advantage, Batchwise, GroupCentered, LeaveOneOut, MaxRL, Rewards
from asyncrl.learning.base import TrainingSequence
from asyncrl.learning.losses import Normalize
from asyncrl.learning.overlong import OverlongPenalty
from asyncrl.scheduling.rules import StalePolicy, Truncation
from asyncrl.training.assembly import StepAssembly
from asyncrl.training.rewards import TrainingReward
from asyncrl.types import DropReason, Group, Span, SpanKind, Trajectory, TruncationCause


class _Doubled(GroupCentered):
    """Overrides the whole."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        return [[2 * value for value in group] for group in super().__call__(rewards, min_members=min_members)]


class _Best(GroupCentered):
    """Needs the whole batch: only what is above its mean is trained."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        present = [reward for group in rewards for reward in group if reward is not None]
        mean = sum(present) / max(1, len(present))
        return [[0.0 if reward is None else max(0.0, reward - mean) for reward in group] for group in rewards]


class _Halved(GroupCentered):
    """Overrides a part."""

    def center(self, group: Sequence[float | None], *, baseline: Sequence[float]) -> list[float]:
        return [value / 2 for value in super().center(group, baseline=baseline)]


class _Tripled(GroupCentered):
    """Overrides the other part."""

    def batch_scale(self, rewards: Rewards, centered: Sequence[Sequence[float]]) -> float:
        return 3.0


class _Spread(Batchwise):
    """Of the other kind."""

    def __call__(self, rewards: Rewards, *, min_members: int) -> list[list[float]]:
        return [[5 * value for value in group] for group in super().__call__(rewards, min_members=min_members)]


SUBCLASSES: list[Advantage] = [
    _Doubled(),
    _Doubled(standardize="batch"),
    _Best(),
    _Halved(),
    _Halved(standardize="batch"),
    _Tripled(),
    _Tripled(standardize="batch"),
    _Spread(),
]
ADVANTAGES: list[Advantage] = [
    GroupCentered(),
    GroupCentered(standardize=True),
    GroupCentered(standardize="batch"),
    Batchwise(),
    Batchwise(standardize=True),
    *SUBCLASSES,
]


def _span(kind: SpanKind, *tokens: int, version: int = 0) -> Span:
    ids = np.array(tokens, dtype=np.int32)
    if kind is not SpanKind.GENERATED:
        return Span(kind=kind, tokens=ids)
    return Span(kind=kind, tokens=ids, logprobs=(-ids / 100).astype(np.float32), version=version)


def _member(reward: float | None, *, generated: int = 2, version: int = 0) -> Trajectory:
    """A prompt of one token, which ``_group`` makes the trajectory's name, and then generated ones."""
    member = Trajectory(id="", group=0, member=0, row=None, seed=0, reward=reward)
    member.append(_span(SpanKind.PROMPT, 0))
    member.append(_span(SpanKind.GENERATED, *range(10, 10 + generated), version=version))
    return member


def _group(index: int, *members: Trajectory) -> Group:
    for position, member in enumerate(members):
        member.spans[0] = _span(SpanKind.PROMPT, 100 * index + position)
    return Group(index=index, row=None, members_G=members, seconds=0.0)


def _assembly(
    advantage: Advantage,
    *,
    normalize: Normalize = "token",
    truncation: Truncation | None = None,
    overlong: OverlongPenalty | None = None,
    version: int = 0,
    max_staleness: int = 1,
    stale_policy: StalePolicy = "wait",
) -> StepAssembly:
    return StepAssembly(
        advantage=advantage,
        normalize=normalize,
        reward=TrainingReward(truncation=truncation or Truncation(), overlong=overlong),
        min_members=2,
        temperature=0.7,
        version=version,
        max_staleness=max_staleness,
        stale_policy=stale_policy,
    )


def _random_groups(seed: int) -> list[Group]:
    chance = random.Random(seed)
    return [
        _group(
            index,
            *(
                _member(chance.choice([None, 0.0, 0.5, 1.0, 2.0]), generated=chance.choice([0, 1, 3, 8]))
                for _ in range(3)
            ),
        )
        for index in range(5)
    ]


def _factors(assembly: StepAssembly, chunks: Sequence[Sequence[Group]]) -> dict[int, float]:
    """First token of each trained trajectory -> what the loss of its tokens is multiplied with in the end."""
    sequences: list[TrainingSequence] = []
    for chunk in chunks:
        sequences += assembly.add(chunk)
    sequences += chain.from_iterable(assembly.finish())
    factors = {int(sequence.tokens[0]): sequence.advantage * sequence.weight for sequence in sequences}
    assert len(factors) == len(sequences)
    return {name: factor / assembly.divisor for name, factor in factors.items()}


def _expected_factors(groups: Sequence[Group], advantage: Advantage, normalize: Normalize) -> dict[int, float]:
    """The same from the definition, with everything known at once."""
    rewards = [[member.reward for member in group.members_G] for group in groups]
    tokens = [
        [0 if member.reward is None else member.generated_tokens for member in group.members_G] for group in groups
    ]
    trajectories = sum(count > 0 for counts in tokens for count in counts)
    active_groups = sum(any(counts) for counts in tokens)
    factors = {}
    for group, advantages, counts in zip(groups, advantage(rewards, min_members=2), tokens, strict=True):
        for position, (value, count) in enumerate(zip(advantages, counts, strict=True)):
            if count and value:
                divisors = {
                    "token": sum(map(sum, tokens)),
                    "sequence": count * trajectories,
                    "prompt": sum(counts) * active_groups,
                    "batch": trajectories,
                    "sum": 1,
                }
                factors[100 * group.index + position] = value / divisors[normalize]
    return factors


@pytest.mark.parametrize("advantage", ADVANTAGES, ids=repr)
@pytest.mark.parametrize("normalize", get_args(Normalize))
def test_the_factor_of_a_token_does_not_depend_on_chunks_or_order(advantage: Advantage, normalize: Normalize) -> None:
    """Every cut and order gives the definition's factors, members without reward or tokens among them."""
    for seed in range(8):
        groups = _random_groups(seed)
        expected = _expected_factors(groups, advantage, normalize)
        chance = random.Random(seed)
        chance.shuffle(groups)
        cut = chance.randrange(len(groups) + 1)
        for chunks in ([groups], [groups[:cut], groups[cut:]], [[group] for group in groups]):
            factors = _factors(_assembly(advantage, normalize=normalize), chunks)
            assert factors == pytest.approx(expected), (seed, cut)


def test_group_advantages_are_ready_early_and_others_wait() -> None:
    """A group with enough rewards is trained at once; the rest needs the whole batch."""
    full, thin = _group(0, _member(1.0), _member(0.0)), _group(1, _member(1.0), _member(None))
    assembly = _assembly(GroupCentered())
    assert [int(sequence.tokens[0]) for sequence in assembly.add([full, thin])] == [0, 1]
    assert [int(sequence.tokens[0]) for sequence in chain.from_iterable(assembly.finish())] == [100]
    assert _assembly(Batchwise()).add([full, thin]) == []


@pytest.mark.parametrize("advantage", SUBCLASSES, ids=repr)
def test_a_subclass_is_asked_for_the_whole_batch(advantage: Advantage) -> None:
    """What it overrides may need the rewards of all groups, so none of them is trained early."""
    groups = [_group(0, _member(1.0), _member(0.0)), _group(1, _member(2.0), _member(0.0))]
    assert _assembly(advantage).add(groups) == []


@pytest.mark.parametrize("advantage", [LeaveOneOut(), MaxRL()], ids=repr)
def test_other_advantages_of_single_groups_are_ready_early(advantage: Advantage) -> None:
    """And are the same as of the whole batch."""
    groups = [_group(0, _member(1.0), _member(0.0)), _group(1, _member(2.0), _member(0.0))]
    found = [sequence.advantage for sequence in _assembly(advantage).add(groups)]
    whole = advantage([[1.0, 0.0], [2.0, 0.0]], min_members=2)
    assert found == list(chain.from_iterable(whole))


def test_a_long_answer_is_trained_with_a_smaller_reward() -> None:
    """Its logged reward stays; a truncated one loses both the reward and the penalty."""
    short, long, cut = _member(1.0, generated=2), _member(1.0, generated=9), _member(1.0, generated=12)
    cut.truncated = TruncationCause.TURNS
    assembly = _assembly(GroupCentered(), overlong=OverlongPenalty(max_tokens=10, buffer=2, penalty=0.5))
    sequences = assembly.add([_group(0, short, long, cut)])
    mean = (1.0 + 0.75 - 0.5) / 3
    assert [one.advantage for one in sequences] == pytest.approx([1.0 - mean, 0.75 - mean, -0.5 - mean])
    assert [one.reward for one in (short, long, cut)] == [1.0, 1.0, 1.0]


def test_a_group_without_variance_counts_but_is_not_trained() -> None:
    """Its tokens make the step smaller; it sends no sequence."""
    signal = _group(0, _member(1.0, generated=10), _member(0.0, generated=30))
    silent = _group(1, _member(1.0, generated=20), _member(1.0, generated=20))
    assembly = _assembly(GroupCentered())
    assert len(assembly.add([signal, silent])) == 2
    assert assembly.divisor == 80


def test_a_sequence_has_the_sampled_tokens_and_their_log_probabilities() -> None:
    """Only generated tokens are trained, with what the server sent; framing at the end is cut off."""
    member = Trajectory(id="", group=0, member=0, row=None, seed=0, reward=1.0)
    member.append(_span(SpanKind.PROMPT, 0, 5))
    member.append(_span(SpanKind.GENERATED, 20, 30))
    member.append(_span(SpanKind.FRAMING, 6))
    member.append(_span(SpanKind.GENERATED, 40))
    member.append(_span(SpanKind.FRAMING, 7, 8))
    assembly = _assembly(GroupCentered(), normalize="sequence")
    sequence, _ = assembly.add([Group(index=0, row=None, members_G=[member, _member(0.0)], seconds=0.0)])
    assert sequence.tokens.tolist() == [0, 5, 20, 30, 6, 40]
    assert sequence.mask.tolist() == [False, False, True, True, False, True]
    np.testing.assert_allclose(sequence.logprobs, [0, 0, -0.2, -0.3, 0, -0.4])
    assert sequence.weight == pytest.approx(1 / 3)
    assert (sequence.advantage, sequence.temperature) == (0.5, 0.7)


@pytest.mark.parametrize(
    ("rule", "advantages"),
    [
        ("zero_reward", [1.0, -1.0]),  # rewards 2 and 0
        ("reward", [0.5, -0.5]),  # rewards 2 and 1
        ("drop", [0.5]),
        ("drop_and_exclude_from_baseline", []),  # one reward left: its own mean
    ],
)
def test_truncated_members(rule: str, advantages: list[float]) -> None:
    """What each truncation policy trains, and with which baseline."""
    truncated = _member(1.0)
    truncated.truncated = TruncationCause.TURNS
    assembly = _assembly(GroupCentered(), truncation=Truncation(by_cause={"turns": rule}))  # type: ignore[dict-item]
    sequences = [*assembly.add([_group(0, _member(2.0), truncated)]), *chain.from_iterable(assembly.finish())]
    assert [sequence.advantage for sequence in sequences] == advantages
    assert truncated.dropped is (DropReason.TRUNCATED if rule.startswith("drop") else None)
    assert assembly.divisor == (2 if rule.startswith("drop") else 4)


@pytest.mark.parametrize("stale_policy", get_args(StalePolicy))
@pytest.mark.parametrize("max_staleness", [0, 3])
@pytest.mark.parametrize("version", [-1, 3, 50, 10**9])
def test_a_version_that_was_not_made_yet_is_never_trained(
    version: int, max_staleness: int, stale_policy: StalePolicy
) -> None:
    """Whatever the rule about old ones is: at version 2 there is no version 3, and none below 0."""
    group = _group(0, _member(1.0, version=2), _member(0.0, version=version))
    assembly = _assembly(GroupCentered(), version=2, max_staleness=max_staleness, stale_policy=stale_policy)
    with pytest.raises(StalenessError, match=f"version {version}, which was not made yet: the run is at version 2"):
        assembly.add([group])


def test_a_stale_span_is_masked_or_refused() -> None:
    """Version 0 trained at version 2 with a bound of 1: no gradient if that was asked for, else an error."""
    mixed = _member(1.0, version=0)
    mixed.append(_span(SpanKind.GENERATED, 50, version=1))
    group = _group(0, mixed, _member(0.0, version=1))
    assembly = _assembly(GroupCentered(), version=2, stale_policy="mask_span")
    first, _ = assembly.add([group])
    assert first.mask.tolist() == [False, False, False, True]
    assert assembly.divisor == 3
    with pytest.raises(StalenessError, match="version 0, which would be trained at version 2 with max_staleness 1"):
        _assembly(GroupCentered(), version=2).add([group])


def test_a_span_at_the_bound_is_trained() -> None:
    """Version 0 at version 1 with a bound of 1, masking or not; without a bound any age is."""
    for assembly in (
        _assembly(GroupCentered(), version=1),
        _assembly(GroupCentered(), version=1, stale_policy="mask_span"),
        _assembly(GroupCentered(), version=100, stale_policy="keep"),
    ):
        assert len(assembly.add([_group(0, _member(1.0), _member(0.0))])) == 2
        assert assembly.divisor == 4


def test_a_batch_that_is_all_stale_has_no_gradient() -> None:
    """Everything masked: no sequence, nothing divided by zero, no active group."""
    assembly = _assembly(GroupCentered(), version=2, stale_policy="mask_span")
    assert assembly.add([_group(0, _member(1.0), _member(0.0))]) == []
    assert list(chain.from_iterable(assembly.finish())) == []
    assert assembly.divisor == 1
    assert assembly.metrics()["train/active_groups"] == 0


def test_a_generated_span_without_a_version_is_refused() -> None:
    """It has no age, and an unknown age is never 0."""
    member = _member(1.0)
    object.__setattr__(member.spans[1], "version", None)
    with pytest.raises(StalenessError, match="without a version"):
        _assembly(GroupCentered()).add([_group(0, member, _member(0.0))])


def test_a_failed_member_is_nowhere() -> None:
    """What it sampled, stale as it is, is neither trained nor counted, nor is its place in the baseline."""
    failed = _member(None, generated=50, version=-9)
    failed.dropped = DropReason.FAILED
    assembly = _assembly(GroupCentered())
    sequences = assembly.add([_group(0, _member(1.0), failed, _member(0.0))])
    assert [(int(sequence.tokens[0]), sequence.advantage) for sequence in sequences] == [(0, 0.5), (2, -0.5)]
    assert assembly.divisor == 4
    assert assembly.metrics()["train/active_groups"] == 1


def test_a_batch_without_signal_has_no_gradient() -> None:
    """Nothing to train, nothing to divide by zero."""
    assembly = _assembly(GroupCentered(standardize="batch"))
    assert assembly.add([_group(0, _member(1.0), _member(1.0))]) == []
    assert list(chain.from_iterable(assembly.finish())) == []


def test_a_group_whose_advantages_are_all_zero_has_no_variance() -> None:
    """Its tokens are active, but it gives no gradient; its share says how much sampling was in vain."""
    assembly = _assembly(GroupCentered())
    rewards = [(1.0, 1.0), (1.0, 0.0), (0.0, 2.0), (1.0, 2.0)]
    assembly.add([_group(index, *map(_member, pair)) for index, pair in enumerate(rewards)])
    sequences = list(chain.from_iterable(assembly.finish()))
    assert sequences == []
    assert assembly.metrics()["reward/zero_variance_group_frac"] == 0.25
    assert assembly.metrics()["train/active_groups"] == 4
    assert assembly.metrics()["train/active_sequences"] == 8
    assert assembly.metrics()["train/active_tokens"] == 16
    assert assembly.metrics()["train/gradient_scale"] == 1 / 16


def test_untrained_tokens_are_wasted_but_not_twice() -> None:
    """Dropped and too old ones; those of a failed member were counted when it failed."""
    failed = _member(None, generated=50)
    failed.dropped = DropReason.FAILED
    dropped = _member(1.0, generated=7)
    dropped.truncated = TruncationCause.TURNS
    old = _member(0.0, generated=3, version=2)
    assembly = _assembly(
        Batchwise(), truncation=Truncation(train="drop"), version=4, max_staleness=1, stale_policy="mask_span"
    )
    assembly.add([_group(0, failed, dropped, old, _member(1.0, version=4))])
    sequences = list(chain.from_iterable(assembly.finish()))
    assert len(sequences) == 1
    assert assembly.wasted_tokens == 7 + 3


def test_the_age_of_a_token_is_counted_from_the_step_s_version() -> None:
    """Span by span; 0 where nothing is trained."""
    member = _member(1.0, version=3)
    member.append(_span(SpanKind.PROMPT, 1))
    member.append(_span(SpanKind.GENERATED, 20, version=5))
    assembly = _assembly(GroupCentered(), version=5, max_staleness=2)
    (sequence, _) = assembly.add([_group(0, member, _member(0.0, version=4))])
    assert sequence.ages.tolist() == [0, 2, 2, 0, 0]
    assert sequence.ages.dtype == np.int32


def test_updates_share_sequences_and_divide_by_what_they_have() -> None:
    """Advantages are those of the whole batch; each part has its own divisor, and one without a signal no update."""
    assembly = _assembly(GroupCentered(standardize="batch"), max_staleness=3)
    groups = [_group(index, _member(1.0, generated=index + 1), _member(0.0)) for index in (0, 1)]
    every = assembly.add([*groups, _group(2, _member(1.0), _member(1.0))])
    assert not list(assembly.finish())
    updates = list(assembly.updates([[1, 2], [0], [2], [], [0, 1]]))
    chunks = [list(update.chunks[0]) for update in updates]
    assert [[int(sequence.tokens[0]) for sequence in chunk] for chunk in chunks] == [
        [100, 101],
        [0, 1],
        [0, 1, 100, 101],
    ]
    assert chunks[2] == [*chunks[1], *chunks[0]] == every, "the same objects"
    scale = assembly.divisor / 11
    assert [update.divisor for update in updates] == pytest.approx([8 * scale, 3 * scale, 7 * scale])


def test_each_update_masks_what_is_too_old_by_then() -> None:
    """With a bound of 3 the third update of a batch that starts at 7 trains version 6, but neither 5 nor 4; the fourth
    has nothing left."""
    old, young = _member(1.0, version=4), _member(0.0, version=5)
    old.append(_span(SpanKind.GENERATED, 20, version=6))
    assembly = _assembly(GroupCentered(), normalize="sequence", version=7, max_staleness=3, stale_policy="mask_span")
    assembly.add([_group(0, old, young)])
    updates = list(assembly.updates([[0]] * 4))
    trained = [[sequence.tokens[sequence.mask].tolist() for sequence in update.chunks[0]] for update in updates]
    assert trained == [[[10, 11, 20], [10, 11]], [[20], [10, 11]], [[20]]]
    assert [update.divisor for update in updates] == [2, 2, 1]
    assert [update.chunks[0][0].weight for update in updates] == pytest.approx([1 / 3, 1, 1])
    assert updates[2].chunks[0][0].ages.tolist() == [0, 0, 0, 1], "at the step's start"


def test_an_update_that_would_train_too_old_tokens_is_refused() -> None:
    """Where the barrier should have kept them away: the second update of the batch is one too late."""
    assembly = _assembly(GroupCentered(), version=3, max_staleness=1)
    assembly.add([_group(0, _member(1.0, version=2), _member(0.0, version=3))])
    with pytest.raises(StalenessError, match="trained at version 4 with max_staleness 1"):
        list(assembly.updates([[0], [0]]))


def _short(rewards: Rewards, *, min_members: int) -> list[list[float]]:
    return [[1.0] * len(group) for group in rewards[1:]]


def _narrow(rewards: Rewards, *, min_members: int) -> list[list[float]]:
    return [[1.0] * (len(group) - 1) for group in rewards]


@pytest.mark.parametrize("wrong", [_short, _narrow])
def test_advantages_of_another_shape_are_refused(wrong: Advantage) -> None:
    """A function of one's own gives one number for each member."""
    assembly = _assembly(wrong)
    assembly.add([_group(0, _member(1.0), _member(0.0)), _group(1, _member(1.0), _member(0.0))])
    with pytest.raises(ConfigError, match=r"advantage\(\.\.\) is .*, but must be those of rewards: \[2, 2\]"):
        list(assembly.finish())

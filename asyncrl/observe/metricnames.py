"""What every metric is: its unit and one sentence, for each key of a step and of an evaluation.

``<name>`` in a key stands for one of many. A test holds the table against what runs emit: no key is missing here, and
none is here that nothing emits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["EVALUATION_METRICS", "STEP_METRICS", "MetricReference", "described"]


@dataclass(frozen=True, slots=True)
class MetricReference:
    """One metric, or all of a pattern."""

    unit: str
    text: str


def described(table: Mapping[str, MetricReference], key: str) -> str | None:
    """The name or the pattern of ``table`` that ``key`` is one of; None if it has none. The longest pattern wins."""
    found = [name for name in table if re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(name)), key)]
    return max(found, key=lambda name: (name == key, len(name)), default=None)


def _table(text: str) -> dict[str, MetricReference]:
    """Lines of ``key | unit | sentence``; an indented one continues the one before."""
    lines = re.sub(r"\n +", " ", text.strip()).splitlines()
    rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return {key: MetricReference(unit, sentence) for key, unit, sentence in rows}


_OF_ENVIRONMENTS = """
rollout/<key> | sum | What environments and tools report under this key, added up over the members; not a number if
    one is not finite.
rollout/<key>_mean | per member | The same for each member; one that did not report the key counts as 0.
rollout/tool_calls | calls | Tool calls of all members.
rollout/tool_calls/<tool> | calls | Those of one tool.
rollout/tool_errors | calls | Tool calls that ended with an error, which the model read.
rollout/tool_seconds | seconds | Time in tools, added up over the members.
"""
STEP_METRICS: Mapping[str, MetricReference] = _table(
    """
reward/mean | reward | Mean reward of the members of the batch that have one, before any rule about truncation.
reward/std | reward | Standard deviation of the same rewards.
reward/zero_variance_group_frac | fraction | Groups whose rewards are all the same: without a difference they teach
    nothing. Near 1: rows are too easy or too hard.
staleness/span_age_p50 | versions | Age of the trained tokens when their batch starts: the median over spans, each
    counted once. The last update of a batch trains them trainer.minibatches * trainer.epochs - 1 versions later.
staleness/span_age_p99 | versions | The same, for the oldest hundredth.
staleness/span_age_max | versions | The oldest trained token of the batch; never above trainer.max_staleness with
    stale_policy "wait".
staleness/token_age_mean | versions | Mean age of the trained tokens, each counted once.
staleness/age_tokens/<age> | tokens | Trained tokens of this age, from 0 to trainer.max_staleness.
staleness/age_tokens/older | tokens | Trained tokens beyond that; 0 with stale_policy "wait".
staleness/frac_masked | fraction | Tokens too old to be trained, with stale_policy "mask_span".
staleness/wait_seconds | seconds | Time at the barrier: the trainer waited for groups that would have become too
    old.
staleness/wait_count | waits | How often that was.
staleness/wait_group | group | The group that the longest such wait was for; -1: there was none.
staleness/wait_member | member | The member that it was for.
staleness/reserved_groups | groups | Groups that are admitted and not yet trained, now.
train/batch_seconds | seconds | The whole step: the sum of the five phases below.
train/wait_for_samples_seconds | seconds | Phase: too few groups were finished. Sampling or tools are the limit.
train/barrier_seconds | seconds | Phase: enough were finished, but one that is due was not.
train/forward_backward_seconds | seconds | Phase: computing gradients.
train/optimizer_seconds | seconds | Phase: the optimizer's step, and writing what it makes to disk.
train/publication_seconds | seconds | Phase: preparing a version for the servers, or waiting until they had one.
train/seconds | seconds | The step without its two waits.
train/active_tokens | tokens | Tokens that were trained, counted once however many epochs there are.
train/active_sequences | members | Members with such a token.
train/active_groups | groups | Groups with such a member.
train/generated_tokens | tokens | Tokens that the batch has, trained or not.
train/gradient_scale | 1 / divisor | What the sum of the gradient was multiplied with, on average over the updates; see
    trainer.normalize.
train/backward_chunks | passes | Forward-backward passes.
train/datums | sequences | Sequences in them.
train/updated | updates | Versions that the batch made: one for each of its updates (trainer.minibatches times
    trainer.epochs) that had a gradient; 0 if none had.
train/input_tokens | tokens | Of the sequences of all passes, prompts included.
train/computed_tokens | tokens | Of these, what went through the model: what sequences have in common is computed once.
train/sharing_factor | ratio | Input tokens for each computed one; 1: nothing was shared.
loss/loss | loss | The loss that was minimised, after normalisation; the mean over the updates of the batch.
loss/entropy | nats per token | Entropy of the policy on the trained tokens; a fall to 0 means that it always says
    the same.
loss/ratio | ratio | Mean importance ratio: probability of a token now, divided by that when it was sampled. Near 1
    is healthy.
loss/kl | nats per token | Estimated distance between the policy that sampled and the one that is trained.
loss/clipped_frac | fraction | Tokens whose ratio reached the loss's bound; 0 for a loss without one.
loss/masked_frac | fraction | Tokens that the loss or its correction gave no gradient; 0 if it masks none.
loss/truncated_frac | fraction | Tokens whose weight met a bound of trainer.correction.
loss/vetoed_frac | fraction | Tokens of sequences that trainer.correction dropped for one outlier.
loss/sequence_ratio | ratio | gspo, geometric_mean: mean importance ratio of a sequence.
loss/divergence | probability or nats | dppo: mean distance between sampler and learner at the sampled token.
loss/gate | fraction | sapo: how far the gate is open; 1 on policy.
loss/reference_kl | nats per token | Estimated distance to the model that training began from, with trainer.kl.
loss/behaviour_weight | weight | decoupled_ppo: mean weight that corrects for age.
loss/behaviour_capped_frac | fraction | decoupled_ppo: tokens whose weight reached its cap.
ratio/mean | ratio | Mean over the trained tokens of their probability when they are trained, divided by that when they
    were sampled; 1 if nothing was trained.
ratio/p99 | ratio | The same, for the largest hundredth.
ratio/max | ratio | The largest.
ratio/kl | nats per token | Distance between the policy that sampled and the one that is trained, from these ratios
    (mean of r - 1 - log r).
ratio/effective_sample_frac | fraction | How many equally weighted tokens the trained ones are worth, as a part of them:
    (sum of ratios)^2 / sum of squares / number. Far below 1: few tokens decide, and the rest is hardly used.
ratio/effective_sequence_frac | fraction | The same over trajectories, each with the geometric mean of its ratios.
mismatch/mean | nats | Absolute difference between the learner's and the sampler's log-probability of the same token,
    before the first update: of tokens of age 0 it is numerics alone. Without any of these the youngest are
    measured, and what training has changed since counts too.
mismatch/p99 | nats | The same, for the largest hundredth.
mismatch/max | nats | The largest.
mismatch/age | versions | Age of the tokens that mismatch was measured on; above 0 it is more than numerics.
optimizer/lr | learning rate | Of this step.
optimizer/grad_norm | norm | Of the gradient before clipping; 0 if there was no update.
length/generated_p50 | tokens | Median length of a trajectory, without what the environment wrote.
length/generated_p99 | tokens | The same, for the longest hundredth.
truncated/generated_tokens | fraction | Members that were ended by budget.max_generated_tokens.
truncated/context | fraction | Members whose conversation was longer than budget.max_context_tokens, or than the
    servers take.
truncated/turns | fraction | Members that were ended by budget.max_turns.
truncated/empty_sample | fraction | Members whose model said nothing.
truncated/group_deadline | fraction | Members that were ended by the deadline of their group ([completion]).
groups/mean_wait_seconds | seconds | From the first request of a group to its last reward, on average.
groups/deadline_frac | fraction | Groups that a deadline closed.
groups/failed_members | members | Members of the batch that failed; they have no reward and are not trained.
"""
    + _OF_ENVIRONMENTS.strip()
    + """
sampling/interval_seconds | seconds | Since the step before; all of sampling/* is of this time, work for later
    batches included.
sampling/generated_tokens | tokens | Sampled.
sampling/generated_tokens_per_second | tokens per second | Sampled, by the interval.
sampling/prompt_tokens | tokens | In prompts of requests, cached or not.
sampling/cached_prompt_tokens | tokens | Of these, what servers had in their cache.
sampling/cached_prompt_fraction | fraction | The part of the prompts that was cached.
sampling/requests | requests | Answered.
sampling/request_seconds | seconds | Added up over requests, from sending to the answer.
sampling/queue_seconds | seconds | Added up over requests, in the client before sending. Large: the servers are the
    limit.
sampling/inflight_requests | requests | At servers, now.
sampling/wasted_tokens | tokens | Sampled and never to be trained: of members that failed, were discarded or begun
    anew.
sampling/kv_refreshes | requests | Whose prefix was computed again for newer weights ([rollout] kv_cache).
sampling/repeated_requests | requests | Sent again, because their server was lost, full or late.
sampling/late_requests | requests | Of these, because of a server that accepted one and did not answer.
throughput/queue_depth | requests | Waiting in the client for a server, now.
publication/versions | versions | That reached the servers since the step before.
publication/seconds | seconds | That this took, added up.
ledger/admitted_rows | rows | Since the run began; it is consumed_rows + dropped_rows + open_rows.
ledger/consumed_rows | rows | Used by a step, whatever became of their members.
ledger/dropped_rows | rows | Given up, because their group failed for good.
ledger/open_rows | rows | Neither yet.
ledger/trained_members | members | Of consumed rows, those that were trained.
ledger/dropped_members/<reason> | members | Of consumed rows, the others: failed, truncated, straggler or run_ended.
ledger/failed_attempts | attempts | Attempts of members that failed, those that were repeated with success included.
ledger/rerolled_groups | groups | Begun anew because a member had failed for good.
evaluation/seconds | seconds | The evaluation after this step; 0: there was none.
loop/lag_max_seconds | seconds | The latest that the event loop was. More than 0.1: code of the environment blocks
    it.
loop/lag_mean_seconds | seconds | How late it was on average.
recovery/steps_replayed | steps | Updates that were repeated when this process resumed the run.
recovery/trajectories_recovered | trajectories | Unfinished ones that went on.
recovery/trajectories_dropped_on_resume | trajectories | Unfinished ones that began anew.
recovery/groups_begun_anew | groups | Which could not have been trained in time any more; 0 unless the state is
    damaged.
"""
)
"""Of ``step.metrics`` and ``metrics.jsonl``."""

EVALUATION_METRICS: Mapping[str, MetricReference] = _table(
    """
reward_mean | reward | Mean reward of the trajectories of the held-out rows.
reward_std | reward | Standard deviation of the same rewards.
reward_standard_error | reward | Of the mean, counted by rows; not a number with fewer than two rows.
reward_ci95 | reward | The true mean is within reward_mean plus or minus this, in 95 of 100 evaluations.
pass@<k> | fraction | Chance that one of k trajectories of a row has a reward of at least evaluation.pass_reward.
rollout/<key>_mean | per trajectory | What environments and tools report under this key; who did not report it counts as
    0.
trajectories | trajectories | That were measured.
generated_tokens_mean | tokens | Mean length of a trajectory.
truncated_frac | fraction | Trajectories that a budget ended.
failed_rows | rows | Left out of the means, because their trajectories failed for good.
"""
)
"""Of ``evaluation_finished`` in ``events.jsonl``, and of ``asyncrl eval``."""

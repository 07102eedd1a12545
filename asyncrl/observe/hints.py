"""What each notice means for whoever reads it, and what to do about it: one sentence or two for every name.

A notice says what happened in its keys, where it happens; what that means and what helps is the same each time, so it
is here. Log lines show the hint at the first notice of a name, and ``events.jsonl`` has it at every one.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["HINTS"]

HINTS: Mapping[str, str] = {
    # A run as a whole.
    "resumed": "the run goes on behind this step; steps since the last saved weights were repeated from the journal",
    "stopping": "the state is saved, which takes half a minute at most; a second signal exits at once",
    "state_not_saved": "a resume goes on from the save before it and samples the rest again; free or mend the disk",
    "weights_not_saved": "a resume repeats the updates since the last saved weights from the journal; nothing is lost",
    "group_begun_anew": "the saved state was older than the journal, so this group is sampled again from its start",
    "schedule_stretched": "trainer.steps is not what it was: the learning rate of the steps to come follows the new "
    "number; set the old number to keep the old rates",
    "snapshot_damaged": "an older save of the run and the journal make up for it; look at the disk",
    "weights_damaged": "older weights and the journal make up for it; look at the disk",
    "line_unreadable": "the line is left out of the summary; training does not read it. It was cut or edited",
    "events_lost": "the disk was slower than the run: so many lines are missing in events.jsonl; metrics.jsonl may "
    "miss steps. Write the run directory to a local disk",
    "rollouts_lost": "the disk was slower than the run: so many steps have no file in rollouts/; training is not "
    "touched",
    # Training.
    "nothing_trained": "these batches had no gradient, so they made no version; causes says what became of their "
    "members. If rewards do not differ in any group: easier or harder rows, a larger trainer.group_size, or a reward "
    "for parts of the task",
    "hardly_anything_trained": "most steps had no gradient: causes says what became of their members, advice what "
    "helps",
    "evaluation_failures": "these trajectories are left out of the means of the evaluation: mend what the error "
    "says, or the figures are of the easy rows only",
    "old_spans_masked": "tokens older than trainer.max_staleness train nothing; stale_policy = 'wait' loses none",
    "staleness_not_bounded": "the age of trained tokens has no bound: watch staleness/span_age_max, or set "
    "stale_policy = 'wait'",
    "stragglers_truncated": "slow members end before they are done; raise completion.max_straggler_tokens, or use "
    "completion.mode = 'wait' to lose none",
    "stragglers_discarded": "slow members are thrown away; on_stragglers = 'truncate' or 'carry_over' keeps them",
    "truncated_dropped": "what is too long for its budget is not trained; raise the budget, or set truncation.train = "
    "'zero_reward'",
    # Rollouts and the user's code.
    "row_is_shared": "what one member changes in the row, its siblings see: keep what cannot be copied out of rows",
    "row_not_sampled": "the prompt leaves no room for an answer: shorten the row's prompt, or raise "
    "budget.max_context_tokens",
    "environment_not_closed": "close() of the environment failed, and what it holds may leak; rewards are not touched. "
    "The error names the line; more such errors are told at 10, 100, ..",
    "context_limited_by_servers": "the servers hold fewer tokens of a conversation than budget.max_context_tokens; "
    "longer conversations end as truncated. Lower the budget, or start servers with a larger context length",
    "loop_held": "while this function ran, no request and no tool of any trajectory went on. Make it a plain def (it "
    "then runs in a thread), use a library that awaits, or put long computing into rl.in_process",
    "nothing_advances": "all wait for what is named first: a tool without a time limit (rl.tool(timeout=..)), a server "
    "that hangs, or a loop over the steps that does not come back",
    # The model's chat template.
    "tools_not_announced": "the model does not know the tools: set rollout.announce_tools = 'text'",
    "calls_not_written": "the model has to guess how a call is written: set rollout.announce_tools = 'text'",
    "calls_not_read": "calls that the model writes as its template does may be lost: set rollout.announce_tools = "
    "'text'",
    "results_not_written": "the model does not see what tools answer: set rollout.announce_tools = 'text', or use a "
    "model whose template has tools",
    "conversation_not_continued": "after an answer, further messages do not reach the model: end the conversation "
    "there, or use another chat template",
    # Servers.
    "server_started": "it takes requests as soon as it holds the current version",
    "server_exited": "it is started again; reason has the last lines that it printed, its log file has all",
    "server_given_up": "it ended too often to be started again: read its log file in the run directory; the usual "
    "cause is too little memory",
    "server_added": "it gets requests as soon as it holds the current version",
    "server_removed": "its requests go on at the other servers; nothing is lost",
    "server_quarantined": "it gets no requests until it answers again; those it had go on elsewhere. If that "
    "happens often, read the server's log",
    "server_returned": "it answers again and takes requests",
    "server_not_ready": "it was added and does not take the current version yet; it is tried again until it does",
    "server_load_unknown": "it does not report its load, so it keeps the limit on requests that it has",
    "servers_unknown": "the list of servers cannot be read; the known ones stay. Mend the file or the name",
    "requests_overdue": "requests that took far longer than others go to other servers, and the slow one is looked "
    "at; if it is only slow, fewer requests at once help (schedule.max_sample_requests)",
    "requests_not_aborted": "the server goes on with requests that nobody waits for, which costs its time only",
    # Versions on servers.
    "adapter_damaged": "a published version cannot be loaded again; trajectories that need it begin anew",
    "adapter_not_unloaded": "the server keeps an adapter that nobody needs: it costs its memory only",
    "version_not_removed": "the folder of an old version is still there; delete it by hand if the disk fills up",
    "version_not_checked": "an older version is used again without comparing what it samples with the learner",
}
"""Name of a notice -> what it means and what to do."""

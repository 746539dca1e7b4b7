"""Checks that find what is worth a look in a run, with advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from leaderless.observability.report.curves import Series
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.view import format_number

MAX_MISMATCH = 0.05
"""Mean |rollout_log_probs - old_log_probs| of a step; above it the engine samples from another policy."""
MAX_NO_SIGNAL = 0.5
"""Largest fraction of groups without signal, lately."""
MAX_TRUNCATED = 0.2
"""Largest fraction of responses that are cut, lately."""
MAX_FAILED_EPISODES = 0.05
"""Largest share of a step's episodes that fail, lately."""
MAX_CUT_EPISODES = 0.2
"""Largest share of episodes that reach a limit of turns or tokens, lately."""
MIN_PREFIX_HITS = 0.5
"""Smallest share of known tokens that the engine has kept, lately."""
MAX_MISREAD = 0.1
"""Largest share of calls of tools that cannot be read, lately."""
MIN_ENTROPY_LEFT = 0.1
"""Smallest fraction of its first entropy that the policy should keep."""
SPIKE_FACTOR = 10.0
"""Multiple of the running median above which a gradient norm is a spike."""
SPIKE_WINDOW = 50
"""Steps over which that median is taken, just before the step."""
RECENT = 0.25
"""Fraction of the run, at its end, that counts as lately."""


class ReportFinding(NamedTuple):
    """Something worth a look: what was seen, why it matters, what to do, and a text from the run that shows it."""

    title: str
    seen: str
    meaning: str
    remedy: str
    example: str = ""


class Check(NamedTuple):
    """A rule for every run, the metric that shows whether it holds (None for all), and how many values that takes."""

    rule: str
    metric: str | None
    min_points: int
    find: Callable[[RunFiles], ReportFinding | None]

    def can_be_made(self, run: RunFiles) -> bool:
        """Whether enough was logged."""
        if self.metric is None:
            return bool(run.series)
        return self.metric in run.series and len(run.series[self.metric].finite) >= self.min_points


class Review(NamedTuple):
    """The outcome of all checks: findings (most serious first), rules that hold, and rules with too little to check."""

    findings: Sequence[ReportFinding]
    passed: Sequence[str]
    not_made: Sequence[str]


def review(run: RunFiles) -> Review:
    """Make all checks."""
    outcomes = [(check, check.find(run)) for check in CHECKS if check.can_be_made(run)]
    return Review(
        [finding for _, finding in outcomes if finding],
        [check.rule for check, finding in outcomes if not finding],
        [check.rule for check in CHECKS if not check.can_be_made(run)],
    )


def _non_finite(run: RunFiles) -> ReportFinding | None:
    is_bad = {name: np.isnan(series.value_array) for name, series in run.series.items()}
    first = {name: run.series[name].point(int(bad.argmax()))[0] for name, bad in is_bad.items() if bad.any()}
    if not first:
        return None
    named = sorted(first, key=lambda name: (first[name], name))
    listed = ", ".join(f"{name} (first at step {first[name]})" for name in named[:6])
    more = f" and {len(named) - 6} more" if len(named) > 6 else ""
    return ReportFinding(
        "Values that are not finite numbers",
        f"{listed}{more}.",
        "A loss, a gradient or a metric became NaN or infinite. Once it reaches the weights, all that follows is lost.",
        "Look at the samples of that step; lower optimizer.learning_rate, use float32 for compute_dtype, "
        "and resume from a checkpoint before that step.",
    )


def _reward_failures(run: RunFiles) -> ReportFinding | None:
    logged = run.series["reward/failed"].finite
    failed = logged.at(logged.value_array > 0)
    if not failed:
        return None
    total, last = failed.value_array.sum(), failed.point(-1)[0]
    return ReportFinding(
        "Rewards that could not be computed",
        f"{total:,.0f} responses in {len(failed)} of {len(logged)} logged steps, the last at step {last}.",
        "A response whose reward failed carries no gradient and is left out of its group. "
        "If certain answers fail more often, the policy learns from a biased selection.",
        "Read the error, correct the reward function or raise its timeout_s, and test it on the failed samples below.",
        run.samples.example_error or "No error of this kind is among the recorded samples.",
    )


def _mismatch(run: RunFiles) -> ReportFinding | None:
    points = run.series["mismatch/abs_mean"].finite
    above = points.at(points.value_array > MAX_MISMATCH)
    if not above:
        return None
    step, worst = above.point(int(above.value_array.argmax()))
    return ReportFinding(
        "Engine and trainer disagree about log-probs",
        f"The mean difference was above {MAX_MISMATCH:g} in {len(above)} of {len(points)} logged steps, "
        f"at most {format_number(worst)} at step {step}.",
        "Samples come from another policy than the one that is trained, so the gradient is off-policy "
        "and the loss does not account for it.",
        "Check that new weights reach the engine (a jump right after an update), that both sides use the same "
        "compute_dtype, temperature and chat template; importance sampling corrects what remains.",
    )


def _no_signal(run: RunFiles) -> ReportFinding | None:
    recent, mean = _recent_mean(run, "group/no_signal")
    if mean <= MAX_NO_SIGNAL:
        return None
    points = reward.recent(RECENT) if (reward := run.series.get("reward/mean")) else None
    reached = f" The mean reward there is {format_number(_mean(points))}." if points else ""
    return ReportFinding(
        "Most groups teach nothing",
        f"{mean:.0%} of groups had no signal in {recent}.{reached}",
        "All responses of such a group earned the same, so their advantages are zero: they cost a rollout and "
        "change no weight.",
        "With a reward near its maximum the prompts are too easy: take harder ones. Near its minimum they are too "
        "hard: take easier ones, raise batch.responses_per_prompt, or check that the reward can be earned at all.",
    )


def _truncated(run: RunFiles) -> ReportFinding | None:
    recent, mean = _recent_mean(run, "rollout/truncated")
    if mean <= MAX_TRUNCATED:
        return None
    limit = run.settings.get(("rollout", "max_response_tokens"))
    limit_text = f" (rollout.max_response_tokens={limit})" if limit else ""
    return ReportFinding(
        "Many responses are cut off",
        f"{mean:.0%} of responses reached the longest allowed length{limit_text} in {recent}.",
        "A response that is cut rarely states its answer and is graded as wrong, so the policy learns to be short "
        "rather than right, or it never learns to stop.",
        "Raise rollout.max_response_tokens, or read the cut samples: endless repetition points at a learning rate that "
        "is too high, or at a stop token that the chat template never produces.",
    )


def _entropy_collapse(run: RunFiles) -> ReportFinding | None:
    points = run.series["policy/entropy"].finite
    count = max(1, len(points) // 10)
    start, end = _mean(points.at(slice(count))), _mean(points.at(slice(-count, None)))
    if start <= 0 or end >= MIN_ENTROPY_LEFT * start:
        return None
    return ReportFinding(
        "The policy's entropy has collapsed",
        f"From {format_number(start)} at the start to {format_number(end)} at the end, "
        f"{end / start:.1%} of what it was.",
        "The policy gives nearly the same response every time; then groups have no signal and learning ends. "
        "That is right only if the task is solved.",
        "Lower optimizer.learning_rate, raise algorithm.policy_loss.clip_high, or set "
        "algorithm.kl.coefficient; keep the checkpoint from before the fall.",
    )


def _gradient_spikes(run: RunFiles) -> ReportFinding | None:
    points = run.series["policy/grad_norm"].finite
    values = points.value_array
    # A step without signal has no gradient, which says nothing about the usual size of one.
    usual = np.where(values > 0, values, np.inf)
    before = sliding_window_view(np.concatenate([np.full(SPIKE_WINDOW, np.inf), usual[:-1]]), SPIKE_WINDOW)
    places = np.flatnonzero(values > SPIKE_FACTOR * before.min(axis=1))  # no others are above that of the median
    known = np.sort(before[places], axis=1)
    counts = np.isfinite(known).sum(axis=1)
    middle = [known[np.arange(len(places)), np.maximum(counts - 1 + more, 0) // 2] for more in (0, 1)]
    medians = (middle[0] + middle[1]) / 2
    is_spike = (counts >= 5) & (values[places] > SPIKE_FACTOR * medians)
    spikes = points.at(places[is_spike])
    if not spikes:
        return None
    factors = spikes.value_array / medians[is_spike]
    largest = int(np.lexsort((spikes.step_array, factors))[-1])
    factor, (step, value) = factors[largest], spikes.point(largest)
    number = "1 step has" if len(spikes) == 1 else f"{len(spikes)} steps have"
    return ReportFinding(
        "The gradient norm spikes",
        f"{number} a norm above {SPIKE_FACTOR:g} times the median of up to {SPIKE_WINDOW} steps before; "
        f"the largest is {format_number(value)} at step {step}, {factor:.0f} times the median.",
        "A few samples dominated the update. Clipping bounds its size, not its direction.",
        "Read the samples of that step (click the curve); check for broken prompts, extreme advantages or lengths. "
        "Lower optimizer.max_grad_norm or optimizer.learning_rate if spikes go with drops in reward.",
    )


def _failed_episodes(run: RunFiles) -> ReportFinding | None:
    sizes = [run.settings.get(("batch", name), "") for name in ("prompts_per_step", "responses_per_prompt")]
    recent, mean = _recent_mean(run, "episode/failed")
    num_episodes = int(sizes[0]) * int(sizes[1]) if all(size.isdigit() for size in sizes) else 0
    if not num_episodes or mean <= MAX_FAILED_EPISODES * num_episodes:
        return None
    found = {name.removeprefix("failure/"): series.recent(RECENT) for name, series in run.matching("failure/*").items()}
    shares = {kind: _mean(series) for kind, series in found.items()}
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items() if share and kind != "policy")
    return ReportFinding(
        "Many episodes fail",
        f"{mean / num_episodes:.0%} of the episodes in {recent}. Kinds of failures then: {kinds or 'not logged'}.",
        "A failed episode carries no gradient. If certain tasks or answers fail more often, the policy learns from a "
        "biased selection.",
        "Read the error. For `deadline` raise environment.act_timeout_s or tool_timeout_s; for errors that pass, let "
        "environment.failures retry them. Play episodes again with leaderless env replay.",
        run.samples.example_error,
    )


def _cut_episodes(run: RunFiles) -> ReportFinding | None:
    recent, mean = _recent_mean(run, "episode/cut")
    if mean <= MAX_CUT_EPISODES:
        return None
    limits = [(name, run.settings.get(("environment", name))) for name in ("max_turns", "max_episode_tokens")]
    known = ", ".join(f"environment.{name}={value}" for name, value in limits if value)
    return ReportFinding(
        "Many episodes are cut",
        f"{mean:.0%} of the episodes in {recent} reached a limit{f' ({known})' if known else ''}.",
        "An episode that is cut keeps only the rewards that it has had, so the policy learns to hurry, or never sees "
        "the end of a task.",
        "Raise the limit, let the environment say less, or look in the samples for turns that repeat.",
    )


def _prefix_hits(run: RunFiles) -> ReportFinding | None:
    recent, mean = _recent_mean(run, "rollout/prefix_hits")
    if mean >= MIN_PREFIX_HITS:
        return None
    return ReportFinding(
        "Conversations are read again in each turn",
        f"The engine had kept {mean:.0%} of what it had seen of its conversations in {recent}.",
        "Keys and values of earlier turns were dropped to make room, so each turn computes all of it again.",
        "Lower environment.concurrency, or give the engine more memory for keys and values.",
    )


def _misread_calls(run: RunFiles) -> ReportFinding | None:
    recent, mean = _recent_mean(run, "tool/misread")
    if mean <= MAX_MISREAD:
        return None
    return ReportFinding(
        "Many calls of tools cannot be read",
        f"{mean:.0%} of the calls in {recent} cannot be read, or name no tool.",
        "The policy gets a message about the error, and loses a turn.",
        "Compare environment.tool_format with how the model was trained to write calls; read such turns below.",
    )


def _recent_mean(run: RunFiles, metric: str) -> tuple[str, float]:
    points = run.series[metric].recent(RECENT)
    first, last = points.point(0)[0], points.point(-1)[0]
    return f"step {last}" if first == last else f"steps {first} to {last}", _mean(points)


def _mean(points: Series) -> float:
    return float(points.value_array.mean())


CHECKS = (
    Check("every logged value is a finite number", None, 0, _non_finite),
    Check("every reward could be computed", "reward/failed", 1, _reward_failures),
    Check(
        f"the mean log-prob difference of engine and trainer is at most {MAX_MISMATCH:g} in every step",
        "mismatch/abs_mean",
        1,
        _mismatch,
    ),
    Check(f"at most {MAX_NO_SIGNAL:.0%} of groups are without signal lately", "group/no_signal", 1, _no_signal),
    Check(f"at most {MAX_TRUNCATED:.0%} of responses are cut off lately", "rollout/truncated", 1, _truncated),
    Check(f"at most {MAX_FAILED_EPISODES:.0%} of episodes fail lately", "episode/failed", 1, _failed_episodes),
    Check(f"at most {MAX_CUT_EPISODES:.0%} of episodes are cut lately", "episode/cut", 1, _cut_episodes),
    Check(
        f"the engine keeps at least {MIN_PREFIX_HITS:.0%} of its conversations lately",
        "rollout/prefix_hits",
        1,
        _prefix_hits,
    ),
    Check(f"at most {MAX_MISREAD:.0%} of calls of tools are misread lately", "tool/misread", 1, _misread_calls),
    Check(
        f"the policy keeps at least {MIN_ENTROPY_LEFT:.0%} of its first entropy",
        "policy/entropy",
        10,
        _entropy_collapse,
    ),
    Check(
        f"no gradient norm is above {SPIKE_FACTOR:g} times its running median", "policy/grad_norm", 6, _gradient_spikes
    ),
)

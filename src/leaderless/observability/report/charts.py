"""The charts of a report: what they show, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from leaderless.observability.clock import PREFIX
from leaderless.observability.report.curves import Series
from leaderless.observability.report.run_files import RunFiles

MAX_OWN_CHARTS = 60
"""Largest number of charts of metrics that are not in the catalogue."""

Unit = Literal["number", "share"]


@dataclass(frozen=True)
class Topic:
    """A chart that a run may have, of metrics by name or pattern, with blanks between them.

    With the unit `share`, 0.25 is written as 25 %. With `is_log`, the axis is logarithmic at first. The metric `band`
    is drawn as a band of its size around the first of the others.
    """

    title: str
    explanation: str
    metrics: str
    unit: Unit = "number"
    is_log: bool = False
    band: str | None = None


@dataclass(frozen=True)
class Chart:
    """A chart of a run: a topic and what was logged of it."""

    topic: Topic
    series: Mapping[str, Series]
    band: Series | None = None


Charts = list[tuple[str, list[Chart]]]
"""Charts under headings."""

_share = partial(Topic, unit="share")
CATALOGUE: Mapping[str, Sequence[Topic]] = {
    "Is it learning?": [
        _share(
            "Held-out accuracy",
            "Correct responses (mean@k); prompts solved once (pass@k) or by majority (maj@k).",
            "evaluation/mean@* evaluation/pass@* evaluation/maj@*",
        ),
        Topic(
            "Reward",
            "Mean over all responses of a step. The band is one standard deviation either way.",
            "reward/mean",
            band="reward/std",
        ),
        Topic("Rewards by name", "Mean of each before weighting. If one rises alone, look for a loophole.", "reward/*"),
        Topic(
            "Loss", "What the optimizer lowers. Near zero by design in on-policy reinforcement learning.", "policy/loss"
        ),
    ],
    "What it writes": [
        Topic(
            "Response length",
            "Mean sampled tokens per response, of training and of held-out prompts.",
            "rollout/response_tokens evaluation/response_tokens",
        ),
        _share(
            "Cut responses",
            "Responses that reached the longest allowed length, of training and of held-out prompts.",
            "rollout/truncated evaluation/truncated",
        ),
        _share(
            "Groups without signal",
            "Groups whose responses all earned the same: they change no weight.",
            "group/no_signal",
        ),
        Topic(
            "Prompts asked",
            "Prompts of a step with dynamic sampling; only those kept have something to teach.",
            "sampling/kept sampling/dropped_*",
        ),
        Topic(
            "Groups waiting or missing",
            "Chosen groups that wait for the next step, and those that the last round did not find.",
            "sampling/carried sampling/missing",
        ),
        Topic("Rounds", "How often a step took new prompts until it had enough groups.", "sampling/rounds"),
        Topic(
            "Entropy",
            "How undecided the policy is about the next token, in nats. A fall to zero ends exploration.",
            "policy/entropy",
        ),
    ],
    "How it moves": [
        _share("Success", "Episodes of training in which the task was done.", "body/success"),
        Topic("Length of episodes", "Mean steps and decisions of an episode.", "body/steps body/decisions"),
        _share(
            "Truncated or failed episodes",
            "Those that were cut although the task went on, and those that the environment could not finish.",
            "body/truncated body/failed",
        ),
        Topic("Steps of environments per second", "On all ranks, with decisions.", "body/steps_per_s"),
        Topic(
            "Transitions that are kept",
            "Those of the run's own episodes, and those of demonstrations and of people who helped.",
            "sac/transitions sac/demonstrations",
        ),
        Topic(
            "Losses of SAC", "Of critics and policy, in the last update of a step.", "sac/critic_loss sac/actor_loss"
        ),
        Topic("Entropy of decisions", "In nats, of actions from -1 to 1.", "sac/entropy"),
        Topic("Temperature", "Weight of the entropy.", "sac/temperature"),
    ],
    "How its episodes go": [
        Topic("Turns", "Mean messages of the policy in an episode.", "episode/turns"),
        Topic(
            "Tokens of an episode",
            "Mean tokens with all messages to the policy, and tokens that it did not sample.",
            "episode/tokens episode/told_tokens",
        ),
        _share(
            "Cut or drifted episodes",
            "Those that reached a limit, and those whose tokens differ from what the template would write anew.",
            "episode/cut episode/drift",
        ),
        Topic("Failed episodes", "They are left out of training, and are not worth 0.", "episode/failed"),
        _share(
            "Episodes that met a failure",
            "By the kind of the failure, whatever was done about it.",
            "failure/*",
        ),
        Topic("Calls of tools", "Mean calls in an episode, by tool.", "tool/calls tool/calls/*"),
        _share(
            "Calls without a result",
            "Calls that cannot be read or name no tool, and by tool those with wrong arguments or that it refused.",
            "tool/misread tool/refused/*",
        ),
        Topic(
            "Seconds of an episode",
            "Mean seconds in which it waits for the policy, the environment and tools, and is graded.",
            "episode/model_s episode/environment_s episode/tools_s episode/grading_s",
        ),
        _share(
            "Known beginnings",
            "Tokens of a conversation whose keys and values the engine still had, of those it had seen before.",
            "rollout/prefix_hits",
        ),
        _share("Engine at work", "Share of the rollout in which it works.", "rollout/engine_busy"),
        Topic("Samples of an episode", "Mean training sequences that one becomes.", "episode/samples"),
    ],
    "How it is used": [
        Topic("Acceptance", "Mean reward that clients have given to the responses of a step.", "online/acceptance"),
        Topic(
            "Seconds of a request",
            "Mean, and exceeded by one in twenty; apart for those that came, or waited, while a rank trained.",
            "online/latency_s online/latency_p95_s online/latency_training_s online/latency_training_p95_s",
        ),
        Topic(
            "Requests", "Those of clients in a step, and those answered with an error.", "online/requests online/failed"
        ),
        Topic(
            "Responses that waited",
            "Those with feedback that wait for a step, and those that new weights have interrupted.",
            "online/waiting online/interrupted",
        ),
        Topic(
            "Dropped responses",
            "Those without feedback in time, and those that were too old.",
            "online/without_feedback online/stale",
        ),
    ],
    "How it is trained": [
        Topic("Gradient norm", "Global L2 norm before clipping.", "policy/grad_norm"),
        Topic(
            "KL to the reference",
            "How far the policy is from it, in nats per token: in the loss, or as subtracted from the rewards.",
            "policy/kl reward/kl",
        ),
        Topic(
            "KL weight",
            "What the divergence is multiplied by, where it adapts to a target.",
            "policy/kl_coefficient",
            is_log=True,
        ),
        _share("Clipped tokens", "Tokens whose ratio left the clip range.", "policy/clip_fraction"),
        Topic("Learning rate", "Rate of the policy, after warm-up and decay.", "policy/learning_rate"),
    ],
    "How the critic is trained": [
        Topic(
            "Explained variance",
            "Share of the returns' variance that the critic foresees. At 0 it knows their mean at best.",
            "critic/explained_variance",
        ),
        Topic("Critic loss", "Half the squared error of the critic's values.", "critic/loss"),
        Topic("Mean value", "What the critic expects, over all tokens.", "critic/value_mean"),
        _share("Clipped values", "Tokens whose value moved further in one step than it may.", "critic/clip_fraction"),
        Topic("Critic gradient norm", "Global L2 norm before clipping.", "critic/grad_norm"),
        Topic("Critic learning rate", "Rate of the critic, after warm-up and decay.", "critic/learning_rate"),
    ],
    "Can the numbers be trusted?": [
        Topic(
            "Log-prob mismatch",
            "|rollout_log_probs - old_log_probs| of a token, mean and largest. Near zero is right.",
            "mismatch/abs_mean mismatch/abs_max",
            is_log=True,
        ),
        Topic(
            "Staleness",
            "Optimizer steps that the policy was ahead of the weights that sampled a response, on average.",
            "rollout/staleness",
        ),
        _share(
            "Oldest tokens",
            "Share of samples by the age of their oldest token, in optimizer updates.",
            "staleness/share/*",
        ),
        Topic("Mismatch as KL", "The same disagreement as a divergence, in nats per token.", "mismatch/kl"),
        Topic("Mismatch by age", "The same for tokens of an age, in optimizer updates.", "mismatch/kl_by_age/*"),
        _share(
            "Effective samples",
            "What tokens are worth under their importance ratios, as a share of their number. 1 is right.",
            "mismatch/effective_samples",
        ),
        _share(
            "Share of failed rewards",
            "Responses whose reward could not be computed, of all responses of a step.",
            "reward/failed_share",
        ),
        Topic(
            "Updates left out",
            "Optimizer steps that guards have skipped since the run began, by role.",
            "guard/skipped/*",
        ),
        Topic("Roll-backs", "How often guards have sent the run back to a checkpoint.", "guard/roll_backs"),
        Topic(
            "Failed rewards",
            "Responses whose reward could not be computed, in training and on held-out prompts.",
            "reward/failed evaluation/failed",
        ),
    ],
    "How fast it is": [
        Topic("Throughput", "Tokens of all samples per second of the whole step.", "throughput/tokens_per_s"),
        Topic("Generation speed", "Sampled tokens per second of rollout.", "rollout/tokens_per_s"),
        Topic(
            "Epoch",
            "Passes over the training data; of a mixture, over each dataset and the one that is behind most.",
            "data/epoch data/epoch/*",
        ),
    ],
}

TIME_PATTERN = "time/*"
"""Seconds by node, which share one chart."""


def matched(run: RunFiles) -> Iterator[tuple[str, Topic, Mapping[str, Series]]]:
    """Topics of the catalogue of which something was logged, each with its heading and its metrics."""
    # A pattern such as `reward/*` takes the metrics that no other topic names.
    named = {name for topics in CATALOGUE.values() for topic in topics for name in (*topic.metrics.split(), topic.band)}
    for title, topics in CATALOGUE.items():
        for topic in topics:
            patterns = topic.metrics.split()
            logged = run.matching(*patterns)
            found = {name: one for name, one in logged.items() if name in patterns or name not in named}
            if found:
                yield title, topic, found


def charts_of(run: RunFiles) -> tuple[Charts, int]:
    """The charts that have something to show, custom metrics last, and the number of metrics left out."""
    found: dict[str, list[Chart]] = {}
    drawn: set[str | None] = set()
    for title, topic, series in matched(run):
        band = run.series.get(topic.band) if topic.band else None
        found.setdefault(title, []).append(Chart(topic, series, band))
        drawn |= {*series, topic.band}
    own = sorted(name for name in run.series if name not in drawn and not name.startswith(("time/", PREFIX)))
    for name in own[:MAX_OWN_CHARTS]:
        prefix, _, rest = name.rpartition("/")
        chart = Chart(Topic(rest or name, "", name), {name: run.series[name]})
        found.setdefault(f"More metrics: {prefix}" if prefix else "More metrics", []).append(chart)
    return list(found.items()), max(0, len(own) - MAX_OWN_CHARTS)

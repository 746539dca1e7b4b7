"""Recorded samples as the page shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from leaderless.observability.report.markup import embedded_json
from leaderless.observability.report.untrusted import as_list, as_mapping, as_number, as_text

MAX_TEXT_CHARACTERS = 20_000
"""A longer prompt, response or answer is cut."""
MAX_ERROR_CHARACTERS = 2_000
"""A longer error of a reward is cut."""


@dataclass(frozen=True)
class Judge:
    """Tells correct responses from wrong ones, as evaluation does.

    Attributes:
        metric: The reward that decides; None when the recipe does not say.
        correct_at: The least value of a correct response.
    """

    metric: str | None = None
    correct_at: float = 1.0

    def state(self, row: Mapping[str, object]) -> str:
        """`correct`, `wrong`, or `failed` when a reward could not be computed.

        Args:
            row: A recorded sample.
        """
        reward = as_number(row.get("reward"))
        if row.get("is_valid") is False or reward is None:
            return "failed"
        detail = as_mapping(as_mapping(row.get("details")).get(self.metric)) if self.metric else {}
        decisive = as_number(detail.get("value"))
        is_correct = reward > 0 if decisive is None else decisive >= self.correct_at
        return "correct" if is_correct else "wrong"

    def __str__(self) -> str:
        """The rule in words."""
        return f"{self.metric} at least {self.correct_at:g}" if self.metric else "reward above 0"


@dataclass(frozen=True)
class Detail:
    """What one reward said about a response: a value, or the error that it failed with."""

    name: str
    value: float | None
    error: str

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"name": self.name, "value": self.value, "error": self.error}


@dataclass(frozen=True)
class Sample:
    """A response; the attributes are those of the recorded line, and `state` is what a `Judge` makes of it.

    A reward that failed is None.
    """

    sample_id: str
    response: str
    reward: float | None
    advantage: float | None
    state: str
    is_truncated: bool
    details: tuple[Detail, ...]

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {
            "sample_id": self.sample_id,
            "response": self.response,
            "reward": self.reward,
            "advantage": self.advantage,
            "state": self.state,
            "is_truncated": self.is_truncated,
            "details": [detail.to_json() for detail in self.details],
        }


@dataclass(frozen=True)
class Group:
    """A prompt, its expected answer and all its responses."""

    group_id: str
    prompt: str
    answer: str
    samples: tuple[Sample, ...]

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        samples = [sample.to_json() for sample in self.samples]
        return {"group_id": self.group_id, "prompt": self.prompt, "answer": self.answer, "samples": samples}


@dataclass(frozen=True)
class RecordedStep:
    """The samples of one step.

    Attributes:
        step: Its number.
        groups: What the page shows of it.
        num_recorded: Samples in the files, of which the groups may hold fewer.
    """

    step: int
    groups: tuple[Group, ...]
    num_recorded: int

    def to_json(self) -> dict[str, object]:
        """JSON-able values, as the page's script reads them."""
        groups = [group.to_json() for group in self.groups]
        return {"step": self.step, "groups": groups, "num_recorded": self.num_recorded}

    @cached_property
    def size_bytes(self) -> int:
        """Bytes that it takes in the page."""
        return _size_bytes(self.to_json())

    def cut(self, limit_bytes: int) -> RecordedStep:
        """Its first groups, as many as fit; the last of them may lack responses.

        Args:
            limit_bytes: What it may take in the page.
        """
        room = limit_bytes - replace(self, groups=()).size_bytes
        groups: list[Group] = []
        for group in self.groups:
            samples: list[Sample] = []
            room -= _size_bytes(replace(group, samples=()).to_json()) + 1
            for sample in group.samples:
                room -= _size_bytes(sample.to_json()) + 1
                if room >= 0:
                    samples.append(sample)
            if samples:
                groups.append(replace(group, samples=tuple(samples)))
            if room < 0:
                break
        return replace(self, groups=tuple(groups))


def read_step(step: int, rows: Sequence[Mapping[str, object]], judge: Judge) -> RecordedStep:
    """The samples of a step, each prompt once with all its responses.

    Args:
        step: Its number.
        rows: Lines of its files, in order; of a sample that was recorded again after a resume the last counts.
        judge: Tells correct from wrong.
    """
    last = {as_text(row.get("sample_id")) or f"line {line}": row for line, row in enumerate(rows)}
    groups: dict[tuple[str, str, str], list[Sample]] = {}
    for row in last.values():
        key = (as_text(row.get("group_id")), _prompt_text(row.get("prompt")), as_text(row.get("answer")))
        groups.setdefault(key, []).append(_sample(row, judge))
    return RecordedStep(
        step,
        tuple(
            Group(group_id, _clip(prompt), _clip(answer), tuple(samples))
            for (group_id, prompt, answer), samples in groups.items()
        ),
        num_recorded=len(last),
    )


def _prompt_text(prompt: object) -> str:
    """A prompt for a reader: chat messages one below the other, each under its role."""
    messages = [as_mapping(message) for message in as_list(prompt)]
    if not messages or not all("role" in message and "content" in message for message in messages):
        return as_text(prompt)
    return "\n\n".join(f"[{as_text(message['role'])}]\n{as_text(message['content'])}" for message in messages)


def _sample(row: Mapping[str, object], judge: Judge) -> Sample:
    state = judge.state(row)
    details = {name: as_mapping(detail) for name, detail in as_mapping(row.get("details")).items()}
    return Sample(
        sample_id=as_text(row.get("sample_id")),
        response=_clip(as_text(row.get("response"))),
        # What stands there for a failed reward is no reward.
        reward=None if state == "failed" else as_number(row.get("reward")),
        advantage=as_number(row.get("advantage")),
        state=state,
        is_truncated=row.get("is_truncated") is True,
        details=tuple(
            Detail(name, as_number(detail.get("value")), _clip(as_text(detail.get("error")), MAX_ERROR_CHARACTERS))
            for name, detail in details.items()
        ),
    )


def _clip(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters are in the file]"


def _size_bytes(value: object) -> int:
    return len(embedded_json(value).encode("utf-8", "backslashreplace"))

"""Recorded samples as the page shows them, and the choice of those that fit on it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from pathlib import Path
from typing import Literal

from leaderless.observability.report.episodes import Conversation, EpisodePages
from leaderless.observability.report.unchecked_values import (
    as_list,
    as_mapping,
    as_number,
    as_text,
    embedded_json,
    parse_json_lines,
)

BUDGET_BYTES = 4_000_000
"""Largest size of all samples of one kind on a page."""
IMAGE_BUDGET_BYTES = 1_000_000
"""Largest size of all images of one kind, within that."""
TOKEN_BUDGET_BYTES = 2_000_000
"""Largest size of their single tokens, on top of that."""
MAX_TEXT_CHARACTERS = 20_000
"""Length at which a prompt, response or answer is cut."""
MAX_ERROR_CHARACTERS = 2_000
"""Length at which an error of a reward is cut."""
MAX_TOKEN_CHARACTERS = 80
"""Length at which the text of a token is cut."""
IMAGE_URL = ("data:image/png;base64,", "data:image/jpeg;base64,")
"""How the address of an image in a sample begins."""
TOKEN_COLUMNS = ("rollout", "old", "mask")
"""Recorded values of tokens: log-probs as sampled and of the trainer, and whether the policy sampled the token."""

_FILE_NAME = re.compile(r"(step|evaluation)-(\d+)(?:\.rank-(\d+))?\.jsonl")


@dataclass(frozen=True)
class JudgeView:
    """Distinguishes correct responses from wrong ones as evaluation does: by the reward `metric`, if it is known."""

    metric: str | None = None
    correct_at: float = 1.0

    def state(self, row: Mapping[str, object]) -> str:
        """`correct`, `wrong`, or `failed` if a reward of the recorded sample could not be computed."""
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
    """Result of one reward for a response: a value, or its error, and the words of a judge."""

    name: str
    value: float | None
    error: str
    said: str = ""


@dataclass(frozen=True)
class Sample:
    """A response as recorded, or several equal ones.

    The state is as in `JudgeView`, and a failed reward is None. The role that sampled it is empty in runs with a
    single one, and the number of the episode in runs without an environment.
    """

    sample_id: str
    response: str
    reward: float | None
    advantage: float | None
    state: str
    is_truncated: bool
    details: tuple[Detail, ...]
    role: str = ""
    episode: str = ""
    count: int = 1


@dataclass(frozen=True)
class SampleGroup:
    """A prompt with its images as data URLs, its expected answer and all its responses."""

    group_id: str
    prompt: str
    answer: str
    samples: tuple[Sample, ...]
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class RecordedStep:
    """The recorded samples of one step that the page shows, single tokens by sample id, and episodes by number."""

    step: int
    groups: tuple[SampleGroup, ...]
    num_recorded: int
    tokens: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    episodes: Mapping[str, Conversation] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of samples in the groups."""
        return sum(sample.count for group in self.groups for sample in group.samples)

    @cached_property
    def size_bytes(self) -> int:
        """Size in the page, without the tokens."""
        return _size_bytes(asdict(replace(self, tokens={}, episodes={})))

    @property
    def image_bytes(self) -> int:
        """Size of the images."""
        return sum(len(url) for group in self.groups for url in group.images)

    def cut_images(self, limit_bytes: int) -> RecordedStep:
        """The step with only the first images of each group that fit into its share."""
        share, groups = limit_bytes // max(1, len(self.groups)), list[SampleGroup]()
        for group in self.groups:
            ends = accumulate(len(url) for url in group.images)
            groups.append(replace(group, images=group.images[: sum(end <= share for end in ends)]))
        return replace(self, groups=tuple(groups))

    def cut(self, limit_bytes: int) -> RecordedStep:
        """The step with only as many groups as fit; the last of them may lack responses."""
        room = limit_bytes - replace(self, groups=()).size_bytes
        groups: list[SampleGroup] = []
        for group in self.groups:
            samples: list[Sample] = []
            room -= _size_bytes(asdict(replace(group, samples=()))) + 1
            for sample in group.samples:
                room -= _size_bytes(asdict(sample)) + 1
                if room >= 0:
                    samples.append(sample)
            if samples:
                groups.append(replace(group, samples=tuple(samples)))
            if room < 0:
                break
        return replace(self, groups=tuple(groups))


@dataclass(frozen=True)
class Samples:
    """Part of the page about one kind of files in `samples/`, within a budget, and what could not be read."""

    steps: tuple[RecordedStep, ...] = ()
    num_recorded_steps: int = 0
    problems: tuple[str, ...] = ()
    budget_bytes: int = BUDGET_BYTES
    image_budget_bytes: int = IMAGE_BUDGET_BYTES

    @property
    def has_images(self) -> bool:
        """Whether some samples have images."""
        return any(step.image_bytes for step in self.steps)

    @property
    def num_left_out(self) -> int:
        """Number of samples of these steps that are not on the page."""
        return sum(step.num_recorded - step.num_samples for step in self.steps)

    @property
    def has_episodes(self) -> bool:
        """Whether some samples are shown with the conversation that they are from."""
        return any(step.episodes for step in self.steps)

    @property
    def example_error(self) -> str:
        """The newest error of a reward, with its step and the reward's name; empty if none was recorded."""
        errors = (
            f"step {recorded.step}, {detail.name}: {detail.error}"
            for recorded in reversed(self.steps)
            for group in recorded.groups
            for sample in group.samples
            for detail in sample.details
            if detail.error
        )
        return next(errors, "")


def read_samples(
    folder: Path,
    judge: JudgeView,
    budget_bytes: int = BUDGET_BYTES,
    kind: Literal["step", "evaluation"] = "step",
    episodes: Path | None = None,
) -> Samples:
    """Read the samples of evenly spread steps, the first and the last among them, within the budget.

    Of images, there are at most `IMAGE_BUDGET_BYTES`. Where there are episodes, only steps that have some are read.

    Args:
        folder: Folder `samples/` of a run, which may be missing.
        judge: Rule that tells correct from wrong.
        budget_bytes: Largest size in the page, without tokens.
        kind: Samples of training steps, or of evaluations after them.
        episodes: Folder of the journal of episodes, which may be missing; None for none.
    """
    files, problems = _files_by_step(folder, kind), list[str]()

    @cache
    def read(step: int) -> RecordedStep:
        return read_step(step, [row for path in files[step] for row in _read_rows(path, problems)], judge)

    conversations = None if episodes is None else EpisodePages(episodes, kind)
    every_step = sorted(files)
    if conversations is not None and files.keys() & conversations.steps:
        every_step = sorted(files.keys() & conversations.steps)
    # Files hold a prompt once per response, the page only once, so files may be larger than the budget.
    count = _num_fitting(
        every_step, len(every_step), lambda step: sum(path.stat().st_size for path in files[step]), 8 * budget_bytes
    )
    count = _num_fitting(every_step, count, lambda step: read(step).size_bytes, budget_bytes)
    count = _num_fitting(every_step, count, lambda step: read(step).image_bytes, IMAGE_BUDGET_BYTES)
    recorded = [read(step) for step in _spread(every_step, count)]
    if sum(one.image_bytes for one in recorded) > IMAGE_BUDGET_BYTES:
        recorded = [one.cut_images(IMAGE_BUDGET_BYTES // len(recorded)) for one in recorded]
    if sum(one.size_bytes for one in recorded) > budget_bytes:
        recorded = [one.cut(budget_bytes // len(recorded)) for one in recorded]
    steps = _with_newest_tokens(recorded)
    if conversations is not None:
        steps = tuple(replace(step, episodes=found) for step, found in conversations.of(steps))
        problems += conversations.problems
    return Samples(steps, len(files), tuple(problems), budget_bytes)


def read_step(step: int, rows: Sequence[Mapping[str, object]], judge: JudgeView) -> RecordedStep:
    """The samples of a step: each prompt once with all its responses, equal responses once with their number.

    The rows are lines of its files, in order; if a sample was recorded again after a resume, its last line counts.
    """
    last = {as_text(row.get("sample_id")) or f"line {line}": row for line, row in enumerate(rows)}
    groups: dict[tuple[str, str, str], dict[Sample, Sample]] = {}
    tokens: dict[str, Mapping[str, object]] = {}
    images: dict[str, tuple[str, ...]] = {}
    for row in last.values():
        urls = [as_text(url) for url in as_list(row.get("images"))]  # a prompt's with the first response alone
        if urls:
            group = as_text(row.get("group_id"))
            images[group] = (*images.get(group, ()), *(url for url in urls if url.startswith(IMAGE_URL)))
        key = (as_text(row.get("group_id")), _prompt_text(row.get("prompt")), as_text(row.get("answer")))
        alike = groups.setdefault(key, {})
        sample = _sample(row, judge)
        what = replace(sample, sample_id="")
        if what in alike:
            alike[what] = replace(alike[what], count=alike[what].count + 1)
        else:
            alike[what] = sample
            if recorded := _tokens(as_mapping(row.get("tokens"))):
                tokens[sample.sample_id] = recorded
    shown = (
        SampleGroup(group_id, _clip(prompt), _clip(answer), tuple(alike.values()), images.get(group_id, ()))
        for (group_id, prompt, answer), alike in groups.items()
    )
    return RecordedStep(step, tuple(shown), len(last), tokens)


def _read_rows(path: Path, problems: list[str]) -> Sequence[Mapping[str, object]]:
    name = f"samples/{path.name}"
    try:
        return parse_json_lines(path.read_text(encoding="utf-8", errors="replace"), name, problems)
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror}.")
        return []


def _files_by_step(folder: Path, kind: str) -> dict[int, list[Path]]:
    found: list[tuple[int, int, Path]] = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FILE_NAME.fullmatch(path.name)
        if match and match[1] == kind and path.is_file():
            found.append((int(match[2]), int(match[3] or -1), path))
    files: dict[int, list[Path]] = {}
    for step, _, path in sorted(found):
        files.setdefault(step, []).append(path)
    return files


def _num_fitting(steps: Sequence[int], count: int, size_of: Callable[[int], int], limit: int) -> int:
    """The number of evenly spread steps, at most `count`, that fit into the limit; at least the first and the last."""
    while count > 2 and (total := sum(map(size_of, _spread(steps, count)))) > limit:
        count = max(2, min(count - 1, count * limit // total))
    return count


def _spread(steps: Sequence[int], count: int) -> Sequence[int]:
    """A number of steps, evenly spread from the first to the last."""
    if count == len(steps):
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _with_newest_tokens(steps: Sequence[RecordedStep]) -> tuple[RecordedStep, ...]:
    """The steps without the tokens that do not fit; the first steps lose theirs first."""
    room, kept = TOKEN_BUDGET_BYTES, list[RecordedStep]()
    for step in reversed(steps):
        on_page = {sample.sample_id for group in step.groups for sample in group.samples}
        tokens = {name: view for name, view in step.tokens.items() if name in on_page}
        room -= _size_bytes(tokens)
        kept.append(replace(step, tokens=tokens if room >= 0 else {}))
    return tuple(reversed(kept))


def _prompt_text(prompt: object) -> str:
    """A prompt as text: chat messages one below the other, each under its role."""
    messages = [as_mapping(message) for message in as_list(prompt)]
    if not messages or not all("role" in message and "content" in message for message in messages):
        return as_text(prompt)
    return "\n\n".join(f"[{as_text(message['role'])}]\n{as_text(message['content'])}" for message in messages)


def _sample(row: Mapping[str, object], judge: JudgeView) -> Sample:
    state = judge.state(row)
    details = {name: as_mapping(detail) for name, detail in as_mapping(row.get("details")).items()}
    return Sample(
        sample_id=as_text(row.get("sample_id")),
        response=_clip(as_text(row.get("response"))),
        # The number that is recorded for a failed reward means nothing.
        reward=None if state == "failed" else as_number(row.get("reward")),
        advantage=as_number(row.get("advantage")),
        state=state,
        is_truncated=row.get("is_truncated") is True,
        details=tuple(
            Detail(
                name,
                as_number(detail.get("value")),
                _clip(as_text(detail.get("error")), MAX_ERROR_CHARACTERS),
                _clip(as_text(detail.get("said"))),
            )
            for name, detail in details.items()
        ),
        role=as_text(row.get("role")),
        episode=as_text(row.get("joint_id")),
    )


def _tokens(view: Mapping[str, object]) -> Mapping[str, object]:
    """Recorded tokens in the shape that the page relies on; empty if they have another one."""
    texts = [as_text(text)[:MAX_TOKEN_CHARACTERS] for text in as_list(view.get("text"))]
    numbers = {name: list(map(as_number, as_list(view.get(name)))) for name in TOKEN_COLUMNS}
    known = {name: values for name, values in numbers.items() if len(values) == len(texts)}
    return {"text": texts, "total": as_number(view.get("total")), **known} if texts and known else {}


def _clip(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[… {len(text) - limit:,} more characters are in the file]"


def _size_bytes(value: object) -> int:
    return len(embedded_json(value).encode("utf-8", "backslashreplace"))

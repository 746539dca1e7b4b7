"""Writes the page about evidence, and the short table of README, from `evidence.yaml`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import yaml
from generate_markup import between, cell, table_of
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

FILE = Path(__file__).parent / "evidence.yaml"
Language = Literal["en", "zh"]
LEVELS = range(5)
WORDS = {
    "en": (
        "# Evidence",
        "Every feature has a level, and a level is raised by a run, never by an argument:",
        ("level", "what has been run"),
        (
            "code; tests use stand-ins, if any",
            "a tiny model or policy with random weights, on CPUs",
            "real pretrained weights, or the real package",
            "a real accelerator",
            "several machines",
        ),
        (
            "The figures are those of the commit and the day that are named. Commands that begin with `make` or "
            "`python benchmarks/` need a copy of the repository."
        ),
        ("feature", "level", "command", "commit", "date", "figure, and what is missing"),
        "missing",
        ("subject", "missing"),
    ),
    "zh": (
        "# 证据 {#evidence}",
        "每项功能都有一个级别；只有运行才能提高级别，论证不能：",
        ("级别", "运行过什么"),
        (
            "代码；如有测试，用的是替身",
            "在 CPU 上运行的极小模型或策略，权重随机",
            "真实的预训练权重，或真实的软件包",
            "真实的加速卡",
            "几台机器",
        ),
        "数字属于所写明的提交和日期。以 `make` 或 `python benchmarks/` 开头的命令需要一份仓库的副本。",
        ("功能", "级别", "命令", "提交", "日期", "数字，以及缺少什么"),
        "缺少",
        ("主题", "缺少"),
    ),
}
"""Title, introduction, table of levels, note, heads of the tables, and words in them."""


class Feature(BaseModel):
    """One feature, and what has been run of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str
    name_zh: str
    level: Annotated[int, Field(ge=LEVELS[0], le=LEVELS[-1])]
    page: str
    command: str = ""
    commit: Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$")] = ""
    date: dt.date | None = None
    figure: str = ""
    figure_zh: str = ""
    missing: str = ""
    missing_zh: str = ""

    @model_validator(mode="after")
    def _has_what_its_level_needs(self) -> Feature:
        run = {"command": self.command, "commit": self.commit, "date": self.date, "figure": self.figure}
        lacking = [name for name, value in run.items() if not value]
        if self.level >= 2 and lacking:
            raise ValueError(f"'{self.name}' has level {self.level}, which needs {', '.join(lacking)}")
        if not self.figure and not self.missing:
            raise ValueError(f"'{self.name}' has no figure: say what is missing")
        if bool(self.figure) != bool(self.figure_zh) or bool(self.missing) != bool(self.missing_zh):
            raise ValueError(f"'{self.name}' has a text in one language only")
        return self


class Subject(BaseModel):
    """Features that belong together."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    subject: str
    subject_zh: str
    missing: str
    missing_zh: str
    features: tuple[Feature, ...]


def load_evidence() -> tuple[Subject, ...]:
    """What has been run.

    Raises:
        ValueError: A feature lacks what its level needs.
    """
    return TypeAdapter(tuple[Subject, ...]).validate_python(yaml.safe_load(FILE.read_text(encoding="utf-8")))


def evidence_page(language: Language) -> str:
    """All features, a table for each subject."""
    title, intro, level_heads, levels, note, heads, missing_word, _ = WORDS[language]
    rows: list[tuple[str, ...]] = [(str(level), meaning) for level, meaning in zip(LEVELS, levels, strict=True)]
    parts = [title, intro, table_of(level_heads, rows), note]
    for subject in load_evidence():
        name = subject.subject if language == "en" else f"{subject.subject_zh} {{#{anchor_of(subject)}}}"
        parts += [f"## {name}", table_of(heads, _rows(subject.features, language, missing_word))]
    return "\n\n".join(["<!-- Written by docs/generate.py from docs/evidence.yaml. -->", *parts]) + "\n"


def _rows(features: Sequence[Feature], language: Language, missing_word: str) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for one in features:
        name = one.name if language == "en" else one.name_zh
        figure = one.figure if language == "en" else one.figure_zh
        missing = one.missing if language == "en" else one.missing_zh
        outcome = "; ".join([figure] * bool(figure) + [f"*{missing_word}*: {missing}"] * bool(missing))
        command, commit = (f"`{text}`" if text else "" for text in (one.command, one.commit))
        row = (f"[{name}]({one.page})", str(one.level), command, commit, str(one.date or ""), outcome)
        rows.append(tuple(cell(text) for text in row))
    return rows


def anchor_of(subject: Subject) -> str:
    """The anchor of a subject's heading, in both languages."""
    return subject.subject.lower().replace(" ", "-")


def with_status(readme: str, language: Language) -> str:
    """A README with the number of features of each level between its two marks."""
    first, last = WORDS[language][-1]
    rows: list[tuple[str, ...]] = []
    for subject in load_evidence():
        counts = [sum(one.level == level for one in subject.features) for level in LEVELS]
        name = subject.subject if language == "en" else subject.subject_zh
        link = f"[{name}](docs/evidence{'' if language == 'en' else '.zh'}.md#{anchor_of(subject)})"
        missing = subject.missing if language == "en" else subject.missing_zh
        rows.append((link, *(str(count) if count else "" for count in counts), missing))
    return between(readme, "status", table_of((first, *map(str, LEVELS), last), rows))

"""Rewards of responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from leaderless.config.base import Section, ShorthandSection
from leaderless.config.errors import nearest


class RewardOptions(ShorthandSection):
    """Settings of every reward; a bare number is its weight."""

    shorthand: ClassVar[str] = "weight"

    weight: float = 1.0
    """Weight in the sample's reward, which is the weighted sum over the rewards that apply to it."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that grading one response may take; after that its process is ended and the reward counts as failed."""
    sources: tuple[str, ...] = ()
    """Sources of rows that the reward applies to (`data.train.source` names the column; without one, the source of a
    mixture's row is the name of its dataset); empty for all."""

    def applies_to(self, source: str | None) -> bool:
        """Whether the reward grades rows of a source; None if the recipe names no such column."""
        return not self.sources or source in self.sources


class MathOptions(RewardOptions):
    """1 where the response's final answer equals the expected one mathematically, else 0."""


class ExactMatchOptions(RewardOptions):
    """1 where the response equals the expected answer, else 0; white space at both ends is ignored."""

    ignore_case: bool = False
    """Ignore case."""


class FormatOptions(RewardOptions):
    """1 where the whole response matches a pattern, else 0."""

    pattern: str
    """Regular expression; `.` also matches line breaks."""

    @field_validator("pattern")
    @classmethod
    def _pattern_compiles(cls, value: str) -> str:
        try:
            re.compile(value, re.DOTALL)
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        return value


SandboxName = Literal["auto", "builtin", "bubblewrap"]


class AnswerMatchOptions(RewardOptions):
    """1 where the response's last `<answer>...</answer>` is an expected answer after normalization, else 0."""


class SearchFormatOptions(RewardOptions):
    """1 for a right answer, less if its tags are out of order, and small rewards for order without a right answer."""

    structure: float = Field(default=0.2, ge=0, le=1)
    """Value of tags in order without a right answer, and what a right answer loses without them."""
    retrieval: float = Field(default=0.1, ge=0, le=1)
    """Value on top of that if a page that was found has the answer."""
    final: float = Field(default=0.1, ge=0, le=1)
    """Value of a wrong answer with tags out of order."""


CODE_RESERVE_S = 2.0
"""Seconds of `timeout_s` that are reserved for starting and ending the sandbox; the rest is for tests."""


class CodeOptions(RewardOptions):
    """The share of its row's tests that the response's program passes, run in a sandbox."""

    sandbox: SandboxName = "auto"
    """Sandbox of the programs: `builtin`, which asks nothing but the kernel; `bubblewrap`, which also puts them into
    namespaces of their own, and needs that program; `auto` takes the first of them that works on the machine."""
    score: Literal["share", "all"] = "share"
    """`share` is the share of passed tests; `all` is 1 if all tests pass, else 0."""
    test_timeout_s: float = Field(default=4.0, gt=0)
    """Seconds of wall-clock time that one test may take before it fails. Tests that have not started two seconds before
    the end of `timeout_s` also fail."""
    memory_mib: int = Field(default=512, ge=64)
    """MiB of address space that each process of the program may use."""
    max_processes: int = Field(default=8, ge=0)
    """Number of processes and threads that a program may start in one run, besides its first."""
    max_files: int = Field(default=32, ge=0, le=500)
    """Number of files and folders that a program may create in one run; opening a file to overwrite it counts, too."""
    max_file_bytes: int = Field(default=2**20, ge=0)
    """Largest size of each of its files, in bytes."""
    max_output_bytes: int = Field(default=2**16, ge=0)
    """Bytes that a program may print in one run, to standard output and to standard error; then it is ended."""
    allow_weaker: bool = False
    """Run programs even if the kernel lacks a layer of the sandbox, at your own risk."""

    @model_validator(mode="after")
    def _a_test_fits(self) -> CodeOptions:
        if self.timeout_s < self.test_timeout_s + CODE_RESERVE_S:
            raise ValueError(
                f"timeout_s={self.timeout_s:g} must be at least {CODE_RESERVE_S:g} more than "
                f"test_timeout_s={self.test_timeout_s:g}: raise the one or lower the other"
            )
        return self


class RewardsConfig(Section):
    """The rewards of a recipe by name; a custom one is named `package.module:function`."""

    model_config = Section.model_config | {"extra": "allow"}
    __pydantic_extra__: dict[str, RewardOptions]

    math: MathOptions | None = None
    """1 where the response's final answer equals the expected one mathematically, else 0."""
    exact_match: ExactMatchOptions | None = None
    """1 where the response equals the expected answer, else 0."""
    format: FormatOptions | None = None
    """1 where the whole response matches `pattern`, else 0."""
    answer_match: AnswerMatchOptions | None = None
    """1 where the response's last `<answer>...</answer>` is an expected answer, apart from case, punctuation and
    articles, else 0."""
    search_format: SearchFormatOptions | None = None
    """1 for such an answer, less if the tags of thoughts, searches and the answer are out of order, and small rewards
    for order without a right answer."""
    code: CodeOptions | None = None
    """The share of its row's tests that the response's program passes, run in a sandbox; see
    [A reward that runs programs](../guides/code.md)."""

    @model_validator(mode="after")
    def _names_are_known(self) -> RewardsConfig:
        for name in self.__pydantic_extra__ or {}:
            if not re.fullmatch(r"[\w.]+:\w+", name):
                hint = nearest(name, type(self).model_fields)
                raise ValueError(
                    f"reward.{name} is no built-in reward{hint}; a custom one is 'package.module:function'"
                )
        return self

    def options(self) -> Mapping[str, RewardOptions]:
        """The rewards in use, by name, in a stable order."""
        builtin = {name: getattr(self, name) for name in type(self).model_fields}
        return {
            name: options
            for name, options in (builtin | (self.__pydantic_extra__ or {})).items()
            if options is not None
        }

"""Rewards of responses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from pydantic import Field, GetJsonSchemaHandler, SerializeAsAny, ValidationError, field_validator, model_validator
from pydantic_core import CoreSchema, InitErrorDetails

from leaderless.base.errors import nearest
from leaderless.base.section import Section
from leaderless.config.judges import DEFAULT_SOURCE, JudgeOptions, RewardOptions


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
    """The rewards of a recipe by name; a custom one is named `package.module:function`.

    A built-in one may be used several times, each under its name, `-` and another word, as `judge-style`.
    """

    model_config = Section.model_config | {"extra": "allow"}
    __pydantic_extra__: dict[str, SerializeAsAny[RewardOptions]]

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
    judge: JudgeOptions | None = None
    """Value of the response in the judgment of a language model, from 0 to 1; see [Judges](../guides/judges.md)."""

    @model_validator(mode="before")
    @classmethod
    def _named_ones(cls, value: object) -> object:
        """Read the settings of built-in rewards that have names of their own."""
        if not isinstance(value, Mapping):
            return value
        return {name: _read(str(name), settings) for name, settings in value.items()}

    @model_validator(mode="after")
    def _names_are_known(self) -> RewardsConfig:
        for name in self.__pydantic_extra__ or {}:
            if not re.fullmatch(r"[\w.]+:\w+", name) and named_type(name) is None:
                hint = nearest(name, type(self).model_fields)
                raise ValueError(
                    f"reward.{name} is no built-in reward{hint}; a custom one is 'package.module:function', and a "
                    "built-in one may have a name such as 'format-boxed'"
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

    def applying(self, source: str | None) -> list[str]:
        """The rewards that grade rows of a source, by name; None if the recipe names no such column."""
        options = self.options()
        known = {one for own in options.values() for one in own.sources}
        wanted = {source} if source in known else {source, DEFAULT_SOURCE}
        return [name for name, own in options.items() if not own.sources or wanted & {*own.sources}]

    def judges(self) -> Mapping[str, JudgeOptions]:
        """Those that ask a language model, by name."""
        return {name: options for name, options in self.options().items() if isinstance(options, JudgeOptions)}

    def roles(self) -> Mapping[str, str]:
        """The roles of those judges that are models of the recipe, by the name of the reward."""
        return {name: options.role for name, options in self.judges().items() if options.role is not None}

    def without_judges(self) -> RewardsConfig:
        """The other rewards, which grade one response after the other."""
        left: dict[str, object] = {name: one for name, one in self.options().items() if name not in self.judges()}
        return RewardsConfig.model_validate(left)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        """The JSON Schema knows the built-in rewards that have names of their own."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        properties = schema["properties"]
        return {**schema, "patternProperties": {f"^{name}-[\\w-]+$": properties[name] for name in cls.model_fields}}


def named_type(name: str) -> type[RewardOptions] | None:
    """The settings of a built-in reward with a name of its own, such as `judge-style`; None if it is none."""
    kind, dash, word = name.partition("-")
    if not dash or not re.fullmatch(r"[\w-]+", word) or kind not in RewardsConfig.model_fields:
        return None
    found: type[RewardOptions] = get_args(RewardsConfig.model_fields[kind].annotation)[0]
    return found


def _read(name: str, settings: object) -> object:
    kind = named_type(name)
    if kind is None or isinstance(settings, kind):
        return settings
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        lines = [
            InitErrorDetails(type=line["type"], loc=(name, *line["loc"]), input=line["input"], ctx=line.get("ctx", {}))
            for line in error.errors()
        ]
        raise ValidationError.from_exception_data(name, lines) from error

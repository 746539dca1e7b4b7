"""Where episodes come from: environments with their tools, bodies, and clients of an online run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, Literal

from pydantic import Field, JsonValue, field_validator, model_validator

from leaderless.base.errors import RecipeError, nearest
from leaderless.base.named_functions import is_function_name, load_function
from leaderless.base.section import Section, ShorthandSection
from leaderless.config.failures import FailuresConfig


class McpServerConfig(Section):
    """A server that offers tools: a program that each rank starts, or an address."""

    command: tuple[str, ...] = ()
    """Program that answers on standard input and output, with its arguments. It gets the variables of `env` and a few
    others, such as `PATH` and `HOME`, but no secrets of the run; its standard error goes to the standard error of the
    run."""
    env: Mapping[str, str] = {}
    """Environment variables of the program."""
    url: str | None = Field(default=None, pattern=r"^https?://.+")
    """Address of a server that answers by streamable HTTP, instead of `command`."""
    token_variable: str | None = Field(default=None, min_length=1)
    """Environment variable of the run whose value is sent to `url` as a bearer token."""
    shared: bool = False
    """Whether all episodes of a rank share one session, for servers that keep nothing between calls; else each episode
    has one of its own, which begins with its first call."""
    start_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that starting a session may take."""

    @model_validator(mode="after")
    def _has_one_address(self) -> McpServerConfig:
        if bool(self.command) == (self.url is not None):
            raise ValueError("must have either `command`, a program to start, or `url`, the address of a server")
        if self.url is None and self.token_variable is not None:
            raise ValueError("`token_variable` is sent to a `url`; a program gets variables by `env`")
        if self.url is not None and self.env:
            raise ValueError("`env` is for a `command`; a server at a `url` is already running")
        return self


TOOL_FORMATS = ("hermes", "llama", "qwen3_coder", "mistral")
"""Built-in formats in which policies write calls of tools."""
FORMAT_KEY = "environment.tool_format"
"""Setting that names a format."""


class ToolConfig(ShorthandSection):
    """A function that the policy may call, or a class with methods that it may call."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Function `package.module:function`, or class `package.module:Class`, of which each episode has an object; or
    `python`, an interpreter in a sandbox."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of the constructor of a class."""


class EnvironmentConfig(ShorthandSection):
    """The environment in which the policy acts. A row of the dataset is a task, and a response an episode."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Environment: a built-in one (`calculator`, `gymnasium`, `openenv`, `reasoning_gym`, `search_r1`, `textarena` or
    `textarena_solo`), or a class `package.module:Class` derived from `leaderless.Environment`; or a program that leads
    the episode, a function `package.module:function`, `command`, `harbor` or `verifiers`; see
    [Programs that lead episodes](../guides/programs.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor; for a program, further arguments."""
    agents: Mapping[str, str] = {}
    """Role that plays each of the environment's agents, by the name of the agent; by default, the role of the rollout
    plays all of them."""
    max_turns: int = Field(default=8, ge=1)
    """Number of messages of the policy after which an episode that is not over is cut."""
    max_episode_tokens: int = Field(default=2048, ge=1)
    """Tokens of the policy and of the environment after a prompt of `data.max_prompt_tokens`, at which an episode is
    cut, and keeps its rewards so far."""
    act_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that one answer of the environment may take, or that a program may take between two questions; then the
    episode fails."""
    failures: FailuresConfig = FailuresConfig()
    """What is done about a failed episode, by the kind of the failure."""
    max_attempts: int = Field(default=3, ge=1)
    """Times that an episode is tried whose failure is `retried`, before it is absent."""
    concurrency: int = Field(default=256, ge=1)
    """Number of episodes that one rank plays at the same time."""
    isolation: Literal["thread", "process"] = "thread"
    """`thread` calls methods that are not `async` in threads; `process` plays each episode in a process of its own,
    which may crash or hang without harm. Environments that use global random numbers ask for processes by
    themselves."""
    images: bool = False
    """Whether messages to the policy may have images, for a model that sees them; see
    [Models that see images](../guides/images.md#images-in-episodes)."""
    tools: tuple[ToolConfig, ...] = ()
    """Tools that the policy may call, in addition to the environment's methods marked with `@tool`."""
    mcp: Mapping[str, McpServerConfig] = {}
    """Servers of the Model Context Protocol, whose tools the policy may call, by name."""
    tool_format: str = Field(default="auto", min_length=1)
    """How the policy writes calls: `hermes`, `llama`, `qwen3_coder`, `mistral`, a custom `package.module:function`, or
    `auto` for the format in which the chat template writes them."""
    tool_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a call of a tool may take; then the episode fails, as one that is late."""
    max_result_characters: int = Field(default=4000, ge=2)
    """Characters of a tool's result that the policy reads; the middle of a longer one is left out."""


def custom_reader(name: str, key: str = FORMAT_KEY) -> Callable[..., object] | None:
    """The function that reads calls in a user's format; None for a built-in format, or for `auto`.

    Raises:
        RecipeError: There is no such format; the error is at the key.
    """
    if name in {"auto", *TOOL_FORMATS}:
        return None
    if not is_function_name(name):
        hint = nearest(name, [*TOOL_FORMATS, "auto"])
        raise RecipeError.at(key, f"unknown format '{name}'{hint}; a custom one is 'package.module:function'")
    return load_function(name, key, 1)


Grain = Literal["token", "action", "chunk"]
"""Unit with its own log-probability: each number of an action, each action, or all actions of a decision."""


class PolicyConfig(ShorthandSection):
    """A model that moves a body, or that values what it sees."""

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Kind of the model: a built-in one, such as `mlp`, `cnn` or `film`, or a class `package.module:Class`."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor, such as sizes."""


class BodyConfig(ShorthandSection):
    """The environment of a body. A row of the dataset is a task, and a response an episode.

    The policy decides on several steps at once, a chunk of actions. What its decisions are made of takes the place of
    tokens.
    """

    shorthand: ClassVar[str] = "type"

    type: str = Field(min_length=1)
    """Environment: a built-in one, such as `table`, or a class `package.module:Class` derived from `VectorEnvironment`;
    see [Bodies](../guides/bodies.md)."""
    options: Mapping[str, JsonValue] = {}
    """Arguments of its constructor."""
    num_environments: int = Field(default=64, ge=1)
    """Episodes that one rank plays at the same time."""
    processes: int = Field(default=0, ge=0)
    """Processes next to each rank that step its environments, which may crash or hang without harm, and step while the
    rank decides; 0 steps them in the rank itself."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds that a reset or a decision's steps may take in a process; then its episodes fail."""
    max_steps: int = Field(default=256, ge=1)
    """Steps after which an episode is truncated, if the environment does not end it before."""
    log_prob: Grain = "token"
    """Unit with its own log-probability and advantage: each number of an action, each action (one step), or all
    actions of a decision together."""
    demonstrations: str | None = None
    """Folder of demonstrations, for workflows that imitate them."""
    encoder: str = Field(default="convolution", min_length=1)
    """Source of vectors of episodes, for workflows that compare them, such as `srpo`: `convolution`, a small network
    with fixed random weights, or the folder of a V-JEPA 2 of transformers."""
    encoded_frames: int = Field(default=16, ge=2)
    """Frames of an episode that it looks at, spread evenly."""


ONLINE = "online"
"""Path of the training data of an online run, which are the requests of clients."""

MAX_REWARD = 1e30
"""Largest absolute value of a reward, which training holds as a float32 number."""


class OnlineConfig(Section):
    """Where clients ask the policy, and what their feedback is worth. It takes the place of `data.train`."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Interface to listen on. Where other machines can reach it, clients send the key in LEADERLESS_TOKEN."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the first replica of the rollout; the next ones have the ports after it. 0 for any free ones."""
    feedback: Mapping[str, float] = {"accepted": 1.0, "edited": 0.5, "rejected": 0.0}
    """Reward of each word that clients may send; they may also send a number."""
    feedback_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a response without feedback is dropped."""
    max_staleness: int = Field(default=8, ge=0)
    """Most optimizer steps between the oldest token of a response and the weights of the step that takes it; an older
    response is dropped."""
    tool_format: str = Field(default="auto", min_length=1)
    """How the policy writes calls of tools; see `environment.tool_format`."""

    @field_validator("feedback")
    @classmethod
    def _words_are_given(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if not value or "" in value:
            raise ValueError("must name at least one word, and none that is empty")
        large = next((word for word in value if abs(value[word]) > MAX_REWARD), None)
        if large is not None:
            raise ValueError(f"gives '{large}' {value[large]:g}, but a reward is at most {MAX_REWARD:g}")
        return value

"""`leaderless env try`."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import Recipe, RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.guarded_environment import EnvironmentFailure
from leaderless.environments.programs.program_environment import ProgramEnvironment
from leaderless.environments.protocol import Message
from leaderless.environments.registry import environment_class, world_maker
from leaderless.environments.tools.calls import CallResult, ToolCalls
from leaderless.environments.tools.sources import ToolSources
from leaderless.environments.try_episode import Audience, Chance, HumanPlayer, TriedEpisode, Trier, try_episode
from leaderless.observability.console import console, errors
from leaderless.planner.workflow import load_recipe
from leaderless.rewards.dry_run import training_rows
from leaderless.run.settings import recipe_path

if TYPE_CHECKING:
    from leaderless.run.standalone_model import Served

MAX_RESPONSE_TOKENS = 512
"""Length of a model's message if no recipe says it."""


@dataclass(frozen=True)
class _Trial:
    """Environment to be tried.

    Attributes:
        config: Section `environment` of the recipe.
        task: Row of the dataset.
        seed: Seed of all randomness.
        recipe: The recipe, if there is one.
    """

    config: EnvironmentConfig
    task: Mapping[str, Json]
    seed: int
    recipe: Recipe | None


def try_(
    target: Annotated[
        str | None,
        typer.Argument(metavar="ENVIRONMENT", help="A class package.module:Class; by default the recipe's."),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policy: human, random, or a model: a folder, a run or a name on the hub.")
    ] = "human",
    task: Annotated[str | None, typer.Option(help='The task as a JSON object, such as {"n": 5}.')] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="A recipe, whose environment, tools and dataset are used.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Row of the recipe's training data that is the task.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of all randomness.")] = 0,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Messages after which the episode ends.")] = None,
) -> None:
    """Play one episode of an environment, and show what is said, called and rewarded.

    A person types lines; `/name {"argument": 1}` calls a tool, and Ctrl-D ends the episode. Ends with exit code 1 if
    the episode failed.
    """
    trial = _trial(target, recipe, task, row, seed, max_turns)
    sources = ToolSources(trial.config, environment_class(trial.config))
    try:
        outcome = asyncio.run(_play(trial, sources, policy))
    except EnvironmentFailure as failure:
        errors.print(
            Text("the episode failed ", "red bold").append(f"({failure.cause}): {failure}", "not bold default")
        )
        raise typer.Exit(1) from failure
    except KeyboardInterrupt as error:
        errors.print("\nstopped")
        raise typer.Exit(128 + signal.SIGINT) from error
    finally:
        sources.close()
    end = {"done": "over", "max_turns": "cut at max_turns", "left": "left before its end"}[outcome.end]
    shown = ", ".join(f"{name} {value:g}".strip() for name, value in outcome.rewards.items())
    console.print(Text(f"{end} after {outcome.num_turns} turns; reward {shown}", "bold"), soft_wrap=True)


def _trial(
    target: str | None, path: Path | None, task: str | None, row: int, seed: int, max_turns: int | None
) -> _Trial:
    if target is None and path is None:
        raise typer.BadParameter("name an environment, or a --recipe that has one")
    recipe = None if path is None else load_recipe(recipe_path(path), []).recipe
    if recipe is not None and recipe.environment is None and target is None:
        raise RecipeError.at("environment", f"{path} has none: name one, as in `leaderless env try module:Class`")
    changes = {"type": target, "max_turns": max_turns}
    given = {} if recipe is None or recipe.environment is None else recipe.environment.model_dump()
    config = EnvironmentConfig.model_validate(
        given | {name: value for name, value in changes.items() if value is not None}
    )
    if environment_class(config) is None:
        raise RecipeError.at("environment.type", f"'{config.type}' is a program, which asks the policy by itself")
    return _Trial(config, _task(task, recipe, row), seed, recipe)


def _task(text: str | None, recipe: Recipe | None, row: int) -> Mapping[str, Json]:
    if text is not None:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise typer.BadParameter(f"is no JSON: {error}", param_hint="--task") from error
        if not isinstance(found, dict):
            raise typer.BadParameter(f"must be a JSON object, not {text}", param_hint="--task")
        return found
    if recipe is None:
        return {}
    rows = list(islice(training_rows(recipe, row + 1), row, row + 1))
    if not rows:
        raise typer.BadParameter(f"the training data has fewer than {row + 1} rows", param_hint="--row")
    return rows[0]


async def _play(trial: _Trial, sources: ToolSources, policy: str) -> TriedEpisode:
    world = world_maker(trial.config)()
    assert not isinstance(world, ProgramEnvironment), "checked before"
    screen = _Screen(is_human=policy == "human")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        toolbox = await sources.open(world)
        stack.push_async_callback(toolbox.close, trial.config.tool_timeout_s)
        if sources.tools:
            console.print(
                Text("tools: ", "dim").append(", ".join(tool.usage for tool in sources.tools)), soft_wrap=True
            )
        trier = await stack.enter_async_context(_trier(trial, sources, policy))
        return await try_episode(trial.config, world, toolbox, trial.task, str(trial.seed), trier, screen)


@asynccontextmanager
async def _trier(trial: _Trial, sources: ToolSources, policy: str) -> AsyncIterator[Trier]:
    if policy == "human":
        yield HumanPlayer(sys.stdin.fileno(), lambda agent: console.print(f"{agent}> ".lstrip(), end=""))
    elif policy == "random":
        yield Chance(sources.tools, Random(trial.seed))  # noqa: S311
    else:
        from leaderless.run.standalone_model import find_model, open_model

        source = find_model(policy, "policy", lambda text: errors.print(Text(text)))
        with open_model(source, None, None, lambda text: errors.print(Text(text))) as served:
            async with _model(trial, sources, served) as trier:
                yield trier


@asynccontextmanager
async def _model(trial: _Trial, sources: ToolSources, served: Served) -> AsyncIterator[Trier]:
    from leaderless.config.rollout import SamplingConfig
    from leaderless.environments.chat_writer import ChatWriter
    from leaderless.environments.engine_scheduler import SharedEngineScheduler
    from leaderless.environments.tools.formats import find_reader
    from leaderless.environments.try_model import ModelTrier
    from leaderless.rollout.engine import SamplingParams
    from leaderless.stages.play_episodes import reader_of, writer_of

    recipe, tokenizer, schemas = trial.recipe, served.tokenizer, sources.schemas
    if recipe is None:
        writer = ChatWriter(tokenizer, tokenizer.chat_template is not None, tools=schemas)
        params = SamplingParams(SamplingConfig(), MAX_RESPONSE_TOKENS, (), trial.seed)
    else:
        data = next(iter(recipe.data.train_sets().values()))
        writer = replace(writer_of(tokenizer, data, None, reader_of(recipe, tokenizer)), tools=schemas)
        params = SamplingParams(recipe.rollout, recipe.rollout.max_response_tokens, recipe.rollout.stop, trial.seed)
    reader = None
    if sources.tools:
        reader = find_reader(trial.config.tool_format, tokenizer, schemas, is_chat=writer.is_chat)
    with served.serving.phase() as engine:
        pump = SharedEngineScheduler(engine)
        running = asyncio.create_task(pump.run())
        try:
            yield ModelTrier(pump, writer, reader, params, served.max_context)
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


class _Screen(Audience):
    """Prints a tried episode on the console."""

    def __init__(self, *, is_human: bool) -> None:
        self._is_human = is_human

    @override
    def told(self, agent: str, messages: Sequence[Message]) -> None:
        """Print messages, except the answers of tools, which were shown before."""
        for message in messages:
            if message["role"] != "tool":
                name = agent if message["role"] == "user" else message["role"]
                console.print(
                    Text(f"{name}< ".lstrip(), "dim").append(str(message["content"]), "not dim cyan"), soft_wrap=True
                )

    @override
    def said(self, agent: str, said: ToolCalls) -> None:
        """Print what an agent has said; a person has already seen what was typed."""
        if said.content and not self._is_human:
            console.print(Text(f"{agent}> ".lstrip(), "dim").append(said.content, "not dim"), soft_wrap=True)
        for call in said.calls:
            shown = call.problem or json.dumps(call.arguments, ensure_ascii=False)
            console.print(Text(f"  call {call.name} ", "yellow").append(shown, "not bold default"), soft_wrap=True)

    @override
    def answered(self, result: CallResult) -> None:
        color = "red" if result.refusal else "green"
        line = Text("  result ", color).append(result.text, "default")
        console.print(line.append(f" ({result.seconds:.2f} s)", "dim"), soft_wrap=True)

    @override
    def rewarded(self, rewards: Mapping[str, float]) -> None:
        for agent, value in rewards.items():
            if value:
                console.print(Text(f"  reward {agent} ".rstrip() + f" {value:+g}", "bold magenta"))

"""`leaderless env`: tries environments, and plays or grades the episodes of a run again."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
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
from leaderless.observability.console import console, errors, print_line
from leaderless.observability.episode_files import Kind
from leaderless.planner.workflow import load_recipe
from leaderless.rewards.dry_run import training_rows
from leaderless.run.settings import recipe_path

if TYPE_CHECKING:
    from leaderless.run.episodes import RunEpisodes

EpisodesOf = Annotated[
    Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or a file of its folder `episodes`.")
]
Overrides = Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value, on top of the run's.")]
OfStep = Annotated[int | None, typer.Option(help="Only the episodes of this step.")]
OfNumber = Annotated[int | None, typer.Option(help="Only the episode of this number.")]
"""Arguments of commands that take the episodes of a run."""
MAX_RESPONSE_TOKENS = 512
"""Length of a model's message if no recipe says it."""
MAX_SHOWN = 10
"""Number of differences that are listed."""

env = typer.Typer(help="Try environments, and play or grade the episodes of a run again.", no_args_is_help=True)


@env.command("try")
def try_environment(
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
    loaded = None if recipe is None else load_recipe(recipe_path(recipe), []).recipe
    config = _config(target, recipe, loaded, max_turns)
    given = _task(task, loaded, row)
    sources = ToolSources(config, environment_class(config))
    try:
        outcome = asyncio.run(_play(config, given, loaded, sources, policy, seed))
    except EnvironmentFailure as failure:
        errors.print(Text("the episode failed ", "red bold").append(f"({failure.kind}): {failure}", "not bold default"))
        raise typer.Exit(1) from failure
    except KeyboardInterrupt as error:
        errors.print("\nstopped")
        raise typer.Exit(128 + signal.SIGINT) from error
    finally:
        sources.close()
    end = {"done": "over", "max_turns": "cut at max_turns", "left": "left before its end"}[outcome.end]
    shown = ", ".join(f"{name} {value:g}".strip() for name, value in outcome.rewards.items())
    console.print(Text(f"{end} after {outcome.num_turns} turns; reward {shown}", "bold"), soft_wrap=True)


def _config(target: str | None, path: Path | None, recipe: Recipe | None, max_turns: int | None) -> EnvironmentConfig:
    """The section `environment` of the recipe, if there is one, with what the command line says."""
    own = None if recipe is None else recipe.environment
    if target is None and path is None:
        raise typer.BadParameter("name an environment, or a --recipe that has one")
    if target is None and own is None:
        raise RecipeError.at("environment", f"{path} has none: name one, as in `leaderless env try module:Class`")
    changes = {"type": target, "max_turns": max_turns}
    config = EnvironmentConfig.model_validate(
        ({} if own is None else own.model_dump()) | {name: one for name, one in changes.items() if one is not None}
    )
    if environment_class(config) is None:
        raise RecipeError.at("environment.type", f"'{config.type}' is a program, which asks the policy by itself")
    return config


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


async def _play(
    config: EnvironmentConfig,
    task: Mapping[str, Json],
    recipe: Recipe | None,
    sources: ToolSources,
    policy: str,
    seed: int,
) -> TriedEpisode:
    world = world_maker(config)()
    assert not isinstance(world, ProgramEnvironment), "checked before"
    screen = _Screen(is_human=policy == "human")
    async with AsyncExitStack() as stack:
        stack.push_async_callback(world.close)
        toolbox = await sources.open(world)
        stack.push_async_callback(toolbox.close, config.tool_timeout_s)
        if sources.tools:
            usages = ", ".join(tool.usage for tool in sources.tools)
            console.print(Text("tools: ", "dim").append(usages), soft_wrap=True)
        if policy == "human":
            trier: Trier = HumanPlayer(sys.stdin.fileno(), lambda agent: console.print(f"{agent}> ".lstrip(), end=""))
        elif policy == "random":
            trier = Chance(sources.tools, Random(seed))  # noqa: S311
        else:
            trier = await stack.enter_async_context(_model(config, recipe, sources, policy, seed))
        return await try_episode(config, world, toolbox, task, str(seed), trier, screen)


@asynccontextmanager
async def _model(
    config: EnvironmentConfig, recipe: Recipe | None, sources: ToolSources, policy: str, seed: int
) -> AsyncIterator[Trier]:
    """A model that plays, of a folder, a run or the hub."""
    from leaderless.config.rollout import SamplingConfig
    from leaderless.environments.chat_writer import ChatWriter
    from leaderless.environments.engine_scheduler import SharedEngineScheduler
    from leaderless.environments.tools.formats import find_reader
    from leaderless.environments.try_model import ModelTrier
    from leaderless.rollout.engine import SamplingParams
    from leaderless.run.standalone_model import find_model, open_model
    from leaderless.stages.episode_rollout import reader_of, writer_of

    def say(text: str) -> None:
        errors.print(Text(text))

    with open_model(find_model(policy, "policy", say), None, None, say) as served:
        tokenizer, schemas = served.tokenizer, sources.schemas
        if recipe is None:
            writer = ChatWriter(tokenizer, tokenizer.chat_template is not None, tools=schemas)
            params = SamplingParams(SamplingConfig(), MAX_RESPONSE_TOKENS, (), seed)
        else:
            data = next(iter(recipe.data.train_sets().values()))
            writer = replace(writer_of(tokenizer, data, None, reader_of(recipe, tokenizer)), tools=schemas)
            params = SamplingParams(recipe.rollout, recipe.rollout.max_response_tokens, recipe.rollout.stop, seed)
        reader = None
        if sources.tools:
            reader = find_reader(config.tool_format, tokenizer, schemas, is_chat=writer.is_chat)
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
                line = Text(f"{name}< ".lstrip(), "dim").append(str(message["content"]), "not dim cyan")
                console.print(line, soft_wrap=True)

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


@env.command("replay")
def replay_episodes(
    target: EpisodesOf,
    overrides: Overrides = None,
    step: OfStep = None,
    episode: OfNumber = None,
    evaluation: Annotated[bool, typer.Option("--evaluation", help="Episodes of evaluations, not of training.")] = False,
    from_journal: Annotated[
        bool,
        typer.Option(
            "--from-journal", help="Take the environment's answers from the journal: compares only the tokens."
        ),
    ] = False,
) -> None:
    """Play the episodes of a run again, without model and tools, and compare each answer of the environment.

    Ends with exit code 1 if anything differs, and says what differs first.
    """
    from leaderless.run.episodes import RunEpisodes  # imports torch

    kind: Kind = "evaluation" if evaluation else "step"
    episodes = RunEpisodes.of(target, overrides or [])
    steps = chosen_steps(episodes, kind, step, target)
    try:
        if not _replay(episodes, kind, steps, episode, from_journal=from_journal):
            raise typer.Exit(1)
    except ValueError as error:
        raise RecipeError.at("", str(error)) from error


def chosen_steps(episodes: RunEpisodes, kind: Kind, step: int | None, target: Path) -> list[int]:
    """The steps of a journal, or the chosen one; a RecipeError if there is none."""
    steps = [one for one in episodes.steps(kind) if step in {None, one}]
    if not steps:
        known = ", ".join(map(str, episodes.steps(kind)))
        remedy = f"there are those of {known}" if known else "none were played yet, or `run.kept_episodes` is 0"
        raise RecipeError.at("", f"{target} has no episodes of this {kind}: {remedy}")
    return steps


def _replay(episodes: RunEpisodes, kind: Kind, steps: Sequence[int], number: int | None, *, from_journal: bool) -> bool:
    """Play episodes again, and print what differs; returns whether nothing does."""
    num_played = num_different = 0
    for step in steps:
        lines = [line for line in episodes.played(kind, step) if number in {None, line["id"]}]
        for line, difference in episodes.replay(kind, lines, from_journal=from_journal):
            num_played += 1
            if difference is None:
                continue
            num_different += 1
            if num_different <= MAX_SHOWN:
                print_line(f"{kind} {step}, episode {line['id']}, {difference.place}:")
                print_line(f"  expected {difference.expected}\n  found    {difference.found}")
    if not num_played:
        raise RecipeError.at("", f"there is no episode {number} in the {kind}s {', '.join(map(str, steps))}")
    if num_different:
        print_line(f"{num_different:,} of {num_played:,} episodes differ")
        return False
    print_line(f"{num_played:,} episodes played again; none differs")
    return True

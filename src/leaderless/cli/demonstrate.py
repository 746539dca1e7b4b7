"""`leaderless demonstrate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from leaderless.config import RecipeError
from leaderless.data.demonstrations import Demonstration, Recorder
from leaderless.environments.bodies.protocol import Observations, VectorEnvironment
from leaderless.environments.bodies.registry import open_body
from leaderless.observability.console import console
from leaderless.run.settings import recipe_path
from leaderless.workflow import load_recipe

AT_ONCE = 64
"""Episodes that are played at the same time."""


def demonstrate(
    target: Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe with a body, or the folder of a run.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the demonstrations, new or one to add to.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as section.key=value.")] = None,
    episodes: Annotated[int, typer.Option(min=1, help="Number of episodes to record.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first episode; the next one has the next.")] = 0,
    keep_failures: Annotated[
        bool, typer.Option("--keep-failures", help="Record episodes without success, too.")
    ] = False,
) -> None:
    """Record what the scripted expert of an environment does, in the format of LeRobot."""
    loaded = load_recipe(recipe_path(target), overrides or [])
    config = loaded.recipe.body
    if config is None:
        raise loaded.locate(RecipeError.at("body", "the recipe has no body whose expert could demonstrate anything"))
    try:
        environment = open_body(config, AT_ONCE)
    except RecipeError as error:
        raise loaded.locate(error) from error
    num_tried = 0
    try:
        with Recorder(folder, robot=config.type) as recorder, console.status("recording"):
            for is_success, episode in played(environment, seed):
                num_tried += 1
                if is_success or keep_failures:
                    recorder.add(episode)
                if len(recorder) >= episodes or num_tried >= 100 * episodes:
                    break
            total = len(recorder)
    except (NotImplementedError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    finally:
        environment.close()
    console.print(f"{folder} has {total} demonstrations; {num_tried} episodes were played", highlight=False)


@dataclass
class _Trace:
    images: dict[str, list[NDArray[np.uint8]]] = field(default_factory=dict)
    states: list[NDArray[np.float32]] = field(default_factory=list)
    actions: list[NDArray[np.generic]] = field(default_factory=list)
    instruction: str = ""

    def see(self, observations: Observations, row: int) -> None:
        for camera, images in observations.images.items():
            self.images.setdefault(camera, []).append(images[row].copy())
        self.states.append(observations.state[row].copy())
        self.instruction = observations.instructions[row]

    def whole(self) -> Demonstration:
        images = {camera: np.stack(frames) for camera, frames in self.images.items()}
        return Demonstration(images, np.stack(self.states), np.stack(self.actions), self.instruction)


def played(environment: VectorEnvironment, seed: int) -> Iterator[tuple[bool, Demonstration]]:
    """Endless episodes of an expert in the order of their seeds, each with whether it did its task."""
    while True:
        yield from _together(environment, range(seed, seed + AT_ONCE))
        seed += AT_ONCE


def _together(environment: VectorEnvironment, seeds: Sequence[int]) -> list[tuple[bool, Demonstration]]:
    running, traces = list(range(len(seeds))), [_Trace() for _ in seeds]
    is_done = [False] * len(seeds)
    seen = environment.reset(running, [{"seed": seed} for seed in seeds], seeds)
    while running:
        actions = environment.expert(running)
        for row, number in enumerate(running):
            traces[number].see(seen, row)
            traces[number].actions.append(actions[row].copy())
        steps = environment.step(running, actions[:, None])
        for row, number in enumerate(running):
            is_done[number] = bool(steps.success[row])
        goes_on = ~(steps.terminated | steps.truncated)
        seen = Observations(
            {camera: images[goes_on] for camera, images in steps.observations.images.items()},
            steps.observations.state[goes_on],
            tuple(text for text, stays in zip(steps.observations.instructions, goes_on, strict=True) if stays),
        )
        running = [number for number, stays in zip(running, goes_on, strict=True) if stays]
    return [(done, trace.whole()) for done, trace in zip(is_done, traces, strict=True)]

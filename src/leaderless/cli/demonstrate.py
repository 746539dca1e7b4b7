"""`leaderless demonstrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leaderless.config import RecipeError
from leaderless.observability.console import console
from leaderless.planner.workflow import load_recipe
from leaderless.run.settings import recipe_path


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
    from leaderless.embodied.data.lerobot import DemonstrationWriter
    from leaderless.embodied.simulators.registry import open_body
    from leaderless.embodied.simulators.scripted_expert import AT_ONCE, played

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
        with DemonstrationWriter(folder, robot=config.type) as recorder, console.status("recording"):
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

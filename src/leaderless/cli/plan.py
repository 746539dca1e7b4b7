"""Commands about the plan of a recipe: `leaderless plan`, `schema` and `simulate` start nothing; `profile` measures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from leaderless.base.devices import find_accelerator
from leaderless.base.values import Json
from leaderless.cli.options import (
    ClusterOption,
    JsonOption,
    LayoutOption,
    OverridesArgument,
    RecipeArgument,
    WorkersOption,
    check_run,
    with_layout,
)
from leaderless.config import Recipe, load_section
from leaderless.config.packaged_files import find_packaged
from leaderless.observability.console import console, print_json, print_path
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.planner.placement.stage_seconds import read_profile
from leaderless.planner.show.placement import choice_to_json, print_choice, print_predicted
from leaderless.planner.simulate.cluster import ClusterConfig
from leaderless.run.planned_run import located, on_devices, plan_training
from leaderless.run.run import Run
from leaderless.run.stage_profile import Spans, measure, num_accelerators, profile_of


def plan(
    target: RecipeArgument,
    overrides: OverridesArgument = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of workers to plan for.")] = 1,
    as_json: JsonOption = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the graph into this SVG file.")] = None,
    layout: LayoutOption = "",
    cluster: ClusterOption = None,
    memory: Annotated[
        float | None, typer.Option(min=1, help="GiB of each accelerator, to show what fits into them.")
    ] = None,
) -> None:
    """Show what every worker would do, what they would send, and the memory it takes; start nothing."""
    if picture is not None and not picture.parent.is_dir():
        raise typer.BadParameter(f"folder {picture.parent} does not exist: make it first", param_hint="--picture")
    run = Run(target, *with_layout(overrides, layout, cluster))
    is_for_others = memory is not None or cluster is not None
    whole = plan_training(on_devices(run.loaded, "bfloat16") if is_for_others else run.loaded, world_size)
    planned, fitted = whole.plan, None
    if memory is not None:
        from leaderless.planner.show.fit import Fitted

        fitted = Fitted.of(whole.recipe, planned, memory)
        planned = fitted.plan
    if picture is not None:
        try:
            from leaderless.planner.show.picture import draw_plan

            write_atomically(picture, draw_plan(planned))
        except OSError as error:
            message = f"{picture} cannot be written: {error.strerror}"
            raise typer.BadParameter(message, param_hint="--picture") from error
        except ModuleNotFoundError as error:
            message = f"a picture needs {error.name}, which is not installed: pip install {error.name}"
            raise typer.BadParameter(message, param_hint="--picture") from error
    if as_json:
        chosen = {} if whole.choice is None else {"placement": choice_to_json(whole.choice)}
        print_json(planned.to_json() | chosen | ({} if fitted is None else {"fit": fitted.to_json()}))
        return
    from leaderless.planner.graph.judges import judge_lines
    from leaderless.planner.show.precision import precision_lines
    from leaderless.planner.show.text import door_lines, print_plan

    lowered: dict[str, int] = {}
    if planned.batch.adapts_to_memory:
        from leaderless.worker.supervision.settled_memory import read_limits

        lowered = read_limits(run.directory)
    lines = (of(whole.recipe, planned) for of in (door_lines, judge_lines, precision_lines))
    print_plan(planned, console, lowered, *lines)
    is_default = any("compute_dtype" not in model.model_fields_set for model in whole.recipe.models.values())
    if not is_for_others and is_default and find_accelerator() is None:
        console.print("Models compute in float32 on this machine, and in bfloat16 on accelerators: add --memory GIB.")
    if fitted is not None:
        fitted.print(console)
    if whole.choice is not None:
        print_choice(whole.choice, console)
    if picture is not None:
        print_path("picture", picture)


def schema() -> None:
    """Print the JSON Schema of recipes, by which editors complete and check them."""
    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema", **Recipe.model_json_schema()})


def simulate(
    target: RecipeArgument,
    cluster: Annotated[Path | None, typer.Option(help="File with the constants of the machines.")] = None,
    profile: Annotated[Path | None, typer.Option(help="File with measured seconds instead: a profile.")] = None,
    overrides: OverridesArgument = None,
    world_size: Annotated[str, typer.Option(help="Number of workers; several to compare, as in 64,512.")] = "1",
    prompts_per_rank: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a step for each worker, in place of batch.prompts_per_step.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; a list for several numbers.")] = False,
    layout: LayoutOption = "",
) -> None:
    """Estimate the time of a step from constants of machines or from measured seconds; start nothing."""
    if (cluster is None) == (profile is None):
        raise typer.BadParameter(
            "give one of --cluster, a file of constants, and --profile, a file of measured seconds"
        )
    sizes, chosen_by = world_sizes(world_size), None
    if layout or Run(target, *(overrides or [])).recipe.placement is not None:
        chosen_by = cluster
    settings = with_layout(overrides, layout, chosen_by)
    runs: dict[int, Run] = {}
    for size in sizes:
        own = [] if prompts_per_rank is None else [f"batch.prompts_per_step={prompts_per_rank * size}"]
        runs[size] = Run(target, *settings, *own)
    if cluster is not None:
        found = _estimates(runs, load_section(find_packaged(cluster), ClusterConfig), as_json=as_json)
    else:
        assert profile is not None
        found = _predictions(runs, profile, as_json=as_json)
    if as_json:
        print_json(found[0] if len(sizes) == 1 else found)


def world_sizes(text: str) -> list[int]:
    """The numbers of workers that a command line names, such as `1024,16384`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        message = f"is '{text}', but must be a number of workers, or several with commas, as in 64,512"
        raise typer.BadParameter(message, param_hint="--world-size")
    return [int(part) for part in parts]


def _estimates(runs: dict[int, Run], constants: ClusterConfig, *, as_json: bool) -> list[Json]:
    """Estimate a step for each number of workers, and print it; or return all as JSON-able values."""
    from leaderless.planner.show.text import estimate_to_json, print_estimate, print_estimates
    from leaderless.planner.simulate.rows import sample_workload, samplers_of
    from leaderless.planner.simulate.step import estimate_step

    found = []
    for size, run in runs.items():
        whole = plan_training(on_devices(run.loaded, constants.device.compute_dtype), size)
        with located(run.loaded):
            agents = [node.node.role for node in samplers_of(whole.plan)]
            workload = sample_workload(whole.recipe, constants.workload, agents)
            found.append((whole.plan, estimate_step(whole.plan, whole.recipe, workload, constants)))
    if as_json:
        return [estimate_to_json(plan, estimate, constants) for plan, estimate in found]
    if len(found) == 1:
        print_estimate(*found[0], constants, console)
    else:
        print_estimates(found, constants, console)
    return []


def _predictions(runs: dict[int, Run], profile: Path, *, as_json: bool) -> list[Json]:
    """The same by measured seconds."""
    from leaderless.planner.placement.search import predict_step  # it imports numpy

    found: list[Json] = []
    for size, run in runs.items():
        whole = plan_training(run.loaded, size)
        with located(run.loaded):
            predicted = predict_step(whole.recipe, whole.plan, read_profile(profile))
        if as_json:
            found.append(asdict(predicted))
        else:
            print_predicted(predicted, console, f"{size:,} workers, " if len(runs) > 1 else "")
    return found


def profile(
    target: RecipeArgument,
    overrides: OverridesArgument = None,
    workers: WorkersOption = 0,
    earlier: Annotated[
        Path | None, typer.Option("--from", help="Folder of a run whose traces are read; nothing is started.")
    ] = None,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("profile.json"),
) -> None:
    """Measure the seconds of each stage, in some short runs; `layout: auto` chooses layouts by them."""
    run = Run(target, *(overrides or []))
    if earlier is None:
        with located(run.loaded):
            found = measure(run.recipe, target, overrides or [], workers or num_accelerators())
    else:
        check_run(earlier, "--from")
        run, directory, spans = Run(earlier), RunDirectory(earlier), Spans()
        workers = len(list(directory.traces.glob("rank-*.json"))) or 1
        with located(run.loaded):
            spans.add(directory, plan_training(run.loaded, workers).plan)
            found = profile_of(spans, run.recipe, workers)
    write_atomically(output, found.model_dump_json(indent=1) + "\n")
    for name, law in found.stages.items():
        parts = (
            f"{law.fixed_s:.3g} s + {law.row_s:.3g} s/row + {law.token_s:.3g} s/token + {law.longest_s:.3g} s/longest"
        )
        parts += " + waits of episodes" * law.waits
        console.print(f"{name}: {parts} ±{law.error:.0%}", highlight=False)
    print_path("profile", output)

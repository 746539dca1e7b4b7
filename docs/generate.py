"""Writes the pages and pictures of the documentation that are derived from the code: `python docs/generate.py`.

They are committed, so that they can be read without building anything; a test fails when they are stale.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import typer
from generate_algorithms import formulas_page, results_page, with_combinations
from generate_bodies import bodies_page
from generate_convert import FRAMEWORKS, with_settings
from generate_distillation import distillation_pictures, with_distillation
from generate_embodied import with_rlpd, with_srpo
from generate_evidence import evidence_page, with_status
from generate_families import families_page
from generate_gallery import gallery_pictures, with_counting, with_evidence, with_gallery
from generate_gdpo import gdpo_pictures, with_gdpo
from generate_generation import with_generation
from generate_gpu import with_decode_counts, with_gpu, with_published
from generate_hosts import with_hosts
from generate_live_page import with_live_page
from generate_markup import cell, table_of
from generate_performance import (
    with_episodes,
    with_families,
    with_fixed_lag,
    with_loading,
    with_lora,
    with_offload,
    with_placement,
    with_real_models,
    with_real_size,
    with_slow_host,
    with_training_step,
    with_trees,
)
from generate_search import with_search
from generate_settings import cluster_page, configuration_pages, section_of
from generate_simulators import simulator_pages
from generate_submit import submit_page

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.cli.main import app
from leaderless.config import Recipe
from leaderless.observability.known_metrics import METRICS
from leaderless.planner import Cluster, make_plan
from leaderless.planner.show.picture import draw_plan
from leaderless.planner.workflow import (
    BUILTIN_STAGES,
    COLUMNS,
    DATA_COLUMNS,
    DATA_RESPONSE_COLUMNS,
    Node,
    StageSpec,
    Workflow,
    load_recipe,
    resolve_workflow,
)
from leaderless.planner.workflow.stage_spec import names_for

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
NOTE = "<!-- Written by docs/generate.py; change the code that it describes instead. -->"


class Picture(NamedTuple):
    """A plan to draw: a recipe of the repository, with overrides, and a number of workers."""

    recipe: str
    world_size: int
    overrides: tuple[str, ...] = ()


GSM8K = "recipes/gsm8k/grpo.yaml"
PICTURES = {
    "workflow-grpo": Picture(GSM8K, 8),
    "workflow-grpo-pruned": Picture(GSM8K, 8, ("algorithm.kl.coefficient=0", "batch.updates_per_step=1")),
    "workflow-grpo-pools": Picture(GSM8K, 8, ("layout.rollout.ranks=0-3", "layout.policy.ranks=4-7")),
    "workflow-grpo-channels": Picture(
        GSM8K, 8, ("layout.rollout.ranks=0-3", "layout.policy.ranks=4-7", "channels.rollout.capacity=2")
    ),
    "workflow-ppo": Picture("recipes/quickstart/ppo.yaml", 2, ("algorithm.kl.coefficient=0.001",)),
    "workflow-dapo": Picture("recipes/quickstart/dapo.yaml", 2),
    "workflow-remax": Picture("recipes/quickstart/grpo.yaml", 2, ("workflow=remax",)),
    "workflow-marft": Picture(
        "recipes/agents/signal/marft.yaml",
        2,
        (
            *(f"layout.{name}.ranks=0" for name in ("planner_rollout", "planner")),
            *(f"layout.{name}.ranks=1" for name in ("solver_rollout", "solver", "advantage", "critic")),
        ),
    ),
    "workflow-gkd": Picture(
        "recipes/quickstart/grpo.yaml",
        2,
        ("workflow=gkd", "algorithm.kl.coefficient=0", "models.reference=teacher", "algorithm.distillation.top_k=64"),
    ),
    "workflow-sft": Picture("recipes/quickstart/sft.yaml", 2),
    "workflow-informative": Picture("examples/own_workflow/recipe.yaml", 2),
}
"""Pictures by file name. Their models are only named, and need not exist."""


FILLED: Mapping[str, Callable[[str], str]] = {
    "algorithms/distillation.md": with_distillation,
    "algorithms/gdpo.md": with_gdpo,
    "algorithms/index.md": with_combinations,
    "algorithms/srpo.md": with_srpo,
    "gallery.md": with_gallery,
    "guides/images.md": with_counting,
    "guides/robots.md": with_rlpd,
    "guides/search.md": with_search,
    "performance/adapters.md": with_lora,
    "performance/asynchrony.md": with_fixed_lag,
    "performance/episodes.md": with_episodes,
    "performance/generation.md": lambda page: with_generation(with_decode_counts(page)),
    "performance/gpu.md": with_gpu,
    "performance/memory.md": lambda page: with_offload(with_loading(with_real_size(page))),
    "performance/placement.md": with_placement,
    "performance/published.md": with_published,
    "performance/real-models.md": with_real_models,
    "performance/slow-host.md": with_slow_host,
    "performance/training.md": lambda page: with_trees(with_families(with_training_step(page))),
    "scaling/hosts.md": with_hosts,
    "why-no-controller.md": with_evidence,
}
"""Pages with generated parts between marks, and what fills them."""


def main() -> None:
    """Write all pages and pictures."""
    sys.path.insert(0, str(ROOT))  # for the stages of examples, and for benchmarks
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def render() -> dict[Path, str]:
    """Every generated file and its content."""
    pages = {
        **configuration_pages(),
        "cluster": cluster_page(),
        "submit": submit_page(section_of),
        "cli": cli_page(),
        "stages": stages_page(),
        "columns": columns_page(),
        "metrics": metrics_page(),
        "algorithms": formulas_page(),
        "bodies": bodies_page(),
        "families": families_page(),
        **{f"simulators/{name}": page for name, page in simulator_pages().items()},
    }
    files = {DOCS / "reference" / f"{name}.md": f"{NOTE}\n\n{text.rstrip()}\n" for name, text in pages.items()}
    files[DOCS / "algorithms/results.md"] = f"{NOTE}\n\n{results_page()}\n"
    for name, fill in FILLED.items():
        files[DOCS / name] = fill((DOCS / name).read_text(encoding="utf-8"))
    for framework in FRAMEWORKS:
        settings = DOCS / f"reference/from-{framework}.md"
        files[settings] = with_settings(settings.read_text(encoding="utf-8"), framework)
    languages: tuple[tuple[Literal["en", "zh"], str], ...] = (("en", ".md"), ("zh", ".zh.md"))
    for language, ending in languages:
        live = DOCS / f"guides/ui{ending}"
        files[live] = with_live_page(live.read_text(encoding="utf-8"), language)
        files[DOCS / f"evidence{ending}"] = evidence_page(language)
        readme = ROOT / f"README{ending}"
        files[readme] = with_status(readme.read_text(encoding="utf-8"), language)
    pictures = {name: draw(picture) for name, picture in PICTURES.items()} | gallery_pictures() | gdpo_pictures()
    pictures |= distillation_pictures()
    return files | {DOCS / "images" / f"{name}.svg": text for name, text in pictures.items()}


def draw(picture: Picture) -> str:
    """The picture of a plan."""
    recipe = load_recipe(ROOT / picture.recipe, picture.overrides).recipe
    workflow = recipe.workflow
    local = ROOT / workflow
    return draw_plan(
        make_plan(recipe, resolve_workflow(str(local) if local.exists() else workflow), Cluster(picture.world_size))
    )


# --- command line ------------------------------------------------------------------------------------------------


def cli_page() -> str:
    """All commands and their options."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Command line",
        (
            "`leaderless COMMAND --help` prints the same, and `leaderless --version` the versions of leaderless and "
            "torch. `python -m leaderless` is the same command, in the form that `torchrun` needs."
        ),
        (
            "Exit codes: 0 for success, 2 for something that you have to correct, 128 + n if signal n stopped the "
            "command (130: Ctrl-C), and 1 for any other failure."
        ),
    ]
    for name, command in _commands_of(group):
        arguments = [p for p in command.params if _is_argument(p)]
        usage = " ".join(_usage(parameter) for parameter in arguments)
        parts += [f"## `leaderless {name}`", inspect.cleandoc(command.help or "")]
        parts += ["```text\n" + f"leaderless {name} {usage}".rstrip() + " [OPTIONS]".rstrip() + "\n```"]
        rows = [("`" + _usage(p).strip("[].").replace("|", "` or `") + "`", "", p.help or "") for p in arguments]
        rows += [_option_row(p) for p in command.params if not _is_argument(p) and p.name != "help"]
        parts += [table_of(("argument or option", "default", "meaning"), rows)] if rows else []
    return "\n\n".join(parts)


def _commands_of(group: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """All commands by name, those of groups such as `env replay` as well."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from ((f"{name} {inner}", one) for inner, one in _commands_of(command))
        else:
            yield name, command


def _is_argument(parameter: Any) -> bool:  # noqa: ANN401
    return not parameter.opts[0].startswith("-")


def _usage(parameter: Any) -> str:  # noqa: ANN401
    name = (parameter.metavar or parameter.name).upper()
    return name if parameter.required else f"[{name}]..."


def _option_row(parameter: Any) -> tuple[str, str, str]:  # noqa: ANN401
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    default = "" if parameter.default in {None, False} and not isinstance(parameter.default, int) else parameter.default
    shown = "" if default is False or default == "" else f"`{default}`"
    return f"`{parameter.opts[0]}{value}`", shown, cell(parameter.help or "")


# --- stages, columns, metrics ------------------------------------------------------------------------------------


def stages_page() -> str:
    """The contracts of the built-in stages."""
    parts = [
        "# Built-in stages",
        (
            "The stages that a node can name as `run`, and the contracts that the planner checks. "
            "[Stages and columns](../concepts/stages.md) explains the words, and "
            "[A custom stage](../guides/stage.md) how to add one."
        ),
    ]
    for name, spec in BUILTIN_STAGES.items():
        parts += [f"## `{name}`", _sentence(spec.summary)]
        parts += [table_of(("", ""), list(_stage_rows(name, spec)))]
    return "\n\n".join(parts)


CONDITIONS = {
    "batch.updates_per_step=2": "`batch.updates_per_step` is above 1",
    "algorithm.kl.coefficient=0.1": "`algorithm.kl.coefficient` is above 0",
    "algorithm.kl={coefficient: 0.1, place: reward}": "also `algorithm.kl.place` is `reward`",
    "algorithm.distillation.top_k=64": "`algorithm.distillation.top_k` is set",
    "algorithm.overlong.filter=true": "`algorithm.overlong.filter` is set",
    **{
        f"algorithm.advantage={{type: {kind}}}": f"`algorithm.advantage.type` is `{kind}`"
        for kind, found in ADVANTAGES.items()
        if found.reads or found.writes
    },
}
"""Settings that make stages read or write more, in words."""


BY_ROLE = {
    "log_probs": "`old_log_probs` for a role that is trained, `ref_log_probs` for a reference, `<role>_log_probs` for "
    "any other",
    "own_log_probs": "`old_log_probs` for a role that samples, `ref_log_probs` for its reference",
}
"""What stages write that depends on the role of the node."""


def _stage_rows(name: str, spec: StageSpec) -> Iterator[tuple[str, str]]:
    node = Node(name, name, "policy")
    workflow = Workflow("one", (node,))
    recipe = _recipe_with()
    reads, writes = spec.reads_of(recipe, node), spec.writes_of(recipe, node, workflow)
    yield "reads", _names(reads) or "nothing"
    for settings, condition in CONDITIONS.items():
        more = [column for column in spec.reads_of(_recipe_with(settings), node) if column not in reads]
        if more:
            yield f"reads, if {condition}", _names(more)
    if optional := names_for(recipe, node, spec.reads_if_made):
        yield "reads, if an earlier node writes it", _names(optional)
    yield "writes", BY_ROLE.get(name) or _names(writes) or "nothing"
    for settings, condition in CONDITIONS.items():
        more = [c for c in spec.writes_of(_recipe_with(settings), node, workflow) if c not in writes]
        if more:
            yield f"writes, if {condition}", _names(more)
    rows = {
        "same": "keeps them",
        "expand": "turns prompts into samples",
        "extend": "keeps samples, and adds further ones",
        "filter": "drops some",
        "regroup": "forms new groups",
    }
    yield "rows", rows[spec.rows]
    role = {
        "none": "none",
        "generate": "generates with it",
        "score": "computes log-probabilities with it",
        "train": "trains it",
    }
    teachers = {"teach": "none; it asks the teachers", "distill": "trains it; without `top_k` it asks the teacher"}
    yield "role", teachers.get(name) or role[spec.role_use]
    if spec.needs_whole_episodes:
        yield "whole groups", "needed on one rank if episodes may have several samples"
    else:
        yield "whole groups", "needed on one rank" if spec.needs_whole_groups else "not needed"
    if name == "record":
        yield "runs", "while `run.recorded_prompts` is above 0"
    elif spec.is_effective(recipe):
        yield "runs", "always"
    else:
        yield "runs", "if another node reads what it writes"


@functools.cache
def _recipe_with(*overrides: str) -> Recipe:
    """A recipe without a penalty, plus some overrides."""
    return load_recipe(ROOT / "recipes/quickstart/grpo.yaml", ["algorithm.kl.coefficient=0", *overrides]).recipe


def columns_page() -> str:
    """The built-in columns."""
    recipe = _recipe_with("algorithm.advantage={type: gae}")
    writers: dict[str, list[str]] = {}
    for column in (*DATA_COLUMNS, *DATA_RESPONSE_COLUMNS):
        writers.setdefault(column, []).append("the data" + " (to imitate)" * (column in DATA_RESPONSE_COLUMNS))
    for stage, spec in BUILTIN_STAGES.items():
        for role in ("policy", "reference"):
            node = Node(stage, stage, role)
            for column in spec.writes_of(recipe, node, Workflow("one", (node, Node("trainer", "update", "policy")))):
                if f"`{stage}`" not in writers.setdefault(column, []):
                    writers[column].append(f"`{stage}`")
    rows = []
    for name, column in COLUMNS.items():
        kind = f"{column.kind}, along `{column.axis}`" if column.axis else column.kind
        meaning = column.meaning + (" (held once per prompt)" if column.is_prompt else "")
        rows.append((f"`{name}`", kind, f"`{column.dtype}`", ", ".join(writers.get(name, ["custom stages"])), meaning))
    return "\n\n".join(
        [
            "# Built-in columns",
            (
                "The columns that built-in stages exchange. A *dense* column has one value per row, a *jagged* column "
                "any number of values per row without padding, and an *object* column a JSON-able value. A custom "
                "stage may read any of them and write columns of any other name, which need no entry here. See "
                "[Batches](../concepts/batch.md)."
            ),
            table_of(("column", "kind", "type", "written by", "meaning"), rows),
        ]
    )


def metrics_page() -> str:
    """The metrics of a run."""
    parts = [
        "# Metrics",
        (
            "The metrics that a run writes to `metrics.jsonl` and TensorBoard, with one record per step. Values cover "
            "the samples of all ranks; apart from times and speeds, none depends on the number of ranks. Parts in "
            "angle brackets stand for a name or a number in the recipe: `<role>/loss` is `policy/loss` and, with a "
            "critic, `critic/loss`. `checkpoint.best_metric` may name any metric that the recipe reports."
        ),
        (
            "Each record also has `step`, which is 0 for measurements before the first step, and `time_s`, the "
            "seconds since the run began, including earlier starts of the same run."
        ),
    ]
    prefixes = dict.fromkeys(name.partition("/")[0] for name in METRICS)
    for prefix in prefixes:
        metrics = {name: metric for name, metric in METRICS.items() if name.startswith(f"{prefix}/")}
        header = ("metric", "meaning", "reported with")
        rows = [(f"`{name}`", cell(_sentence(metric.meaning)), metric.needs) for name, metric in metrics.items()]
        if not any(metric.needs for metric in metrics.values()):
            header, rows = header[:2], [row[:2] for row in rows]
        parts += [f"## `{prefix}/`", table_of(header, rows)]
    context = "[context](../guides/stage.md#metrics)"
    parts.append(f"Custom stages report metrics through their {context}; the report draws them below the others.")
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f"`{column}`" for column in columns)


if __name__ == "__main__":
    main()

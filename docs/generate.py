"""Writes the pages and pictures of the documentation that are derived from the code: `python docs/generate.py`.

They are committed, so that they can be read without building anything; a test fails when they are stale.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import typer
from generate_algorithms import formulas_page, results_page, with_combinations
from generate_bodies import bodies_page
from generate_convert import FRAMEWORKS, with_settings
from generate_embodied import with_rlpd, with_srpo
from generate_families import families_page
from generate_gallery import gallery_pictures, with_counting, with_evidence, with_gallery
from generate_gdpo import gdpo_pictures, with_gdpo
from generate_generation import with_generation
from generate_gpu import with_decode_counts, with_gpu, with_published
from generate_hosts import with_hosts
from generate_live_page import with_live_page
from generate_markup import cell, sections_of, table_of
from generate_performance import (
    with_episodes,
    with_fixed_lag,
    with_loading,
    with_lora,
    with_placement,
    with_real_size,
    with_slow_host,
    with_training_step,
)
from generate_search import with_search
from generate_simulators import simulator_pages
from generate_submit import submit_page
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.registry import CUSTOM
from leaderless.cli.main import app
from leaderless.config import Recipe
from leaderless.config.base import ShorthandSection
from leaderless.config.reward_options import RewardOptions
from leaderless.config.roles import RoleConfig
from leaderless.planner import Cluster, make_plan
from leaderless.planner.costs.cluster import ClusterConfig
from leaderless.planner.picture import draw_plan
from leaderless.workflow import (
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
from leaderless.workflow.metrics import METRICS

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
    "workflow-sft": Picture("recipes/quickstart/sft.yaml", 2),
    "workflow-informative": Picture("examples/own_workflow/recipe.yaml", 2),
}
"""Pictures by file name. Their models are only named, and need not exist."""


def main() -> None:
    """Write all pages and pictures."""
    sys.path.insert(0, str(ROOT))  # for the stages of examples, and for benchmarks
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def render() -> dict[Path, str]:
    """Every generated file and its content."""
    pages = {
        "configuration": configuration_page(),
        "cluster": cluster_page(),
        "submit": submit_page(_section),
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
    index = DOCS / "algorithms/index.md"
    files[index] = with_combinations(index.read_text(encoding="utf-8"))
    for framework in FRAMEWORKS:
        guide = DOCS / f"guides/from-{framework}.md"
        files[guide] = with_settings(guide.read_text(encoding="utf-8"), framework)
    gallery = DOCS / "gallery.md"
    files[gallery] = with_gallery(gallery.read_text(encoding="utf-8"))
    images = DOCS / "guides/images.md"
    files[images] = with_counting(images.read_text(encoding="utf-8"))
    reasons = DOCS / "why-no-controller.md"
    files[reasons] = with_evidence(reasons.read_text(encoding="utf-8"))
    gdpo = DOCS / "algorithms/gdpo.md"
    files[gdpo] = with_gdpo(gdpo.read_text(encoding="utf-8"))
    srpo = DOCS / "algorithms/srpo.md"
    files[srpo] = with_srpo(srpo.read_text(encoding="utf-8"))
    robots = DOCS / "guides/robots.md"
    files[robots] = with_rlpd(robots.read_text(encoding="utf-8"))
    scaling = DOCS / "scaling.md"
    files[scaling] = with_hosts(scaling.read_text(encoding="utf-8"))
    for language, name in (("en", "ui.md"), ("zh", "ui.zh.md")):
        live = DOCS / "guides" / name
        files[live] = with_live_page(live.read_text(encoding="utf-8"), language)
    search = DOCS / "guides/search.md"
    files[search] = with_search(search.read_text(encoding="utf-8"))
    lora = DOCS / "guides/lora.md"
    files[lora] = with_lora(lora.read_text(encoding="utf-8"))
    placement = DOCS / "guides/placement.md"
    files[placement] = with_placement(placement.read_text(encoding="utf-8"))
    performance = DOCS / "performance.md"
    page = with_published(with_decode_counts(with_slow_host(performance.read_text(encoding="utf-8"))))
    files[performance] = with_gpu(
        with_episodes(with_loading(with_real_size(with_fixed_lag(with_generation(with_training_step(page))))))
    )
    pictures = {name: draw(picture) for name, picture in PICTURES.items()} | gallery_pictures() | gdpo_pictures()
    return files | {DOCS / "images" / f"{name}.svg": text for name, text in pictures.items()}


def draw(picture: Picture) -> str:
    """The picture of a plan."""
    recipe = load_recipe(ROOT / picture.recipe, picture.overrides).recipe
    workflow = recipe.workflow
    local = ROOT / workflow
    return draw_plan(
        make_plan(recipe, resolve_workflow(str(local) if local.exists() else workflow), Cluster(picture.world_size))
    )


# --- configuration -----------------------------------------------------------------------------------------------


def configuration_page() -> str:
    """Every setting of a recipe."""
    parts = [
        "# Recipe settings",
        (
            "All keys of a recipe. On the command line, each can be set as `section.key=value`. "
            "[Recipes and overrides](../concepts/recipe.md) explains how recipes are read and checked."
        ),
        "Keys without a default are required. Names of times in seconds end in `_s`.",
    ]
    own = {name: field for name, field in Recipe.model_fields.items() if not sections_of(field.annotation)}
    parts += ["## Top level", _settings_table(own, "")]
    for name, field in Recipe.model_fields.items():
        for section in sections_of(field.annotation):
            key = f"{name}.<name>" if get_origin(field.annotation) is Mapping else name
            parts += list(_section(section, key, field.description or ""))
    return "\n\n".join(parts)


def cluster_page() -> str:
    """Every constant of a cluster file."""
    parts = [
        "# Cluster constants",
        (
            "The constants of machines, libraries and workload that `leaderless simulate` reads from a cluster file. "
            "[Scaling](../scaling.md) explains how they are used; `recipes/clusters/` has files with values and their "
            "sources."
        ),
        "Names of times end in `_us` (microseconds), of memory in `_gib`, of bandwidth in `_gb_per_s` (10⁹ bytes/s).",
    ]
    for name, field in ClusterConfig.model_fields.items():
        for section in sections_of(field.annotation):
            key = f"{name}.<name>" if get_origin(field.annotation) is Mapping else name
            parts += list(_section(section, key, field.description or ""))
    return "\n\n".join(parts)


def _section(section: type[BaseModel], key: str, description: str) -> Iterator[str]:
    heading = key.replace(
        "<name>",
        {"models": "<role>", "roles": "<role>", "layout": "<node>", "channels": "<node>"}.get(
            key.partition(".")[0], "<name>"
        ),
    )
    yield f"## `{heading}`" if "." not in heading or "<" in heading else f"### `{heading}`"
    yield cell(description, keep_lines=True)
    if issubclass(section, ShorthandSection):
        yield f"A single value in place of this section sets `{section.shorthand}`."
    fields = section.model_fields
    plain = {name: field for name, field in fields.items() if not sections_of(field.annotation)}
    if plain:
        yield _settings_table(plain, f"{heading}.")
    if section.__name__ == "RewardsConfig":
        yield "Every reward, built-in or custom, also has these settings:"
        yield _settings_table(RewardOptions.model_fields, "reward.<name>.")
        yield "A custom reward is named `package.module:function`; see [Rewards](../concepts/rewards.md)."
    for name, field in fields.items():
        inner_sections = sections_of(field.annotation)
        if len(inner_sections) > 1 and "type" not in inner_sections[0].model_fields:
            yield from _one_or_several(inner_sections, f"{heading}.{name}", field)
            continue
        if len(inner_sections) > 1:
            yield from _typed_sections(inner_sections, f"{heading}.{name}", field)
            continue
        for inner in inner_sections:
            if issubclass(inner, RewardOptions):
                yield from _reward(inner, f"{heading}.{name}", field.description or "")
            elif section is RoleConfig:
                yield f"### `{heading}.{name}`"
                yield f"{cell(field.description or '')} It has the settings of [`{name}`](#{name})."
            else:
                yield from _section(inner, f"{heading}.{name}", field.description or "")


def _reward(options: type[RewardOptions], heading: str, description: str) -> Iterator[str]:
    """The settings of a reward that not all rewards have, or that mean something else in it."""
    yield f"### `{heading}`"
    yield cell(description, keep_lines=True)
    common = {name: field.description for name, field in RewardOptions.model_fields.items()}
    own = {name: one for name, one in options.model_fields.items() if one.description != common.get(name)}
    if plain := {name: one for name, one in own.items() if not sections_of(one.annotation)}:
        yield _settings_table(plain, f"{heading}.")
    for name, one in own.items():
        for inner in sections_of(one.annotation):
            several = ".<name>" if get_origin(one.annotation) is Mapping else ""
            yield from _section(inner, f"{heading}.{name}{several}", one.description or "")


def _one_or_several(sections: Sequence[type[BaseModel]], heading: str, field: FieldInfo) -> Iterator[str]:
    """A section that may also be given several times, by names that the user chooses."""
    one, of_several = sections
    yield from _section(one, heading, field.description or "")
    more = {name: inner for name, inner in of_several.model_fields.items() if name not in one.model_fields}
    yield f"### `{heading}.<name>`"
    yield f"One of several, by name. It has the settings of [`{heading}`](#{heading.replace('.', '')}), and also:"
    yield _settings_table(more, f"{heading}.<name>.")


def _typed_sections(sections: Sequence[type[BaseModel]], heading: str, field: FieldInfo) -> Iterator[str]:
    """Sections from which `type` selects one."""
    yield f"### `{heading}`"
    yield f"{cell(field.description or '')} `{heading}.type` selects it; the default is `{field.default.type}`."
    rows: list[tuple[str, ...]] = []
    for section in sections:
        kind = section.model_fields["type"].default
        if kind is PydanticUndefined:
            text = (
                "A custom class with settings of its own; see [A custom class](../algorithms/index.md#a-custom-class)."
            )
            rows.append((f"**`{CUSTOM}`**", "", "", text))
            continue
        rows.append((f"**`{kind}`**", "", "", cell(inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0])))
        for name, inner in section.model_fields.items():
            if name != "type":
                rows.append((f"`{heading}.{name}`", _type_name(inner), _default(inner), cell(inner.description or "")))
    yield table_of(("type and its settings", "type", "default", "meaning"), rows)


def _settings_table(fields: Mapping[str, FieldInfo], prefix: str) -> str:
    rows = [
        (f"`{prefix}{name}`", f"{_type_name(field)}", _default(field), cell(field.description or ""))
        for name, field in fields.items()
    ]
    return table_of(("setting", "type", "default", "meaning"), rows)


def _type_name(field: FieldInfo) -> str:
    """The type of a setting in YAML terms, with its bounds."""
    bounds = []
    for bound in field.metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            value = getattr(bound, name, None)
            if value is not None:
                bounds.append(f"{sign} {value}")
    return " ".join([_annotation_name(field.annotation), ", ".join(bounds)]).strip()


def _annotation_name(annotation: object) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", type(None): ""}
    if annotation in names:
        return names[annotation]  # type: ignore[index]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_annotation_name(get_args(annotation)[0])}s"
    inner = [name for argument in get_args(annotation) if (name := _annotation_name(argument))]
    return " or ".join(inner)


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None:
        return "see meaning"
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, tuple) and not value:
        return "none"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"`{value:.0e}`".replace("e-0", "e-")
    return f"`{json.dumps(value)}`"


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
    if optional := spec.reads_if_made_of(node):
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
    yield "role", role[spec.role_use]
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

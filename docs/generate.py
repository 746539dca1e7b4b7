"""Writes the pages and pictures of the documentation that follow from the code: `python docs/generate.py`.

What it writes is committed, so that it can be read without building anything; a test tells when it is stale.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from leaderless.algorithms.catalogue import entries
from leaderless.cli.main import app
from leaderless.config import Recipe
from leaderless.config.algorithm import AlgorithmConfig, KlConfig, refusals
from leaderless.config.base import ShorthandSection
from leaderless.config.rewards import RewardOptions
from leaderless.observability.report.catalogue import CATALOGUE
from leaderless.planner import Cluster, make_plan
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

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # for the stages of examples, and for benchmarks
NOTE = "<!-- Written by docs/generate.py; change the code that it describes instead. -->"


class Picture(NamedTuple):
    """A plan to be drawn: of a recipe of the repository, with overrides, on so many workers."""

    recipe: str
    world_size: int
    overrides: tuple[str, ...] = ()


GSM8K = "recipes/gsm8k/grpo.yaml"
PICTURES = {
    "workflow-grpo": Picture(GSM8K, 8),
    "workflow-grpo-pruned": Picture(GSM8K, 8, ("algorithm.kl.coefficient=0", "batch.updates_per_step=1")),
    "workflow-grpo-pools": Picture(GSM8K, 8, ("layout.rollout.ranks=0-3", "layout.policy.ranks=4-7")),
    "workflow-ppo": Picture("recipes/quickstart/ppo.yaml", 2, ("algorithm.kl.coefficient=0.001",)),
    "workflow-dapo": Picture("recipes/quickstart/dapo.yaml", 2),
    "workflow-remax": Picture("recipes/quickstart/grpo.yaml", 2, ("workflow=remax",)),
    "workflow-sft": Picture("recipes/quickstart/sft.yaml", 2),
    "workflow-informative": Picture("examples/own_workflow/recipe.yaml", 2),
}
"""Pictures by file name; their models are named, and need not be here."""


def main() -> None:
    """Write all of it."""
    for path, text in render().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def render() -> dict[Path, str]:
    """Every generated file and what it should hold."""
    pages = {
        "configuration": configuration_page(),
        "cli": cli_page(),
        "stages": stages_page(),
        "columns": columns_page(),
        "metrics": metrics_page(),
        "algorithms": formulas_page(),
    }
    files = {DOCS / "reference" / f"{name}.md": f"{NOTE}\n\n{text.rstrip()}\n" for name, text in pages.items()}
    files[DOCS / "algorithms/results.md"] = f"{NOTE}\n\n{results_page()}\n"
    index = DOCS / "algorithms/index.md"
    files[index] = with_combinations(index.read_text(encoding="utf-8"))
    return files | {DOCS / "images" / f"{name}.svg": draw(picture) for name, picture in PICTURES.items()}


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
        "# Settings of a recipe",
        (
            "Every key that a recipe may have; on the command line each can be set as `section.key=value`. "
            "See [Recipes and overrides](../concepts/recipe.md) for how they are read and checked."
        ),
        "A key without a default has to be given. Seconds end in `_s`; sizes count what their name says.",
    ]
    own = {name: field for name, field in Recipe.model_fields.items() if not _sections_of(field.annotation)}
    parts += ["## The recipe itself", _settings_table(own, "")]
    for name, field in Recipe.model_fields.items():
        for section in _sections_of(field.annotation):
            key = f"{name}.<name>" if get_origin(field.annotation) is Mapping else name
            parts += list(_section(section, key, field.description or ""))
    return "\n\n".join(parts)


def _section(section: type[BaseModel], key: str, description: str) -> Iterator[str]:
    heading = key.replace("<name>", {"models": "<role>", "layout": "<node>"}.get(key.partition(".")[0], "<name>"))
    yield f"## `{heading}`" if "." not in heading or "<" in heading else f"### `{heading}`"
    yield _cell(description, keep_lines=True)
    if issubclass(section, ShorthandSection):
        yield f"Written as one value, it sets `{section.shorthand}`."
    fields = section.model_fields
    plain = {name: field for name, field in fields.items() if not _sections_of(field.annotation)}
    if plain:
        yield _settings_table(plain, f"{heading}.")
    if section.__name__ == "RewardsConfig":
        yield "Each reward, built in or of one's own, also has:"
        yield _settings_table(RewardOptions.model_fields, "reward.<name>.")
        yield "A reward of one's own is named `package.module:function`; see [Rewards](../concepts/rewards.md)."
    for name, field in fields.items():
        inner_sections = _sections_of(field.annotation)
        if len(inner_sections) > 1:
            yield from _typed_sections(inner_sections, f"{heading}.{name}", field)
            continue
        for inner in inner_sections:
            own = {n: f for n, f in inner.model_fields.items() if n not in RewardOptions.model_fields}
            if issubclass(inner, RewardOptions):
                yield f"### `{heading}.{name}`"
                yield _cell(field.description or "", keep_lines=True)
                if own:
                    yield _settings_table(own, f"{heading}.{name}.")
            elif inner.__name__ == "OptimizerConfig":
                yield f"### `{heading}.{name}`"
                yield f"{_cell(field.description or '')} It has the settings of [`optimizer`](#optimizer)."
            else:
                yield from _section(inner, f"{heading}.{name}", field.description or "")


def _typed_sections(sections: Sequence[type[BaseModel]], heading: str, field: FieldInfo) -> Iterator[str]:
    """Sections of which `type` chooses one."""
    yield f"### `{heading}`"
    yield f"{_cell(field.description or '')} `{heading}.type` says which; `{field.default.type}` when not given."
    rows: list[tuple[str, ...]] = []
    for section in sections:
        kind = section.model_fields["type"].default
        rows.append((f"**`{kind}`**", "", "", _cell(inspect.cleandoc(section.__doc__ or ""))))
        for name, inner in section.model_fields.items():
            if name != "type":
                rows.append((f"`{heading}.{name}`", _type_name(inner), _default(inner), _cell(inner.description or "")))
    yield _table(("type, and its settings", "type", "default", "meaning"), rows)


def _sections_of(annotation: object) -> list[type[BaseModel]]:
    """The sections that a field's annotation holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {Union, UnionType, Annotated, Mapping}:
        return [section for argument in get_args(annotation) for section in _sections_of(argument)]
    return []


def _settings_table(fields: Mapping[str, FieldInfo], prefix: str) -> str:
    rows = [
        (f"`{prefix}{name}`", f"{_type_name(field)}", _default(field), _cell(field.description or ""))
        for name, field in fields.items()
    ]
    return _table(("setting", "type", "default", "meaning"), rows)


def _type_name(field: FieldInfo) -> str:
    """The type of a setting in words of YAML, with its bounds."""
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
    if value is PydanticUndefined:
        return "must be given"
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
            "`leaderless COMMAND --help` prints the same. `python -m leaderless` is the same command, as it is needed "
            "behind `torchrun`."
        ),
        (
            "Exit codes: 0 for success, 2 for something that the user has to correct, 128 + n when signal n stopped it "
            "(130: Ctrl-C), 1 for any other failure."
        ),
    ]
    for name, command in group.commands.items():
        arguments = [p for p in command.params if _is_argument(p)]
        usage = " ".join(_usage(parameter) for parameter in arguments)
        parts += [f"## `leaderless {name}`", inspect.cleandoc(command.help or "")]
        parts += ["```text\n" + f"leaderless {name} {usage}".rstrip() + " [OPTIONS]".rstrip() + "\n```"]
        rows = [("`" + _usage(p).strip("[].").replace("|", "` or `") + "`", "", p.help or "") for p in arguments]
        rows += [_option_row(p) for p in command.params if not _is_argument(p) and p.name != "help"]
        parts += [_table(("argument or option", "default", "meaning"), rows)] if rows else []
    return "\n\n".join(parts)


def _is_argument(parameter: Any) -> bool:  # noqa: ANN401
    return not parameter.opts[0].startswith("-")


def _usage(parameter: Any) -> str:  # noqa: ANN401
    name = (parameter.metavar or parameter.name).upper()
    return name if parameter.required else f"[{name}]..."


def _option_row(parameter: Any) -> tuple[str, str, str]:  # noqa: ANN401
    value = "" if parameter.is_flag else f" {parameter.name.upper()}"
    default = "" if parameter.default in {None, False} and not isinstance(parameter.default, int) else parameter.default
    shown = "" if default is False or default == "" else f"`{default}`"
    return f"`{parameter.opts[0]}{value}`", shown, _cell(parameter.help or "")


# --- stages, columns, metrics ------------------------------------------------------------------------------------


def stages_page() -> str:
    """The contracts of the built-in stages."""
    parts = [
        "# Built-in stages",
        (
            "What a node may name as `run`, and the contract that the planner checks. "
            "See [Stages and columns](../concepts/stages.md) for the words, and "
            "[A stage of one's own](../guides/stage.md) for how to add one."
        ),
    ]
    for name, spec in BUILTIN_STAGES.items():
        parts += [f"## `{name}`", f"{spec.summary[0].upper()}{spec.summary[1:]}."]
        parts += [_table(("", ""), list(_stage_rows(name, spec)))]
    return "\n\n".join(parts)


CONDITIONS = {
    "batch.updates_per_step=2": "`batch.updates_per_step` is above 1",
    "algorithm.kl.coefficient=0.1": "`algorithm.kl.coefficient` is above 0",
    "algorithm.kl={coefficient: 0.1, place: reward}": "that is so and `algorithm.kl.place` is `reward`",
    "algorithm.overlong.filter=true": "`algorithm.overlong.filter` is set",
    "algorithm.advantage={type: gae}": "`algorithm.advantage.type` is `gae`",
}
"""Settings under which stages read or write more, in words."""


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
    if name == "log_probs":
        own, other = "`old_log_probs` for a role that is trained", "`<role>_log_probs` for any other"
        yield "writes", f"{own}, `ref_log_probs` for `reference`, {other}"
    else:
        yield "writes", _names(writes) or "nothing"
    for settings, condition in CONDITIONS.items():
        more = [c for c in spec.writes_of(_recipe_with(settings), node, workflow) if c not in writes]
        if more:
            yield f"writes, if {condition}", _names(more)
    rows = {
        "same": "keeps them",
        "expand": "makes samples of prompts",
        "filter": "leaves some out",
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
    yield "whole groups", "needed on one rank" if spec.needs_whole_groups else "not needed"
    if name == "record":
        yield "runs", "while `run.recorded_prompts` is above 0"
    elif spec.is_effective(recipe):
        yield "runs", "always"
    else:
        yield "runs", "if another node reads what it writes"


def _recipe_with(*overrides: str) -> Recipe:
    """A recipe without a penalty, but for what is asked for."""
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
        rows.append((f"`{name}`", kind, f"`{column.dtype}`", ", ".join(writers[name]), meaning))
    return "\n\n".join(
        [
            "# Built-in columns",
            (
                "What built-in stages exchange. *Dense* is one value per row, *jagged* a run of values per row and "
                "never padded, *object* a JSON-able value. A stage of one's own may read any of them and write "
                "columns of any other name; those need no entry here. See [Batches](../concepts/batch.md)."
            ),
            _table(("column", "kind", "type", "written by", "meaning"), rows),
        ]
    )


MORE_METRICS = {
    "step": "The step, from 0 for what is measured before the first.",
    "time_s": "Seconds since the run began, earlier starts of the same run included.",
    "time/step": "Seconds of the whole step, evaluation and checkpoints left out.",
    "time/<entry>": "Seconds of one entry of the chain, on the rank that took longest: a node by its name, `load`, "
    "`reshard(a->0-3)`, `weights(policy->0-3)`.",
    "time/evaluate": "Seconds of an evaluation.",
    "reward/<name>": "Mean of one reward before weighting, over the responses that it could be computed for.",
    "<role>/...": "Where the tables above say `policy/`, the name of the trained role stands.",
}


def metrics_page() -> str:
    """What a run logs."""
    parts = [
        "# Metrics",
        (
            "What a run writes into `metrics.jsonl` and TensorBoard, one record a step, in the order of its report. "
            "All are over the samples of all ranks; none depends on how many ranks there are, except "
            "times and speeds. `*` stands for a number or a name."
        ),
    ]
    for title, topics in CATALOGUE.items():
        rows = []
        for topic in topics:
            names = [*topic.metrics, *([topic.band] if topic.band else [])]
            rows.append((", ".join(f"`{name}`" for name in names), topic.title, _cell(topic.explanation)))
        parts += [f"## {title}", _table(("metric", "chart", "meaning"), rows)]
    rows = [(f"`{name}`", _cell(text)) for name, text in MORE_METRICS.items()]
    parts += ["## Beside these", _table(("metric", "meaning"), rows)]
    parts += [
        (
            "A stage of one's own adds metrics through its [context](../guides/stage.md#metrics); the report draws "
            "them below the others."
        )
    ]
    return "\n\n".join(parts)


# --- algorithms --------------------------------------------------------------------------------------------------


def results_page() -> str:
    """What `benchmarks/algorithms.py` has measured last."""
    from benchmarks.algorithms import PICTURE, describe, load, table

    parts = [
        "# Measured on the quickstart",
        (
            "Every built-in workflow of reinforcement learning begins with the same tiny model, which has learnt to "
            "add from a careless teacher, and learns from nothing but whether its answers are right. Accuracy is that "
            "of greedy answers to 512 additions that no run was trained on. The settings are those of "
            "`recipes/quickstart/grpo.yaml`, but `ppo` and `dapo` have recipes of their own there. One worker on one "
            "CPU core; the seed decides the order of the prompts and the samples."
        ),
    ]
    curves = load()
    if curves:
        parts += [
            f"{describe()} Seconds are those of all steps, evaluation left out, the mean over seeds.",
            table(curves, link="[{0}]({0}.md)"),
            f"![Held-out accuracy by step, a chart for each workflow](../images/{PICTURE.name})",
            (
                "The line is the mean over seeds, the band goes from the worst to the best, and the grey lines are the "
                "other workflows. The task is small and its reward exact: this shows that each of them learns, not "
                "which is the best for a large model."
            ),
        ]
    else:
        parts += ["There is nothing here yet: the script below has not been run for this version."]
    return "\n\n".join([*parts, "To measure it again:", "```shell\npython benchmarks/algorithms.py\n```"])


def formulas_page() -> str:
    """All functions of `leaderless.algorithms`, as their docstrings have them."""
    rows = [(entry.kind, f"`{entry.name}`", f"`{_cell(entry.formula)}`", _cell(entry.source)) for entry in entries()]
    return "\n\n".join(
        [
            "# Formulas and sources",
            (
                "Every function of `leaderless.algorithms`, with what its docstring says. `python -m "
                "leaderless.algorithms` prints the same. `A` is the advantage of a token, `ratio` that of its "
                "probability under the current policy to that before the step's updates, `sg` stops the gradient. "
                "How to combine them: [Algorithms](../algorithms/index.md)."
            ),
            _table(("kind", "function", "formula", "source, and what differs from it"), rows),
        ]
    )


PENALTIES = {
    "no penalty": {"coefficient": 0.0},
    "penalty in the loss": {"coefficient": 0.1},
    "penalty in the loss, `unbiased_gradient`": {"coefficient": 0.1, "unbiased_gradient": True},
    "penalty in the reward": {"coefficient": 0.1, "place": "reward"},
    "penalty in the reward, `unbiased_gradient`": {"coefficient": 0.1, "place": "reward", "unbiased_gradient": True},
}
MARKS = "<!-- combinations: begin -->", "<!-- combinations: end -->"


class Trial(NamedTuple):
    """A combination, and why it is refused."""

    advantage: str
    loss: str
    aggregation: str
    penalty: str
    reasons: list[str]


def with_combinations(page: str) -> str:
    """A page with the table of combinations between its two marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{combinations()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def combinations() -> str:
    """Advantage x loss x aggregation x KL, every combination tried, and why some are refused."""
    trials = list(_trials())
    advantages, losses = (list(dict.fromkeys(trial[i] for trial in trials)) for i in range(2))
    cells = {(loss, name): [t for t in trials if t[:2] == (name, loss)] for loss in losses for name in advantages}
    rules = list(dict.fromkeys(reason for trial in trials for reason in trial.reasons))
    # A rule that holds whatever the advantage and the loss says nothing in their table.
    everywhere = [rule for rule in rules if all(any(rule in t.reasons for t in cell) for cell in cells.values())]
    numbered = [rule for rule in rules if rule not in everywhere]
    rows = []
    for loss in losses:
        row = [f"`{loss}`"]
        for name in advantages:
            cell = cells[loss, name]
            # The aggregations and penalties of a rule that refuses all of them need no other rule.
            total = [rule for rule in numbered if all(rule in trial.reasons for trial in cell)]
            found = total or [rule for rule in numbered if any(rule in trial.reasons for trial in cell)]
            marks = " ".join(f"({numbered.index(rule) + 1})" for rule in found)
            row.append(f"refused {marks}" if total else f"yes {marks}".rstrip())
        rows.append(tuple(row))
    table = _table(("loss, advantage", *(f"`{name}`" for name in advantages)), rows)
    notes = [f"{i}. {_rule(rule, trials)}" for i, rule in enumerate(numbered, 1)]
    wide = [f"Whatever the advantage and the loss are: {_rule(rule, trials)}" for rule in everywhere]
    counted = f"Of {len(trials):,} combinations {sum(not trial.reasons for trial in trials):,} are taken."
    return "\n\n".join([table, "\n".join(notes), *wide, counted])


def _trials() -> Iterator[Trial]:
    parts = {name: _sections_of(AlgorithmConfig.model_fields[name].annotation) for name in ("advantage", "policy_loss")}
    aggregations = get_args(AlgorithmConfig.model_fields["aggregation"].annotation)
    for advantage, loss, aggregation, (penalty, kl), estimator in product(
        parts["advantage"],
        parts["policy_loss"],
        aggregations,
        PENALTIES.items(),
        get_args(KlConfig.model_fields["estimator"].annotation),
    ):
        algorithm = AlgorithmConfig.model_construct(
            advantage=advantage.model_construct(),
            policy_loss=loss.model_construct(),
            aggregation=aggregation,
            kl=KlConfig(**kl, estimator=estimator),
        )
        reasons = [reason.replace(f"aggregation={aggregation}", "aggregation=…") for reason in refusals(algorithm)]
        names = (section.model_fields["type"].default for section in (advantage, loss))
        yield Trial(*names, aggregation, penalty, reasons)


def _rule(rule: str, trials: Sequence[Trial]) -> str:
    """A refusal, with the aggregations and penalties that it is about if not about all."""
    about = [trial for trial in trials if rule in trial.reasons]
    scopes = []
    for field, mark in (("aggregation", "`"), ("penalty", "")):
        met, all_values = (dict.fromkeys(getattr(trial, field) for trial in some) for some in (about, trials))
        if len(met) < len(all_values):
            scopes.append(", ".join(f"{mark}{value}{mark}" for value in met))
    text = re.sub(r"[\w.]+=[\w.…]+|(?:algorithm|kl|policy_loss)\.[\w.]+", lambda match: f"`{match[0]}`", rule)
    return f"{text} ({'; '.join(scopes)})." if scopes else f"{text}."


def _names(columns: tuple[str, ...]) -> str:
    return ", ".join(f"`{column}`" for column in columns)


def _cell(text: str, *, keep_lines: bool = False) -> str:
    """A text on one line, safe inside a table."""
    text = " ".join(text.split())
    return text if keep_lines else text.replace("|", "\\|")


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [titles, tuple("---" for _ in titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    main()

"""Commands that check what a run will use: machines (`leaderless doctor`), rewards and chat templates."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from leaderless.base.leftover_processes import leftovers_ended
from leaderless.cli.options import JsonOption, OverridesArgument, RecipeArgument, RendezvousOption, cut, parse_nodes
from leaderless.config import RecipeError
from leaderless.observability.console import Display, console, errors, print_json, print_line
from leaderless.planner.workflow import load_recipe
from leaderless.rewards.dry_run import RewardTrial, Score, read_responses, try_rewards
from leaderless.run.doctor.finding import DoctorFinding, merged, run_checks
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.settings import recipe_path
from leaderless.worker.rank_info import RankInfo

if TYPE_CHECKING:
    from leaderless.models.chat_templates.report import TemplateDifference, TemplateReport

STYLES = {"ok": "green", "warning": "yellow", "error": "red bold"}
MAX_CELL_CHARACTERS = 60
"""Length at which prompts, answers and responses are cut in the table of rewards."""
MAX_TRACES = 3
"""Largest number of different errors of rewards that are shown with their tracebacks."""
MAX_TEMPLATE_CHARACTERS = 120
"""Length at which texts and tokens are cut in the table of a template."""


def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder of all runs, as in run.directory.")] = Path("runs"),
    workers: Annotated[int, typer.Option(min=0, help="Workers on this machine; 0 checks it without any.")] = 0,
    nodes: Annotated[str, typer.Option(metavar="MIN:MAX", help="Number of machines; start this command on each.")] = "",
    rendezvous: RendezvousOption = "",
    as_json: JsonOption = False,
) -> None:
    """Check this machine, or all machines of a job: versions, devices, limits, folders, network.

    Ends with exit code 1 if a run would fail.
    """
    machines = parse_nodes(nodes or "1", rendezvous) if nodes or rendezvous else None
    if RankInfo.is_given():
        from leaderless.run.doctor.collective_checks import check_together

        place = RankInfo.from_environment()
        found = check_together(place, folder)
        if place.rank > 0:
            return
    elif workers or nodes:
        found = _with_workers(folder, max(1, workers), machines if nodes else None)
    else:
        from leaderless.run.doctor.machine import CHECKS, folder_check, port_check

        port = int(rendezvous.rpartition(":")[2]) if rendezvous else 29500
        checks = [*CHECKS, port_check(port), folder_check(folder, is_shared=False)]
        found = run_checks(socket.gethostname(), checks)
    found = merged(found)
    if as_json:
        print_json([finding.to_json() for finding in found])
    else:
        _print_findings(found)
    if any(finding.level == "error" for finding in found):
        raise typer.Exit(1)


def _with_workers(folder: Path, workers: int, machines: Nodes | None) -> list[DoctorFinding]:
    """Start workers as a run does, and read what they have found."""
    from leaderless.observability.run_directory import RunDirectory
    from leaderless.run.launch.agent import Agent, Launch
    from leaderless.run.launch.restarts import Restarts
    from leaderless.worker.supervision.failure import WorkersFailed

    with tempfile.TemporaryDirectory(prefix="leaderless-doctor-") as name:
        directory, result = RunDirectory(Path(name)), Path(name) / "found.json"
        job = json.dumps({"folder": str(folder), "found": str(result)})
        launch = Launch("leaderless.run.doctor.worker", job, workers, directory.logs, 5.0, "doctor", machines)
        try:
            Agent(launch, Restarts(directory, 0, print_line)).run()
        except WorkersFailed as error:
            remedy = "check `leaderless doctor` on each machine, and that the others reach the address of --rendezvous"
            return [DoctorFinding("workers", error.failure.message, "error", remedy, (socket.gethostname(),))]
        return [DoctorFinding.from_json(one) for one in json.loads(result.read_text(encoding="utf-8"))]


def _print_findings(found: Sequence[DoctorFinding]) -> None:
    num_places = len({place for finding in found for place in finding.places})
    has_places = len({finding.places for finding in found}) > 1
    table = Table("check", "found", *["where"] * has_places)
    for finding in found:
        value = escape(finding.value) + (f"\n[bold]{escape(finding.remedy)}" if finding.remedy else "")
        where = "all" if len(finding.places) == num_places else ", ".join(finding.places)
        table.add_row(f"[{STYLES[finding.level]}]{escape(finding.name)}", value, *[escape(where)] * has_places)
    console.print(table)
    counts = {level: sum(finding.level == level for finding in found) for level in STYLES}
    print_line(f"{counts['ok']} as they should be, {counts['warning']} warnings, {counts['error']} errors")


def reward(
    target: RecipeArgument,
    overrides: OverridesArgument = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows of each dataset to try.")] = 5,
    response: Annotated[str | None, typer.Option(help="A response to grade for every row.")] = None,
    responses: Annotated[
        Path | None,
        typer.Option(
            help="A file with a response for each row: JSON lines (texts or objects with `response`) or text."
        ),
    ] = None,
) -> None:
    """Try the rewards of a recipe on its data, in this process; without responses, grade the expected and an empty one.

    Ends with exit code 1 if a reward failed.
    """
    if response is not None and responses is not None:
        raise typer.BadParameter("give either --response or --responses")
    if responses is not None and not responses.is_file():
        raise typer.BadParameter(f"{responses} is no file", param_hint="--responses")
    loaded = load_recipe(recipe_path(target), overrides or [])
    if not loaded.recipe.reward.options():
        raise loaded.locate(RecipeError.at("reward", "the recipe has no reward to try"))
    try:
        given = read_responses(responses) if responses else [response] if response is not None else []
        graded = [""]  # names of rewards

        def status() -> str:
            return f"{graded.count(graded[-1])} responses are graded by '{graded[-1]}'" if graded[-1] else "grading"

        with leftovers_ended(), Display(errors, status=status):
            trials = try_rewards(loaded.recipe, rows, given, graded.append)
    except RecipeError as error:
        raise loaded.locate(error) from error
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--responses") from error
    console.print(_table_of_trials(trials, list(loaded.recipe.reward.options())))
    failed = [(name, score) for trial in trials for name, score in trial.scores.items() if score.error]
    traces = {score.trace or score.error: name for name, score in failed}
    for trace, name in islice(traces.items(), MAX_TRACES):
        console.print(Text(f"\n{name}\n", "bold red").append(trace.rstrip(), "not bold default"), soft_wrap=True)
    if len(traces) > MAX_TRACES:
        console.print(Text(f"\nand {len(traces) - MAX_TRACES} more errors"))
    if any(not trial.scores for trial in trials):
        console.print(Text("\nno reward applies to some rows: look at the `sources` of rewards", "red"))
    if any(trial.reward is None for trial in trials):
        raise typer.Exit(1)


def _table_of_trials(trials: list[RewardTrial], names: list[str]) -> Table:
    # The name of its function distinguishes a custom reward well enough, and is short.
    scores = [Column(Text(name.rpartition(":")[2]), justify="right") for name in (*names, "reward")]
    table = Table("row", "prompt", "expected", "response", *scores, show_lines=len(names) > 1)
    made = {"expected": Text("the expected answer", "dim"), "empty": Text("empty", "dim")}
    for trial in trials:
        sample = trial.sample
        table.add_row(
            str(trial.row),
            _cell(sample.prompt),
            _cell(sample.answer),
            made.get(trial.kind) or _cell(sample.response),
            *(_score(trial.scores.get(name)) for name in names),
            Text("failed", "red") if trial.reward is None else Text(f"{trial.reward:.4g}", "bold"),
        )
    return table


def _score(score: Score | None) -> Text:
    if score is None:
        return Text("–", "dim")
    text = Text("failed" if score.value is None else f"{score.value:.4g}", "red" if score.error else "")
    if score.answer is not None:
        text.append("\nfound ", "dim").append_text(_cell(score.answer))
    if score.said:
        said = " ".join(score.said.split())
        said = said if len(said) <= MAX_CELL_CHARACTERS else f"…{said[-MAX_CELL_CHARACTERS:]}"
        text.append("\nsays ", "dim").append(said)
    milliseconds = 1000 * score.seconds
    return text.append("\n<1 ms" if milliseconds < 1 else f"\n{milliseconds:,.0f} ms", "dim")


def _cell(value: object) -> Text:
    return Text(cut(value, MAX_CELL_CHARACTERS))


def template(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="Folder of a model, checkpoint or run, GGUF file, or name of a model on the hub."
        ),
    ],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Permission to run Python code that comes with the model.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Tell whether a chat template is append-only, and show the tokens that it adds between turns.

    It is append-only if each prompt of a conversation begins with all that the model has seen and written before.
    """
    from leaderless.config.models import ModelConfig
    from leaderless.models.chat_templates.check import check_template
    from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
    from leaderless.run.standalone_model import find_model

    try:
        has_tokenizer = (Path(model) / "tokenizer_config.json").exists()
        found = ModelConfig(path=model) if has_tokenizer else find_model(model, "policy", errors.print).config
        trusts = trust_remote_code or found.trust_remote_code
        config = found.model_copy(update={"revision": revision or found.revision, "trust_remote_code": trusts})
        tokenizer = load_tokenizer(config, "policy")
        report = check_template(tokenizer, end_tokens(config, tokenizer))
    except RecipeError as error:  # there is no recipe with a key
        raise RecipeError([replace(problem, key=model) for problem in error.problems]) from error
    if as_json:
        print_json({"is_append_only": report.is_append_only, "verdict": report.verdict(), **asdict(report)})
        return
    color = "green" if report.is_append_only else "red"
    kind, _, rest = report.verdict().partition(":")
    console.print(Text(kind, f"{color} bold").append(f":{rest}", "not bold default"), soft_wrap=True)
    for what, problem in report.refused.items():
        console.print(Text(f"{what} not tried: ", "yellow").append(problem, "default"), soft_wrap=True)
    for trial in report.trials:
        for difference in trial.differences:
            _print_difference(trial.conversation, difference)
    console.print(_table_of_template(report))


def _print_difference(conversation: str, difference: TemplateDifference) -> None:
    text = Text(f"\n{conversation}, turn {difference.turn}: ", "bold").append(difference.cause, "red")
    text.append(f" (token {difference.position})", "dim")
    for label, tokens, shown in (
        ("was", difference.was, difference.was_text),
        ("now", difference.now, difference.now_text),
    ):
        text.append(f"\n  {label}  ", "not bold dim").append(repr(shown), "not bold cyan")
        text.append(f"  {' '.join(map(str, tokens))}", "not bold dim")
    console.print(text, soft_wrap=True)


def _table_of_template(report: TemplateReport) -> Table:
    columns = "place", Column("text", style="cyan", overflow="fold"), Column("tokens", style="dim", overflow="fold")
    table = Table(*columns, title="\ntokens that the template adds", title_justify="left")
    for piece in report.boundaries():
        tokens = " ".join(map(str, piece.tokens))
        table.add_row(piece.place, Text(_without_middle(repr(piece.text))), _without_middle(tokens))
    end = Text(repr(report.end) if report.end else "none")
    table.add_row("end of an answer, sampled", end, "" if report.end_token is None else str(report.end_token))
    return table


def _without_middle(text: str) -> str:
    """A text without its middle if it is too long; `--json` has all of it."""
    half = MAX_TEMPLATE_CHARACTERS // 2
    return text if len(text) <= MAX_TEMPLATE_CHARACTERS else f"{text[:half]} … {text[-half:]}"

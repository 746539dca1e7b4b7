"""`leaderless template`."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from leaderless.config import RecipeError
from leaderless.observability.console import console, print_json

MAX_CELL_CHARACTERS = 120
"""Length at which texts and tokens are cut in the table."""

if TYPE_CHECKING:
    from leaderless.models.chat_templates.report import TemplateDifference, TemplateReport


def template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or the name of a model on the hub.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Permission to run Python code that comes with the model.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether a chat template is append-only, and show the tokens that it adds between turns.

    It is append-only if each prompt of a conversation begins with all that the model has seen and written before.
    """
    report = _check(model, revision, trust_remote_code=trust_remote_code)
    if as_json:
        facts = {"is_append_only": report.is_append_only, "verdict": report.verdict(), **asdict(report)}
        print_json(facts)
        return
    color = "green" if report.is_append_only else "red"
    kind, _, rest = report.verdict().partition(":")
    console.print(Text(kind, f"{color} bold").append(f":{rest}", "not bold default"), soft_wrap=True)
    for what, problem in report.refused.items():
        console.print(Text(f"{what} not tried: ", "yellow").append(problem, "default"), soft_wrap=True)
    for trial in report.trials:
        for difference in trial.differences:
            _print_difference(trial.conversation, difference)
    console.print(_table(report))


def _check(model: str, revision: str | None, *, trust_remote_code: bool) -> TemplateReport:
    from leaderless.config.models import ModelConfig
    from leaderless.models.chat_templates.check import check_template
    from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer

    config = ModelConfig(path=model, revision=revision, compute_dtype="float32", trust_remote_code=trust_remote_code)
    try:
        tokenizer = load_tokenizer(config, "policy")
        return check_template(tokenizer, end_tokens(config, tokenizer))
    except RecipeError as error:  # there is no recipe with a key
        raise RecipeError([replace(problem, key=model) for problem in error.problems]) from error


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


def _table(report: TemplateReport) -> Table:
    table = Table(title="\ntokens that the template adds", title_justify="left")
    table.add_column("place")
    table.add_column("text", style="cyan", overflow="fold")
    table.add_column("tokens", style="dim", overflow="fold")
    for piece in report.boundaries():
        tokens = [str(token) for token in piece.tokens]
        table.add_row(piece.place, Text(_cut(repr(piece.text))), _cut(" ".join(tokens)))
    table.add_row(
        "end of an answer, sampled",
        Text(repr(report.end) if report.end else "none"),
        "" if report.end_token is None else str(report.end_token),
    )
    return table


def _cut(text: str) -> str:
    """A text without its middle if it is too long; `--json` has all of it."""
    half = MAX_CELL_CHARACTERS // 2
    return text if len(text) <= MAX_CELL_CHARACTERS else f"{text[:half]} … {text[-half:]}"

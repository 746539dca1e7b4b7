"""`leaderless eval --with`: tasks that others have defined, measured by their own package."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rich.table import Column, Table

from leaderless.cli.options import check_serving, ended_by_signals
from leaderless.config import RecipeError
from leaderless.observability.console import Display, console, errors, print_json, print_path
from leaderless.observability.evaluations import (
    FOLDER,
    ROW_TITLES,
    TaskEvaluation,
    lm_eval_scores,
    score_row,
)
from leaderless.serving.lm_harness import (
    NAME,
    HarnessTarget,
    HarnessTasks,
    answer_harness,
    find_harness,
    harness_command,
    newest_results,
    write_config,
)
from leaderless.worker.rank_info import RankInfo

if TYPE_CHECKING:
    from leaderless.run.standalone_model import ModelSource, Served

LOOPBACK = "127.0.0.1"


def evaluate_with_lm_eval(
    target: str, role: str, python: str, tasks: HarnessTasks, out: Path | None, *, as_json: bool
) -> None:
    """Serve a model on a free port of this machine, have lm-eval ask it, and print and keep what it has measured.

    Args:
        target: Model, checkpoint or run.
        role: Role that answers, of a checkpoint or run.
        python: Interpreter of an environment with lm-eval.
        tasks: Tasks and their settings.
        out: Folder for the evaluation; one in the folder of the run by default, or in `runs` for a model.
        as_json: Whether the numbers are printed as JSON.

    Raises:
        RecipeError: The package, a task or the model is not there, or lm-eval has ended with an error.
        Interrupted: A signal has stopped it.
        RuntimeError: The server has failed.
    """
    check_serving("eval --with")
    if RankInfo.is_given() and RankInfo.from_environment().world_size > 1:
        raise RecipeError.at("", "`leaderless eval --with` is one process: start it without torchrun")
    tasks.check()
    version = find_harness(python, tasks)
    from leaderless.run.standalone_model import find_model, open_model

    loading = Display(errors, status=lambda: f"loading {target}")
    with ended_by_signals(), loading as display:
        source = find_model(target, role, _say)
        _say(f"loading {source.checkpoint or source.config.path}")
        # Only the native engine tells log-probabilities of prompts, and on an accelerator only without pages.
        with open_model(source, "native", None, _say, is_full=True) as served:
            folder = _new_folder(out or _parent_of(source) / f"{NAME}-{datetime.now(UTC):%Y%m%d-%H%M%S}")
            display.status = lambda: f"{NAME} {version} at work"
            with display.counting(f"{NAME} {version}", "requests") as count:
                begin = time.monotonic()
                results = _measured(served, python, tasks, folder, count)
                seconds = time.monotonic() - begin
    weights = str(source.checkpoint or source.config.path)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    scores = lm_eval_scores(results)
    evaluation = TaskEvaluation(f"{NAME} {version}", source.name, weights, when, seconds, tasks.to_json(), scores)
    evaluation.write(folder)
    if as_json:
        print_json(asdict(evaluation))
        return
    table = Table(*ROW_TITLES[:2], *(Column(title, justify="right") for title in ROW_TITLES[2:]))
    for score in scores:
        table.add_row(*score_row(score))
    console.print(table)
    print_path("evaluation", folder)


def _say(text: str) -> None:
    errors.print(text, highlight=False, markup=False, soft_wrap=True)


def _parent_of(source: ModelSource) -> Path:
    """The folder for evaluations of a model: in its run, or else one that is named after it."""
    run = Path("runs") / f"eval-{Path(source.name).name}"
    if source.checkpoint is not None and (source.checkpoint.parents[1] / "config.yaml").exists():
        run = source.checkpoint.parents[1]
    return run / FOLDER


def _new_folder(path: Path) -> Path:
    if path.exists() and any(path.iterdir()):
        raise RecipeError.at("--out", f"{path} is not empty: name another folder")
    path.mkdir(parents=True, exist_ok=True)
    return path


def _measured(
    served: Served, python: str, tasks: HarnessTasks, folder: Path, count: Callable[[int, int], None]
) -> Mapping[str, object]:
    """The results of lm-eval about a model, whose server ends with this call."""
    import asyncio

    from leaderless.serving.api.app import ModelServer
    from leaderless.serving.listen import address_of, take_port

    token = secrets.token_hex(32)
    with take_port(LOOPBACK, 0, token) as listener, TemporaryDirectory(prefix="leaderless-") as tokenizer:
        served.tokenizer.save_pretrained(tokenizer)
        adds_begin = bool(served.tokenizer.encode(""))
        url = f"http://{address_of(listener)}/v1"
        asked = HarnessTarget(served.name, url, Path(tokenizer), served.max_context, adds_begin)
        command = harness_command(python, write_config(tasks, asked, folder), tasks)
        server = ModelServer(served, token, _say)
        asyncio.run(answer_harness(server, listener, command, token, folder / "log.txt", count))
    return newest_results(folder)

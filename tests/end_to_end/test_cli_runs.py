"""`leaderless ls` and `compare`: runs in the terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.end_to_end.alone import refused, run_alone
from tests.unit.observability.report.runs import write_lines, write_run


def write_runs(folder: Path) -> Path:
    """Two runs that differ in a setting, of which one is half done."""
    alpha = write_run(folder / "runs/alpha", 4)
    beta = Path(shutil.copytree(alpha, alpha.with_name("beta")))
    recipe = (beta / "config.yaml").read_text()
    changed = recipe.replace("  tags: []\n", "  tags:\n  - sweep\n").replace("seed: 0", "seed: 7")
    assert changed != recipe
    (beta / "config.yaml").write_text(changed)
    numbers = {"reward/mean": 0.5, "policy/loss": -1e-6}
    rows = [{"step": 0, "time_s": 1.0, "evaluation/mean@4": 0.25}, {"step": 2, "time_s": 2.0} | numbers]
    write_lines(beta / "metrics.jsonl", rows)
    return alpha.parent


def test_runs_are_listed_with_what_is_known_of_them(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    listed = run_alone(tmp_path, "ls", runs, "--column", "seed")
    assert listed.code == 0, listed
    head, *rows = listed.output.splitlines()
    assert head.split() == ["run", "state", "step", "accuracy", "reward", "seed", "tags", "changed"]
    beta = next(row.split() for row in rows if row.startswith("beta"))
    assert beta[:8] == ["beta", "stopped", "2/4", "0.250", "(step", "0)", "0.5", "7"]
    assert beta[8] == "sweep"
    found = json.loads(run_alone(tmp_path, "ls", runs, "--json").output)
    assert {run["key"]: run["tags"] for run in found} == {"alpha": [], "beta": ["sweep"]}
    (tmp_path / "none").mkdir()
    assert "there is no run in" in run_alone(tmp_path, "ls", tmp_path / "none").output
    assert "is no folder" in refused(tmp_path, "ls", tmp_path / "nothing")


def test_runs_are_compared_by_settings_and_newest_numbers(tmp_path: Path) -> None:
    runs = write_runs(tmp_path)
    compared = run_alone(tmp_path, "compare", runs / "alpha", runs / "beta")
    assert compared.code == 0, compared
    settings, numbers = compared.output.split("newest number")
    assert settings.split() == ["setting", "alpha", "beta", "seed", "0", "7"]
    rows = {line.split()[0]: line.split()[2:] for line in numbers.splitlines() if "(" in line}
    assert rows["accuracy"][-3:] == ["0.250", "(step", "0)"]
    assert rows["loss"][-1] == "0.0000"
    assert "no setting differs" in run_alone(tmp_path, "compare", runs / "alpha", runs / "alpha").output
    found = json.loads(run_alone(tmp_path, "compare", runs / "alpha", runs / "beta", "--json").output)
    assert found[0] == {"kind": "settings", "name": "seed", "alpha": "0", "beta": "7"}
    assert run_alone(tmp_path, "compare", runs).code == 2, "it is no run"

"""A pretrained model is offered a tool, and a grader fails for some rows and is mended: what grading again finds.

    python benchmarks/failures.py MODEL       # about ten minutes for a small model on two cores

The run is of two steps. It counts the episodes that could not be graded, trains on the others, and warns.
`leaderless env regrade` then finds the same ones with the grader as it was, and grades all of them once it is mended.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

from leaderless.cli.quickstart_project.data import write_word_problems
from leaderless.observability.episode_files import episode_files, read_episode_file
from leaderless.observability.run_directory import RunDirectory
from real_models import ROOT, Trial

GRADER = """\
from pathlib import Path


def careful(sample):
    if int(sample.row["answer"]) % 2 and not Path("mended").exists():
        raise KeyError("no key for odd answers")
    return float(str(sample.answer) in sample.response) + 1.0 / (1 + len(sample.response))
"""


def main(model: Path) -> None:
    """Run it, and print what was found."""
    folder, begin = ROOT / "runs/failures" / model.name, time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    write_word_problems(folder)
    trial = Trial(model.resolve(), folder)
    environment = {"type": "calculator", "options": {"cost": 0.0}, "max_turns": 3, "max_episode_tokens": 256}
    policy = {"path": str(model.resolve()), "compute_dtype": "float32", "lora": {"rank": 8}}
    trial.write(
        {
            "models": {"policy": policy},
            "environment": environment,
            "reward": {"grader:careful": 1.0},
            "data": {"train": {"path": "train.jsonl", "answer": "answer"}, "max_prompt_tokens": 384},
            "rollout": {"max_response_tokens": 48, "max_sequences": 16},
            "batch": {"prompts_per_step": 4, "responses_per_prompt": 2, "micro_batch_tokens": 1024},
            "evaluation": None,
            "guards": {"reward_failures_limit": None},
        }
    )
    (folder / "grader.py").write_text(GRADER, encoding="utf-8")
    trial.command("train", "recipe.yaml", "--workers=1")
    steps = [row for row in RunDirectory(folder / "runs/real").read_metrics() if row["step"]]
    for row in steps:
        shares = {name: round(value, 4) for name, value in row.items() if name.startswith("failure/")}
        print(f"step {row['step']:.0f}: {shares}, reward/mean {row['reward/mean']:.4f}, calls {row['tool/calls']:.2f}")
    print(next(line for line in (folder / "output.log").read_text().splitlines() if "failures_limit" in line))
    deferred = {(file.step, one["id"]) for file, one in lines_of(folder) if file.what == "deferred"}
    assert len(deferred) == round(sum(8 * row["failure/grader"] for row in steps)), deferred
    assert deferred, "no row of these steps has an odd answer"
    print(trial.command("env", "regrade", "runs/real", code=1))
    (folder / "mended").touch()
    print(trial.command("env", "regrade", "runs/real"))
    changed = set[tuple[int, object]]()
    for path in sorted((folder / "runs/real/episodes").glob("step-*/regraded-2.jsonl.gz")):
        new = list(read_episode_file(path))
        assert all(one["is_valid"] for one in new)
        changed |= {(int(path.parent.name[5:]), one["id"]) for one in new if one["is_changed"]}
    assert changed == deferred
    facts = {"deferred": len(deferred), "graded": len(changed), "seconds": round(time.monotonic() - begin)}
    print(json.dumps(facts))


def lines_of(folder: Path) -> list[tuple[object, dict[str, object]]]:
    """All lines of the run's journal, each with its file."""
    files = episode_files(folder / "runs/real/episodes")
    return [(file, line) for file in files for line in read_episode_file(file.path)]  # type: ignore[misc]


if __name__ == "__main__":
    main(Path(sys.argv[1]))

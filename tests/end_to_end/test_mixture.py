"""A mixture of files and a stream trains, and continues with the same prompts on another number of workers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_additions, write_recipe

from leaderless.config import load_recipe
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import resolve_workflow
from leaderless.worker.build.process import train
from leaderless.worker.rank_info import RankInfo

Sample = dict[str, object]


def write_mixture(folder: Path) -> Path:
    """A recipe that trains on three datasets with different columns."""
    doubles = [{"q": f"{i}+{i}=", "a": str(2 * i), "level": i % 3} for i in range(20)]
    parquet.write_table(pa.Table.from_pylist(doubles), folder / "doubles.parquet", row_group_size=8)
    with gzip.open(folder / "minus.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"prompt": f"{i}-1=", "solution": str(i - 1)}) + "\n" for i in range(10))
    additions = write_additions(folder / "additions.jsonl")
    mixture = {
        "additions": {"path": str(additions), "prompt": "question", "answer": "answer", "weight": 2},
        "doubles": {"path": str(folder / "doubles.parquet"), "prompt": "q", "answer": "a", "curriculum": "level"},
        "minus": {
            "path": str(folder / "minus.jsonl.gz"),
            "answer": "solution",
            "streaming": True,
            "shuffle_buffer": 4,
        },
    }
    changes = {
        "data.train": {name: dataset | {"template": "plain"} for name, dataset in mixture.items()},
        "reward": {
            "exact_match": {"sources": ["additions", "doubles"]},
            "format": {"pattern": ".*", "sources": ["minus"]},
        },
        "run.recorded_prompts": 6,
    }
    return write_recipe(folder, tiny_model(), changes)


def train_steps(recipe: str, name: str, steps: int) -> None:
    """Train, or continue, as one of the workers."""
    loaded = load_recipe(recipe, [f"name={name}", f"steps={steps}"])
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    train(loaded.recipe, plan, place, Display(Console(), is_shown=False))


def recorded(run: Path) -> dict[int, Sample]:
    """The first sample of each prompt that was recorded, by group id."""
    lines = [line for file in (run / "samples").iterdir() for line in file.read_text().splitlines()]
    samples = sorted(map(json.loads, lines), key=lambda sample: sample["sample_id"], reverse=True)
    return {sample["group_id"]: sample for sample in samples}


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_mixture_goes_on_on_another_number_of_workers(ranks: RankPool, tmp_path: Path) -> None:
    recipe = str(write_mixture(tmp_path))
    ranks.run(1, train_steps, recipe, "alone", 3, init_group=False)
    for world_size, steps in ((2, 2), (1, 3)):
        ranks.run(world_size, train_steps, recipe, "moved", steps, init_group=False)
    alone, moved = (recorded(tmp_path / "runs" / name) for name in ("alone", "moved"))
    assert sorted(alone) == list(range(18))
    assert sorted(moved) == [0, 1, 2, 6, 7, 8, *range(12, 18)], "of two ranks, the first has half of each step"
    for group_id, sample in moved.items():
        assert (sample["prompt"], sample["answer"]) == (alone[group_id]["prompt"], alone[group_id]["answer"])
    for sample in alone.values():
        prompt, details = str(sample["prompt"]), sample["details"]
        assert isinstance(details, dict)
        assert set(details) == ({"format"} if "-" in prompt else {"exact_match"}), "each dataset has its own reward"
    assert sum("-" in str(sample["prompt"]) for sample in alone.values()) in {4, 5}, "a quarter of 18"
    epochs = [
        [{name: value for name, value in step.items() if name.startswith("data/")} for step in metrics(run)]
        for run in (tmp_path / "runs/alone", tmp_path / "runs/moved")
    ]
    assert epochs[0] == epochs[1]
    assert set(epochs[0][-1]) == {f"data/epoch{name}" for name in ("", "/additions", "/doubles", "/minus")}

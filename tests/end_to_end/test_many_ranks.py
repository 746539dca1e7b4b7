"""The same recipe gives the same run on any number of ranks and with any layout."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.pictures import vision_model, write_rows
from tests.tiny import mixture_model, tiny_model, untied_model, write_recipe

from leaderless.data.batch import Batch
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.build.process import open_worker
from leaderless.worker.evaluate.evaluator import EvaluationStep
from leaderless.worker.rank_info import RankInfo

Step = dict[str, object]
NUM_STEPS = 2


def walk_steps(recipe_file: str, name: str, num_steps: int) -> list[Step]:
    """What one rank sees of each step: its samples, and the weights after it; with the last one an evaluation."""
    loaded = load_recipe(recipe_file, [f"name={name}"])
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    steps: list[Step] = []
    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        engines = worker.parts.roles.engines.values()
        assert all(engine.seed == loaded.recipe.seed for engine in engines if isinstance(engine, FsdpEngine))
        rollout = worker.chain.stages.get("rollout")
        sampled: dict[int, list[int]] = {}

        def watched(batch: Batch, context: StageContext) -> Batch:
            assert rollout is not None
            result = rollout(batch, context)
            tokens = result.jagged("tokens").to_lists()
            sampled.update(zip(result.ids.tolist(), tokens, strict=True))
            return result

        worker.chain.stages = {**worker.chain.stages, **({"rollout": watched} if rollout else {})}
        for _ in range(num_steps):
            sampled.clear()
            numbers = worker.run_step()
            trained = worker.parts.roles.trained().items()
            weights = {f"{role}.{name}": w.clone() for role, engine in trained for name, w in engine.full_weights()}
            steps.append({"samples": dict(sampled), "numbers": numbers, "weights": weights})
        if worker.parts.evaluator is not None:
            steps[-1]["numbers"] = numbers | worker.parts.evaluator.run(EvaluationStep(lambda _: None))
    return steps


def merged(results: list[list[Step]], step: int) -> Step:
    """One step as all ranks together saw it."""
    whole: Step = {"samples": {}, "weights": {}, "numbers": results[0][step]["numbers"]}
    for result in results:
        for part in ("samples", "weights"):
            whole[part] |= result[step][part]  # type: ignore[operator]
    return whole


LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "1 rank": (1, {}),
    "2 ranks": (2, {}),
    "4 ranks": (4, {}),
    "rollout on 0-1, update on 2-3": (4, {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}}),
    "rollout on 0-1, update on 2-3, in windows": (
        4,
        {
            "layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}, "reference": {"ranks": "2-3"}},
            "batch.windows_per_step": 3,
        },
    ),
    "update on 0, rollout and reward on 1-3": (
        4,
        {"layout": {"rollout": {"ranks": "1-3"}, "policy": {"ranks": "0"}}},
    ),
    "4 ranks, all for each pass": (4, {"layout": {"policy": {"cp": 2, "tp": 2}, "reference": {"cp": 4}}}),
    "every node elsewhere": (
        4,
        {
            "layout": {
                "rollout": {"ranks": "0-2"},
                "old": {"ranks": "3"},
                "reference": {"ranks": "1,3"},
                "advantage": {"ranks": "2"},
                "policy": {"ranks": "0-3"},
            }
        },
    ),
}
LAYOUTS |= {
    f"{layout}, adapters": (LAYOUTS[layout][0], LAYOUTS[layout][1] | {"optimizer.learning_rate": 0.01})
    for layout in ("1 rank", "2 ranks", "rollout on 0-1, update on 2-3, in windows", "every node elsewhere")
}
LAYOUTS |= {
    f"{layout}, merged": (
        LAYOUTS[layout][0],
        LAYOUTS[layout][1] | {"rollout.engine": "tests.contracts.plain_engine:make"},
    )
    for layout in ("2 ranks, adapters", "rollout on 0-1, update on 2-3, in windows, adapters")
}
LAYOUTS |= {
    f"{layout}, images": (LAYOUTS[layout][0], LAYOUTS[layout][1] | {"data.max_prompt_tokens": 50})
    for layout in ("1 rank", "2 ranks", "rollout on 0-1, update on 2-3, in windows", "every node elsewhere")
}
LAYOUTS |= {
    f"{layout} and adapters": (LAYOUTS[layout][0], LAYOUTS[layout][1] | {"optimizer.learning_rate": 0.01})
    for layout in ("1 rank, images", "rollout on 0-1, update on 2-3, in windows, images")
}
LAYOUTS |= {
    "1 rank, stages": (1, {}),
    "4 ranks, stages": (4, {"layout": {"policy": {"pp": 2}}}),
    "rollout on 0-1, update on 2-3, in stages": (
        4,
        {
            "layout": {
                "rollout": {"ranks": "0-1"},
                "policy": {"ranks": "2-3", "pp": 2},
                "reference": {"ranks": "0-1", "pp": 2},
            }
        },
    ),
    "2 ranks in a pipeline, adapters": (2, {"layout": {"policy": {"pp": 2}}, "optimizer.learning_rate": 0.01}),
}
LAYOUTS |= {
    "1 rank, experts": (1, {}),
    "rollout on 0, update on 1-2, in windows, experts": (
        3,
        {
            "layout": {
                "rollout": {"ranks": "0"},
                "policy": {"ranks": "1-2", "ep": 2},
                "reference": {"ranks": "1-2", "ep": 2},
            },
            "batch.windows_per_step": 3,
        },
    ),
    "4 ranks, all for each pass of experts": (4, {"layout": {"policy": {"tp": 2, "ep": 2}}}),
}
SETTINGS = {
    "batch.updates_per_step": 2,
    "algorithm.kl.coefficient": 0.1,
    "reward": {"format": {"pattern": r".*\d.*"}},
    "steps": NUM_STEPS,
}
"""An untrained model writes a digit now and then, so that groups have a signal."""


@pytest.fixture(scope="module")
def walked(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[list[Step]]]:
    """What the ranks of a layout see of each step; each layout is run once."""

    @functools.cache
    def walk(layout: str) -> list[list[Step]]:
        world_size, changes = LAYOUTS[layout]
        num_layers = 2 if "stages" in layout or "pipeline" in layout else 1
        if "adapters" in layout:
            changes = changes | {"models": {"policy": {"path": tiny_model(num_layers=num_layers), "lora": {"rank": 4}}}}
        folder = tmp_path_factory.mktemp("walk")
        if "images" in layout:
            rows = str(write_rows(folder / "rows.jsonl"))
            data = {"path": rows, "prompt": "question", "images": "images", "answer": "answer", "template": "plain"}
            model = {"path": vision_model(), "lora": {"rank": 4}} if "adapters" in layout else vision_model()
            changes = changes | {"data.train": data, "models": {"policy": model}}
            changes["reward"] = {"format": {"pattern": ".*7.*"}}  # of its words, half are digits
        if "experts" in layout:
            changes = changes | {"algorithm.replay_experts": True}
        # Biases of keys have no gradient but rounding: the other family has none.
        make = untied_model if "stages" in layout else mixture_model if "experts" in layout else None
        model = make(tiny_model("qwen3", num_layers=num_layers)) if make else tiny_model(num_layers=num_layers)
        recipe = write_recipe(folder, model, SETTINGS | changes)
        return ranks.run(world_size, walk_steps, str(recipe), "walk", NUM_STEPS, init_group=False)

    return walk


IN_LONG_FORM = (
    "2 ranks",  # four ranks divide more; tests/end_to_end/test_algorithms_run.py trains on two
    "rollout on 0-1, update on 2-3",  # these pools also run in windows
    "update on 0, rollout and reward on 1-3",  # every node elsewhere
    "2 ranks, adapters",  # also merged
    "rollout on 0-1, update on 2-3, in windows, adapters",  # also with images
    "rollout on 0-1, update on 2-3, in windows, adapters, merged",
    "every node elsewhere, adapters",
    "2 ranks, images",
    "rollout on 0-1, update on 2-3, in windows, images",  # also with adapters
    "every node elsewhere, images",  # tests/distributed/test_vision.py trains all weights on several ranks
    "2 ranks in a pipeline, adapters",  # tests/distributed/test_lora.py trains them on stages
    "4 ranks, all for each pass of experts",
)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, marks=pytest.mark.thorough if layout in IN_LONG_FORM else ())
        for layout in LAYOUTS
        if not layout.startswith("1 rank")
    ],
)
def test_samples_gradients_and_weights_are_those_of_one_rank(
    walked: Callable[[str], list[list[Step]]], layout: str
) -> None:
    kinds = ("images and adapters", "images", "adapters", "stages", "experts")
    kind = next((f", {kind}" for kind in kinds if kind in layout), "")
    single, several = walked(f"1 rank{kind}"), walked(layout)
    for step in range(NUM_STEPS):
        expected, result = merged(single, step), merged(several, step)
        assert result["samples"] == expected["samples"], f"step {step + 1}"
        worst = 0.0
        for name, weights in expected["weights"].items():  # type: ignore[attr-defined]
            other = result["weights"][name]  # type: ignore[index]
            worst = max(worst, float((other - weights).norm() / weights.norm()))
        loads = ("policy/expert_entropy", "policy/expert_peak", "policy/expert_balance") if "experts" in kind else ()
        for name in ("policy/grad_norm", "policy/kl", "policy/entropy", "reward/mean", "mismatch/kl", *loads):
            value = expected["numbers"][name]  # type: ignore[index]
            assert result["numbers"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name  # type: ignore[index]
        assert expected["numbers"]["policy/grad_norm"] > 0.1, "there is something to learn"  # type: ignore[index]
        assert worst < 1e-4
    print(f"{layout}: weights after step {NUM_STEPS} differ by {worst:.1e}")


def traced(recipe_file: str) -> dict[str, list[tuple[int, float, float]]]:
    """Lane, begin and end of each span of two steps on this rank."""
    loaded = load_recipe(recipe_file)
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        numbers = [worker.run_step() for _ in range(2)][-1]
        worker.tracer.close()
        events = json.loads((worker.parts.directory.traces / f"rank-{place.rank}.json").read_text())
    assert place.rank or numbers["time/waiting"] > 0
    spans: dict[str, list[tuple[int, float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            begin = event["ts"]
            spans.setdefault(event["name"], []).append((event["tid"], begin, begin + event["dur"]))
    return spans


def test_windows_travel_while_the_next_is_sampled(ranks: RankPool, tmp_path: Path) -> None:
    pools = {"layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}, "reference": {"ranks": "1"}}}
    settings = SETTINGS | pools | {"batch.windows_per_step": 4, "run.trace_steps": 2}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), settings)
    first, second = ranks.run(2, traced, str(recipe), init_group=False)
    assert len(first["rollout"]) == len(second["old"]) == 2 * 4, "each of two steps has four windows"
    sent = first["reshard(rollout->1)"]
    assert {lane for lane, _, _ in sent} == {1}
    overlaps = [
        min(end, until) - max(begin, since)
        for _, begin, end in sent
        for _, since, until in first["rollout"]
        if min(end, until) > max(begin, since)
    ]
    assert overlaps, "no window was on its way while another was sampled"


def test_the_log_reaches_the_first_rank_whoever_computes(ranks: RankPool, tmp_path: Path) -> None:
    layout = {"layout": {"rollout": {"ranks": "1-2"}, "policy": {"ranks": "2"}, "reward": {"ranks": "0"}}}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), layout)
    numbers = ranks.run(3, walk_steps, str(recipe), "log", 1, init_group=False)[0][0]["numbers"]
    for name in ("rollout/response_tokens", "reward/mean", "policy/loss", "time/policy", "time/rollout"):
        assert name in numbers  # type: ignore[operator]


def test_the_diamond_gives_every_rank_every_input(walked: Callable[[str], list[list[Step]]], tmp_path: Path) -> None:
    """rollout -> {old, reference} -> update: both branches arrive complete on all four ranks."""
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS)
    plan = make_plan(load_recipe(recipe).recipe, resolve_workflow("grpo"), Cluster(4))
    sources = dict(plan["policy"].reads)
    assert (sources["old_log_probs"], sources["ref_log_probs"]) == ("old", "reference")
    results = walked("4 ranks")
    first, second = (step["numbers"] for step in results[0])
    assert 0 < first["policy/kl"] < second["policy/kl"], "the reference stays where the policy began"  # type: ignore[index]
    assert first["mismatch/abs_max"] < 1e-4, "old log-probabilities are those of the weights that sampled"  # type: ignore[index]
    for result in results:
        assert len(result[0]["samples"]) > 0  # type: ignore[arg-type]

"""The network of one host becomes slow while a run goes on, and the run finds a layout that avoids it.

    python benchmarks/slow_host.py            # results go to docs/performance/slow_host.json

Three hosts with one rank each are network namespaces, for which it needs Linux and root. Two of them generate and
train, so that weights and gradients go between them in every step; the third one has a judge that takes half a second
a step. From some step on, the network of a host that trains is limited. Of the layouts that are fixed, the fastest one
on this network is the optimum, and one run may choose among the same; for another one the planner searches. The losses
of all steps must be those of a run that nothing has disturbed: to the last bit where as many ranks train, else up to
rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hosts import Hosts, obstacle

from leaderless import Batch, StageContext, Workflow, stage

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/slow_host.json"
NUM_HOSTS, SLOW_HOST, NUM_STEPS, SLOW_FROM, WITHIN = 3, 2, 16, 7, 5
QUICK_MBIT, SLOW_MBIT = 1000.0, 20.0
JUDGE_S = 0.5
SAME = ("policy/loss", "policy/grad_norm")
SECONDS = "seconds"
"""Name of the seconds from one step's end to the next one's."""
PORT = 29533


def _layout(judge: str, others: str) -> dict[str, dict[str, str]]:
    nodes = dict.fromkeys(("rollout", "reward", "advantage", "policy"), others)
    return {node: {"ranks": ranks} for node, ranks in {**nodes, "judge": judge}.items()}


LAYOUTS = {
    "judge on host 0, all else on hosts 1 and 2": _layout("0", "1-2"),
    "judge on host 2, all else on hosts 0 and 1": _layout("2", "0-1"),
}
OWN = next(iter(LAYOUTS))


@stage(reads=["rewards"], writes=["rewards"], streams=True)
def judge(batch: Batch, context: StageContext) -> Batch:
    """Take a time for each sample."""
    time.sleep(
        JUDGE_S * len(batch) / (context.recipe.batch.prompts_per_step * context.recipe.batch.responses_per_prompt)
    )
    return batch.with_columns(rewards=batch.dense("rewards") * 2)


def workflow() -> Workflow:
    """GRPO with a judge."""
    return (
        Workflow("judged")
        .node("rollout", run="rollout", role="policy")
        .node("reward", run="reward", after="rollout")
        .node("judge", run="benchmarks.slow_host:judge", after="reward")
        .node("advantage", run="advantage", after="judge")
        .node("policy", run="update", role="policy", after="advantage")
    )


def be_rank(recipe_file: str, name: str, slow_from: int, folder: Path) -> None:
    """Be one worker of a run; before some step, wait until the network is slow."""
    from rich.console import Console

    from leaderless.observability.console import Display
    from leaderless.planner.workflow import load_recipe
    from leaderless.run.planned_run import plan_training
    from leaderless.worker.build.process import open_worker
    from leaderless.worker.rank_info import RankInfo

    place = RankInfo.from_environment()
    planned = plan_training(load_recipe(recipe_file, [f"name={name}"]), place.world_size)
    with open_worker(planned.recipe, planned.plan, place, Display(Console(), is_shown=False)) as worker:
        run_step = worker.run_step

        def step() -> dict[str, float]:
            if worker.progress.step + 1 == slow_from:
                (folder / f"ready-{place.rank}").touch()
                while not (folder / "slow").exists():
                    time.sleep(0.02)
            return run_step()

        worker.run_step = step  # type: ignore[method-assign]
        worker.run()


def run(folder: Path, name: str, changes: Mapping[str, object], slow_from: int) -> list[dict[str, Any]]:
    """The metrics of each step of a run."""
    from tests.tiny import tiny_model, write_recipe

    recipe = write_recipe(folder, tiny_model(head_dim=32), {**SETTINGS, **changes})
    for left in (folder / "slow", *folder.glob("ready-*")):
        left.unlink(missing_ok=True)
    with Hosts(NUM_HOSTS, QUICK_MBIT) as hosts:
        common = {"MASTER_ADDR": hosts.address(0), "MASTER_PORT": str(PORT), "WORLD_SIZE": str(NUM_HOSTS)}
        common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        common |= {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "HF_HUB_OFFLINE": "1"}
        command = [
            sys.executable,
            "-m",
            "benchmarks.slow_host",
            "--rank",
            str(recipe),
            name,
            str(slow_from),
            str(folder),
        ]
        ranks = [
            hosts.start(
                rank, command, folder / f"{name}-{rank}.log", {**common, "RANK": str(rank), "GROUP_RANK": str(rank)}
            )
            for rank in range(NUM_HOSTS)
        ]
        while any(rank.poll() is None for rank in ranks):
            if len(list(folder.glob("ready-*"))) == NUM_HOSTS and not (folder / "slow").exists():
                hosts.limit(SLOW_HOST, SLOW_MBIT)
                (folder / "slow").touch()
            time.sleep(0.1)
            if any(rank.poll() for rank in ranks):
                raise RuntimeError((folder / f"{name}-0.log").read_text()[-3000:])
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if line["step"]]
    # The first rank's own seconds leave out what it does not take part in.
    before = [0.0, *(step["time_s"] for step in steps)]
    return [{**step, SECONDS: step["time_s"] - before[place]} for place, step in enumerate(steps)]


SETTINGS: dict[str, object] = {
    "workflow": "benchmarks.slow_host:workflow",
    "steps": NUM_STEPS,
    "layout": LAYOUTS[OWN],
    "checkpoint.every_steps": 0,
    "batch.prompts_per_step": 6,
    "batch.responses_per_prompt": 4,
    "optimizer.learning_rate": 1e-3,
    "reward": {"format": {"pattern": r".*\d.*"}},
}


def load() -> dict[str, Any] | None:
    """The newest results; None without any."""
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else None


def summary(results: Mapping[str, Any]) -> str:
    """What the results say, in sentences."""
    after = [event["step"] for event in results["switches"]]
    same = "are the same bit by bit" if results["is_same"] else "DIFFER"
    return (
        f"Three ranks on {results['cores']} cores, {results['quick_mbit_per_s']:g} Mbit/s, and for one host "
        f"{results['slow_mbit_per_s']:g} Mbit/s from step {results['slow_from_step']} on. The run changed its layout "
        f"after step {', '.join(map(str, after))}, and from step {results['slow_from_step'] + WITHIN} on had "
        f"{results['share_of_optimum']:.0%} of the speed of the best fixed layout. Losses and gradient norms of all "
        f"{len(results['step_s'])} steps {same} as in the run that nothing has disturbed."
    )


def summary_of_search(results: Mapping[str, Any]) -> str:
    """What the results of the run with searched layouts say, in a sentence."""
    searched = results["searched"]
    changes = ", and ".join(f"after step {event['step']} to `{event['to']}`" for event in searched["switches"])
    return (
        f"With `layouts: auto` the run changed its layout {changes}, and had "
        f"{searched['share_of_optimum']:.0%} of that speed from step {results['slow_from_step'] + WITHIN} on; its "
        f"losses and gradient norms differ by {searched['largest_difference']:.1g} at most."
    )


def table(results: Mapping[str, Any]) -> str:
    """The seconds of a step as a table."""
    begin, took, found = results["slow_from_step"], results["step_s"], results["searched"]["step_s"]
    rows = {
        f"{OWN}, nothing is slow": results["undisturbed_s"],
        **{f"{name}, one host slow": seconds for name, seconds in results["fixed_s"].items()},
        "a run that plans again: before": median(took[2 : begin - 1]),
        "a run that plans again: the first slow step": took[begin - 1],
        f"a run that plans again: from step {begin + WITHIN} on": median(took[begin + WITHIN - 1 :]),
        "a run that searches: before": median(found[2 : begin - 1]),
        "a run that searches: the first slow step": found[begin - 1],
        f"a run that searches: from step {begin + WITHIN} on": median(found[begin + WITHIN - 1 :]),
    }
    lines = ["| run | seconds of a step |", "| --- | ---: |"]
    return "\n".join([*lines, *(f"| {name} | {seconds:.2f} |" for name, seconds in rows.items())])


def _planned_again(
    folder: Path, name: str, layouts: object, quick: Sequence[Mapping[str, Any]], best_s: float
) -> dict[str, Any]:
    """A run that chooses among layouts, next to one that nothing has disturbed."""
    steps = run(folder, name, {"schedule": {"replan_every_steps": 1, "layouts": layouts}}, SLOW_FROM)
    events = (folder / "runs" / name / "events.jsonl").read_text().splitlines()
    took = [step[SECONDS] for step in steps]
    pairs = [(step[key], other[key]) for step, other in zip(steps, quick, strict=True) for key in SAME]
    return {
        "step_s": took,
        "share_of_optimum": best_s / median(took[SLOW_FROM + WITHIN - 1 :]),
        "is_same": all(one == other for one, other in pairs),
        "largest_difference": max(abs(one - other) for one, other in pairs),
        "switches": [event for event in map(json.loads, events) if event["event"] == "switch"],
    }


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if problem := obstacle():
        sys.exit(problem)
    folder = Path(tempfile.mkdtemp(prefix="slow-host-"))
    seconds: dict[str, float] = {}
    for place, (name, layout) in enumerate(LAYOUTS.items()):
        steps = run(folder, f"fixed-{place}", {"layout": layout, "steps": 5}, 2)
        seconds[name] = median(step[SECONDS] for step in steps[2:])
        print(f"{name}: {seconds[name]:.2f} s", flush=True)
    quick = run(folder, "undisturbed", {}, 0)
    others = {name: layout for name, layout in LAYOUTS.items() if name != OWN}
    best = min(seconds.values())
    planned = _planned_again(folder, "planned", others, quick, best)
    searched = _planned_again(folder, "searched", "auto", quick, best)
    results = {
        "slow_mbit_per_s": SLOW_MBIT,
        "quick_mbit_per_s": QUICK_MBIT,
        "slow_from_step": SLOW_FROM,
        "fixed_s": seconds,
        "undisturbed_s": median(step[SECONDS] for step in quick[2:]),
        **planned,
        "searched": searched,
        "cores": os.cpu_count(),
    }
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        be_rank(sys.argv[2], sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]))
    else:
        main()

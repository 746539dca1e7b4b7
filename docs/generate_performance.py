"""The measurements of training steps and of memory, for the page about performance."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from generate_markup import between

ALT = "Seconds of generation, log-probs and update of a step, ours next to TRL's, for four workloads"
MEMORY = Path(__file__).parent / "performance/real_size.json"
LOADING = Path(__file__).parent / "performance/loading.json"


def with_real_size(page: str) -> str:
    """A page with the newest results of `benchmarks/real_size.py` between its two marks."""
    return between(page, "real size", _memory_table() if MEMORY.exists() else None)


def _memory_table() -> str:
    """Bytes measured and planned in each phase, by the number of workers."""
    lines = [
        "| workers | phase | measured, GiB | planned, GiB | measured / planned |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    for workers, phases in json.loads(MEMORY.read_text(encoding="utf-8")).items():
        for phase, sizes in phases.items():
            measured, planned = (sizes[kind] / 2**30 for kind in ("measured", "planned"))
            lines.append(f"| {workers} | {phase} | {measured:.2f} | {planned:.2f} | {measured / planned:.2f} |")
    return "\n".join(lines)


def with_loading(page: str) -> str:
    """A page with the newest results of `benchmarks/loading.py` between its two marks."""
    return between(page, "loading", _loading_table() if LOADING.exists() else None)


def _loading_table() -> str:
    """Memory and bytes read where ranks read their parts, and memory where they read all, by model and layout."""
    lines = [
        "| model | layout | weights kept, MiB | peak, MiB | planned, MiB | read, MiB | peak with whole models, MiB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, layouts in json.loads(LOADING.read_text(encoding="utf-8")).items():
        for layout, ways in layouts.items():
            parts = ways["parts"]
            figures = [f"{parts[kind] / 2**20:,.0f}" for kind in ("held", "peak", "planned", "read")]
            figures.append(f"{ways['whole']['peak'] / 2**20:,.0f}" if "whole" in ways else "")
            lines.append(f"| {model} | {layout} | {' | '.join(figures)} |")
    return "\n".join(lines)


def with_fixed_lag(page: str) -> str:
    """A page with the newest results of `benchmarks/fixed_lag.py` between its two marks."""
    from benchmarks.fixed_lag_report import MEAN_S, load, table

    results, content = load(), None
    if results is not None:
        on = f"{results['cores']} cores, {results['iterations']} iterations, {MEAN_S:g} s of each kind on average."
        content = f"{on}\n\n{table(results)}"
    return between(_with_weight_travel(page), "fixed lag", content)


def _with_weight_travel(page: str) -> str:
    """A page with the newest results of `benchmarks/weight_travel.py` between its two marks."""
    from benchmarks.weight_travel_report import conditions, load, table

    results, page = load(), _with_weight_differences(page)
    return between(page, "weight travel", None if results is None else f"{conditions(results)}\n\n{table(results)}")


def _with_weight_differences(page: str) -> str:
    """A page with the newest results of `benchmarks/weight_differences.py` between its two marks."""
    from benchmarks.weight_differences_report import conditions, load, table

    found = load()
    return between(page, "weight differences", f"{conditions(found)}\n\n{table(found)}" if found else None)


def with_placement(page: str) -> str:
    """A page with the newest results of `benchmarks/placement.py` between its two marks."""
    from benchmarks.placement_report import load, summary, table

    results, content = load(), None
    if results is not None:
        content = f"{summary(results)}\n\n{table(results)}"
    return between(_with_continuous_placement(page), "placement", content)


def _with_continuous_placement(page: str) -> str:
    """A page with the newest results of `benchmarks/continuous_placement.py` between its two marks."""
    from benchmarks.continuous_placement_report import load, summary, table

    results, content = load(), None
    if results is not None:
        content = f"{summary(results)}\n\n{table(results)}"
    return between(page, "continuous placement", content)


def with_lora(page: str) -> str:
    """A page with the newest results of `benchmarks/lora*.py`, each between its two marks."""
    from benchmarks.lora_report import load, load_loads, load_syncs, load_table, sync_table, table

    outcomes, syncs, loads = load(), load_syncs(), load_loads()
    page = between(page, "lora vllm", load_table(loads) if loads else None)
    page = between(page, "lora", table(outcomes) if outcomes else None)
    return between(page, "lora sync", sync_table(syncs) if syncs else None)


def with_slow_host(page: str) -> str:
    """A page with the newest results of `benchmarks/slow_host.py` between its two marks."""
    from benchmarks.slow_host import load, summary, summary_of_search, table

    results, content = load(), None
    if results is not None:
        content = f"{summary(results)}\n\n{summary_of_search(results)}\n\n{table(results)}"
    return between(page, "slow host", content)


def with_episodes(page: str) -> str:
    """A page with the newest results of `benchmarks/episodes.py` between its two marks."""
    from benchmarks.episodes import load, summary, table

    results, content = load(), None
    if results is not None:
        content = f"{summary(results)}\n\n{table(results)}"
    return between(page, "episodes", content)


def with_training_step(page: str) -> str:
    """A page with the newest results of `benchmarks/training_step.py` between its two marks."""
    return between(page, "training step", measured())


def with_families(page: str) -> str:
    """A page with the newest results of `benchmarks/families.py` between its two marks."""
    from benchmarks import families

    content = None
    if families.RESULTS.exists():
        results = json.loads(families.RESULTS.read_text(encoding="utf-8"))
        picture = f"![Held-out accuracy by step, for each family](../images/{families.PICTURE.name})"
        content = f"{picture}\n\n{families.table(results)}\n\n{families.conditions(results)}"
    return between(page, "families", content)


def with_trees(page: str) -> str:
    """A page with the newest results of `benchmarks/trees.py` between its two marks."""
    from benchmarks import trees

    results = json.loads(trees.RESULTS.read_text(encoding="utf-8")) if trees.RESULTS.exists() else None
    return between(page, "trees", None if results is None else trees.table(results))


def with_real_models(page: str) -> str:
    """A page with the newest results of `benchmarks/real_task.py` and `benchmarks/real_models.py` between its marks."""
    from benchmarks import real_models, real_task

    models, task = None, None
    if real_models.RESULTS.exists():
        results = json.loads(real_models.RESULTS.read_text(encoding="utf-8"))
        models = f"{real_models.conditions(results)}\n\n{real_models.table(results)}"
    if real_task.RESULTS.exists():
        results = json.loads(real_task.RESULTS.read_text(encoding="utf-8"))
        picture = f"![Mean reward of each step, and held-out accuracy, by side](../images/{real_task.PICTURE.name})"
        task = f"{picture}\n\n{real_task.conditions(results)}\n\n{real_task.table(results)}"
    return between(between(page, "real models", models), "real task", task)


def with_offload(page: str) -> str:
    """A page with the newest results of `benchmarks/offload.py` between its marks."""
    from benchmarks import offload, real_models

    content = None
    if offload.RESULTS.exists():
        results = json.loads(offload.RESULTS.read_text(encoding="utf-8"))
        content = f"{real_models.conditions(results)}\n\n{offload.table(results)}"
    return between(page, "offload", content)


def measured() -> str:
    """Picture and tables."""
    from benchmarks.training_step_report import PICTURE, PROMPTS, RESPONSES, load, operations, table

    results = load()
    if results is None or not results["runs"]:
        return "There are no results yet: the script has not been run for this version."
    versions = {name: version for run in results["runs"] for name, version in run["versions"].items()}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    repeats = sorted(set(Counter((run["workload"], run["side"]) for run in results["runs"]).values()))
    workers = "one worker" if results["workers"] == 1 else f"{results['workers']} workers"
    sizes = " or ".join(f"{size:,}" for size in sorted(set(results["parameters"].values())))
    on = (
        f"{results['cores']} cores, a Qwen2 of {sizes} parameters, "
        f"{PROMPTS} prompts with {RESPONSES} responses each; ours with {workers}, TRL with passes of "
        f"{results['trl_batch']} sequences; "
        f"{libraries}; repeats: {' or '.join(map(str, repeats))}."
    )
    at_work = "Operations that our passes must do, divided by the seconds they took:"
    return "\n\n".join([f"![{ALT}](../images/{PICTURE.name})", on, table(results), at_work, operations(results)])

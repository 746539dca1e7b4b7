"""What has been measured of whole training steps, for the page about performance."""

from __future__ import annotations

MARKS = "<!-- training step: begin -->", "<!-- training step: end -->"
ALT = "Seconds of generation, log-probs and update of a step, ours beside TRL's, for four workloads"


def with_training_step(page: str) -> str:
    """A page with what `benchmarks/training_step.py` has measured last between its two marks."""
    before, _, rest = page.partition(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{measured()}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}"


def measured() -> str:
    """Picture and tables."""
    from benchmarks.training_step_report import PICTURE, PROMPTS, RESPONSES, load, operations, table

    results = load()
    if results is None or not results["runs"]:
        return "There is nothing here yet: the script has not been run for this version."
    versions = {name: version for run in results["runs"] for name, version in run["versions"].items()}
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    repeats = 1 + max(run["repeat"] for run in results["runs"])
    workers = "one worker" if results["workers"] == 1 else f"{results['workers']} workers"
    sizes = " or ".join(f"{size:,}" for size in sorted(set(results["parameters"].values())))
    on = (
        f"{results['cores']} cores, a Qwen2 of {sizes} parameters, "
        f"{PROMPTS} prompts with {RESPONSES} responses each; ours with {workers}, TRL with passes of "
        f"{results['trl_batch']} sequences; "
        f"{told}; repeats: {repeats}."
    )
    at_work = "Operations that our passes have to do, in the seconds they took:"
    return "\n\n".join([f"![{ALT}](images/{PICTURE.name})", on, table(results), at_work, operations(results)])

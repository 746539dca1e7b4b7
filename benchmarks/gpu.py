"""Tests and measurements on a CUDA GPU, in at most eight minutes and without a network: `make gpu`.

    python benchmarks/gpu.py [--wheels FOLDER] [--parts training generation] && python docs/generate.py

It runs with the Python and the torch of the machine (torch 2.11 or newer, transformers 5.17 or newer), from a checkout.
Other packages that are missing are installed next to the results from wheels in the folder that `--wheels` names.

Each part is a separate process with a time limit, and its result is saved in `docs/performance/gpu.json` as soon as it
is done; if a part fails or is stopped, its error and what it has measured are saved, and the others continue. Tests
print to `runs/gpu-tests.log`. `--parts` measures some parts again. Models are Qwen2 with random weights, with 1.5 or
0.5 billion parameters, whichever fits. `--draw` only draws the existing results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpu_report import PICTURE, RESULTS, ROOT, TIMELINE, Results, draw, draw_timeline, table

PACKAGES = ROOT / "runs/gpu-packages"
LOG = ROOT / "runs/gpu-tests.log"
MARK = "MEASURED "
LIMITS_S = {
    "environment": 30,
    "speeds": 30,
    "attention": 45,
    "tests": 150,
    "agreement": 90,
    "training": 90,
    "generation": 150,
    "decoding": 120,
    "weights": 60,
    "quickstart": 180,
    "timeline": 90,
    "published_verl": 120,
    "published_one": 120,
    "published_many": 180,
}
"""Time limit of each part, the most important first; all parts together have the minutes from the command line."""

Runner = Callable[[str, float], Results]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=LIMITS_S, default=list(LIMITS_S))
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit of all parts together")
    parser.add_argument("--wheels", type=Path, help="folder with wheels of missing packages")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script itself")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--timeline", type=Path, default=TIMELINE, help="file of the second picture")
    parser.add_argument("--draw", action="store_true", help="only draw the existing results")
    options = parser.parse_args()
    if not options.draw:
        install(missing_packages(), options.wheels)
        check_device(options.device)
        preset = "tiny" if options.tiny else preset_of(options.device)

        def run(part: str, limit_s: float) -> Results:
            return run_part(part, options.device, preset, limit_s)

        measure(options.parts, run, options.results, 60 * options.minutes)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    draw(results, options.picture)
    draw_timeline(results, options.timeline)
    print(table(results))
    sys.exit(any(part.keys() & {"error", "problem"} for part in results["parts"].values()))


def missing_packages() -> list[str]:
    """Packages that this project needs and this Python does not have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    names = [requirement.split(">")[0].split("[")[0].strip() for requirement in wanted]
    return [name for name in names if name != "leaderless" and not is_installed(name)]


def is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def install(names: Sequence[str], wheels: Path | None) -> None:
    """Install packages into a separate folder, which later processes search."""
    if names and wheels is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(wheels)]
        for name in names:  # one by one: a package that cannot be installed may not be needed either
            subprocess.run([*command, "--target", str(PACKAGES), "--upgrade", name], check=False)
    elif names:
        print(f"not installed here: {', '.join(names)}; name a folder with their wheels with --wheels")
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, [ROOT / "src", ROOT, PACKAGES]))


def check_device(device: str) -> None:
    """End with a reason if there is no CUDA device that torch can use."""
    if device == "cpu":
        return
    code = "import torch; torch.cuda.init(); print(torch.cuda.get_device_name())"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if tried.returncode:
        reason = (tried.stderr.strip().splitlines() or ["no reason given"])[-1]
        sys.exit(f"nothing was measured: this machine has no CUDA GPU that torch can use: {reason}")


def preset_of(device: str) -> str:
    code = f"from benchmarks.gpu_machine import preset_for; print('{MARK}' + preset_for('{device}'))"
    return answer_of([sys.executable, "-c", code], 120)


def measure(parts: Sequence[str], run: Runner, path: Path, most_s: float) -> Results:
    """Run parts and keep each as soon as it is done.

    Args:
        parts: Parts to run, by name.
        run: Function that runs a part within a time limit in seconds.
        path: File of the results; parts that are not run again, if only for lack of time, stay in it.
        most_s: Time limit of all parts together.
    """
    results: Results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for part in parts:
        started = time.monotonic()
        left = most_s - (started - begin)
        if left < 10:
            results["parts"].setdefault(part, {"error": "no time was left"})
            print(f"{part}: no time was left", flush=True)
        else:
            print(f"{part} ...", flush=True)
            try:
                result = run(part, min(LIMITS_S[part], left))
            except (RuntimeError, TimeoutError) as error:
                result = {"error": str(error)}
            result["seconds_in_all"] = round(time.monotonic() - started, 1)
            results["parts"][part] = result
            print(f"{part}: {result.get('error', 'done')}, {result['seconds_in_all']:.0f} s", flush=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def run_part(part: str, device: str, preset: str, limit_s: float) -> Results:
    """Run a part in separate processes."""
    if part == "tests":
        return run_tests(limit_s)
    if part == "quickstart":
        return run_quickstart(device, limit_s)
    script = str(ROOT / "benchmarks/gpu_parts.py")
    result: Results = json.loads(answer_of([sys.executable, script, part, device, preset], limit_s))
    return result


class StoppedError(TimeoutError):
    """A process took too long; `output` is what it had printed."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message)
        self.output = output


def answer_of(command: Sequence[str], limit_s: float) -> str:
    """What a process prints last after the mark, with the problem if it fails or takes too long after that.

    Raises:
        RuntimeError: It fails before.
        TimeoutError: It takes too long before.
    """
    try:
        code, output = output_of(command, limit_s)
        problem = f"exit code {code}: " + " / ".join(output.strip().splitlines()[-3:])
    except StoppedError as stopped:
        code, output, problem = -1, stopped.output, str(stopped)
        if MARK not in output:
            raise
    answers = [line.removeprefix(MARK) for line in output.splitlines() if line.startswith(MARK)]
    if code:
        answers = [answer for answer in answers if answer.endswith("}")]  # the last one may be cut off
    if not answers:
        raise RuntimeError(problem)
    return json.dumps(json.loads(answers[-1]) | {"problem": problem}) if code else answers[-1]


def output_of(command: Sequence[str], limit_s: float) -> tuple[int, str]:
    """Exit code and output of a process, all of whose children are ended."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        last = " / ".join(output.strip().splitlines()[-2:])
        raise StoppedError(f"stopped after {limit_s:.0f} s; it said last: {last or 'nothing'}", output) from None
    return process.returncode, output


def run_tests(limit_s: float) -> Results:
    """The tests of `tests/gpu`, those of kernels and of the engine first; what they print is kept next to the runs."""
    files = sorted((ROOT / "tests/gpu").glob("test_*.py"), key=lambda file: (file.name != "test_paged.py", file.name))
    command = [sys.executable, "-m", "pytest", *map(str, files), "-vv", "-rs", "--timeout", "120"]
    try:
        code, output = output_of(command, limit_s)
        problem = f"exit code {code}: " + " / ".join(output.splitlines()[-3:])
    except StoppedError as stopped:
        code, output, problem = -1, stopped.output, str(stopped)
    LOG.parent.mkdir(exist_ok=True)
    LOG.write_text(output, encoding="utf-8")
    found = test_results(output)
    if not any(found[kind] for kind in OUTCOMES.values()):
        raise RuntimeError(problem)
    return found if code in {0, 1} else found | {"problem": problem}


OUTCOMES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped"}
"""Names of outcomes of tests, as pytest prints them and in the results."""


def test_results(output: str) -> Results:
    """Numbers of tests by outcome, and failed ones with their reasons, in what pytest prints as it runs."""
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|ERROR|SKIPPED)\b", output, re.MULTILINE)
    counts = Counter(outcome for _, outcome in found)
    failures = dict.fromkeys(line for line in output.splitlines() if line.startswith("FAILS "))
    return {name: counts[outcome] for outcome, name in OUTCOMES.items()} | {"failures": [*failures]}


def run_quickstart(device: str, limit_s: float) -> Results:
    """Imitation, export, and reinforcement learning of the quickstart; few steps on a CPU."""
    begin = time.monotonic()
    few = ["steps=1", "evaluation.every_steps=0"] * (device == "cpu")
    commands = [
        [str(ROOT / "examples/quickstart/prepare.py")],
        ["-m", "leaderless", "train", "recipes/quickstart/sft.yaml", "--workers", "1", "--fresh", *few],
        ["-m", "leaderless", "export", "runs/quickstart-sft", "runs/quickstart-base"],
        ["-m", "leaderless", "train", "recipes/quickstart/grpo.yaml", "--workers", "1", "--fresh", *few],
    ]
    shutil.rmtree(ROOT / "runs/quickstart-base", ignore_errors=True)  # of an earlier quickstart
    seconds = []
    for command in commands:
        started = time.monotonic()
        code, output = output_of([sys.executable, *command], limit_s - (time.monotonic() - begin))
        if code:
            raise RuntimeError(f"{' '.join(command[-3:])}: " + " / ".join(output.strip().splitlines()[-3:]))
        seconds.append(round(time.monotonic() - started, 1))
    text = (ROOT / "runs/quickstart/metrics.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    accuracies = [value for line in lines for key, value in line.items() if key == "evaluation/accuracy"]
    last = lines[-1]
    return {
        "seconds": dict(zip(("prepare", "imitate", "export", "reinforce"), seconds, strict=True)),
        "accuracy": [accuracies[0], accuracies[-1]] if accuracies else [],
        "mismatch": last.get("mismatch/abs_mean"),
    }


if __name__ == "__main__":
    main()

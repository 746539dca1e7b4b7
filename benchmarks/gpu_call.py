"""A call of `benchmarks/gpu.py`: what it runs, what it keeps of each result at once, and what it prints at its end."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpu_needs
import gpu_ready
from gpu_processes import Ended, Job, end_descendants, run_together
from gpu_ready import MODELS, ROOT
from gpu_screen import counts, described_parts, described_tests, failed, screen, short

MARK = "MEASURED "
RECORD = "gpu-call.json"
"""What a call has run and what of it has failed, from which the next one may continue."""
TESTS, OUTCOMES, NAMES = "tests", "GPU_TEST_OUTCOMES", "GPU_TEST_NAMES"
"""Name of the tests among parts, and variables for `tests/gpu/conftest.py`: a file for outcomes, and names of tests."""
TEST_S = 110
"""Time limit of a test, with a cold compiler."""
MOST_WORKERS = 6

Results = dict[str, Any]


class Part(NamedTuple):
    """A part of the measurements.

    Attributes:
        name: Name of the part, or of the tests.
        preset: Its sizes; empty for tests.
        is_real: Whether it runs alone, and its result counts.
    """

    name: str
    preset: str = ""
    is_real: bool = False

    def __str__(self) -> str:
        return "-".join(
            [self.name, *filter(None, [self.preset]), *["alone"] * (self.is_real and self.preset == "tiny")]
        )


class Call:
    """What has happened in a call.

    Attributes:
        real_s: Time limit of all parts with real sizes together, in seconds.

    Args:
        command: Name of the command.
        device: `cuda`, or `cpu` to try the script itself.
        is_tiny: Whether real sizes are tiny, too, to try the script itself.
        results: File of the results of real sizes.
        slowness: Factor of time limits.
    """

    def __init__(self, command: str, device: str, results: Path, *, is_tiny: bool, slowness: float) -> None:
        self.command, self.device, self.results, self.is_tiny = command, device, results, is_tiny
        self.begin, self.slowness = time.monotonic(), slowness
        self.real_s = 240.0
        self.out = gpu_ready.out_folder()
        self.logs = gpu_ready.WORK / "logs" if os.environ.get("OUT") else self.out / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        for folder in (self.out, self.logs):
            folder.mkdir(parents=True, exist_ok=True)
        self.outcomes = self.logs / "outcomes.jsonl"
        self.notes: list[str] = []
        self.facts: Results = {}
        self.sizes: tuple[str, int] | None = None
        self.ended: dict[Part, Ended] = {}
        self.measured: dict[Part, Results] = {}
        self.models: str | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begin

    def say(self, text: str) -> None:
        print(f"{self.seconds:4.0f} s  {text}", flush=True)

    def note(self, *lines: str) -> None:
        """Say something now and among the last lines."""
        for line in filter(None, lines):
            self.notes.append(line)
            self.say(line)

    def get_ready(self, wheels: Path) -> bool:
        """Look at the machine, install what it lacks, and take compiled kernels; return whether anything can run."""
        probe = Job("probe", [sys.executable, str(ROOT / "benchmarks/gpu_probe.py")], 90 * self.slowness, ROOT)
        probed = gpu_ready.run(probe, self.logs)
        found = answer(probed)
        if found is None:
            self.note(
                f"the machine cannot be looked at: {probed.problem}",
                *described_parts([("probe", "", probed.output)])[1:],
            )
            return False
        self.facts = found if self.device == "cuda" else found | {"device": "a CPU, to try the script"}
        versions = ", ".join(f"{name} {number}" for name, number in self.facts["packages"].items())
        self.note(f"{self.facts['device'] or 'no CUDA device'}; Python {self.facts['python']}, {versions}")
        fatal, said = gpu_needs.problems(self.facts, self.device)
        self.note(*said, *(f"nothing was run: {line}" for line in fatal))
        if fatal:
            return False
        chosen, said = gpu_ready.fitting_wheels(wheels)
        self.note(*said, *gpu_ready.install(chosen, self.logs), *gpu_ready.failed_imports(chosen, self.logs))
        archive = gpu_ready.brought(gpu_ready.CACHE)
        self.note(gpu_ready.take_kernels(archive, gpu_ready.identity_of(self.facts)))
        os.environ.update(gpu_ready.variables())
        tempfile.tempdir = None  # to be looked up in the environment again
        self.models = os.environ[MODELS] = tempfile.mkdtemp(prefix="leaderless-gpu-models-")
        self.sizes = ("tiny", 64) if self.is_tiny else gpu_needs.fitting_sizes(self.facts["free_bytes"])
        self.say("ready")
        return True

    def real(self, name: str) -> Part | None:
        """A part with a real size, that behind an @ in its name or else the largest, if it fits."""
        name, _, preset = name.partition("@")
        sizes = self._sizes(preset) if preset else self.sizes
        return Part(name, sizes[0], is_real=True) if sizes else None

    def _sizes(self, preset: str) -> tuple[str, int] | None:
        """A preset with the tokens of a training pass, if it fits; where real sizes are tiny, this one is, too."""
        if self.sizes and (self.is_tiny or preset == self.sizes[0]):
            return self.sizes
        return gpu_needs.fitting_sizes(self.facts["free_bytes"], preset)

    def name_of(self, part: Part) -> str:
        """Name of a part among results."""
        is_usual = not part.is_real or (self.sizes is not None and part.preset == self.sizes[0])
        return part.name if is_usual else f"{part.name}@{part.preset}"

    def run(self, parts: Mapping[Part, float], ids: Sequence[str] = ()) -> None:
        """Run parts at the same time.

        Args:
            parts: Parts with their time limits in seconds.
            ids: Names of tests, if there are tests among the parts; without any, all of them run.
        """
        jobs, shared = list[Job](), shared_variables() if len(parts) > 1 else {}
        for part, limit_s in parts.items():
            command, own = self._tests_command(ids) if part.name == TESTS else self._part_command(part)
            jobs.append(Job(str(part), command, limit_s * self.slowness, ROOT, {**shared, **own}))
        if jobs:
            self.say(f"{', '.join(map(str, parts))} ...")
            named = {str(part): part for part in parts}
            done = partial(self._keep, is_whole=not ids)
            run_together(jobs, self.logs, lambda ended: done(named[ended.job.name], ended), max(2, os.cpu_count() or 1))

    def _part_command(self, part: Part) -> tuple[Sequence[str], dict[str, str]]:
        """The command of a part, with its variables."""
        sizes = self._sizes(part.preset) if part.is_real else None
        tokens = [str(sizes[1])] if sizes else []
        device = "cuda:0" if self.device == "cuda" else self.device  # as a run names it
        # Not for weights: another process cannot open memory in segments that grow.
        own = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if part.name == "training" else {}
        return (sys.executable, str(ROOT / "benchmarks/gpu_parts.py"), part.name, device, part.preset, *tokens), own

    def _tests_command(self, names: Sequence[str]) -> tuple[Sequence[str], dict[str, str]]:
        """The command of the tests, or of those with some names, with their variables."""
        workers, limit_s = min(MOST_WORKERS, os.cpu_count() or 1), f"{TEST_S * self.slowness:.0f}"
        options = ["-n", str(workers), "--dist", "load", "--maxschedchunk", "1", "--timeout", limit_s, "--tb=short"]
        options += ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-rfE"]
        files = dict.fromkeys(name.split("::")[0] for name in names) or ["tests/gpu"]
        # Names are compared while tests are collected: pytest runs none if one of its arguments is not found.
        own = {OUTCOMES: str(self.outcomes), NAMES: json.dumps([*names])}
        return (sys.executable, "-m", "pytest", *(file for file in files if (ROOT / file).exists()), *options), own

    def _keep(self, part: Part, ended: Ended, *, is_whole: bool) -> None:
        """Keep what a process has measured as soon as it has ended."""
        if part.name == TESTS:
            found = test_results(self.tests, ended)
        else:
            found = answer(ended) or {"error": ended.problem or "it measured nothing"}
            if ended.problem and "error" not in found:
                found["problem"] = ended.problem
        found |= {"seconds_in_all": ended.seconds, "device": self.facts["device"]}
        self.ended[part], self.measured[part] = ended, found
        if part.is_real or (part.name == TESTS and is_whole):
            self.store(self.name_of(part), found)
        self._write_record()
        self.say(f"{part}: {ended.problem or 'done'}, {ended.seconds:.0f} s")

    def store(self, name: str, found: Results) -> None:
        """Save a result of a real size; the others in the file stay, and so does one that a failure would replace."""
        results: Results = {"parts": {}}
        if self.results.exists():
            results = json.loads(self.results.read_text(encoding="utf-8"))
        before = results["parts"].get(name, {"error": "not measured"})
        if "error" in found and "error" not in before and before.get("device") == found["device"]:
            self.note(f"{name} has failed, and {self.results.name} keeps what was measured before")
        else:
            results["parts"][name] = found
        results["parts"]["environment"] = self.facts
        text = json.dumps(results, indent=1) + "\n"
        for path in {self.results, self.out / "gpu.json"}:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    @property
    def tests(self) -> list[dict[str, Any]]:
        """What is known of each test."""
        lines = self.outcomes.read_text(encoding="utf-8").splitlines() if self.outcomes.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def failed_parts(self) -> list[Part]:
        return [part for part, ended in self.ended.items() if ended.problem and part.name != TESTS]

    @property
    def has_failed(self) -> bool:
        return any(ended.problem for ended in self.ended.values())

    def _write_record(self) -> None:
        record = {
            "command": self.command,
            "device": self.facts.get("device"),
            "failed_tests": [one["test"] for one in failed(self.tests)],
            "failed_parts": [[self.name_of(part), part.is_real] for part in self.failed_parts],
            "parts": {str(part): short(found) for part, found in self.measured.items()},
        }
        (self.out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def finish(self) -> None:
        """Pack logs and kernels, and print what has to be known."""
        end_descendants()
        if self.models:
            shutil.rmtree(self.models, ignore_errors=True)
            self.note(gpu_ready.keep_kernels(self.out, gpu_ready.identity_of(self.facts)))
        self.note(gpu_ready.keep_logs(self.out, self.logs))
        failures = [(str(part), self.ended[part].problem, self.ended[part].output) for part in self.failed_parts]
        tests = self.ended.get(Part(TESTS))
        described = described_tests(self.tests)
        if tests is not None:
            number = ", ".join(f"{number} {name}" for name, number in counts(self.tests).items())
            described.insert(0, f"{number}; {tests.problem or 'exit code 0'}")
            if tests.problem and not self.tests:
                described += described_parts([(TESTS, tests.problem, tests.output)])
        measured = [
            f"{part} = {json.dumps(short(found))}"[:900]
            for part, found in self.measured.items()
            if part.name != TESTS and "error" not in found
        ]
        codes = "; ".join(f"{part} {one.problem or 0} {one.seconds:.0f} s" for part, one in self.ended.items())
        files = ", ".join(sorted(path.name for path in self.out.iterdir() if path.is_file()))
        end = [codes, f"{self.command}: {self.seconds:.0f} s in all; {self.out} has {files}"]
        sections = {"notes": self.notes, "tests": described, "parts": described_parts(failures), "measured": measured}
        print(screen(sections, end), flush=True)


def shared_variables() -> dict[str, str]:
    """Variables of processes that share the machine."""
    return {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": str(min(4, os.cpu_count() or 1))}


def answer(ended: Ended) -> Results | None:
    """The last whole result that a process has printed, if there is one."""
    for line in reversed(ended.output.splitlines()):
        if line.startswith(MARK):
            try:
                found: Results = json.loads(line.removeprefix(MARK))
            except json.JSONDecodeError:  # it was stopped while it printed
                continue
            return found
    return None


def test_results(tests: Sequence[Mapping[str, Any]], ended: Ended) -> Results:
    """Numbers of tests by outcome with the failures, and what has kept them from being all."""
    found: Results = {**counts(tests), "failures": described_tests(tests)}
    return found if ended.code in {0, 1} and not ended.is_stopped else found | {"problem": ended.problem}

"""Tests and measurements on a CUDA GPU, without a network, in three calls of three or four minutes each.

    python benchmarks/gpu.py smoke               all tests and tiny forms of all parts, at once; then a step of decoding
    python benchmarks/gpu.py retry [NAME...]     tests and parts that have failed, again; then a pass of training
    python benchmarks/gpu.py measure [PART...]   what is still unknown, the most valuable first
    python benchmarks/gpu.py draw                pictures of the results

It runs with the Python and the torch of the machine (torch 2.11 or newer, transformers 5.17 or newer), from a checkout.
What else is missing is installed from the wheels that `make gpu-wheels` brings. Each part is a separate process with a
time limit: what fails hides nothing else, and what hangs prints where. The last 12,000 characters of the output say
what has failed, with the frames of our own code, and what was measured.

Results of real sizes are saved in `docs/performance/gpu.json` as soon as they are known. Logs, results and compiled
kernels are in `$OUT`, or in `runs/gpu` if it is not set. A later call takes kernels from `.gpu-cache.tgz`, and `retry`
without names takes what has failed from `.gpu-call.json`: the files of the call before, with a dot before their names.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import gpu_ready
from gpu_call import RECORD, TESTS, Call, Part
from gpu_processes import StoppedError, stopped_by_signals
from gpu_report import PICTURE, RESULTS, ROOT, TIMELINE, Results, draw, draw_timeline, table

LIMITS_S = {
    "speeds": 25,
    "attention": 30,
    "generation": 80,
    "decoding": 60,
    "agreement": 60,
    "weights": 50,
    "training": 100,
    "training@0.5B": 60,
    "timeline": 60,
    "published_verl": 90,
    "published_one": 90,
    "published_many": 120,
    "quickstart": 300,
    "weights@7B": 120,
}
"""Time limit of each part with a real size, the most valuable first: that behind the @, or the largest that fits."""
TINY = tuple(name for name in LIMITS_S if name != "quickstart" and "@" not in name)
"""Parts that have a tiny form."""
MEASURED = ("speeds", "attention", "generation", "decoding", "agreement", "weights", "training", "training@0.5B")
"""Parts that are measured if none is named."""
SMOKE_S, RETRY_S, REAL_S = 150, 60, 240
"""Time limits of all tests and tiny parts, of those that are tried again, and of all real sizes of a call."""
LEAST_S = 10


def main() -> None:
    options = parsed(sys.argv[1:])
    if options.command == "draw":
        show(options.results or RESULTS, options.picture, options.timeline)
        return
    is_tiny = options.tiny or options.device == "cpu"
    results = options.results or (gpu_ready.out_folder() / "gpu.json" if is_tiny else RESULTS)
    call = Call(options.command, options.device, results, is_tiny=is_tiny, slowness=options.slowness)
    call.real_s, code = options.seconds, 0
    with stopped_by_signals():
        try:
            if call.get_ready(options.wheels):
                COMMANDS[options.command](call, options.names)
            else:
                code = 2
        except StoppedError as stopped:
            call.note(f"stopped by {stopped}")
            code = 128 + stopped.number
        finally:
            call.finish()
    sys.exit(code or int(call.has_failed))


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=[*COMMANDS, "draw"])
    parser.add_argument("names", nargs="*", help=f"tests as pytest names them, or of {', '.join(LIMITS_S)}")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".whl", help="folder with wheels of missing packages")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself")
    parser.add_argument("--tiny", action="store_true", help="real sizes are tiny, to try the script itself")
    parser.add_argument("--slowness", type=float, default=1.0, help="factor of time limits on a slow machine")
    parser.add_argument("--seconds", type=float, default=REAL_S, help="time limit of all real sizes together")
    parser.add_argument("--results", type=Path, help=f"file of results instead of {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--timeline", type=Path, default=TIMELINE, help="file of the second picture")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in LIMITS_S and not is_test(name)]
    if unknown or (options.command == "smoke" and options.names):
        parser.error(f"unknown: {', '.join(unknown or options.names)}")
    return options


def is_test(name: str) -> bool:
    return name.startswith("tests/")


def smoke(call: Call, _: Sequence[str]) -> None:
    """All tests and all parts with a tiny model at the same time: faults need no quiet machine."""
    call.run({Part(TESTS): SMOKE_S, **{Part(name, "tiny"): SMOKE_S - 10 for name in TINY}})
    if not call.ended[Part("decoding", "tiny")].problem:
        run_real(call, ["decoding"])


def retry(call: Call, names: Sequence[str]) -> None:
    """Tests and parts that are named, or that the last call has left as failed; then a pass of training."""
    real = ["training"]
    if not names:
        names, others = left_by_last_call(call)
        real = [*dict.fromkeys([*others, *real])]
    tests = [name for name in names if is_test(name) and (ROOT / name.split("::")[0]).exists()]
    parts: dict[Part, float] = {Part(TESTS): RETRY_S} if tests else {}
    parts |= {Part(name, "tiny"): RETRY_S - 5 for name in names if not is_test(name)}
    call.run(parts, tests)
    known = [one["test"] for one in call.tests]
    for name in filter(is_test, names):
        if not any(is_named(test, name) for test in known):
            call.note(f"{name} was not found, or had not begun")
    run_real(call, real)


def is_named(test: str, name: str) -> bool:
    """Whether a test is meant by a name: its own, without parameters, or that of its file."""
    return test == name or test.startswith((f"{name}[", f"{name}::"))


def left_by_last_call(call: Call) -> tuple[list[str], list[str]]:
    """Tests and tiny parts that failed in the last call, and parts of real sizes that did."""
    path = gpu_ready.brought(RECORD)
    if path is None:
        call.note(f"no {RECORD} was brought, so that nothing is known of what has failed: name tests and parts")
        return [], []
    try:
        record: Results = json.loads(path.read_text(encoding="utf-8"))
        tiny, real = ([name for name, is_real in record["failed_parts"] if is_real is kind] for kind in (False, True))
        names = [*record["failed_tests"], *tiny]
    except (ValueError, KeyError, TypeError) as error:
        call.note(f"{path.name} cannot be read ({error}): name tests and parts")
        return [], []
    call.note(f"from {path.name}: {', '.join([*names, *real]) or 'nothing has failed'}")
    return names, real


def measure(call: Call, names: Sequence[str]) -> None:
    """Parts with real sizes, one after another: those that are not measured yet come first."""
    known: Results = json.loads(call.results.read_text(encoding="utf-8"))["parts"] if call.results.exists() else {}

    def is_known(name: str) -> bool:
        found = known.get(name, {"error": "not measured"})
        return not found.keys() & {"error", "problem"} and found.get("device") == call.facts["device"]

    different = {call.real(name): name for name in reversed(MEASURED)}.values()  # by the first name of each
    run_real(call, names or sorted((name for name in MEASURED if name in different), key=is_known))


def run_real(call: Call, names: Sequence[str]) -> None:
    """Run parts with real sizes alone, the first ones if time does not suffice for all."""
    begin = call.seconds
    for name in names:
        part, left = call.real(name), call.real_s - (call.seconds - begin) / call.slowness
        if part is None:
            call.note(f"{name} was not run: no model fits into the memory that is free")
        elif left < LEAST_S:
            call.note(f"{name} was not run: no time was left; measure {name} runs it")
        else:
            call.run({part: min(LIMITS_S[name], left)})


def show(results: Path, picture: Path, timeline: Path) -> None:
    """Draw results, and print them as a table."""
    found: Results = json.loads(results.read_text(encoding="utf-8"))
    draw(found, picture)
    draw_timeline(found, timeline)
    print(table(found))


COMMANDS = {"smoke": smoke, "retry": retry, "measure": measure}


if __name__ == "__main__":
    main()

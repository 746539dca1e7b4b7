"""GRPO on a real pretrained model and real questions, for some seconds, on the device that is there.

    python benchmarks/gpu_real.py run MODEL --train train.jsonl --held-out dev.jsonl --seconds 300

MODEL is a folder in Hugging Face format, or a GGUF file, which is unpacked next to it (this needs the packages `gguf`
and `accelerate`). Questions are rows of JSONL or Parquet files, with answers as in GSM8K. Measured are the accuracy
before and after, tokens per second, how much rollout and trainer differ, and memory next to what `plan` says. The time
limit holds for everything, and Ctrl-C keeps what was measured.

A machine that takes only small files gets the model in pieces, which may come in any order, in several calls:

    python benchmarks/gpu_real.py split MODEL pieces       # here: pieces of 40 MiB
    python benchmarks/gpu_real.py add pieces               # there, for each piece or folder of pieces that has come
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]  # also where nothing is installed

from gpu_real_pieces import LARGEST_PIECE, add, checksum_of, split  # noqa: E402

RESULTS = ROOT / "docs/performance/gpu_real.json"
FOLDER = ROOT / "runs/gpu-real"
NEEDED_FOR_GGUF = ("gguf", "accelerate")
Results = dict[str, Any]
SYSTEM = "Reason step by step, and put your final answer within \\boxed{}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    splitting = commands.add_parser("split", help="cut a model into pieces")
    splitting.add_argument("model", type=Path)
    splitting.add_argument("folder", type=Path)
    splitting.add_argument("--mib", type=float, default=LARGEST_PIECE / 2**20, help="size of a piece")
    adding = commands.add_parser("add", help="keep pieces that have come, and join them when all are there")
    adding.add_argument("source", type=Path, help="piece, or folder of pieces")
    adding.add_argument("--into", type=Path, default=FOLDER)
    unpacking = commands.add_parser("unpack", help="make a folder of a GGUF file")
    unpacking.add_argument("file", type=Path)
    unpacking.add_argument("folder", type=Path)
    _add_run(commands.add_parser("run", help="train and measure"))
    options = parser.parse_args()
    try:
        sys.exit(COMMANDS[options.command](options))
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _add_run(running: argparse.ArgumentParser) -> None:
    running.add_argument("model", type=Path, help="folder, or GGUF file")
    running.add_argument("--train", type=Path, required=True, help="questions to train on")
    running.add_argument("--held-out", type=Path, required=True, help="questions that are answered before and after")
    running.add_argument("--seconds", type=float, default=300.0, help="time limit of everything")
    running.add_argument("--steps", type=int, default=0, help="most steps; 0: as many as there is time for")
    running.add_argument("--questions", type=int, default=128, help="number of held-out questions")
    running.add_argument("--columns", nargs=2, default=("question", "answer"), metavar=("QUESTION", "ANSWER"))
    running.add_argument("--system", default=SYSTEM, help="system message; empty for a model that has no chat template")
    running.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    running.add_argument("--responses", type=int, default=8, help="responses to a prompt")
    running.add_argument("--response-tokens", type=int, default=256, help="most tokens of a response")
    running.add_argument("--learning-rate", type=float, default=1e-6)
    running.add_argument("--evaluate-every", type=int, default=20, help="steps between evaluations")
    running.add_argument("--set", nargs="*", default=(), metavar="KEY=VALUE", help="further settings of the recipe")
    running.add_argument("--folder", type=Path, default=FOLDER, help="folder for the run")
    running.add_argument("--results", type=Path, default=RESULTS)


def do_split(options: argparse.Namespace) -> int:
    pieces = split(options.model, options.folder, int(options.mib * 2**20))
    size = sum(piece.stat().st_size for piece in pieces)
    print(f"{options.model} is in {len(pieces)} pieces in {options.folder}, {size / 2**20:,.1f} MiB together")
    return 0


def do_add(options: argparse.Namespace) -> int:
    arrivals, problems = add(options.source, options.into)
    for arrival in arrivals:
        if arrival.missing:
            missing = ", ".join(map(str, arrival.missing))
            print(f"{arrival.model}: {len(arrival.missing)} of {arrival.total} pieces are missing: {missing}")
        else:
            print(f"{arrival.model} is complete: python benchmarks/gpu_real.py run {arrival.model}")
    for problem in problems:
        print(f"refused: {problem}", file=sys.stderr)
    return int(bool(problems))


def do_unpack(options: argparse.Namespace) -> int:
    unpack(options.file, options.folder)
    return 0


def unpack(file: Path, folder: Path) -> None:
    """Make a folder in Hugging Face format of a GGUF file, with weights in bfloat16.

    Raises:
        RuntimeError: A package is missing.
    """
    missing = [name for name in NEEDED_FOR_GGUF if find_spec(name) is None]
    if missing:
        raise RuntimeError(
            f"{file} is a GGUF file, and transformers reads these with {' and '.join(missing)}, which this Python does "
            f"not have: pip install {' '.join(missing)}, or unpack it elsewhere with `unpack` and bring the folder"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(partial)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(partial)
    (partial / "gguf.json").write_text(json.dumps({"checksum": checksum_of(file)}), encoding="utf-8")
    partial.rename(folder)


def folder_of(model: Path) -> Path:
    """The folder of a model; a GGUF file is unpacked in another process, whose memory is not that of the run.

    Raises:
        ValueError: The model is neither.
        RuntimeError: It cannot be unpacked.
    """
    if model.is_file() and model.open("rb").read(4) == b"GGUF":
        folder = model.with_name(f"{model.stem}-unpacked")
        mark = folder / "gguf.json"
        if mark.exists() and json.loads(mark.read_text(encoding="utf-8"))["checksum"] == checksum_of(model):
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, __file__, "unpack", str(model), str(folder)]
        if subprocess.run(command, check=False).returncode:
            raise RuntimeError(f"{model} could not be unpacked, see above")
        return folder
    if not (model / "config.json").exists():
        raise ValueError(f"{model} is neither a folder with a config.json nor a GGUF file")
    return model


def do_run(options: argparse.Namespace) -> int:
    folder = folder_of(options.model)
    # Processes that grade find the package, too.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    from gpu_real_run import MANY_STEPS, Options, measure

    for path in (options.train, options.held_out):
        if not path.exists():
            raise ValueError(f"{path} does not exist: name a file of questions, .jsonl or .parquet")
    options.results.parent.mkdir(parents=True, exist_ok=True)
    measured = Options(
        model=folder,
        train=options.train,
        held_out=options.held_out,
        columns=tuple(options.columns),
        system=options.system,
        num_held_out=options.questions,
        sizes=(options.prompts, options.responses, options.response_tokens),
        learning_rate=options.learning_rate,
        evaluate_every=options.evaluate_every,
        seconds=options.seconds,
        steps=options.steps or MANY_STEPS,
        folder=options.folder,
        overrides=tuple(options.set),
    )
    results = measure(measured, options.results)
    print(table(results))
    return int("problem" in results)


def table(results: Results) -> str:
    """The figures as a table in Markdown, below the conditions of the measurement."""
    packages = ", ".join(f"{name} {number}" for name, number in results["packages"].items())
    steps = f"{results['steps']} steps of {results['prompts']} prompts with {results['responses']} responses"
    seconds = f"{results.get('spent_s', results['seconds']):.0f} s"
    head = f"{results['model']} on {results['device']}; {packages}; {steps} in {seconds}."
    body = "\n".join(f"| {name} | {value} |" for name, value in rows(results))
    return f"{head}\n\n| figure | measured |\n| --- | ---: |\n{body}"


def rows(results: Results) -> list[tuple[str, str]]:
    """Each figure with its name."""
    lines = []
    accuracies = list(results["accuracy_by_step"].items())
    if accuracies:
        (_, before), (step, last) = accuracies[0], accuracies[-1]
        is_known = len(accuracies) > 1
        after = f" → {last:.1%} after step {step}" if is_known else ", before; stopped too early to measure it after"
        lines.append((f"accuracy on {results['questions']} held-out questions", f"{before:.1%}{after}"))
    if results["steps"]:
        rewards = results["rewards"]
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in results["part_s"].items() if seconds >= 0.05)
        mismatch = results["mismatch"]
        lines += [
            ("reward of the first and the last step", f"{rewards[0]:.3f} → {rewards[-1]:.3f}"),
            ("generation", f"{results['generation_tokens_per_s']:,.0f} tokens/s"),
            ("whole steps, prompts included", f"{results['tokens_per_s']:,.0f} tokens/s"),
            ("a step", f"{results['step_s']:.1f} s ({parts})"),
            ("tokens of a response", f"{results['response_tokens']:.0f}, {results['truncated'][-1]:.0%} cut"),
            ("rollout and trainer differ", f"{mismatch['abs_mean']:.2g} per token, {mismatch['abs_max']:.2g} at most"),
        ]
    if "peak_bytes" in results:
        sizes = [f"{results[name] / 2**30:.2f}" for name in ("peak_bytes", "planned_bytes")]
        phases = f"{results['peak_phase']}, planned {results['planned_phase']}"
        lines.append(("most memory, of what `plan` says", f"{sizes[0]} of {sizes[1]} GiB ({phases})"))
    if "problem" in results:
        lines.append(("not complete", results["problem"]))
    return lines


COMMANDS = {"split": do_split, "add": do_add, "unpack": do_unpack, "run": do_run}

if __name__ == "__main__":
    main()

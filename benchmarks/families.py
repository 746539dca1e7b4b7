"""Families with windows, sinks and linear attention next to a dense Qwen2 of the same size.

    python benchmarks/families.py [--seconds] && python docs/generate.py

Each family learns the additions of the quickstart from random weights: first from the careless teacher, by
`recipes/quickstart/sft.yaml`, then by `recipes/quickstart/grpo.yaml`. Windows are narrower than an addition. Runs that
are there are not repeated. With `--seconds`, passes through larger models are measured instead, forward and back, in
turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.tiny import random_samples
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from leaderless.cli.quickstart_project.data import write_additions
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.training.fsdp import FsdpEngine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/families.json"
PICTURE = ROOT / "docs/images/families.png"
DENSE = "qwen2"
FAMILIES: Mapping[str, Mapping[str, object]] = {
    DENSE: {},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "initializer_range": 0.06,  # with weights as small as usual, so small a model takes thousands of steps
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
}
"""Settings of each family; types of layers take turns."""
TITLES = {
    DENSE: "Qwen2: full attention",
    "gemma3_text": "Gemma 3: windows and full attention",
    "gpt_oss": "GPT-OSS: windows, sinks and experts",
    "lfm2": "LFM2: convolutions and full attention",
    "qwen3_5_text": "Qwen3.5: linear and full attention",
}
ACCURACY = "evaluation/mean@1"


def config_of(family: str, hidden: int, num_layers: int, window: int, vocabulary: int) -> PretrainedConfig:
    """The description of a model with about as many active parameters as a dense one."""
    own = dict(FAMILIES[family])
    if "layer_types" in own:
        own["layer_types"] = [*own["layer_types"]] * (num_layers // 2)  # type: ignore[misc]
    heads, width = 4, hidden // 4
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": width,
        "query_pre_attn_scalar": width,
        "linear_key_head_dim": width,
        "linear_value_head_dim": width,
        "sliding_window": window,
        "use_sliding_window": False,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    config = CONFIG_MAPPING[family]()
    if family == "gpt_oss":  # each token passes two experts, which together are as wide
        sizes["intermediate_size"] = hidden
    known = {name: value for name, value in sizes.items() if hasattr(config, name)}
    if family == DENSE:
        known.pop("sliding_window")
    return CONFIG_MAPPING[family](**known, **own)


def learn(home: Path, family: str, seed: int) -> Mapping[str, object]:
    """Rewards and accuracies of a run that learns from the teacher, then by reinforcement."""
    if not (home / "runs/quickstart-data").exists():
        write_additions(home / "runs/quickstart-data", seed)
        model = home / "runs/quickstart-data/model"
        if family != DENSE:
            tokenizer = AutoTokenizer.from_pretrained(model)
            torch.manual_seed(seed)
            config = config_of(family, hidden=128, num_layers=2, window=4, vocabulary=len(tokenizer))
            AutoModelForCausalLM.from_config(config).save_pretrained(model)
    for recipe in ("sft", "grpo"):
        name = {"sft": "quickstart-sft", "grpo": "quickstart"}[recipe]
        if not (home / "runs" / name / "report.html").exists():
            leaderless(home, "train", ROOT / f"recipes/quickstart/{recipe}.yaml", "--workers", 2, f"seed={seed}")
        if recipe == "sft" and not (home / "runs/quickstart-base").exists():
            leaderless(home, "export", home / "runs/quickstart-sft", home / "runs/quickstart-base")
    rows = [json.loads(line) for line in (home / "runs/quickstart/metrics.jsonl").read_text().splitlines()]
    return {
        "parameters": num_parameters(home / "runs/quickstart-base"),
        "accuracy": [[row["step"], row[ACCURACY]] for row in rows if ACCURACY in row],
        "mismatch": max(row["mismatch/abs_max"] for row in rows if row["step"]),
    }


def leaderless(home: Path, *arguments: object) -> None:
    """Call the command in a folder."""
    paths = {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "leaderless", *map(str, arguments)]
    subprocess.run(command, cwd=home, env=os.environ | paths, check=True, stdout=sys.stderr)


def num_parameters(folder: Path) -> int:
    """Parameters of a model that is written in a folder."""
    return sum(one.numel() for one in AutoModelForCausalLM.from_pretrained(folder).parameters())


@contextmanager
def trainers(hidden: int, num_layers: int, window: int) -> Iterator[dict[str, FsdpEngine]]:
    """A trainer of a larger model of each family."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        engines = {}
        for family in FAMILIES:
            torch.manual_seed(0)
            path = f"{folder}/{family}"
            config = config_of(family, hidden, num_layers, window, vocabulary=512)
            AutoModelForCausalLM.from_config(config).save_pretrained(path)
            model = ModelConfig(path=path)
            trunk = load_causal_lm(model, "policy")
            place = ProcessGroup((0,), 0), torch.device("cpu"), 1 << 20
            engines[family] = FsdpEngine(trunk, model, *place, optimizer=OptimizerConfig(), num_updates=1)
        yield engines
    dist.destroy_process_group()


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Seconds of a pass of each family, forward and back, in turns."""
    lengths = [(options.tokens // 2, options.tokens // 2)] * options.sequences
    batch = random_samples(lengths, vocabulary=500)
    seconds = dict[str, list[float]]()
    with trainers(options.hidden, options.layers, options.window) as engines:
        for turn in range(options.repeats + 1):  # the first one is for warming up
            for family, engine in engines.items():
                begin = time.perf_counter()
                for micro_batch in engine.micro_batches(batch):
                    engine.forward(micro_batch).log_probs.sum().backward()
                engine.model.zero_grad()
                if turn:
                    seconds.setdefault(family, []).append(time.perf_counter() - begin)
                    print(f"{family}: {seconds[family][-1]:.2f} s", file=sys.stderr)
        counts = {name: sum(one.numel() for one in engine.model.parameters()) for name, engine in engines.items()}
    sizes = {name: getattr(options, name) for name in ("hidden", "layers", "window", "tokens", "sequences")}
    return {"seconds": seconds, "parameters": counts, "cores": len(os.sched_getaffinity(0)), **sizes}


def table(results: Mapping[str, Any]) -> str:
    """The accuracy of each family, and the seconds of its passes, in Markdown."""
    lines = [
        "| family | parameters | held-out accuracy before | after | largest mismatch | a pass, larger | ratio |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    seconds = results.get("passes", {}).get("seconds", {})
    for family, title in TITLES.items():
        cells = ["–"] * 6
        if (found := results["curves"].get(family)) is not None:
            (_, before), *_, (_, after) = found["accuracy"]
            cells[:4] = [f"{found['parameters']:,}", f"{before:.1%}", f"{after:.1%}", f"{found['mismatch']:.1g}"]
        if family in seconds:
            ratios = sorted(own / dense for own, dense in zip(seconds[family], seconds[DENSE], strict=True))
            spread = "1" if family == DENSE else f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells[4:] = [f"{median(seconds[family]):.2f} s", spread]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def conditions(results: Mapping[str, Any]) -> str:
    """What was passed through the larger models, in a sentence."""
    passes = results.get("passes")
    if passes is None:
        return "Passes were not measured yet."
    return (
        f"Passes: forward and back, {passes['sequences']} packed sequences of {passes['tokens']:,} tokens, "
        f"{passes['layers']} layers of width {passes['hidden']}, windows of {passes['window']} tokens, float32, "
        f"{passes['cores']} cores; medians of {len(passes['seconds'][DENSE])} in turns."
    )


def draw(curves: Mapping[str, Mapping[str, list[list[float]]]]) -> None:
    """The held-out accuracy of each family by step."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for family, found in curves.items():
        steps, values = zip(*found["accuracy"], strict=True)
        axes.plot(steps, values, marker="o", markersize=3, label=TITLES[family])
    axes.set_xlabel("step of reinforcement learning")
    axes.set_ylabel("held-out accuracy")
    axes.set_ylim(0, 1.02)
    axes.legend(loc="lower right")
    figure.savefig(PICTURE, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/families", help="folder for data and runs")
    parser.add_argument("--only", nargs="+", default=[*FAMILIES], choices=FAMILIES)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", action="store_true", help="measure passes, and nothing else")
    parser.add_argument("--repeats", type=int, default=5)
    for name, size in {"hidden": 512, "layers": 4, "window": 128, "tokens": 1024, "sequences": 4}.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="size for --seconds")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {"curves": {}}
    if options.seconds:
        results["passes"] = measure(options)
    else:
        for family in options.only:
            home = options.folder.resolve() / family
            home.mkdir(parents=True, exist_ok=True)
            results["curves"][family] = learn(home, family, options.seed)
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        draw(results["curves"])
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()

"""What the dataloader reads on each rank, and how long a step waits for it.

    python benchmarks/dataloader.py
    python benchmarks/dataloader.py --large 300000  # a large file, with a realistic tokenizer

Ranks are processes on this machine. A pause stands for the computation of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pyarrow import parquet
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.counts import counting_bytes_read

from leaderless.config import Recipe
from leaderless.data.dataloader import Dataloader, open_training_set
from leaderless.data.sources.disk_cache import DataCache
from leaderless.distributed.transport import Transport
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.loading.tokenizer import load_tokenizer

CHARACTERS = "0123456789+-=?. abcdefghijklmnopqrstuvwxyz"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{% endfor %}assistant:"
LIBRARY = Path(os.__file__).parent
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIZE = 256
"""Prompts per step."""


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank.

    Attributes:
        start_s: Time from opening the data to the first step, at the first and at the second start.
        start_bytes: Bytes read until then, likewise.
        epoch_bytes: Bytes read in the epoch that follows, without read-ahead.
        wait_s: Mean wait for a step after the first, without read-ahead and with it.
    """

    start_s: tuple[float, float]
    start_bytes: tuple[int, int]
    epoch_bytes: int
    wait_s: tuple[float, float]


@dataclass(frozen=True)
class Task:
    """What is measured: a file, folders of the cache and of the model, the pause of a step, and the number of steps."""

    file: Path
    cache: Path
    model: Path
    pause_s: float
    num_steps: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10 * SIZE)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--pause", type=float, default=0.3, help="seconds of computation in a step")
    parser.add_argument("--large", type=int, help="measure only two starts, with this many rows of about 560 bytes")
    options = parser.parse_args()
    if options.large:
        measure_starts(options.large, options.ranks)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tiny_model(folder / "model", CHARACTERS, hidden_size=32, num_heads=4, chat_template=TEMPLATE)
        files = write_data(folder, options.rows)
        print(f"{options.rows} rows, {files[0].stat().st_size / 1e6:.2f} MB as JSON lines; steps of {SIZE} prompts\n")
        print("| file | ranks | MB at the first start | at the second | in an epoch | seconds | ms of waiting |")
        print("| --- " * 7 + "|")
        for file in files:
            for num_ranks in options.ranks:
                cache = folder / f"{file.name}-{num_ranks}"
                task = Task(file, cache, folder / "model", options.pause, options.rows // SIZE)
                print(line(file, measure(num_ranks, task)), flush=True)
        print("\nMB: most of any rank; seconds: of the two starts; waiting: without reading ahead, and with it")


def measure_starts(num_rows: int, num_ranks: Sequence[int]) -> None:
    """Print the time of the first and the second start, with 30,000 tokens and text from Python's library."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(LIBRARY.rglob("*.py"))[:1500]]
        train_tokenizer(texts).save_pretrained(folder)
        words, draw = " ".join(texts).split(), random.Random(0)
        with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
            for number in range(num_rows):
                begin = draw.randrange(len(words) - 100)
                prompt = " ".join(words[begin : begin + draw.randint(20, 100)])
                file.write(json.dumps({"prompt": prompt, "answer": str(number), "solution": "x" * 88}) + "\n")
        size = (folder / "rows.jsonl").stat().st_size
        print(
            f"{num_rows:,} rows, {size / 1e6:.0f} MB as JSON lines\n\n| ranks | s, first start | s, next |\n"
            + "| --- " * 3
            + "|"
        )
        for ranks in num_ranks:
            task = Task(folder / "rows.jsonl", folder / f"cache-{ranks}", folder, 0.0, 2)
            seconds = zip(*(one.start_s for one in measure(ranks, task)), strict=True)
            print(f"| {ranks} | " + " | ".join(f"{max(start):.1f}" for start in seconds) + " |", flush=True)


def train_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer like those of current models: byte-level pairs, and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=30_000, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", chat_template=TEMPLATE)


def line(file: Path, ranks: Sequence[Measured]) -> str:
    """A row of the table."""
    starts = [max(one.start_bytes[i] for one in ranks) / 1e6 for i in range(2)]
    seconds = ", ".join(f"{max(one.start_s[i] for one in ranks):.2f}" for i in range(2))
    waits = ", ".join(f"{1e3 * max(one.wait_s[i] for one in ranks):.1f}" for i in range(2))
    epoch = max(one.epoch_bytes for one in ranks) / 1e6
    return f"| {file.name} | {len(ranks)} | {starts[0]:.2f} | {starts[1]:.2f} | {epoch:.2f} | {seconds} | {waits} |"


def write_data(folder: Path, num_rows: int) -> list[Path]:
    """Write the same rows in each format."""
    draw = random.Random(0)
    rows = [{"prompt": "".join(draw.choices(CHARACTERS, k=draw.randint(100, 500)))} for _ in range(num_rows)]
    lines, table, stream = (folder / name for name in ("rows.jsonl", "rows.parquet", "stream.jsonl"))
    for path in (lines, stream):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    parquet.write_table(pa.Table.from_pylist(rows), table, row_group_size=max(1, num_rows // 16))
    return [lines, table, stream]


def measure(num_ranks: int, task: Task) -> list[Measured]:
    """Open a dataset twice and read two epochs of it, on a number of ranks."""
    with tempfile.TemporaryDirectory() as answers:
        mp.spawn(_be_rank, (num_ranks, task, answers), num_ranks)
        texts = [Path(answers, f"{rank}.json").read_text(encoding="utf-8") for rank in range(num_ranks)]
    return [Measured(**json.loads(text)) for text in texts]


def _be_rank(rank: int, num_ranks: int, task: Task, answers: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{answers}/store", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=300))
    cache = DataCache(Transport(torch.device("cpu"), timeout_s=300).world, task.cache)
    tokenizer = load_tokenizer(make_recipe(task, 0).models["policy"], "policy")
    starts, num_bytes, waits, epochs = [], [], [], []
    for ahead in (0, 1):
        recipe = make_recipe(task, ahead)
        with counting_bytes_read() as read:
            begin = time.perf_counter()
            sets = [open_training_set(c, key, tokenizer, recipe, cache) for key, c in recipe.data.train_sets().items()]
            starts.append(time.perf_counter() - begin)
            num_bytes.append(read.total)
            loader = Dataloader(sets, recipe, rank, num_ranks)
            waits.append(fmean(wait_for_steps(loader, task)[1:]))
            loader.close()
            epochs.append(read.total - num_bytes[-1])
    measured = {"start_s": starts, "start_bytes": num_bytes, "epoch_bytes": epochs[0], "wait_s": waits}
    Path(answers, f"{rank}.json").write_text(json.dumps(measured), encoding="utf-8")
    dist.destroy_process_group()


def wait_for_steps(loader: Dataloader, task: Task) -> list[float]:
    """Seconds that each step waits for its prompts, with a pause after each."""
    waits: list[float] = []
    for _ in range(task.num_steps):
        begin = time.perf_counter()
        loader.next()
        waits.append(time.perf_counter() - begin)
        time.sleep(task.pause_s)
    return waits


def make_recipe(task: Task, ahead: int) -> Recipe:
    settings = {
        "name": "benchmark",
        "workflow": "grpo",
        "models": {"policy": str(task.model)},
        "data": {
            "train": {"path": str(task.file), "streaming": task.file.stem == "stream"},
            "max_prompt_tokens": 2000,
            "prefetch_steps": ahead,
        },
        "batch": {"prompts_per_step": SIZE},
        "steps": 1,
    }
    return Recipe.model_validate(settings)


if __name__ == "__main__":
    main()

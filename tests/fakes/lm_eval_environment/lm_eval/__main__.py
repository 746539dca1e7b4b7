"""The command: a question whose answer is scored, and one that is generated."""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml


def ask(model: dict[str, Any], **fields: Any) -> Any:
    """The choice of the server's reply, asked as lm-eval asks."""
    body = {"model": model["model"], "temperature": 0, "seed": 1234, **fields}
    headers = {"content-type": "application/json", "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(model["base_url"], json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def main(arguments: list[str]) -> None:
    assert arguments[:2] == ["run", "--config"], arguments
    config = yaml.safe_load(Path(arguments[2]).read_text(encoding="utf-8"))
    model, (task, *_) = config["model_args"], config["tasks"]
    assert Path(model["tokenizer"], "tokenizer_config.json").exists()
    print("Requesting API:   0%|          | 0/2 [00:00<?, ?it/s]", end="\r", file=sys.stderr)
    scored = ask(model, prompt=[[3, 4, 5]], max_tokens=1, logprobs=1, echo=True)["logprobs"]
    if task == "failing_sums":
        print("API request failed! Status code: 400, Response text: too long. Retrying...", file=sys.stderr)
        raise ValueError("that was all")
    Path(config["output_path"], "asked").touch()
    while task == "slow_sums":
        time.sleep(0.05)
    text = ask(model, prompt=[[3, 4]], max_tokens=4, stop=["\n"])["text"]
    print("Requesting API: 100%|##########| 2/2 [00:00<00:00, 9it/s]", file=sys.stderr)
    numbers = {"alias": task, "acc,none": sum(scored["token_logprobs"][1:-1]), "acc_stderr,none": 0.25}
    numbers |= {"length,strict": float(len(text)), "length_stderr,strict": "N/A", "sample_len": 1}
    results = {
        "results": {task: numbers},
        "n-shot": {task: config.get("num_fewshot", 0)},
        "n-samples": {task: {"original": 9, "effective": config.get("limit", 9)}},
        "further": arguments[3:],
    }
    folder = Path(config["output_path"], "model")
    folder.mkdir(parents=True)
    (folder / "results_2026-11-29T10-00-00.000001.json").write_text(json.dumps(results), encoding="utf-8")


main(sys.argv[1:])

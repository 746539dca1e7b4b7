"""A process that makes a folder of a GGUF file: `python -m leaderless.models.loading.gguf FILE FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging


def unpack(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file, with weights in float32, its tokenizer and chat template as Hugging Face does."""
    options: dict[str, object] = {"gguf_file": file.name}
    AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):  # earlier versions have no other way than to dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **options).save_pretrained(folder)


if __name__ == "__main__":
    logging.disable_progress_bar()
    unpack(*map(Path, sys.argv[1:]))

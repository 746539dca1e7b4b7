"""Tiny models that see images, and samples with pictures."""

from __future__ import annotations

import base64
import functools
import io
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image
from tests.tiny import scatter_vectors
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    CLIPVisionConfig,
    GemmaConfig,
    LlamaConfig,
    LlavaConfig,
    PaliGemmaConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from leaderless.base.image_files import open_image
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.images import PromptImage, expanded, pack_images, placed
from leaderless.models.loading.support import register_classifiers
from leaderless.models.loading.tiny import write_vision_model
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.vision.image_readers import FamilyImageReader, open_reader

Family = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "paligemma"]
WORDS = [*"0123456789", "red", "blue", "how many ", " squares? ", " and "]
SIZES = [[(32, 32)], [], [(40, 16), (16, 24)], [(8, 64)], [], [(24, 24), (32, 32), (16, 16)]]
"""Widths and heights of the images of each prompt: several, and none in some."""


@functools.cache
def vision_model(family: Family = "qwen3_vl") -> str:
    """The folder of a model, the same for all tests of a process."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-vision-")
    _KEPT.append(folder)
    path = Path(folder.name) / family
    if family == "llava":
        _write_llava(path)
    elif family == "paligemma":
        _write_paligemma(path)
    else:
        write_vision_model(path, WORDS, family=family, hidden_size=32)
    scatter_vectors(path, AutoModelForImageTextToText)
    return str(path)


@functools.cache
def vision_critic(family: Family = "qwen3_vl") -> str:
    """The folder of a value model of the same weights, with a head that is not zero."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-vision-")
    _KEPT.append(folder)
    source = vision_model(family)
    path = shutil.copytree(source, Path(folder.name) / f"{family}_critic")
    register_classifiers(AutoConfig.from_pretrained(source))
    model = AutoModelForTokenClassification.from_pretrained(source, num_labels=1)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.score.parameters():
            weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    model.save_pretrained(path)
    return str(path)


def _write_llava(path: Path) -> None:
    """A model of type llava, with the tokenizer of the others."""
    write_vision_model(path, WORDS, hidden_size=32)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    described = AutoConfig.from_pretrained(path)
    config = LlavaConfig(
        text_config=LlamaConfig(vocab_size=described.text_config.vocab_size, num_key_value_heads=2, **sizes),
        vision_config=CLIPVisionConfig(image_size=16, patch_size=4, projection_dim=32, **sizes),
        image_token_index=described.image_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    (path / "preprocessor_config.json").unlink()
    square = {"height": 16, "width": 16}
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=square).save_pretrained(path)


def _write_paligemma(path: Path) -> None:
    """A model of type paligemma, with the tokenizer of the others."""
    write_vision_model(path, WORDS, hidden_size=32)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 48}
    described = AutoConfig.from_pretrained(path)
    vision = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 4, "vision_use_head": False, **sizes}
    config = PaliGemmaConfig(
        text_config=GemmaConfig(
            vocab_size=described.text_config.vocab_size, num_key_value_heads=1, head_dim=8, **sizes
        ).to_diff_dict()
        | {"model_type": "gemma"},
        vision_config=vision,
        image_token_id=described.image_token_id,
        projection_dim=32,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(path)
    (path / "preprocessor_config.json").unlink()
    SiglipImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(path)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def reader_of(family: Family = "qwen3_vl") -> FamilyImageReader:
    """How it reads images."""
    config = ModelConfig(path=vision_model(family))
    return open_reader(config, "policy", load_tokenizer(config, "policy"))


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A file with colors at random."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, "PNG")
    return file.getvalue()


def write_rows(path: Path, count: int = 24) -> Path:
    """A file of questions with images, several, and none in some."""
    rows = []
    for number in range(count):
        sizes = SIZES[number % len(SIZES)]
        files = [picture(*size, seed=10 * number + place) for place, size in enumerate(sizes)]
        urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
        text = f"how many {' and '.join(['<image>'] * len(sizes))}red squares? {number % 7}"
        rows.append({"question": text, "images": urls, "answer": str(number % 5)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompt_with(
    sizes: Sequence[tuple[int, int]], family: Family = "qwen3_vl", seed: int = 0
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Tokens of a prompt with images of some widths and heights in its text, and the images."""
    reader, tokenizer = reader_of(family), load_tokenizer(ModelConfig(path=vision_model(family)), "policy")
    marks, between = [reader.marker] * len(sizes), " and "
    text = f"how many {between.join(marks)}red squares? {seed % 7}"
    if family == "paligemma":  # images come first
        text = f"{''.join(marks)}how many red squares? {seed % 7}"
    files = [picture(*size, seed=seed + number) for number, size in enumerate(sizes)]
    pictures = [(*reader.grid(image.height, image.width), data) for data in files for image in [open_image(data)]]
    tokens = expanded(reader.arranged(tokenizer.encode(text)), reader, pictures)
    return tokens, tuple(placed(tokens, reader, pictures))


def samples_with(
    family: Family = "qwen3_vl", siblings: int = 3, sizes: Sequence[Sequence[tuple[int, int]]] = SIZES, longest: int = 7
) -> Batch:
    """Samples of prompts with images of some sizes; their tokens depend on the sample alone."""
    prompts = [prompt_with(one, family, 10 * number) for number, one in enumerate(sizes)]
    count, generator = len(sizes) * siblings, torch.Generator().manual_seed(3)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    responses = [torch.randint(2, 15, (length,), generator=generator).tolist() for length in lengths]
    packed = [list(pack_images(images)) for _, images in prompts]
    table = {
        "prompt_tokens": Jagged.from_lists([tokens for tokens, _ in prompts], torch.int64, "prompt_tokens"),
        "images": Jagged.from_lists(packed, torch.uint8, "image_bytes"),
    }
    tokens = Jagged.from_lists(responses, torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    index = torch.arange(count) // siblings
    columns = {"tokens": tokens, "response_mask": mask}
    return Batch(torch.arange(count), columns, Batch(torch.arange(len(prompts)), table), index)

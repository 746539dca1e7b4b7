"""Tiny models, data and recipes that several tests share."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from leaderless.config import LoadedRecipe
from leaderless.data.batch import Batch, Jagged
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.planner.workflow import load_recipe
from leaderless.stages.rollout import support_columns
from leaderless.training.micro_batches import response_lengths

if TYPE_CHECKING:
    from leaderless.training.fsdp import FsdpEngine, FsdpValueEngine

CHARACTERS = "0123456789+=-*()# \nabcdefghijklmnopqrstuvwxyz<>|_ABCDEFGHIJKLMNOPQRSTUVWXYZ.,?!':$"


def tiny_model(
    family: Literal["qwen2", "qwen3"] = "qwen2",
    chat_template: str | None = None,
    *,
    head_dim: int = 8,
    num_layers: int = 2,
) -> str:
    """The folder of a model, the same for all tests of a process; one layer is enough where a whole run is tested."""
    return _write_once(family, chat_template, head_dim, num_layers)


@functools.cache
def _write_once(family: Literal["qwen2", "qwen3"], chat_template: str | None, head_dim: int, num_layers: int) -> str:
    """Write a model; arguments are by place, since a cache tells a default from the same value that is given."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-model-")
    _KEPT.append(folder)
    path = write_tiny_model(
        Path(folder.name) / family,
        CHARACTERS,
        family=family,
        hidden_size=4 * head_dim,
        num_layers=num_layers,
        num_heads=4,
        chat_template=chat_template,
    )
    scatter_vectors(path)
    return str(path)


@functools.cache
def untied_model(path: str) -> str:
    """The folder of a model like another one, but with a separate output head."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-model-")
    _KEPT.append(folder)
    shutil.copytree(path, folder.name, dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(path)
    config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder.name)
    return folder.name


@functools.cache
def mixture_model(path: str, num_experts: int = 4) -> str:
    """The folder of a model like another one of Qwen3, but with experts, two for a token."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-model-")
    _KEPT.append(folder)
    shutil.copytree(path, folder.name, dirs_exist_ok=True)
    dense = AutoConfig.from_pretrained(path)
    same = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    more = "max_position_embeddings tie_word_embeddings bos_token_id eos_token_id pad_token_id"
    config = Qwen3MoeConfig(
        **{name: getattr(dense, name) for name in f"{same} {more}".split()},
        num_experts=num_experts,
        num_experts_per_tok=2,
        moe_intermediate_size=dense.hidden_size // 2,
        norm_topk_prob=True,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder.name)
    scatter_vectors(Path(folder.name))
    return folder.name


def scatter_vectors(path: Path, kind: type[AutoModelForCausalLM] = AutoModelForCausalLM) -> None:
    """Give biases and norms values as after training: with all zeros and ones, mistakes could hide."""
    model = kind.from_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)


def add_gradients(
    engine: FsdpEngine | FsdpValueEngine, batch: Batch, loss: Callable[..., Tensor], **options: object
) -> None:
    """Pass all micro-batches of a batch through a model and back, with a loss of its outputs and of the micro-batch."""
    for micro_batch in engine.micro_batches(batch):
        loss(engine.forward(micro_batch, **options), micro_batch).backward()


def at_temperature(batch: Batch, temperature: float | Tensor) -> Batch:
    """The same samples, with the temperature at which their tokens were sampled: one, or [total]."""
    lengths = response_lengths(batch.jagged("response_mask"))
    values = torch.zeros(int(lengths.sum())) + temperature
    return batch.with_columns(temperatures=Jagged(values, lengths, "response_tokens"))


@functools.cache
def judge_model() -> str:
    """The folder of a model that is asked in a chat, with fewer tokens than the others; what it says depends on all."""
    folder = tempfile.TemporaryDirectory(prefix="tiny-model-")
    _KEPT.append(folder)
    template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    path = write_tiny_model(
        Path(folder.name) / "judge", CHARACTERS[:40], family="qwen3", hidden_size=32, chat_template=template, seed=3
    )
    scatter_vectors(path)
    return str(path)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


def write_additions(path: Path, count: int = 64) -> Path:
    """A file of small additions."""
    rows = [{"question": f"{i % 10}+{i // 10 % 10}=", "answer": str(i % 10 + i // 10 % 10)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_recipe(folder: Path, model: str, changes: Mapping[str, object] | None = None) -> Path:
    """A small GRPO recipe, as a file; `changes` are by dotted key."""
    train = write_additions(folder / "train.jsonl")
    data = {"path": str(train), "prompt": "question", "answer": "answer", "template": "plain"}
    recipe: dict[str, object] = {
        "name": "tiny",
        "workflow": "grpo",
        "models": {"policy": model},
        "data": {"train": data, "max_prompt_tokens": 8},
        "reward": {"exact_match": 1.0},
        "batch": {"prompts_per_step": 6, "responses_per_prompt": 4, "micro_batch_tokens": 64},
        "rollout": {"max_response_tokens": 6, "max_sequences": 16},
        "optimizer": {"learning_rate": 1e-3},
        "run": {
            "directory": str(folder / "runs"),
            "timeout_s": 60,
            "reward_processes": 0,
        },
        "loggers": [],
        "steps": 2,
    }
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        section = recipe
        for part in path:
            section = section.setdefault(part, {})  # type: ignore[assignment]
        section[last] = value
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(recipe))
    return file


def tiny_recipe(folder: Path, model: str, changes: Mapping[str, object] | None = None) -> LoadedRecipe:
    """The small recipe, loaded."""
    return load_recipe(write_recipe(folder, model, changes))


def with_support(samples: Batch, vocabulary: int = 60) -> Batch:
    """Samples of whose tokens most could be a few words only, which depend on the sample alone."""
    support: list[list[bytes]] = []
    for sample, tokens in zip(samples.ids.tolist(), samples.jagged("tokens").to_lists(), strict=True):
        generator = torch.Generator().manual_seed(sample)
        rows: list[bytes] = []
        for place, token in enumerate(tokens):
            count = (sample + place) % 5
            words = sorted({token, *torch.randperm(vocabulary, generator=generator)[:count].tolist()}) if count else []
            rows.append(torch.tensor(words, dtype=torch.int32).numpy().tobytes())
        support.append(rows)
    return samples.with_columns(support_columns(support, samples.jagged("tokens").lengths))


def tree_samples(seed: int, prompts: int, rows: int, longest: int = 7) -> Batch:
    """Samples of some prompts that begin alike: each goes on from somewhere in an earlier one of its prompt.

    Of what goes on, parts of up to so many tokens, the policy has sampled some.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(0, most, (), generator=generator))

    texts, masks = list[list[int]](), list[list[bool]]()
    for _ in range(prompts):
        own = [([1 + draw(50) for _ in range(draw(longest))], 0)]
        for _ in range(rows):
            text, _ = own[draw(len(own))]
            begin = draw(len(text) + 1)
            text = text[:begin] + [1 + draw(50) for _ in range(draw(longest + 1))]
            own.append((text, begin))
        texts += [text for text, _ in own[1:]]
        masks += [[place >= begin and draw(3) > 0 for place in range(len(text))] for text, begin in own[1:]]
    table = [[1 + draw(50) for _ in range(1 + draw(longest))] for _ in range(prompts)]
    columns = {
        "tokens": Jagged.from_lists(texts, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists(masks, torch.bool, "tokens"),
    }
    known = {"prompt_tokens": Jagged.from_lists(table, torch.int64, "prompt_tokens")}
    index = torch.arange(prompts).repeat_interleave(rows)
    return Batch(torch.arange(len(texts)), columns, Batch(torch.arange(prompts), known), index)


def random_samples(
    lengths: list[tuple[int, int]], vocabulary: int = 60, seed: int = 0, siblings: int = 1, *, is_shared: bool = True
) -> Batch:
    """Samples with prompts and responses of given lengths; tokens depend on the sample alone.

    With siblings, so many samples have the prompt of the first of them: in a table, or each for itself.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(1, vocabulary, (before,), generator=generator).tolist() for before, _ in lengths]
    responses = [torch.randint(1, vocabulary, (after,), generator=generator).tolist() for _, after in lengths]
    tokens = Jagged.from_lists(responses, torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    columns = {"tokens": tokens, "response_mask": mask}
    table = {"prompt_tokens": Jagged.from_lists(prompts[::siblings], torch.int64, "prompt_tokens")}
    index = torch.arange(len(lengths)) // siblings
    batch = Batch(torch.arange(len(lengths)), columns, Batch(torch.arange(len(prompts[::siblings])), table), index)
    if siblings > 1 and is_shared:
        return batch
    return Batch(batch.ids, columns | {"prompt_tokens": batch.jagged("prompt_tokens")})

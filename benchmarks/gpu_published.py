"""Parts of `benchmarks/gpu.py`: what others have published on one GPU, repeated.

Models have random weights and the published shapes, and responses have given lengths. The keys of figures are those of
`docs/performance/published.json`, which names the sources. With the preset `tiny` everything is small,
to try the parts themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config

from gpu_machine import PRESETS, Machine, Preset, Result
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.packed import ATTENTION_NAME
from leaderless.models.causal_lm import CausalLM
from leaderless.planner.memory.limits import PAGE_TOKENS
from leaderless.rollout.engine import Request, SamplingParams
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_check import paged_attention
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

if TYPE_CHECKING:
    from leaderless.training.fsdp import FsdpEngine

VLLM_AT_A_TIME = 256
"""Responses that vLLM decodes at a time unless it is told otherwise."""
VERL_MINI_BATCH = 64
VERL_LENGTHS = (41, 512)
"""Shortest and longest response; all lengths between them are equally frequent, which gives the published mean, 276."""
VERL = Preset(896, 24, 14, 2, 4864, 151936, 256, 104, 512, 16384)
"""Qwen2.5-0.5B with the prompts of a step; passes have as many tokens as in our other measurements."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a published model.

    Attributes:
        config: Its family.
        sizes: Width, layers, heads, key heads, width of the feed-forward part, and vocabulary.
        is_tied: Whether its head has the weights of its embedding.
    """

    config: type[PreTrainedConfig]
    sizes: tuple[int, int, int, int, int, int]
    is_tied: bool

    def make(self) -> PreTrainedConfig:
        """Its description, without tokens that end or fill up a text."""
        hidden, layers, heads, key_heads, feed_forward, vocabulary = self.sizes
        return self.config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=8192,
            tie_word_embeddings=self.is_tied,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )


QWEN = {
    "0.5B": Shape(Qwen2Config, (896, 24, 14, 2, 4864, 151936), is_tied=True),
    "1.5B": Shape(Qwen2Config, (1536, 28, 12, 2, 8960, 151936), is_tied=True),
    "7B": Shape(Qwen2Config, (3584, 28, 28, 4, 18944, 152064), is_tied=False),
}
"""Qwen2.5 by size."""
LLAMA = Shape(LlamaConfig, (4096, 32, 32, 8, 14336, 128256), is_tied=False)
"""Llama 3 with eight billion weights."""
TINY = (64, 2, 4, 2, 128, 512)


def random_model(machine: Machine, shape: Shape) -> CausalLM:
    """A model with random weights, made on the device."""
    shape = replace(shape, sizes=TINY) if machine.is_trial else shape
    with torch.device(machine.device):
        model = AutoModelForCausalLM.from_config(shape.make(), dtype=machine.dtype, attn_implementation=ATTENTION_NAME)
    return CausalLM(model).requires_grad_(requires_grad=False).eval()


def engine_for(machine: Machine, model: CausalLM, at_a_time: int, longest: int) -> PagedEngine:
    """The native engine with pages for some responses at a time, none of which has to wait for memory."""
    attend = paged_attention(model, machine.dtype, machine.device, ProcessGroup((0,), 0)) or attend_with_torch
    options = PagedOptions(attend, at_a_time * (longest + 2 * PAGE_TOKENS), longest, keeps_memory=True)
    return PagedEngine(model, None, frozenset(), at_a_time, machine.device, options)  # type: ignore[arg-type]


def responses_of(
    engine: PagedEngine, prompts: Sequence[Sequence[int]], lengths: Sequence[int], first_id: int = 0
) -> list[list[int]]:
    """A response of a given length to each prompt."""
    places, tokens = {}, [[] for _ in prompts]  # type: tuple[dict[int, int], list[list[int]]]
    for place, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        request = Request(prompt, [first_id + place])
        places[engine.submit(request, SamplingParams(SamplingConfig(), length))] = place
    left = len(places)
    while left:
        for delta in engine.step():
            tokens[places[delta.request]] += delta.tokens
            left -= delta.finish_reason is not None
    return tokens


def random_prompts(number: int, length: int, vocabulary: int) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(1, vocabulary) for _ in range(length)] for _ in range(number)]


def speed(machine: Machine, shape: Shape, number: int, prompt_tokens: int, response_tokens: int) -> float:
    """Sampled tokens per second, after a few short responses in which kernels are compiled and passes recorded."""
    if machine.is_trial:
        number, prompt_tokens, response_tokens = min(number, 3), min(prompt_tokens, 4), 5
    at_a_time = min(number, VLLM_AT_A_TIME)
    model = random_model(machine, shape)
    engine = engine_for(machine, model, at_a_time, prompt_tokens + response_tokens)
    prompts = random_prompts(number, prompt_tokens, int(model.model.config.vocab_size))
    responses_of(engine, prompts[:at_a_time], [min(8, response_tokens)] * at_a_time, number)
    seconds = machine.once(lambda: responses_of(engine, prompts, [response_tokens] * number))
    engine.close()
    return number * response_tokens / seconds


def published_one(machine: Machine) -> Result:
    """One response at a time: vLLM in Qwen2.5's speed benchmark."""
    figures: dict[str, float] = {}
    for name, shape in QWEN.items():
        figures[f"vLLM, one response, {name}"] = speed(machine, shape, 1, 1, 2048)
        machine.say({"figures": figures})
    return {"figures": figures}


def published_many(machine: Machine) -> Result:
    """Many prompts at once: `benchmark_throughput.py` of vLLM, 256 tokens in and 256 out."""
    return {"figures": {"vLLM, many responses, 8B": speed(machine, LLAMA, 1000, 256, 256)}}


def published_verl(machine: Machine) -> Result:
    """The phases of a step of verl's PPO that need no critic."""
    preset = replace(PRESETS["tiny"], prompts=6, prompt_tokens=5) if machine.is_trial else VERL
    machine, (shortest, longest) = replace(machine, preset=preset), (2, 6) if machine.is_trial else VERL_LENGTHS
    lengths = [shortest + (longest - shortest) * place // (preset.prompts - 1) for place in range(preset.prompts)]
    random.Random(0).shuffle(lengths)
    prompts = random_prompts(preset.prompts, preset.prompt_tokens, preset.vocabulary)
    with machine.model_folder() as folder, machine.trainer(folder) as trainer:
        engine = engine_for(machine, machine.sampler(folder), preset.prompts, preset.prompt_tokens + longest)
        responses = responses_of(engine, prompts, lengths, preset.prompts)
        generation = machine.once(lambda: responses_of(engine, prompts, lengths))
        engine.close()
        batch = batch_of(prompts, responses)
        slices = [slice(at, at + VERL_MINI_BATCH) for at in range(0, preset.prompts, VERL_MINI_BATCH)]
        parts = [batch_of(prompts[one], responses[one]) for one in slices]
        scoring = machine.seconds(lambda: trainer.log_probs(batch), 1)
        update = machine.seconds(lambda: [update_with(trainer, part) for part in parts], 1)
    figures = {"verl, generation": generation + scoring, "verl, reference": scoring, "verl, update": update}
    return {"figures": figures, "tokens": sum(lengths), "generation_alone_s": generation}


def batch_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Batch:
    """Prompts with a response each, as the trainer takes them."""
    tokens = Jagged.from_lists([list(response) for response in responses], torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    index = torch.arange(len(prompts))
    asked = Jagged.from_lists([list(prompt) for prompt in prompts], torch.int64, "prompt_tokens")
    return Batch(index, {"tokens": tokens, "response_mask": mask}, Batch(index, {"prompt_tokens": asked}), index)


def update_with(trainer: FsdpEngine, batch: Batch) -> None:
    """An optimizer step with log-probs and entropies in the loss, as in verl's."""
    for micro_batch in trainer.micro_batches(batch):
        outputs = trainer.forward(micro_batch, "gradient")
        (outputs.log_probs.mean() - 1e-3 * outputs.entropies.mean()).backward()
    trainer.optimizer_step()

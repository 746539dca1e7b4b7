"""How far the log-probabilities of engine and trainer are apart in bfloat16, with and without replayed experts.

    python benchmarks/replayed_experts.py

The model is a small Qwen3-MoE with random weights. The native engine samples, and FSDP scores the same tokens.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.tiny import tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import Transport
from leaderless.models.attention.packed import ATTENTION_NAME
from leaderless.models.causal_lm import CausalLM
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.routers import Routers
from leaderless.rollout.engine import Completion, Request, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.training.fsdp import FsdpEngine

CPU = torch.device("cpu")
SIZES = {"vocab_size": 83, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "head_dim": 32}
EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
LENGTHS = (5, 21, 40, 70, 9, 12, 33, 50)
RESPONSES, RESPONSE_TOKENS = 4, 200


def model(dtype: torch.dtype) -> CausalLM:
    """The same weights in each type."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.06, "eos_token_id": None}
    described = Qwen3MoeConfig(**SIZES, **EXPERTS, **heads, bos_token_id=None, pad_token_id=None)  # type: ignore[arg-type]
    return CausalLM(AutoModelForCausalLM.from_config(described, attn_implementation=ATTENTION_NAME).eval().to(dtype))


def sampled() -> tuple[list[list[int]], list[Completion]]:
    """Prompts, and what the engine samples."""
    own = model(torch.bfloat16)
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    routers = Routers.required(own, "models.policy")
    engine = NativeEngine(own, tokenizer, frozenset({0}), 64, CPU, routers=routers)
    noise = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 60, (length,), generator=noise).tolist() for length in LENGTHS]
    requests = [Request(prompt, [10 * i + j for j in range(RESPONSES)]) for i, prompt in enumerate(prompts)]
    groups = generate(engine, requests, SamplingParams(SamplingConfig(), RESPONSE_TOKENS))
    return [prompt for prompt in prompts for _ in range(RESPONSES)], [one for group in groups for one in group]


def main() -> None:
    """Print the differences."""
    prompts, found = sampled()
    tokens = Jagged.from_lists([one.tokens for one in found], torch.int64, "tokens")
    recorded = [torch.tensor(list(b"".join(one.experts)), dtype=torch.uint8) for one in found]
    rows = Batch(
        torch.arange(len(found)),
        {
            "prompt_tokens": Jagged.from_lists(prompts, torch.int64, "prompt_tokens"),
            "tokens": tokens,
            "response_mask": Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens"),
        },
    )
    experts = Jagged(torch.cat(recorded), torch.tensor([*map(len, recorded)]), "experts")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config, group = ModelConfig(path="unused", compute_dtype="bfloat16"), Transport(CPU, timeout_s=60).world
    engine = FsdpEngine(model(torch.float32), config, group, CPU, 8192)
    said = torch.tensor([one for completion in found for one in completion.log_probs])
    for name, batch in (("chosen by the trainer", rows), ("replayed", rows.with_columns(experts=experts))):
        apart = (engine.log_probs(batch).values - said).abs()
        print(f"{name}: mean {apart.mean():.4f}, 99th percentile {apart.quantile(0.99):.3f}, largest {apart.max():.3f}")
    own = Routers.required(engine.model, "models.policy")
    differing = []
    with torch.no_grad():
        for pass_ in engine.micro_batches(rows.with_columns(experts=experts)):
            assert pass_.experts is not None
            replayed = pass_.experts.view(-1, SIZES["num_hidden_layers"], 4).long().sort(-1).values
            plain = engine.micro_batches(rows)[len(differing)]
            engine.forward(plain, "none")
            chosen = own.now.choices().view_as(replayed).long().sort(-1).values
            differing.append((replayed != chosen).any(-1))
    layers = torch.cat(differing).float()
    print(f"choices that differ: {layers.mean():.1%}; tokens with one in some layer: {layers.amax(1).mean():.1%}")


if __name__ == "__main__":
    main()

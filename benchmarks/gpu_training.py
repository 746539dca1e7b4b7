"""Parts of `benchmarks/gpu.py`: a pass of training, and whether the trainer agrees with the engine."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from gpu_machine import SIBLINGS, Machine, Result, samples
from gpu_plan import planned_memory
from leaderless.config.rollout import SamplingConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.blocks import Pool, everything
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.models.compiled_layers import compile_layers, why_not_compiled
from leaderless.models.fused_scores import compile_scores
from leaderless.models.scoring import Scoring, score_tokens
from leaderless.planner import Layout
from leaderless.planner.memory.limits import MAX_LOGITS
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.weight_sources import Colocated
from leaderless.training.fsdp import FsdpEngine
from model_flops import training_flops

MOST_LAYERS = 8
"""Layers of the model by which rollout and trainer are compared."""


def training(machine: Machine) -> Result:
    """Forward pass, backward pass and optimizer step of one pass with groups of eight, and its peak memory.

    Layers are compiled where those of a run are; what is measured first is what a run does.
    """
    preset = machine.preset
    batch = samples(preset, preset.vocabulary)

    with machine.model_folder() as folder, machine.trainer(folder) as trainer:
        micro_batches = trainer.micro_batches(batch)
        num_tokens = sum(len(m.tokens) for m in micro_batches)
        num_scored = sum(len(m.targets) for m in micro_batches)
        num_pairs = sum(int((m.positions + 1).sum()) for m in micro_batches)
        planned, peaks = planned_memory(machine, folder), dict[str, int]()
        result: Result = {
            "tokens": num_tokens,
            "model_flops": training_flops(preset, num_tokens, num_scored, num_pairs),
            "planned_bytes": planned.allocated("policy trains"),
            "planned": planned.memory.to_json(),
            "compiled_forward_backward_s": None,
        }

        def add_gradients() -> None:
            for micro_batch in micro_batches:
                trainer.forward(micro_batch, "value").log_probs.mean().backward()

        def update() -> None:
            add_gradients()
            trainer.optimizer_step()

        is_compiled = compile_as_in_a_run(machine, trainer)
        with machine.watching(peaks, "update"):
            begin = time.perf_counter()
            update()  # compilers work, and memory is allocated
            result["first_update_s"] = time.perf_counter() - begin
            if is_compiled:
                result["compiled_forward_backward_s"] = machine.seconds(add_gradients)
                machine.say(result)
            result["step_s"] = machine.seconds(update)
        result["peak_bytes"] = peaks["update"]
        machine.say(result)
        result["log_probs_s"] = machine.seconds(lambda: trainer.log_probs(batch))
        machine.say(result)
        for name, most in (("head_s", LARGE_MAX_LOGITS), ("head_in_small_chunks_s", MAX_LOGITS)):
            result[name] = head_seconds(machine, num_scored, Scoring(most, trainer.model.fused_scores))
        machine.say(result)
        trainer.model.fused_scores = None
        with torch.compiler.set_stance("force_eager"), machine.watching(peaks, "eager"):
            result["forward_backward_s"] = machine.seconds(add_gradients)
        trainer.discard_gradient()
        result["eager_peak_bytes"] = peaks["eager"]
    return result


def compile_as_in_a_run(machine: Machine, trainer: FsdpEngine) -> bool:
    """Compile layers and scores of a trainer where a run would; whether it has been done."""
    is_compiled = machine.device.type == "cuda" and not why_not_compiled(trainer.model, has_dropout=False)
    if is_compiled:
        trainer.model.fused_scores = compile_scores()
        compile_layers(trainer.model)
    return is_compiled


def head_seconds(machine: Machine, rows: int, how: Scoring) -> float:
    """Scoring of tokens by the head alone, forward and backward, in chunks of a size."""
    preset = machine.preset
    head = torch.nn.Linear(preset.hidden, preset.vocabulary, bias=False, device=machine.device, dtype=machine.dtype)
    hidden = torch.randn(rows, preset.hidden, device=machine.device, dtype=machine.dtype, requires_grad=True)
    targets = torch.randint(0, preset.vocabulary, (rows,), device=machine.device)

    def score() -> None:
        scores, _ = score_tokens(hidden, head, targets, 1.0, "value", how=how)
        scores.sum().backward()

    return machine.seconds(score)


def agreement(machine: Machine) -> Result:
    """Mean difference between log-probs of the rollout and of the trainer, with small and with large keys.

    The engine has pages, and the trainer has compiled layers, as in a run; the model has at most eight layers.
    """
    machine = replace(machine, preset=replace(machine.preset, layers=min(MOST_LAYERS, machine.preset.layers)))
    results: dict[str, dict[str, float]] = {}
    for key_bias in (0.0, 50.0):
        with machine.model_folder(key_bias) as folder, machine.trainer(folder) as trainer:
            compile_as_in_a_run(machine, trainer)
            requests = machine.requests(min(4, machine.preset.prompts))
            engine = machine.native(empty_causal_lm(machine.config(folder), "policy"), "pages")
            pool = Pool(Layout((0,), 1), everything)
            with Colocated(engine, trainer, pool, machine.dtype).phase():
                params = SamplingParams(SamplingConfig(), min(64, machine.preset.response_tokens))
                groups = generate(engine, requests, params)
            engine.close()
            batch = sampled(requests, [completion.tokens for group in groups for completion in group])
            found = torch.tensor([score for group in groups for completion in group for score in completion.log_probs])
            difference = (trainer.log_probs(batch).values - found).abs()
            results[f"{key_bias:g}"] = {"mean": float(difference.mean()), "largest": float(difference.max())}
        machine.say({"key_bias": results})
    return {"key_bias": results}


def sampled(requests: list[Request], responses: list[list[int]]) -> Batch:
    tokens = Jagged.from_lists(responses, torch.int64, "tokens")
    mask = Jagged(torch.ones(len(tokens.values), dtype=torch.bool), tokens.lengths, "tokens")
    prompts = Jagged.from_lists([list(request.prompt) for request in requests], torch.int64, "prompt_tokens")
    return Batch(
        torch.arange(len(responses)),
        {"tokens": tokens, "response_mask": mask},
        Batch(torch.arange(len(requests)), {"prompt_tokens": prompts}),
        torch.arange(len(responses)) // SIBLINGS,
    )

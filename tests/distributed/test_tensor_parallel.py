"""Ranks that divide the layers of a model compute what one rank does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_context_parallel import train
from tests.distributed.test_critic import write_critic
from tests.distributed.test_mesh import setup_of
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference
from tests.tiny import add_gradients, random_samples, tiny_model, untied_model
from tests.unit.recipes import plan_of, write_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CTRLConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3MoeConfig,
)

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.config.run import CheckpointConfig
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.models.decoder import Decoder
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.parallel.tensor import TensorParallel
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout
from leaderless.training.engine import EngineSetup
from leaderless.training.fsdp import make_engine
from leaderless.worker.checkpoint.export import export_model
from leaderless.worker.checkpoint.reader import RunState, load_checkpoint
from leaderless.worker.checkpoint.writer import CheckpointWriter, Content


def write(family: str, folder: Path) -> str:
    """The folder of a model; families that are written here have padding, "biased" and "tied" biases everywhere."""
    if family == "critic":
        return write_critic(folder)
    if family == "untied":
        return untied_model(tiny_model("qwen3"))
    if family not in {"biased", "tied", "gemma", "granite"}:
        return tiny_model(family)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    small, biases = {**sizes, "vocab_size": 88, "pad_token_id": 7}, {"attention_bias": True, "mlp_bias": True}
    if family == "gemma":
        config = GemmaConfig(**small, num_key_value_heads=2, head_dim=8)
    elif family == "granite":
        config = GraniteConfig(**small, num_key_value_heads=2, logits_scaling=3.0)
    else:
        config = LlamaConfig(**small, **biases, tie_word_embeddings=family == "tied")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("sizes", "family", "micro_batch_tokens", "changes"),
    [
        ({"dp": 1, "tp": 2}, "qwen2", 4096, {}),  # its number of words is odd
        ({"dp": 1, "tp": 2}, "qwen3", 31, {"gradient_checkpointing": True}),
        ({"dp": 2, "tp": 2}, "qwen3", 31, {}),
        ({"dp": 1, "tp": 2, "cp": 2}, "untied", 31, {}),
        ({"dp": 1, "tp": 4}, "biased", 31, {}),
        ({"dp": 1, "tp": 2}, "tied", 4096, {}),
        ({"dp": 1, "tp": 2}, "gemma", 31, {}),  # its embeddings are scaled
        ({"dp": 1, "tp": 2}, "granite", 4096, {}),  # its logits are divided
        ({"dp": 1, "tp": 2}, "critic", 31, {"is_critic": True}),
    ],
    ids=str,
)
def test_ranks_that_divide_layers_score_and_learn_like_one(
    ranks: RankPool,
    tmp_path: Path,
    sizes: dict[str, int],
    family: str,
    micro_batch_tokens: int,
    changes: dict[str, object],
) -> None:
    path = write(family, tmp_path)
    (expected,) = ranks.run(1, train, path, {"dp": 1}, 64, {**changes})
    num_ranks = sizes["dp"] * sizes["tp"] * sizes.get("cp", 1)
    found = ranks.run(num_ranks, train, path, sizes, micro_batch_tokens, {**changes})
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("sizes", [{"dp": 1, "tp": 2}, {"dp": 1, "cp": 3}], ids=str)
def test_ranks_that_compute_in_bfloat16_differ_by_rounding_only(
    ranks: RankPool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    path, half = write("tied", tmp_path), {"compute_dtype": "bfloat16"}
    (exact,), (expected,) = (ranks.run(1, train, path, {"dp": 1}, 64, {**changes}) for changes in ({}, half))
    found = ranks.run(sizes.get("tp", sizes.get("cp", 1)), train, path, sizes, 64, {**half})

    def error(numbers: Numbers) -> float:
        return max(float((numbers[name] - exact[name]).norm()) for name in exact if name.startswith("scores"))

    assert error(expected) > 1e-4, "it is rounded at all"
    for numbers in found:
        assert error(numbers) < 2 * error(expected)
        assert float(numbers["norm"] / exact["norm"]) == pytest.approx(1, abs=0.05)


def save_or_load(
    folder: str, path: str, sizes: dict[str, int], lora: LoraConfig | None = None
) -> tuple[dict[str, Tensor], float]:
    """State after an update, of the ranks that write a checkpoint or, where there is one, of others that read it.

    In both cases it is that after another update, which depends on what the optimizer keeps.
    """
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = setup_of(transport, layout, path)
    setup = replace(setup, model=setup.model.model_copy(update={"lora": lora}))
    engine = make_engine(setup)
    samples = random_samples(LENGTHS)
    mine = samples.select(torch.arange(len(LENGTHS)) % layout.dp == layout.shard_of(transport.rank))

    def update() -> float:
        add_gradients(engine, mine, lambda out, _: out.log_probs.sum() / 50)
        return engine.optimizer_step().grad_norm

    checkpoints = list_checkpoints(Path(folder))
    if checkpoints:
        load_checkpoint(checkpoints[0], {"policy": engine})
    else:
        update()
        tokenizer = load_tokenizer(setup.model, "policy")
        writer = CheckpointWriter(
            Path(folder), {"policy": engine}, transport.world, tokenizer, CheckpointConfig(), 30.0, {}
        )
        writer.begin(Content(RunState(1, 0, 0.0)))
        writer.finish()
    norm = update()
    return {name: value.clone() for name, value in engine.full_weights()}, norm


def test_a_checkpoint_is_read_with_another_size_and_exported_whole(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny_model("qwen3")
    (folder := tmp_path / "checkpoints").mkdir()
    [(expected, norm), *_] = ranks.run(4, save_or_load, str(folder), path, {"dp": 2, "tp": 2})
    for sizes in ({"dp": 1, "tp": 2}, {"dp": 1}):
        for weights, found in ranks.run(sizes["dp"] * sizes.get("tp", 1), save_or_load, str(folder), path, sizes):
            assert found == pytest.approx(norm, rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-5)
    (checkpoint,) = list_checkpoints(folder)
    exported = AutoModelForCausalLM.from_pretrained(export_model(checkpoint, "policy", tmp_path / "exported"))
    first = AutoModelForCausalLM.from_pretrained(path)
    for (name, value), before in zip(exported.named_parameters(), first.parameters(), strict=True):
        assert value.shape == before.shape, name
        assert not torch.equal(value, before), name


def test_sizes_that_do_not_divide_a_model_are_refused(tmp_path: Path) -> None:
    def plan(**layout: int) -> None:
        plan_of("grpo", 4, models=model, layout={"policy": layout})

    model = {"policy": write_model(tmp_path / "model", num_attention_heads=8, num_key_value_heads=2)}
    with pytest.raises(RecipeError, match=r"policy.tp.*tp=4 does not divide the 2 heads of keys of 'policy'.* be 1, 2"):
        plan(tp=4)
    plan(tp=2, cp=2)


def test_memory_counts_the_part_of_a_rank(tmp_path: Path) -> None:
    def plan(vocab_size: int, **layout: int) -> dict[str, dict[str, int]]:
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": vocab_size, "num_attention_heads": 8}
        model = {"policy": write_model(tmp_path / "model", **sizes)}
        memory = plan_of("grpo", 4, models=model, layout={"policy": layout}).memory
        assert memory is not None
        return {"resident": dict(memory.cpu.resident), **memory.cpu.phases}

    divided, shared, odd = plan(10_000, tp=2), plan(10_000, dp=4), plan(10_001, tp=2)
    assert divided["resident"]["policy weights"] == pytest.approx(shared["resident"]["policy weights"], rel=1e-3)
    assert odd["resident"]["policy weights"] > 1.2 * shared["resident"]["policy weights"]
    for name in ("gathered weights", "gradients being summed", "gradient of the head"):
        here, there = (one["policy trains"].get(name, 0) for one in (divided, shared))
        assert here == pytest.approx(there / 2, rel=0.01), name
    assert divided["policy trains"]["activations"] < 0.8 * shared["policy trains"]["activations"]


def test_families_that_are_divided_otherwise_are_refused() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = {**sizes, "intermediate_size": 48, "vocab_size": 88, "pad_token_id": None}
    peers = ProcessGroup((0, 1), 0)
    for config, what in (
        (Olmo2Config(**small), "self_attn.k_norm"),
        (Phi3Config(**small), "o_proj"),
    ):
        with pytest.raises(RecipeError, match=f"{config.model_type} cannot be divided by tp: .*{what}"):
            TensorParallel.divide(Decoder(AutoModelForCausalLM.from_config(config)), peers, "models.policy")
    mixture = Qwen3MoeConfig(**small, moe_intermediate_size=16, num_experts=4, head_dim=8)
    with pytest.raises(RecipeError, match=r"models.policy: ranks along tp=2 divide attention, .*: set ep, as to 2"):
        TensorParallel.divide(Decoder(AutoModelForCausalLM.from_config(mixture)), peers, "models.policy")


def test_a_family_that_does_not_name_its_inner_features_is_refused_for_its_layers(tmp_path: Path) -> None:
    config = CTRLConfig(vocab_size=88, n_embd=32, dff=64, n_layer=1, n_head=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    peers = ProcessGroup((0, 1), 0)
    setup = EngineSetup(
        role="policy",
        model=ModelConfig(path=str(tmp_path)),
        is_critic=False,
        layout=Layout((0, 1), dp=1, tp=2),
        process_group=peers,
        axis_groups={"tp": peers},
        device=torch.device("cpu"),
        optimizer=None,
        num_updates=0,
        micro_batch_tokens=64,
    )
    with pytest.raises(RecipeError, match="ctrl cannot be divided by tp: it is not known how"):
        make_engine(setup)

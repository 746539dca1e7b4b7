"""Sizes of models against models that are really built, and the memory that follows."""

from __future__ import annotations

import json

import pytest
from tests.unit.recipes import plan_of, write_model

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner import memory
from leaderless.planner.memory import format_bytes
from leaderless.planner.model_size import FAMILIES, read_model_size

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 40}


@pytest.mark.parametrize("is_tied", [True, False, None])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"head_dim": 16, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"attention_bias": True}),
        ("mixtral", {"num_local_experts": 4}),
        ("qwen2", {"attention_bias": False}),
        ("qwen2_moe", {**EXPERTS, **SHARED}),
        ("qwen3", {}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
        ("gemma", {"head_dim": 16}),
        ("granite", {}),
        ("phi3", {}),
        ("smollm3", {}),
    ],
)
def test_weights_are_counted_as_the_model_has_them(tmp_path, family, changes, is_tied):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tied = {} if is_tied is None else {"tie_word_embeddings": is_tied}
    config = transformers.AutoConfig.for_model(family, **(SMALL | changes | tied))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    size = read_model_size(ModelConfig(path=str(tmp_path)))
    assert size is not None
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    key = next(p for name, p in model.named_parameters() if name.endswith(("k_proj.weight", "qkv_proj.weight")))
    if family != "phi3":
        assert size.num_kv_heads * size.head_dim == key.shape[0]
    assert (size.num_layers, size.hidden_size, size.vocab_size, size.max_positions) == (3, 32, 50, 128)
    assert size.kv_values_per_token == 2 * 3 * size.num_kv_heads * size.head_dim


@pytest.mark.parametrize("family", ["gemma", "llama", "smollm3"])
def test_embeddings_are_tied_as_the_family_has_it_when_the_file_does_not_say(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(family, **SMALL, head_dim=16)
    config.save_pretrained(tmp_path)
    said = read_model_size(ModelConfig(path=str(tmp_path)))
    settings = json.loads((tmp_path / "config.json").read_text())
    settings.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_model_size(ModelConfig(path=str(tmp_path))) == said


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"model_type": "llama"}', '{"model_type": "mamba", "hidden_size": 4}', "{", "\udcff"],
)
def test_a_config_that_says_nothing_known_gives_no_size(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert read_model_size(ModelConfig(path=str(tmp_path))) is None


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_model_of_nothing_is_refused(tmp_path, name):
    model = write_model(tmp_path / "m", **{name: 0})
    with pytest.raises(RecipeError, match=rf"^models.policy: .*config.json: {name} is 0, but must be at least 1"):
        plan_of("grpo", models={"policy": model})


def test_a_model_that_is_not_here_gives_no_size(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for path in (str(tmp_path), "/no/such/folder", "no-such-owner/no-such-model", "not a name"):
        assert read_model_size(ModelConfig(path=path)) is None
    assert "mamba" not in FAMILIES


# Memory of the fullest rank

COUNT = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 2 * 16 + 3 * 64 * 96 + 2 * 64) + 1000 * 64 + 64
"""Weights of the model that `write_model` describes: four layers, tied embeddings, the last norm."""


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model")


def memory_of(workflow, world_size, model, **sections):
    settings = {"models": {"policy": model}} | sections
    estimate = plan_of(workflow, world_size, **settings).memory
    assert estimate is not None
    return estimate


def test_data_parallel_ranks_divide_weights_gradients_and_optimizer(model):
    for shards in (1, 2, 4, 128):
        resident = memory_of("grpo", shards, model).resident
        assert resident == {
            "policy weights": -(-COUNT * 4 // shards),
            "policy gradients": -(-COUNT * 4 // shards),
            "policy optimizer": 2 * -(-COUNT * 4 // shards),
        }


def test_a_rank_that_generates_holds_all_weights_and_the_cache(model):
    alone, divided = memory_of("grpo", 1, model), memory_of("grpo", 4, model)
    per_token = 2 * 4 * 2 * 16 * 4
    assert alone.phases["policy generates"] == {"unsharded weights": 0, "kv cache": 256 * 1024 * per_token}
    assert divided.phases["policy generates"]["unsharded weights"] == COUNT * 4
    few = memory_of("grpo", 64, model)
    assert few.phases["policy generates"]["kv cache"] == 2 * 8 * 1024 * per_token


def test_held_out_prompts_may_fill_the_cache(model):
    sections = {
        "data": {"train": {"path": "a"}, "evaluation": {"path": "b"}},
        "evaluation": {"every_steps": 1},
    }
    per_token = 2 * 4 * 2 * 16 * 4
    assert memory_of("grpo", 64, model, **sections).phases["policy generates"]["kv cache"] == 256 * 1024 * per_token


def test_half_precision_halves_what_computes_and_not_what_is_optimised(model):
    half = {"policy": {"path": model, "compute_dtype": "bfloat16"}}
    full, less = memory_of("grpo", 4, model), memory_of("grpo", 4, model, models=half)
    assert less.resident == full.resident
    for part in ("unsharded weights", "kv cache"):
        assert less.phases["policy generates"][part] * 2 == full.phases["policy generates"][part]
    assert less.phases["policy trains"]["activations"] * 2 == full.phases["policy trains"]["activations"]


def test_more_tokens_in_a_pass_take_more_and_checkpointing_takes_less(model):
    def activations(**sections):
        return memory_of("grpo", 1, model, **sections).phases["policy trains"]["activations"]

    small, large = activations(batch={"micro_batch_tokens": 2048}), activations(batch={"micro_batch_tokens": 4096})
    assert large == 2 * small == 4096 * 4 * (16 * 64 + 3 * 96) * 4
    checkpointed = activations(models={"policy": {"path": model, "gradient_checkpointing": True}})
    assert checkpointed < activations()


def test_logits_are_held_in_chunks(tmp_path):
    large = write_model(tmp_path / "large", vocab_size=200_000)
    logits = [
        memory_of("grpo", 1, large, batch={"micro_batch_tokens": tokens}).phases["policy trains"]["logits"]
        for tokens in (1024, 65536)
    ]
    assert logits == [4 * 4 * memory.MAX_LOGITS] * 2
    small = memory_of("grpo", 1, write_model(tmp_path / "small"), batch={"micro_batch_tokens": 1024})
    assert small.phases["policy trains"]["logits"] == 4 * 4 * 1024 * 1000


def test_the_chunks_of_logits_are_those_of_the_model():
    scoring = pytest.importorskip("leaderless.models.scoring")
    assert scoring.CHUNK_ELEMENTS == memory.MAX_LOGITS


def test_a_reference_is_another_model_that_only_scores(model):
    sections = {"algorithm": {"kl": {"coefficient": 0.1}}}
    estimate = memory_of("grpo", 2, model, **sections)
    assert estimate.resident["reference weights"] == COUNT * 4 // 2
    assert not {"reference gradients", "reference optimizer"} & set(estimate.resident)
    scoring, training = estimate.phases["reference scores"], estimate.phases["policy trains"]
    assert scoring["activations"] * 4 == training["activations"]


def test_the_estimate_is_of_the_rank_that_holds_most(model):
    layout = {"rollout": {"ranks": 0}, "policy": {"ranks": "1-2"}}
    estimate = memory_of("grpo", 3, model, layout=layout, batch={"micro_batch_tokens": 1024})
    assert set(estimate.phases) == {"policy generates"}
    assert estimate.resident == {"policy weights": COUNT * 4}
    estimate = memory_of("grpo", 3, model, layout=layout, batch={"micro_batch_tokens": 10**6})
    assert set(estimate.phases) == {"policy trains"}


def test_the_peak_is_what_is_resident_and_the_largest_phase(model):
    estimate = memory_of("grpo", 2, model)
    phases = [sum(parts.values()) for parts in estimate.phases.values()]
    assert estimate.peak == sum(estimate.resident.values()) + max(phases)
    assert estimate.to_json()["peak"] == estimate.peak


def test_memory_is_unknown_when_one_model_is(model):
    sections = {"algorithm": {"kl": {"coefficient": 0.1}}}
    models = {"policy": model, "reference": "/no/such/model"}
    assert plan_of("grpo", models=models, **sections).memory is None
    assert plan_of("grpo", models=models).memory is not None


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (10 * 1024, "10 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (5 * 1024**3, "5.0 GiB"),
        (2048 * 1024**4, "2.0 PiB"),
    ],
)
def test_bytes_are_written_for_a_reader(count, text):
    assert format_bytes(count) == text

"""Sizes of models compared with models that are really built, and the resulting memory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe, plan_of, write_model

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.planner import Cluster, make_plan
from leaderless.planner.memory import estimate as memory
from leaderless.planner.memory import limits
from leaderless.planner.memory import rank as memory_parts
from leaderless.planner.memory.fit import MARGIN, Fit, fit_plan
from leaderless.planner.memory.limits import MAX_LOGITS, UNBOUND, CacheBound
from leaderless.planner.memory.model_size import FAMILIES, read_model_size
from leaderless.planner.memory.rank import LARGE_MAX_LOGITS, Room, format_bytes
from leaderless.planner.workflow import load_recipe, resolve_workflow

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


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "llava", "paligemma"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_of_models_that_see_images_are_counted(tmp_path, family, is_frozen):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.pictures import vision_model

    from leaderless.distributed.weights.tensor_parallel import divided_dim, sees
    from leaderless.models.loading.tiny import write_vision_model
    from leaderless.planner.memory.layers import TOWERS

    is_qwen = family.startswith("qwen")
    if is_qwen:
        write_vision_model(tmp_path, "ab", family=family, num_vision_layers=3)
    else:
        shutil.copy(Path(vision_model(family), "config.json"), tmp_path)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    config = ModelConfig(path=str(tmp_path), freeze_vision=is_frozen)
    size, critic = (read_model_size(config, is_critic=is_critic) for is_critic in (False, True))
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    with_scalar_head = sum(counts.values()) - counts.get("lm_head.weight", 0) + size.hidden_size + 1
    assert critic.num_parameters == with_scalar_head
    assert (critic.vision, critic.is_tied) == (size.vision, False)
    assert size.num_parameters == sum(counts.values())
    seeing = {name: n for name, n in counts.items() if not name.startswith(("model.language_model.", "lm_head."))}
    assert size.vision.num_parameters == sum(seeing.values())
    frozen = sum(count for name, count in counts.items() if name.startswith(TOWERS)) * is_frozen
    assert size.num_trained == size.num_parameters - frozen
    assert (size.vision.num_layers, size.vision.patches_per_token) == ((3, 4) if is_qwen else (2, 1))
    assert size.num_layers == 2
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = sum(counts[name] // (1 if divided_dim(name, shape, 2) is None else 2) for name, shape in shapes.items())
    small = sum(counts[name] for name, shape in shapes.items() if len(shape) == 1 and not sees(name))
    if family != "qwen3_vl_moe":  # whose experts are not divided in this way
        assert 0 <= held - size.part(2).num_parameters <= small, "norms, which each rank has, are counted as divided"
    first, last = (size.stage(2, stage) for stage in range(2))
    assert (first.vision, last.vision) == (size.vision, None)
    words = counts["model.language_model.embed_tokens.weight"]  # the head is counted with the last stage if it is tied
    assert first.num_parameters - last.num_parameters == size.vision.num_parameters + words - last.num_root_parameters
    path = tmp_path / "config.json"
    described = json.loads(path.read_text())
    if is_qwen:
        path.write_text(json.dumps(described.pop("text_config") | described))  # as published with Qwen2.5-VL
        assert read_model_size(ModelConfig(path=str(tmp_path), freeze_vision=is_frozen)) == size


PUBLISHED = {
    "llava-1.5": {
        "model_type": "llava",
        "image_token_index": 32_000,
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32_064},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "image_size": 336,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "patch_size": 14,
            "projection_dim": 768,
        },
    },
    "paligemma-3b": {
        "model_type": "paligemma",
        "image_token_index": 257_152,
        "projection_dim": 2048,
        "text_config": {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_attention_heads": 8,
            "num_hidden_layers": 18,
            "num_key_value_heads": 1,
            "vocab_size": 257_216,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "projection_dim": 2048,
            "vision_use_head": False,
        },
    },
    "qwen2-vl-2b": {
        "model_type": "qwen2_vl",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 32_768,
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 1536,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    },
}
"""Shapes of published models, with the settings that such files leave out."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_published_files_leave_out_is_as_transformers_has_it(tmp_path, name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        model = transformers.AutoModelForImageTextToText.from_config(config)
    size = read_model_size(ModelConfig(path=str(tmp_path)))
    assert size.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    described = config.get_text_config()
    assert (size.max_positions, size.num_heads) == (described.max_position_embeddings, described.num_attention_heads)
    assert size.kv_values_per_token == 2 * size.num_layers * size.num_kv_heads * size.head_dim


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"model_type": "mamba"}},
        {"vision_config": {"model_type": "pixtral"}},
        {"vision_config": PUBLISHED["paligemma-3b"]["vision_config"] | {"vision_use_head": True}},
        {"multimodal_projector_bias": False},
    ],
    ids=str,
)
def test_a_model_with_other_parts_than_are_counted_gives_no_size(tmp_path, changes):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["llava-1.5"] | changes))
    assert read_model_size(ModelConfig(path=str(tmp_path))) is None


def test_ranks_along_cp_see_the_images_of_the_whole_pass(tmp_path):
    pytest.importorskip("torch")
    from leaderless.models.loading.tiny import write_vision_model

    write_vision_model(tmp_path, "ab", num_vision_layers=3)
    sections = {
        "models": {"policy": str(tmp_path)},
        "data": {"train": {"path": "a", "images": "images"}, "max_prompt_tokens": 32},
        "rollout": {"max_response_tokens": 9},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 2},
    }
    plans = [plan_of("grpo", size, **sections, layout={"policy": {"cp": size}}) for size in (1, 2)]
    alone, divided = (plan.memory.cpu.phases["policy trains"]["activations"] for plan in plans)
    seen = 2 * 32 * plans[0].sizes["policy"].vision.kept_values(gradient_checkpointing=False) * 4
    assert alone - seen == 2 * (divided - seen)


@pytest.mark.parametrize(
    ("hidden", "inner", "layers", "heads", "shares"),
    [(896, 4864, 24, 14, {8: 0.89, 16: 1.78}), (1536, 8960, 28, 12, {8: 0.60, 16: 1.20})],
    ids=["0.5B", "1.5B"],
)
def test_adapters_of_rank_8_need_less_than_a_hundredth_of_the_bytes(tmp_path, hidden, inner, layers, heads, shares):
    """Shapes of Qwen2.5; the guide to adapters names these shares of what an engine is sent."""
    path = write_model(
        tmp_path,
        model_type="qwen2",
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=hidden // heads,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    guide = Path(__file__).parents[3].joinpath("docs/guides/lora.md").read_text(encoding="utf-8")
    for rank, percent in shares.items():
        size = read_model_size(ModelConfig(path=path, lora={"rank": rank}))
        share = 100 * size.num_adapter_parameters / size.num_parameters
        assert round(share, 2) == percent
        assert f"{percent:.2f} %" in guide
        assert share <= 1 or rank > 8


@pytest.mark.parametrize("is_critic", [False, True])
def test_the_first_stage_has_the_embeddings_and_the_last_one_the_head(tmp_path, is_critic):
    config = ModelConfig(path=write_model(tmp_path, tie_word_embeddings=False))
    size = read_model_size(config, is_critic=is_critic)
    stages = [size.stage(3, stage) for stage in range(3)]
    words, norm, head = 1000 * 64, 64, 65 if is_critic else 1000 * 64
    assert [one.num_root_parameters for one in stages] == [words, 0, norm + head]
    assert [one.num_layers for one in stages] == [2, 1, 1]
    assert sum(one.num_parameters for one in stages) == size.num_parameters


def test_the_first_and_the_last_stage_have_embeddings_that_are_the_head(model):
    size = read_model_size(ModelConfig(path=model))
    stages = [size.stage(3, stage) for stage in range(3)]
    words, norm = 1000 * 64, 64
    assert [one.num_root_parameters for one in stages] == [words, 0, words + norm]
    assert sum(one.num_parameters for one in stages) == size.num_parameters + words


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


MANY = {"prompts_per_step": 4096}


def estimate_of(workflow, world_size, model, **sections):
    settings = {"models": {"policy": model}} | sections
    estimate = plan_of(workflow, world_size, **settings).memory
    assert estimate is not None
    return estimate


def memory_of(workflow, world_size, model, **sections):
    return estimate_of(workflow, world_size, model, **sections).accelerator


def test_data_parallel_ranks_divide_weights_gradients_and_optimizer(model):
    for shards in (1, 2, 4, 128):
        estimate = memory_of("grpo", shards, model, batch=MANY)
        share = -(-COUNT * 4 // shards)
        assert estimate.resident["policy weights"] == share
        assert estimate.resident["policy optimizer"] == 2 * share
        assert estimate.phases["policy trains"]["gradients"] == share


def test_a_rank_that_generates_holds_all_weights_and_the_cache(model):
    alone, divided = memory_of("grpo", 1, model), memory_of("grpo", 4, model)
    per_token = 2 * 4 * 2 * 16 * 4
    # 256 sequences of 512 tokens with one more and a page to spare, and their 32 prompts of 512, in pages of 64.
    pages = 256 * (9 + 1) + 32 * 9
    assert alone.phases["policy generates"]["kv cache"] == pages * 64 * per_token
    results, listed = (3 * 256 + 512) * 4 * (16 + 1) * 4, 2 * 256 * 1024 // 64
    numbers = 256 * (32 + 28 + 16 + 4 + 8) + 2 * 512 * 20 + 4 * listed
    assert alone.phases["policy generates"]["buffers of passes"] == results + numbers
    values = 3 * (96 + 64) + 2 * (4 + 2) * 16  # of a token in a layer
    assert alone.phases["policy generates"]["recorded passes"] == 256 * (values * 4 + 1000 * 12)
    # On a CPU they are in slots, which were half as long before, and in slots of all sizes if others begin meanwhile.
    for settings, smaller in (({"max_sequences": 1024}, 256), ({}, 448)):
        sequences = settings.get("max_sequences", 256)
        slots = sequences * (512 + smaller) + sequences // 8 * 512
        on_cpu = plan_of("grpo", 1, models={"policy": model}, rollout=settings).memory.cpu
        assert on_cpu.phases["policy generates"]["kv cache"] == slots * per_token
    assert alone.phases["policy generates"]["unsharded weights"] == 0
    assert divided.phases["policy generates"]["unsharded weights"] == COUNT * 4
    few = memory_of("grpo", 64, model)
    assert few.phases["policy generates"]["kv cache"] == (16 * (9 + 1) + 2 * 9) * 64 * per_token


def test_each_agent_of_an_episode_has_a_conversation_in_the_cache(model):
    def cache(name, prompts_per_step):
        sections = {"environment": name, "batch": {"prompts_per_step": prompts_per_step, "responses_per_prompt": 2}}
        return memory_of("grpo", 1, model, **sections).phases["policy generates"]["kv cache"]

    alone, team = "tests.unit.environments.scripted:Count", "tests.unit.environments.test_player:Pair"
    assert cache(team, 16) == 2 * cache(alone, 16) == cache(alone, 32)
    assert cache(team, 256) == cache(alone, 256), "both fill rollout.max_sequences"


def test_held_out_prompts_may_fill_the_cache(model):
    sections = {
        "data": {"train": {"path": "a"}, "evaluation": {"path": "b"}},
        "evaluation": {"every_steps": 1},
    }
    cache = memory_of("grpo", 1, model).phases["policy generates"]["kv cache"]
    assert memory_of("grpo", 64, model, **sections).phases["policy generates"]["kv cache"] == cache


def test_half_precision_halves_what_computes_and_not_what_is_optimized(model):
    half = {"policy": {"path": model, "compute_dtype": "bfloat16"}}
    full, less = memory_of("grpo", 4, model), memory_of("grpo", 4, model, models=half)
    assert less.resident == full.resident
    for part in ("unsharded weights", "kv cache"):
        assert less.phases["policy generates"][part] * 2 == full.phases["policy generates"][part]
    ratio = less.phases["policy trains"]["activations"] / full.phases["policy trains"]["activations"]
    assert 0.5 < ratio < 0.6, "norms keep copies in float32"


def test_more_tokens_in_a_pass_take_more_and_checkpointing_takes_less(model):
    def activations(**sections):
        return memory_of("grpo", 1, model, **sections).phases["policy trains"]["activations"]

    small, large = (activations(batch={**MANY, "micro_batch_tokens": tokens}) for tokens in (2048, 4096))
    attention = 4 * 16 + 2 * 16
    layer = 6 * 64 + 2 * attention + 2 * attention + 4 * 96
    assert large == 2 * small == 4096 * 4 * layer * 4, "when the head's backward pass begins"
    checkpointed = {"policy": {"path": model, "gradient_checkpointing": True}}
    assert activations(models=checkpointed, batch={**MANY, "micro_batch_tokens": 4096}) < large


def test_a_pass_is_counted_with_no_more_tokens_than_a_mini_batch_has(model):
    def activations(**sections):
        return memory_of("grpo", 1, model, **sections).phases["policy trains"]["activations"]

    batch = {"prompts_per_step": 2, "responses_per_prompt": 4}
    limits = {"data": {"train": {"path": "a"}, "max_prompt_tokens": 8}, "rollout": {"max_response_tokens": 33}}
    held = 2 * (8 + 4 * 32)
    exact, plenty = (activations(batch={**batch, "micro_batch_tokens": n}, **limits) for n in (held, 100_000))
    assert exact == plenty > 0
    halves = {**batch, "updates_per_step": 2, "micro_batch_tokens": 100_000}
    assert activations(batch=halves, **limits) == exact // 2


def test_a_cpu_packs_no_more_prompts_into_a_pass_than_its_caches_hold(model):
    """A single rank in float32 stops at 2,048 tokens, as `BoundedPasses.micro_batches` does."""
    settings = {
        "batch": {**MANY, "micro_batch_tokens": 8192},
        "data": {"train": {"path": "a"}, "max_prompt_tokens": 64},
        "rollout": {"max_response_tokens": 64},
    }
    estimate = estimate_of("grpo", 1, model, **settings)
    activations = [kind.phases["policy trains"]["activations"] for kind in (estimate.cpu, estimate.accelerator)]
    layer = 6 * 64 + 4 * (4 * 16 + 2 * 16) + 4 * 96
    assert activations[0] == 2048 * (4 * layer + 3 * 96) * 4
    assert activations[1] == 8192 * 4 * layer * 4


def test_logits_are_held_in_chunks(tmp_path):
    large = write_model(tmp_path / "large", vocab_size=200_000)
    sizes = []
    for tokens in (1024, 65536):
        estimate = estimate_of("grpo", 1, large, batch={**MANY, "micro_batch_tokens": tokens})
        sizes.append([kind.phases["policy trains"]["logits"] for kind in (estimate.cpu, estimate.accelerator)])
    kept = [MAX_LOGITS // limits.CPU_MAX_LOGITS * limits.CPU_MAX_LOGITS, MAX_LOGITS]
    assert sizes == [[12 * limits.CPU_MAX_LOGITS + 4 * kept[0], 12 * MAX_LOGITS + 4 * kept[1]]] * 2
    assert memory_of("grpo", 1, large).phases["policy trains"]["gradient of the head"] == 200_000 * 64 * 4


def test_chunks_of_logits_are_large_where_accelerators_have_room(tmp_path):
    """At Qwen2.5's vocabulary, chunks of 220 tokens would read and write the gradient of the head 75 times a pass."""
    sections = {
        "models": {"policy": write_model(tmp_path / "large", vocab_size=151_936)},
        "batch": {**MANY, "micro_batch_tokens": 16384},
    }
    recipe, plan = make_recipe(**sections), plan_of("grpo", 1, **sections)

    def logits(room=None, kind="accelerator"):
        estimate = memory.estimate_memory(recipe, plan, 16384, room=room)
        return getattr(estimate, kind).phases["policy trains"]["logits"]

    large = Room(max_logits=LARGE_MAX_LOGITS)
    assert logits() == logits(Room()) == (12 + 4) * MAX_LOGITS
    assert logits(large) == (12 + 4) * LARGE_MAX_LOGITS
    assert logits(large, "cpu") == logits(kind="cpu")
    least = int(plan.memory.accelerator.peak / MARGIN) + 1
    more = least + int(16 * (LARGE_MAX_LOGITS - MAX_LOGITS) / MARGIN) + 1
    assert fit_plan(recipe, plan, least, is_cpu=False).room.max_logits == MAX_LOGITS
    assert fit_plan(recipe, plan, more, is_cpu=False).room.max_logits == LARGE_MAX_LOGITS
    assert fit_plan(recipe, plan, more, is_cpu=True).room == Room()


def test_checksums_take_what_their_code_says():
    messages = pytest.importorskip("leaderless.distributed.weights.buckets")
    assert 2 * 8 * messages.DEVICE_CHECKSUM_WORDS == memory.CHECKSUM_BYTES, "factors and products of eight bytes"


def test_an_asynchronous_checkpoint_is_written_from_a_copy(model):
    def of(*, is_asynchronous):
        return estimate_of("grpo", 2, model, checkpoint={"asynchronous": is_asynchronous})

    with_copy, without = of(is_asynchronous=True), of(is_asynchronous=False)
    copy = 3 * -(-COUNT * 4 // 2)
    assert with_copy.cpu.resident["checkpoint copy"] == with_copy.accelerator.host["checkpoint copy"] == copy
    assert "checkpoint copy" not in {
        **without.cpu.resident,
        **without.accelerator.host,
        **with_copy.accelerator.resident,
    }
    assert with_copy.cpu.peak - without.cpu.peak == copy + min(copy, memory_parts.WRITE_BYTES)
    assert without.cpu.phases["checkpoint"] == {"files being written": min(copy, memory_parts.WRITE_BYTES)}


def test_each_rank_reads_its_own_part_of_the_weights(model):
    estimate, share = estimate_of("grpo", 128, model), -(-COUNT * 4 // 128)
    parts = {"libraries": memory_parts.LIBRARIES_BYTES, "weights": share, "weights being read": share}
    assert estimate.cpu.apart["loading"] == parts
    assert estimate.cpu.totals["loading"] == sum(parts.values())
    assert estimate.accelerator.host["weights being read"] == share, "they go straight to the accelerator"
    assert "weights" not in estimate.accelerator.host


def test_a_back_end_of_ones_own_may_read_whole_models(model):
    training = {"backend": "tests.distributed.test_mesh:repeats_over_pp"}
    estimate = estimate_of("grpo", 2, model, training=training, algorithm={"kl": {"coefficient": 0.1}})
    assert estimate.accelerator.host["whole weights"] == COUNT * 4
    # The share of the policy stays while the reference is read.
    assert estimate.cpu.apart["loading"]["whole weights"] == COUNT * 4
    assert estimate.cpu.apart["loading"]["weights"] == COUNT * 4 // 2


def test_of_a_large_model_a_few_rows_are_read_at_a_time(tmp_path):
    large = write_model(tmp_path / "large", vocab_size=2_000_000)
    assert estimate_of("grpo", 1, large).accelerator.host["weights being read"] == limits.READ_BYTES


@pytest.mark.parametrize(
    ("world_size", "dtype", "on_cpu", "on_accelerator"),
    [(2, "float32", 4 + 8, 4 + 4), (2, "bfloat16", 2 + 8, 2 + 4), (1, "bfloat16", 2 + 4, 2 + 4)],
)
def test_gloo_sums_gradients_in_a_copy_of_its_own(tmp_path, world_size, dtype, on_cpu, on_accelerator):
    wide = write_model(tmp_path / "wide", intermediate_size=2048)
    few_tokens = {
        "batch": {**MANY, "micro_batch_tokens": 8},
        "data": {"train": {"path": "a"}, "max_prompt_tokens": 4},
        "rollout": {"max_response_tokens": 4},
    }
    models = {"policy": {"path": wide, "compute_dtype": dtype}}
    estimate = estimate_of("grpo", world_size, wide, models=models, **few_tokens)
    moments = [kind.phases["policy trains"] for kind in (estimate.cpu, estimate.accelerator)]
    two_layers = 2 * (64 * (64 + 2 * 32) + 64 * 64 + 2 * 16 + 3 * 64 * 2048 + 2 * 64)
    assert [moment["gradients being summed"] / two_layers for moment in moments] == [on_cpu, on_accelerator]


def test_several_accelerators_need_buffers_to_communicate(model):
    def count(world_size, **sections):
        buffers = memory_of("grpo", world_size, model, **sections).resident.get("communication", 0)
        assert buffers % memory_parts.COMMUNICATOR_BYTES == 0
        return buffers // memory_parts.COMMUNICATOR_BYTES

    assert count(1) == 0
    assert count(2) == count(8) == 1, "all ranks do everything together"
    apart = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1-3"}}
    assert count(4, layout=apart) == 2, "all ranks, and those that train; the one that generates is alone"
    # All ranks, those that stand for rows; along dp and along tp; those with the same part are those along dp.
    assert count(4, layout={"policy": {"tp": 2}}) == 4


def test_new_weights_pass_to_an_engine_in_another_process_in_two_stagings(model):
    estimate = estimate_of("grpo", 2, model, rollout={"engine": "vllm"})
    parts = estimate.accelerator.phases["policy generates"]
    assert parts["buckets for the engine"] == 3 * COUNT * 4, "two stagings and a copy, of a model that fits into one"
    assert parts["buckets"] == 4 * COUNT * 4 + memory.CHECKSUM_BYTES
    assert {"engine's weights", "kv cache"} == set(estimate.cpu.phases["policy generates"])


def test_a_weight_larger_than_a_bucket_passes_whole_to_an_engine_in_another_process(tmp_path):
    model = write_model(tmp_path / "model", vocab_size=1 << 21)
    parts = estimate_of("grpo", 2, model, rollout={"engine": "vllm"}).accelerator.phases["policy generates"]
    embedding = (1 << 21) * 64 * 4
    assert embedding == 2 * limits.DEVICE_WEIGHT_BUCKET_BYTES
    assert (parts["largest weight"], parts["buckets for the engine"]) == (embedding, 3 * embedding)
    assert parts["buckets"] == 4 * limits.DEVICE_WEIGHT_BUCKET_BYTES + memory.CHECKSUM_BYTES, "rows are divided there"


def test_a_reference_is_another_model_that_only_scores(model):
    sections = {"algorithm": {"kl": {"coefficient": 0.1}}}
    estimate = memory_of("grpo", 2, model, **sections)
    assert estimate.resident["reference weights"] == COUNT * 4 // 2
    assert not {"reference gradients", "reference optimizer"} & set(estimate.resident)
    scoring, training = estimate.phases["reference scores"], estimate.phases["policy trains"]
    assert 0 < scoring["activations"] * 4 < training["activations"]
    assert "reference trains" not in estimate.phases


def test_the_estimate_is_of_the_rank_that_holds_most(model):
    layout = {"rollout": {"ranks": 0}, "policy": {"ranks": "1-2"}}
    batch = {"micro_batch_tokens": 1024}
    estimate = memory_of("grpo", 3, model, layout=layout, rollout={"max_sequences": 1024}, batch=batch)
    assert "policy generates" in estimate.phases
    assert "policy trains" not in estimate.phases
    assert estimate.resident["policy engine's weights"] == COUNT * 4
    assert "policy weights" not in estimate.resident, "a rank that only generates holds nothing but the engine's copy"
    half = {"policy": {"path": model, "compute_dtype": "bfloat16"}}
    rollout = {"max_sequences": 1024, "max_response_tokens": 1024}
    estimate = memory_of("grpo", 3, model, layout=layout, rollout=rollout, models=half)
    assert estimate.resident["policy engine's weights"] == COUNT * 2
    largest = estimate.phases["weights of policy travel"]["largest weight"]
    assert largest == 1000 * 64 * 2, "the embedding, until it replaces that of earlier weights"
    few = {"rollout": {"max_sequences": 1}, "batch": {**MANY, "micro_batch_tokens": 10**6}}
    estimate = memory_of("grpo", 3, model, layout=layout, **few)
    assert "policy trains" in estimate.phases
    assert "weights of policy travel" in estimate.phases


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


# Whether it fits


def fit(model, available, workflow="grpo", **sections):
    settings = {"models": {"policy": model}, "batch": {**MANY, "micro_batch_tokens": "auto"}} | sections
    recipe = make_recipe(workflow=workflow, **settings)
    return fit_plan(recipe, plan_of(workflow, 1, **settings), available, is_cpu=False)


def test_auto_begins_with_passes_that_fit(model):
    sizes = [fit(model, gigabytes << 30) for gigabytes in (64, 1)]
    assert sizes[0] == Fit(16384, room=Room("all", LARGE_MAX_LOGITS, CacheBound(stays=True)))
    assert 1024 <= sizes[1].pass_tokens < 16384
    assert 16384 % sizes[1].pass_tokens == 0
    recipe = {"batch": {**MANY, "micro_batch_tokens": sizes[1].pass_tokens}}
    assert not fit(model, 1 << 30, **recipe).problem
    twice = {"batch": {**MANY, "micro_batch_tokens": 2 * sizes[1].pass_tokens}}
    assert fit(model, 1 << 30, **twice).problem
    assert "lower batch.micro_batch_tokens=16384" in fit(model, 1 << 30, batch={**MANY}).problem


def test_a_pool_is_as_large_as_there_is_room_for(model):
    settings = {"models": {"policy": model}, "rollout": {"max_sequences": 1024}, "batch": {"micro_batch_tokens": 1024}}
    recipe, plan = make_recipe(**settings), plan_of("grpo", 1, **settings)

    def estimate(cache):
        room = Room(cache=cache)
        return memory.estimate_memory(recipe, plan, 1024, room=room).accelerator

    whole, small = estimate(UNBOUND), estimate(CacheBound(1 << 15))
    parts = small.phases["policy generates"]
    assert parts["kv cache"] == (1 << 15) * 2 * 4 * 2 * 16 * 4
    largest = sum(whole.phases["policy generates"].values())
    assert sum(small.phases["policy trains"].values()) < sum(parts.values()) < largest
    fitting = fit_plan(recipe, plan, int(small.peak / MARGIN) + 1, is_cpu=False)
    assert (fitting.room.cache, fitting.problem) == (CacheBound(1 << 15), "")
    pool = memory.plan_pool(recipe, plan.instances, plan.sizes, plan.instances[0], fitting.room.cache)
    assert (pool.tokens, pool.stays) == (1 << 15, False)
    assert fit_plan(recipe, plan, int(whole.peak / MARGIN) + 1, is_cpu=False).room.cache == UNBOUND
    asleep = estimate(CacheBound(stays=True))
    assert fit_plan(recipe, plan, int(asleep.peak / MARGIN) + 1, is_cpu=False).room.cache == CacheBound(stays=True)
    passing = sum(asleep.phases["policy generates"].values())
    assert set(asleep.phases["policy generates"]) == {"activations", "pixels", "logits"}
    assert asleep.resident["policy engine asleep"] == largest - passing + COUNT * 4, "with weights of its own"
    least = memory.plan_pool(recipe, plan.instances, plan.sizes, plan.instances[0], CacheBound(64))
    assert least.tokens >= 512 + 512 + 1, "the longest sequence fits in any case"


def test_ranks_keep_whole_what_the_memory_has_room_for(model):
    half = {"policy": {"path": model, "compute_dtype": "bfloat16"}}
    sections = {"models": half, "batch": {**MANY, "micro_batch_tokens": 1024}, "rollout": {"max_sequences": 1}}

    def memory(keep_whole):
        return plan_of("grpo", 4, training={"keep_whole": keep_whole}, **sections).memory.accelerator

    nothing, weights, everything = (memory(name) for name in ("nothing", "weights", "all"))
    assert memory("auto") == nothing
    layers = (COUNT - 64_064) // 4
    begins, ends = weights.phases["policy trains"], everything.phases["policy trains"]
    assert begins["gathered weights"] - nothing.phases["policy trains"]["gathered weights"] == 2 * layers * 2
    assert (begins["gradients"], ends["gradients"]) == (COUNT, 4 * COUNT), "of a quarter in float32, and of all"
    recipe, plan = make_recipe(**sections), plan_of("grpo", 4, **sections)
    for least, expected in ((nothing, "nothing"), (weights, "weights"), (everything, "all")):
        assert fit_plan(recipe, plan, int(least.peak / MARGIN) + 1, is_cpu=False).room.keeps == expected
        assert fit_plan(recipe, plan, 64 << 30, is_cpu=True).room == Room()
    changing = make_recipe(**sections, schedule={"replan_every_steps": 1})
    assert fit_plan(changing, plan, 64 << 30, is_cpu=False).room == Room()


def test_what_cannot_fit_is_hopeless_and_says_what_it_holds(model):
    found = fit(model, 100 << 20)
    assert found.is_hopeless
    assert re.search(r"a rank needs at least \d+ MiB in its fullest phase, '[a-z ]+' \(driver 600 MiB", found.problem)
    assert "and there are 100 MiB for it: " in found.problem
    assert "models.policy.gradient_checkpointing" in found.problem


def test_what_is_kept_whole_is_not_where_memory_is_short(model):
    sections = {"models": {"policy": {"path": model, "compute_dtype": "bfloat16"}}, "rollout": {"max_sequences": 1}}
    for kept in ("weights", "all"):
        problem = fit(model, 100 << 20, **sections, training={"keep_whole": kept}).problem
        assert f"for it: leave out training.keep_whole={kept}; " in problem
        own = {"roles": {"policy": {"training": {"keep_whole": kept}}}}
        problem = fit(model, 100 << 20, **sections, **own).problem
        assert f"leave out roles.policy.training.keep_whole={kept}; " in problem
    assert "keep_whole" not in fit(model, 100 << 20, **sections).problem


def test_a_plan_with_a_model_of_unknown_size_is_taken_to_fit():
    assert fit("/no/such/model", 1) == Fit(16384)


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


@pytest.mark.parametrize(
    ("name", "world_size", "weights", "active", "memory_gib"),
    [("qwen3-30b-a3b", 8, 30.5e9, 3.35e9, 74.5), ("qwen3-235b-a22b", 64, 235.1e9, 22.2e9, 131.3)],
)
def test_large_mixtures_of_experts_fit_where_their_recipes_say(
    monkeypatch, name, world_size, weights, active, memory_gib
):
    monkeypatch.chdir(Path(__file__).parents[3])
    loaded = load_recipe(Path(f"recipes/scaling/{name}.yaml"))
    size = read_model_size(loaded.recipe.model_of("policy"))
    assert (size.num_parameters, size.num_active_parameters) == (
        pytest.approx(weights, 0.002),
        pytest.approx(active, 0.002),
    )
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(world_size))
    assert 0.8 * memory_gib < plan.memory.accelerator.peak / 2**30 < memory_gib
    assert plan.memory.accelerator.phases["policy trains"]["gathered weights"] < 4 * 2**30

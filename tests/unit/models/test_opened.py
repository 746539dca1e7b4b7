"""Models that are read in parts: whatever form their files have, and what is wrong with these."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.distributed.test_experts import experts_model
from tests.pictures import vision_model
from tests.tiny import tiny_model, untied_model
from tests.unit.recipes import plan_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.distributed.weights import files
from leaderless.distributed.weights.blocks import WeightBlock
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.family_trial import shrunk, trial_model
from leaderless.models.loading.sharded_loading import ShardedModelFiles, open_model
from leaderless.models.loading.support import check_supported
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.models.loading.weight_sources import WeightFiles, WeightSource
from leaderless.models.value_model import load_value_model

INDEX, FILE = "model.safetensors.index.json", "model.safetensors"


def completed(path: str, *, is_critic: bool = False, num_ranks: int = 1) -> ShardedModelFiles:
    """A model that one rank has read."""
    opened = open_model(ModelConfig(path=path), "policy", is_critic=is_critic, num_ranks=num_ranks)
    opened.decoder.complete(lambda _, weight: weight, torch.device("cpu"))
    return opened


def state_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_same(opened: ShardedModelFiles, whole: torch.nn.Module) -> None:
    own, expected = state_of(opened.decoder), state_of(whole)
    assert own.keys() == expected.keys()
    assert all(torch.equal(value, own[name]) for name, value in expected.items())


def copied(path: str, folder: Path) -> Path:
    shutil.copytree(path, folder / "model")
    return folder / "model"


def changed(path: Path, change: Callable[[dict[str, Tensor]], object]) -> str:
    """A folder whose one file has been changed."""
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE, {"format": "pt"})
    return str(path)


def divided(path: str, folder: Path) -> Path:
    """The same model in several files with an index."""
    own = copied(path, folder)
    model = AutoModelForCausalLM.from_pretrained(path)
    (own / FILE).unlink()
    model.save_pretrained(own, max_shard_size="60KB")
    assert (own / INDEX).exists()
    return own


def test_a_model_of_several_files_is_read(tmp_path: Path) -> None:
    path = str(divided(untied_model(tiny_model("qwen3")), tmp_path))
    check_same(completed(path, num_ranks=2), load_causal_lm(ModelConfig(path=path), "policy"))


@pytest.mark.parametrize("is_same", [True, False])
def test_words_that_a_file_has_twice_are_tied_if_they_are_the_same(tmp_path: Path, *, is_same: bool) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        words = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = words.clone() if is_same else words.flip(0).contiguous()

    path = changed(copied(tiny_model(), tmp_path), add)
    opened = completed(path)
    check_same(opened, load_causal_lm(ModelConfig(path=path), "policy"))
    model = opened.decoder.model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_same


def test_words_may_have_the_name_of_the_head(tmp_path: Path) -> None:
    path = changed(copied(tiny_model(), tmp_path), lambda one: one.update(x=one.pop("model.embed_tokens.weight")))
    path = changed(Path(path), lambda one: one.update({"lm_head.weight": one.pop("x")}))
    check_same(completed(path), load_causal_lm(ModelConfig(path=path), "policy"))


def test_names_may_lack_what_all_names_of_a_language_model_begin_with(tmp_path: Path) -> None:
    def cut(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    path = changed(copied(tiny_model(), tmp_path), cut)
    check_same(completed(path), load_causal_lm(ModelConfig(path=path), "policy"))


def test_experts_may_be_joined_in_the_files(tmp_path: Path) -> None:
    path = Path(experts_model(tmp_path, "qwen3_moe"))
    apart = completed(str(path))
    joined = {name: value.detach().clone() for name, value in apart.decoder.model.named_parameters()}
    assert any(value.ndim == 3 for value in joined.values())
    save_file(joined, path / FILE, {"format": "pt"})
    check_same(completed(str(path)), apart.decoder)


def test_tensors_may_be_turned_in_the_files(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text = {**sizes, "vocab_size": 83, "intermediate_size": 64, "moe_intermediate_size": 24, "head_dim": 8} | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
    }
    own = copied(vision_model(), tmp_path)
    vision = json.loads((own / "config.json").read_text())["vision_config"]
    ids = ("vision_start", "vision_end", "image", "video")
    tokens = {f"{name}_token_id": 17 + place for place, name in enumerate(ids)}
    settings = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **tokens)
    transformers.Qwen3VLMoeForConditionalGeneration(settings).save_pretrained(own)
    names = [name for name, value in load_file(own / FILE).items() if value.ndim == 3]
    shapes = {name: load_file(own / FILE)[name].shape for name in names}
    path = str(own)
    for _ in "12":  # once as saved, once with both dimensions the other way round
        check_same(completed(path), load_causal_lm(ModelConfig(path=path), "policy"))
        path = changed(own, lambda one: one.update({name: one[name].transpose(1, 2).contiguous() for name in names}))
    assert names
    assert all(shape[1] != shape[2] for shape in shapes.values())


def test_a_reward_model_keeps_its_head_and_others_get_one_of_zeros(tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_model(), num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(copied(tiny_model(), tmp_path))
    for path in (str(tmp_path / "model"), tiny_model()):
        opened = completed(path, is_critic=True)
        check_same(opened, load_value_model(ModelConfig(path=path), "critic"))
        assert bool(opened.decoder.model.score.weight.any()) == (path != tiny_model())


def test_files_of_another_kind_are_read_whole_with_a_warning(tmp_path: Path) -> None:
    path = copied(tiny_model(), tmp_path)
    torch.save(load_file(path / FILE), path / "pytorch_model.bin")
    (path / FILE).unlink()
    with pytest.warns(UserWarning, match=r"models.policy: each rank reads all of .* since it has no safetensors: save"):
        opened = completed(str(path), num_ranks=2)
    assert opened.files is None
    check_same(opened, load_causal_lm(ModelConfig(path=tiny_model()), "policy"))


def remove_file(path: Path) -> None:
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def cut_file(path: Path) -> None:
    file = min(path.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])


def misplace(path: Path) -> None:
    index = json.loads((path / INDEX).read_text())
    places = index["weight_map"]
    places["model.norm.weight"] = next(one for one in places.values() if one != places["model.norm.weight"])
    (path / INDEX).write_text(json.dumps(index))


def break_index(path: Path) -> None:
    (path / INDEX).write_text('{"weight_map": ')


DAMAGED = {
    remove_file: r"model.safetensors.index.json names model-00002-of-\d+.safetensors, which is not there",
    cut_file: r"model-00001-of-\d+.safetensors is damaged, or not there: ",
    misplace: r"index.json says that model.norm.weight is in model-\d+-of-\d+.safetensors, which lacks it",
    break_index: r"model.safetensors.index.json is no index of files: JSONDecodeError: ",
}


@pytest.mark.parametrize("damage", DAMAGED, ids=lambda one: one.__name__)
def test_damaged_files_are_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = divided(tiny_model(), tmp_path)
    damage(path)
    with pytest.raises(RecipeError, match=DAMAGED[damage]) as caught:
        open_model(ModelConfig(path=str(path)), "policy")
    assert caught.value.problems[0].key == "models.policy"


def test_what_the_files_lack_and_other_sizes_are_named(tmp_path: Path) -> None:
    def refused(change: Callable[[dict[str, Tensor]], object], source: str, folder: str) -> str:
        path = changed(copied(source, tmp_path / folder), change)
        with pytest.raises(RecipeError) as caught:
            open_model(ModelConfig(path=path), "policy")
        return str(caught.value)

    experts = experts_model(tmp_path, "qwen3_moe")
    bias, up = "model.layers.1.self_attn.k_proj.bias", "model.layers.1.mlp.experts.3.up_proj.weight"
    assert f"lacks 1 of its weights, as {bias}" in refused(lambda one: one.pop(bias), tiny_model(), "1")
    shorter = refused(lambda one: one.update({bias: torch.zeros(3)}), tiny_model(), "2")
    assert f"another size than it says: its {bias} is (3,), but its config.json asks for (16,)" in shorter
    assert f"made of 5 tensors, not of 6: {up} is not there" in refused(lambda one: one.pop(up), experts, "3")
    narrow = refused(lambda one: one.update({up: one[up][:, :-1].contiguous()}), experts, "4")
    assert f"its {up} is (16, 31), but its config.json asks for (16, 32)" in narrow


def described_as(folder: Path, **changes: object) -> ModelConfig:
    path = Path(copied(tiny_model(), folder))
    about = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps(about | changes), encoding="utf-8")
    return ModelConfig(path=str(path))


def test_a_wrong_number_of_layers_is_named(tmp_path: Path) -> None:
    for number, words in (
        (1, "has model.layers.1.input_layernorm.weight"),
        (3, "weights, as model.layers.2.inp"),
    ):
        config = described_as(tmp_path / str(number), num_hidden_layers=number, layer_types=["full_attention"] * number)
        with pytest.raises(RecipeError, match=re.escape(words)) as caught:
            open_model(config, "policy")
        assert f"its config.json says num_hidden_layers={number}" in str(caught.value)
    with pytest.raises(RecipeError, match="cannot be loaded: ") as caught:
        load_tokenizer(described_as(tmp_path / "types", num_hidden_layers=3, layer_types=["full_attention"]), "policy")
    assert "num_hidden_layers" in str(caught.value)
    assert "tokenizer" not in str(caught.value)


def test_quantized_weights_are_named_with_the_remedy(tmp_path: Path) -> None:
    config = described_as(tmp_path / "gptq", quantization_config={"quant_method": "gptq", "bits": 4})
    words = re.escape("has weights that are quantized (gptq), which cannot be trained: name the model")
    with pytest.raises(RecipeError, match=words):
        open_model(config, "policy")
    with pytest.raises(RecipeError, match=words):
        plan_of("grpo", 1, models={"policy": config.path})


LARGE: dict[str, PreTrainedConfig] = {
    "Qwen3-235B-A22B": transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "Qwen2.5-32B": transformers.Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "DeepSeek-V3": transformers.DeepseekV3Config(),
    "dots 3": transformers.CONFIG_MAPPING["dots3_note_text"](),
    "Qwen3-VL": transformers.Qwen3VLConfig(),
    "Gemma 4, dense": transformers.Gemma4TextConfig(
        hidden_size=1536,
        num_hidden_layers=35,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "Gemma 4, mixture": transformers.Gemma4TextConfig(
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
}


def test_a_tensor_that_is_not_finite_is_refused_with_its_file(tmp_path: Path) -> None:
    """Also where all weights are read at once, and by the rank that has the value where ranks divide them."""
    for place, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        name = ("model.norm.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")[place]
        path = changed(
            copied(tiny_model(), tmp_path / str(place)), lambda one, n=name, x=value: one[n].view(-1)[5].fill_(x)
        )
        with pytest.raises(RecipeError, match="NaN or infinite") as error:
            completed(path)
        assert f"models.policy: {name} in {path}/{FILE} has values" in str(error.value)
        with pytest.raises(RecipeError, match=f"{name} in {path} has values"):
            load_causal_lm(ModelConfig(path=path), "policy")


def test_a_tensor_that_is_not_finite_is_found_among_those_that_make_up_a_weight(tmp_path: Path) -> None:
    path = Path(experts_model(tmp_path, "qwen3_moe"))
    name = next(name for name in load_file(path / FILE) if "experts.3" in name)
    with pytest.raises(RecipeError, match=f"{name} in "):
        completed(changed(path, lambda one: one[name].view(-1)[0].fill_(float("nan"))))


@pytest.mark.parametrize("name", LARGE)
def test_a_small_model_is_tried_in_the_place_of_a_large_one(name: str) -> None:
    large = LARGE[name]
    kind = transformers.AutoModelForImageTextToText if name == "Qwen3-VL" else AutoModelForCausalLM
    model = trial_model(large, kind, trust_remote_code=False)
    assert sum(weight.numel() for weight in model.parameters()) < 1e7
    check_supported(model, "models.policy")
    text, small = large.get_text_config(), shrunk(large).get_text_config()
    assert 4 <= small.num_hidden_layers < 7 < text.num_hidden_layers, "the large one is as it was"
    sharing = {*getattr(text, "kv_sharing_modes", ())}
    assert {*getattr(small, "kv_sharing_modes", ())} == sharing, "a small one has layers that share keys, too"
    assert type(small.rope_parameters) is type(text.rope_parameters)


def test_no_more_is_read_than_a_block_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"rows": torch.randn(64, 3000), "cube": torch.randn(6, 8, 2000).bfloat16(), "narrow": torch.randn(7, 5)}
    values["number"] = torch.tensor(3.5)
    save_file(values, tmp_path / FILE)
    monkeypatch.setattr(files, "BLOCK_BYTES", 30_000)
    tensors = files.read_header(tmp_path / FILE).tensors
    for name, block, times in (
        ("rows", WeightBlock((3, 0), (10, 3000)), 1.0),
        ("rows", WeightBlock((3, 1500), (61, 1500)), 1.0),
        ("cube", WeightBlock((2, 0, 0), (3, 8, 2000)), 1.0),
        ("cube", WeightBlock((2, 4, 0), (3, 4, 2000)), 1.0),
        ("cube", WeightBlock((0, 1, 900), (6, 7, 1100)), 2000 / 1100),  # columns of less than a page: whole rows
        ("narrow", WeightBlock((1, 2), (6, 2)), 5 / 2),
    ):
        own = WeightFiles(tensors)
        expected = values[name][tuple(slice(a, a + n) for a, n in zip(block.offsets, block.sizes, strict=True))]
        target = torch.zeros(block.sizes)
        own.read(name, block.offsets, target)
        assert torch.equal(target, expected.float())
        assert own.num_bytes == expected.nbytes * times
        turned = torch.zeros(*block.sizes[:-2], block.sizes[-1], block.sizes[-2]).transpose(-1, -2)
        own.read(name, block.offsets, turned)
        assert torch.equal(turned, expected.float())
    source, target = WeightSource("cube", WeightBlock((0, 0, 0), (6, 2000, 8)), is_turned=True), torch.zeros(3, 700, 4)
    source.read(WeightFiles(tensors), WeightBlock((2, 900, 3), (3, 700, 4)), target)
    assert torch.equal(target, values["cube"].transpose(1, 2)[2:5, 900:1600, 3:7].float())
    number = torch.zeros(())
    assert files.read_block(tensors["number"], (), number) == 4
    assert float(number) == 3.5
    shorter = files.StoredTensor(tmp_path / FILE, (tmp_path / FILE).stat().st_size - 8, torch.float32, (4,))
    with pytest.raises(OSError, match="ends too early"):
        files.read_block(shorter, (0,), torch.zeros(4))

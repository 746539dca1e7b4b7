"""Adapters next to those of `peft`: what they compute and learn, and their folders."""

from __future__ import annotations

import json
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from rich.console import Console
from tests.distributed.test_experts import experts_model
from tests.end_to_end.cli import ROOT
from tests.engines import ALONE
from tests.tiny import tiny_model
from tests.unit.environments.test_play_on import TEAM
from tests.unit.models.test_models import packed_logits
from tests.unit.recipes import make_recipe, plan_of, write_model
from tests.unit.rollout.test_native_engine import engine_of
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.distributed.weights.tensor_parallel import divided_dim
from leaderless.models.causal_lm import CausalLM, empty_causal_lm, load_causal_lm
from leaderless.models.lora.linear import adapted_layers, is_adapter, merged, without_adapters, write_adapters
from leaderless.planner import Plan
from leaderless.planner.graph.adapters import PREFIX, described, optimizer_of
from leaderless.planner.memory.model_size import read_model_size
from leaderless.planner.memory.rank import DeviceMemory
from leaderless.planner.show.text import print_plan
from leaderless.rollout.engine import Request, SamplingParams, generate, make_probe
from leaderless.rollout.weight_sources import probe_of
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.optimizers.optimizer import learning_rate_at
from leaderless.worker.checkpoint.reader import ROLE_FILE, STATE_FILE, RoleState, RunState, fingerprint, load_checkpoint
from leaderless.worker.checkpoint.shards import DamagedCheckpointError

TOKENS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3])]
SETTINGS = [{"rank": 3, "alpha": 7.0}, {"rank": 4, "rslora": True, "targets": ["q_proj", "mlp.down_proj"]}]


def settings_of(lora: dict[str, object]) -> ModelConfig:
    return ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(**lora))  # type: ignore[arg-type]


def adapted(lora: dict[str, object]) -> CausalLM:
    """A model whose adapters change it."""
    model = load_causal_lm(settings_of(lora), "policy")
    for number, (_, layer) in enumerate(adapted_layers(model)):
        torch.nn.init.normal_(layer.lora_B, std=0.3, generator=torch.Generator().manual_seed(number))
    return model


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in model.model.named_parameters() if is_adapter(name)}


def peft_of(model: CausalLM, folder: Path, lora: dict[str, object]) -> PeftModel:
    """The same model by `peft`, through a folder that this package has written."""
    folder.mkdir(exist_ok=True)
    write_adapters(folder, weights_of(model), settings_of(lora))
    base = AutoModelForCausalLM.from_pretrained(model.model.name_or_path, dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder, is_trainable=True)


@pytest.mark.parametrize("lora", SETTINGS, ids=str)
def test_a_model_computes_and_learns_as_in_peft(tmp_path: Path, lora: dict[str, object]) -> None:
    model = adapted(lora)
    twin = peft_of(model, tmp_path / "ours", lora)
    expected = torch.cat([twin(input_ids=one[None]).logits[0] for one in TOKENS])
    logits = packed_logits(model, TOKENS)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    with without_adapters(model), twin.disable_adapter():
        plain = torch.cat([twin(input_ids=one[None]).logits[0] for one in TOKENS])
        torch.testing.assert_close(packed_logits(model, TOKENS), plain, atol=1e-5, rtol=0)
    assert (logits - plain).abs().max() > 0.01
    gain = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    for one in (logits, expected):
        (gain * one).sum().backward()
    known = {name.replace(".default", ""): one.grad for name, one in twin.named_parameters() if one.grad is not None}
    found = {f"{PREFIX}{name}.weight": one.grad for name, one in model.model.named_parameters() if is_adapter(name)}
    assert known.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, known[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lora", SETTINGS, ids=str)
def test_merged_weights_compute_the_same(lora: dict[str, object]) -> None:
    model = adapted(lora)
    logits = packed_logits(model, TOKENS)
    for _, layer in adapted_layers(model):
        layer.weight.data = merged(layer, layer.weight.data, layer.lora_A.data, layer.lora_B.data)
    with without_adapters(model):
        torch.testing.assert_close(packed_logits(model, TOKENS), logits, atol=1e-5, rtol=0)


def test_at_first_a_model_is_exactly_its_base() -> None:
    path = tiny_model("qwen3")
    base, model = (load_causal_lm(ModelConfig(path=path, lora=lora), "policy") for lora in (None, LoraConfig()))
    assert torch.equal(packed_logits(model, TOKENS), packed_logits(base, TOKENS))
    assert {name for name, _ in model.trained_weights()} == {*weights_of(model)}
    again = load_causal_lm(ModelConfig(path=path, lora=LoraConfig()), "policy")
    for name, value in weights_of(again).items():
        assert torch.equal(value, weights_of(model)[name])
        assert value.any() == name.endswith("lora_A")


def test_an_engine_samples_with_the_adapters_that_it_is_sent() -> None:
    trained = adapted(SETTINGS[0])
    engine = engine_of(load_causal_lm(settings_of(SETTINGS[0]), "policy").requires_grad_(False))
    sent = weights_of(trained)
    lost = max(sent)
    with pytest.raises(RuntimeError, match=f"1 of the model's weights have not been sent, such as {lost}"):
        engine.load_weights(WeightStream(((name, one) for name, one in sent.items() if name != lost), 1))
    assert engine.policy_version is None
    engine.load_weights(WeightStream(iter(sent.items()), 1))
    prompt = TOKENS[0].tolist()
    ((completion,),) = generate(engine, [Request(prompt, [0])], SamplingParams(SamplingConfig(), 8))
    tokens = torch.tensor(completion.tokens)
    with torch.no_grad():
        logits = packed_logits(trained, [torch.cat([TOKENS[0], tokens])])[len(prompt) - 1 : -1]
        with without_adapters(trained):
            base = packed_logits(trained, [torch.cat([TOKENS[0], tokens])])[len(prompt) - 1 : -1]
    scores, others = (one.log_softmax(1).gather(1, tokens[:, None])[:, 0] for one in (logits, base))
    torch.testing.assert_close(torch.tensor(completion.log_probs), scores, atol=1e-4, rtol=0)
    assert (scores - others).abs().max() > 1e-2


@pytest.mark.parametrize("changed", ["lora_A", "lora_B"])
def test_an_engine_that_computes_with_other_adapters_than_the_trainer_is_refused(changed: str) -> None:
    model = adapted(SETTINGS[0])
    trainer = FsdpEngine(model, settings_of(SETTINGS[0]), ALONE, torch.device("cpu"), 64)
    probe = probe_of(trainer, make_probe(trainer.vocab_size, 64))
    assert probe is not None
    sent, engine = weights_of(model), engine_of(load_causal_lm(settings_of(SETTINGS[0]), "policy").eval())
    engine.load_weights(WeightStream(iter(sent.items()), 4, probe))
    assert engine.policy_version == 4
    stale = next(name for name in sent if name.endswith(changed))
    again = {**sent, stale: sent[stale].flip(0)}
    with pytest.raises(RuntimeError, match="the native engine does not use the weights of policy version 5 that were"):
        engine.load_weights(WeightStream(iter(again.items()), 5, probe))
    assert engine.policy_version is None, "nothing is generated with them"


def test_a_folder_of_peft_is_where_training_begins(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    torch.manual_seed(0)
    config = PeftConfig(r=5, lora_alpha=9, target_modules="all-linear", init_lora_weights=False, use_rslora=True)
    twin = get_peft_model(base, config).eval()
    twin.save_pretrained(tmp_path)
    model = load_causal_lm(ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(adapter=str(tmp_path))), "policy")
    expected = torch.cat([twin(input_ids=one[None]).logits[0] for one in TOKENS])
    torch.testing.assert_close(packed_logits(model, TOKENS), expected, atol=1e-5, rtol=0)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"policy.lora: models of type gpt2 have no linear layers, which could have"):
        load_causal_lm(ModelConfig(path=str(tmp_path), lora=LoraConfig()), "policy")


def test_targets_cannot_be_experts(tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen2_moe")  # with an expert for all tokens, which has linear layers
    for target in ("experts", "gate_up_proj", "experts.down_proj", "mlp.experts.3.down_proj"):
        lora = LoraConfig(targets=["q_proj", target])
        with pytest.raises(RecipeError, match=f"policy.lora.targets: '{target}' names experts: leave it out, and set"):
            load_causal_lm(ModelConfig(path=path, lora=lora), "policy")
    for targets in ("all-linear", ["down_proj"]):
        model = load_causal_lm(ModelConfig(path=path, lora=LoraConfig(targets=targets)), "policy")
        assert not any(".experts." in name for name, _ in adapted_layers(model))
        assert any(".shared_expert.down_proj" in name for name, _ in adapted_layers(model))


def test_a_folder_says_which_of_the_layers_with_a_name_have_adapters(tmp_path: Path) -> None:
    lora: dict[str, object] = {"rank": 2, "targets": ["1.self_attn.q_proj", "down_proj"]}
    model = adapted(lora)
    write_adapters(tmp_path, weights_of(model), settings_of(lora))
    assert weights_of(load_causal_lm(described(tmp_path, "policy"), "policy")).keys() == weights_of(model).keys()
    plain = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    twin = PeftModel.from_pretrained(plain, tmp_path)
    names = {name.replace(".default.", ".") for name, _ in twin.named_parameters() if "lora_" in name}
    assert names == {f"{PREFIX}{name}.weight" for name in weights_of(model)}


def test_adapters_for_a_base_that_peft_changes_are_refused(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    before = base.model.layers[0].self_attn.q_proj.weight.clone()
    twin = get_peft_model(base, PeftConfig(target_modules=["q_proj"], init_lora_weights="pissa"))
    twin.save_pretrained(tmp_path)
    assert not torch.equal(base.model.layers[0].self_attn.q_proj.weight, before)
    with pytest.raises(RecipeError, match="init_lora_weights is pissa, but must be True here"):
        load_causal_lm(ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(adapter=str(tmp_path))), "policy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"base_model_name_or_path": "other/model"}, "the adapters are of the model 'other/model'"),
        ({"use_dora": True}, "use_dora is True, but must be False here: merge these adapters into their model"),
        ({"alora_invocation_tokens": [3]}, r"alora_invocation_tokens is \[3\], but must be \[\] here"),
        ({"target_parameters": ["experts.down_proj"]}, r"target_parameters is \['experts.down_proj'\], but must be"),
        ({"r": 4}, "the adapters are those of another model"),
        ({"target_modules": ["q_proj"]}, "which the model lacks: the adapters are those of another model"),
        ({"target_modules": ["c_proj"]}, "'c_proj' is no linear layer of qwen3: these are down_proj, gate_proj"),
        ({"r": "many"}, "does not describe adapters"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    model = adapted(SETTINGS[0])
    write_adapters(tmp_path, weights_of(model), settings_of(SETTINGS[0]))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        load_causal_lm(ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(adapter=str(tmp_path))), "policy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora": LoraConfig(rank=3, alpha=7)}, r"policy.lora.alpha: is 7.0, but the adapters in .* trained with 6.0"),
        ({"lora": LoraConfig(rank=3, alpha=6, rslora=True)}, "policy.lora.rslora: is True, but .* with False"),
        ({"path": "/elsewhere/larger"}, "policy.path: is /elsewhere/larger, but the adapters in .* leave it as it was"),
        ({"revision": "v2"}, "policy.revision: is v2, but .* trained with None"),
        (
            {"lora": LoraConfig(rank=3, alpha=6, base_dtype="nf4")},
            "policy.lora.base_dtype: is nf4, but .* with float32",
        ),
    ],
    ids=str,
)
def test_a_run_does_not_continue_with_adapters_that_compute_otherwise(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    settings = settings_of({"rank": 3, "alpha": 6.0})
    model, folder = load_causal_lm(settings, "policy"), tmp_path / "policy"
    folder.mkdir()

    def engine_with(config: ModelConfig) -> FsdpEngine:
        return FsdpEngine(model, config, ALONE, torch.device("cpu"), 64)

    engine_with(settings).write_description(folder)
    (tmp_path / STATE_FILE).write_text(json.dumps(asdict(RunState(1, 0, 0.0))))
    (folder / ROLE_FILE).write_text(json.dumps(asdict(RoleState(1, fingerprint(engine_with(settings))))))
    with pytest.raises(RecipeError, match=message):
        load_checkpoint(tmp_path, {"policy": engine_with(settings.model_copy(update=changes))})
    moved = {"path": f"/elsewhere/{Path(settings.path).name}"}
    with pytest.raises(DamagedCheckpointError):  # its description fits, but it has no weights
        load_checkpoint(tmp_path, {"policy": engine_with(settings.model_copy(update=moved))})


def test_plans_that_cannot_train_adapters_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    model: dict[str, object] = {"policy": {"path": path, "lora": {"rank": 4}}}
    backend = "tests.contracts.replicated:make_engine"
    with pytest.raises(RecipeError, match="cannot train adapters, as role 'policy' needs"):
        plan_of("grpo", 2, models=model, training={"backend": backend})
    with pytest.raises(RecipeError, match=r"folder/adapter_config\.json cannot be read"):
        plan_of("grpo", 2, models={"policy": {"path": path, "lora": {"adapter": "folder"}}})


QWEN = {"model_type": "qwen2", "num_key_value_heads": 2, "head_dim": None, "vocab_size": 151_936}
"""What the configurations of Qwen2.5 of 0.5B and 1.5B have in common."""
SMALL = QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
MEDIUM = QWEN | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}


@pytest.mark.parametrize(
    ("rank", "config", "num_weights", "share"),
    [
        (8, SMALL, 494_032_768, "0.89 %"),
        (8, MEDIUM, 1_543_714_304, "0.60 %"),
        (16, SMALL, 494_032_768, "1.78 %"),
        (16, MEDIUM, 1_543_714_304, "1.20 %"),
    ],
)
def test_adapters_are_a_small_share_of_what_a_model_sends(
    tmp_path: Path, rank: int, config: dict[str, object], num_weights: int, share: str
) -> None:
    """They have the type of the other weights, so shares of weights are those of bytes."""
    path = write_model(tmp_path, **config)
    size = read_model_size(ModelConfig(path=path, lora=LoraConfig(rank=rank)))
    assert size is not None
    assert size.num_parameters == num_weights
    assert rank > 8 or size.num_adapter_parameters <= num_weights / 100
    assert f"{100 * size.num_adapter_parameters / num_weights:.2f} %" == share
    assert share in (ROOT / "docs/guides/lora.md").read_text(encoding="utf-8")
    assert LoraConfig().rank == 8, "the page says so"


def test_a_plan_counts_what_is_trained(tmp_path: Path) -> None:
    def memory_of(plan: Plan) -> DeviceMemory:
        assert plan.memory is not None
        return plan.memory.cpu

    path = write_model(tmp_path / "model", vocab_size=10_000)
    plans = [
        plan_of("grpo", 1, models={"policy": {"path": path, "lora": lora}}, algorithm={"kl": {"coefficient": 0.1}})
        for lora in (None, {"rank": 2})
    ]
    memories = [memory_of(plan) for plan in plans]
    full, adapted = (memory.resident for memory in memories)
    made = empty_causal_lm(ModelConfig(path=path, lora=LoraConfig(rank=2)), "policy")
    trained = sum(weight.numel() for _, weight in made.trained_weights())
    assert adapted["policy optimizer"] == 8 * trained < full["policy optimizer"] / 10
    assert adapted["policy weights"] == full["policy weights"] + 4 * trained
    assert full["reference weights"] == full["policy weights"]
    assert "reference weights" not in adapted
    console = Console(file=StringIO(), record=True, width=200)
    print_plan(plans[1], console)
    assert f"trains adapters ({trained:,} weights)" in console.export_text()
    assert adapted["policy engine's base"] == full["policy weights"]
    for command in ("loading", "serve"):
        before, after = (memory.totals[command] for memory in memories)
        assert after >= before + full["policy weights"] * (command == "serve"), "the engine has the weights once more"


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_a_plan_counts_the_parts_of_adapters_that_a_rank_has(tmp_path: Path, tp: int, pp: int) -> None:
    path, size = write_model(tmp_path / "model", num_hidden_layers=4), tp * pp
    lora = {"rank": 3, "targets": ["q_proj", "down_proj"]}
    layout = {"policy": {"tp": tp, "pp": pp}, "rollout": {"dp": size}}
    plan = plan_of("grpo", size, models={"policy": {"path": path, "lora": lora}}, layout=layout)
    made = empty_causal_lm(ModelConfig(path=path, lora=LoraConfig(**lora)), "policy")  # type: ignore[arg-type]
    num_weights = 0
    for name, weight in made.trained_weights():
        is_whole = divided_dim(name, tuple(weight.shape), tp) is None
        num_weights += weight.numel() // (1 if is_whole else tp)
    assert plan.memory is not None
    assert plan.memory.cpu.resident["policy optimizer"] == 8 * num_weights // pp


POOL = {"planner_rollout": {"ranks": "1"}, "solver_rollout": {"ranks": "1"}}


@pytest.mark.parametrize(("layout", "engine"), [({}, "native"), (POOL, "native"), (POOL, "vllm"), (POOL, "sglang")])
def test_a_plan_counts_the_model_of_several_agents_once(tmp_path: Path, layout: dict[str, object], engine: str) -> None:
    paths = [write_model(tmp_path / name) for name in ("one", "other")]
    rest = {node: {"ranks": "0"} for node in ("reward", "advantage", "samples", "planner", "solver")} if layout else {}
    sizes = {}
    for path in paths:
        models = {role: {"path": p, "lora": {"rank": 2}} for role, p in (("planner", paths[0]), ("solver", path))}
        team = TEAM | {"algorithm": {"advantage": {"type": "dr_mas"}}, "models": models, "layout": layout | rest}
        team["rollout"] = {**TEAM.get("rollout", {}), "engine": engine, "external": {"python": "python3"}}
        memory = plan_of("dr_mas", 2 if layout else 1, **team).memory
        assert memory is not None
        sizes[path] = memory.cpu
    one, two = sizes.values()
    made = empty_causal_lm(ModelConfig(path=paths[0], lora=LoraConfig(rank=2)), "planner")
    adapters = 4 * sum(weight.numel() for _, weight in made.trained_weights())
    full = 4 * sum(weight.numel() for weight in made.model.parameters()) - adapters
    if layout:  # the ranks that generate have most
        assert one.resident["solver engine's weights"] == adapters
        assert one.resident["planner engine's weights"] == full == two.resident["solver engine's weights"]
    else:
        assert one.resident["solver weights"] == adapters
        assert one.resident["planner weights"] == full + adapters == two.resident["solver weights"]
        assert "solver engine's base" not in one.resident
        assert two.resident["solver engine's base"] == full
        assert two.totals["loading"] - one.totals["loading"] >= full


@pytest.mark.parametrize(
    ("solver", "is_shared"),
    [({}, True), ({"model": {"compute_dtype": "bfloat16"}}, False), ({"rollout": {"max_sequences": 3}}, False)],
    ids=["alike", "another type", "another number of sequences"],
)
def test_agents_share_a_vllm_in_the_process_if_they_use_it_alike(
    tmp_path: Path, solver: dict[str, dict[str, object]], is_shared: bool
) -> None:
    base = {"path": write_model(tmp_path / "model"), "lora": {"rank": 2}}
    models = {"planner": base, "solver": base | solver.get("model", {})}
    team = TEAM | {"algorithm": {"advantage": {"type": "dr_mas"}}, "models": models, "rollout": {"engine": "vllm"}}
    roles = {"solver": {"rollout": solver["rollout"]}} if "rollout" in solver else {}
    if is_shared:
        plan = plan_of("dr_mas", 1, **team, roles=roles)
        both = [one for one in plan.instances if one.generates]
        assert [one.role for one in both] == ["planner", "solver"]
        return
    with pytest.raises(RecipeError, match=r"several roles generate .* a process holds one vLLM"):
        plan_of("dr_mas", 1, **team, roles=roles)


def test_what_a_folder_says_is_not_said_again() -> None:
    with pytest.raises(ValueError, match="adapter says what rank is: leave this out"):
        LoraConfig(adapter="folder", rank=4)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, {"policy": 1e-5, "critic": 1e-6}), (2e-4, {"policy": 2e-4, "critic": 2e-4})]
)
def test_adapters_have_ten_times_the_learning_rate_unless_one_is_given(
    given: float | None, expected: dict[str, float]
) -> None:
    recipe = make_recipe(models={"policy": {"path": "p", "lora": {}}, "critic": {"path": "p"}})
    recipe = recipe.model_copy(update={"optimizer": OptimizerConfig(learning_rate=given, warmup_updates=1)})
    for role, model in recipe.models.items():
        settings = optimizer_of(recipe, model)
        assert learning_rate_at(settings, 5, 10) == expected[role]
        assert learning_rate_at(settings, 0, 10) == expected[role] / 2

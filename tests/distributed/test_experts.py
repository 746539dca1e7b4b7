"""Mixtures of experts: ranks that divide their weights compute what one does."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from tests.distributed.continued import check_continued
from tests.distributed.ranks import RankPool
from tests.distributed.test_mesh import REPEATING, setup_of
from tests.distributed.test_training import LENGTHS, SHARES, Numbers, largest_difference, train_one_update, whole
from tests.tiny import add_gradients, random_samples, tiny_model
from tests.unit.recipes import plan_of, write_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import (
    AutoModelForCausalLM,
    JetMoeConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.models.decoder import Decoder
from leaderless.models.parallel.expert import ExpertParallel, num_experts
from leaderless.planner import Layout
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.training.micro_batches import MicroBatch

SIZES = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, norm_topk_prob=True
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES | {"num_key_value_heads": 4},
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=24,
    ),
}


def experts_model(folder: Path, family: str) -> str:
    """A model with experts and the tokenizer of the others."""
    shutil.copytree(tiny_model("qwen3"), folder / family)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(folder / family)
    return str(folder / family)


def with_experts(batch: Batch, num_experts: int) -> Batch:
    """Samples with random experts for each token, two in each of two layers; siblings share those of their prompt."""

    def choose(count: int, seed: int) -> Tensor:
        noise = torch.rand(count, 2, num_experts, generator=torch.Generator().manual_seed(seed))
        return noise.topk(2).indices.flatten().byte()

    prompts, tokens = batch.jagged("prompt_tokens").lengths.tolist(), batch.jagged("tokens").lengths.tolist()
    rows = [
        torch.cat([choose(before, group), choose(max(0, after - 1), 100 + row)])
        for row, group, before, after in zip(batch.ids.tolist(), batch.group_ids.tolist(), prompts, tokens, strict=True)
    ]
    values = torch.cat(rows) if rows else torch.empty(0, dtype=torch.uint8)
    return batch.with_columns(experts=Jagged(values, torch.tensor([*map(len, rows)], dtype=torch.int64), "experts"))


def train_divided(
    model: str, sizes: dict[str, int], changes: dict[str, object], num_replayed: int = 0, balance: float = 0
) -> Numbers:
    """Scores, the gradient's norm and weights of two updates, with experts that stay divided.

    Choices of some experts, if any, are replayed, and loads are balanced.
    """
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = setup_of(transport, layout, model)
    engine = make_engine(replace(setup, model=ModelConfig(path=model, **changes), micro_batch_tokens=31))  # type: ignore[arg-type]
    assert isinstance(engine, FsdpEngine)
    shard, numbers = layout.shard_of(transport.rank), Numbers()
    shares = SHARES[layout.dp]
    first = sum(shares[:shard])
    batch = random_samples(LENGTHS, siblings=3).select(torch.arange(first, first + shares[shard]))
    if num_replayed:
        batch = with_experts(batch, num_replayed)
    for update in range(2):
        if balance:
            engine.balance_experts(batch, balance)
        for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
            numbers[f"scores.{update}.{row}"] = values
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "FSDP.* returned a view")  # adding to it in place would be wrong
            add_gradients(engine, batch, loss_of)
        loads = engine.expert_loads()
        assert loads is not None
        numbers[f"loads.{update}"] = loads / loads.sum(-1, keepdim=True)
        numbers[f"norm.{update}"] = torch.tensor(engine.optimizer_step().grad_norm)
    return numbers | {f"weights.{name}": value.clone() for name, value in engine.full_weights()}


def loss_of(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
    gain = (micro_batch.targets % 7 - 3) * 0.01
    return (gain[: len(outputs.log_probs)] * (outputs.log_probs + 0.3 * outputs.entropies)).sum()


@pytest.mark.parametrize(
    ("family", "sizes", "changes"),
    [
        pytest.param("qwen3_moe", {"dp": 2, "ep": 2}, {}, marks=pytest.mark.thorough),  # four ranks divide more
        ("mixtral", {"dp": 4, "ep": 4}, {"gradient_checkpointing": True}),  # one rank has no samples
        pytest.param("qwen3_moe", {"dp": 1, "cp": 2, "ep": 2}, {}, marks=pytest.mark.thorough),  # also with tp
        pytest.param(  # the next ones have halves of experts
            "mixtral", {"dp": 4, "ep": 2}, {"gradient_checkpointing": True}, marks=pytest.mark.thorough
        ),
        ("qwen3_moe", {"dp": 4, "ep": 2}, {}),  # two ranks have a half of three experts each
        pytest.param(
            "qwen3_moe", {"dp": 1, "tp": 2, "ep": 2}, {"gradient_checkpointing": True}, marks=pytest.mark.thorough
        ),
        ("qwen2_moe", {"dp": 1, "tp": 4, "ep": 2}, {}),  # with an expert for all tokens
        ("qwen3_moe", {"dp": 1, "cp": 2, "tp": 2, "ep": 2}, {}),
    ],
    ids=str,
)
def test_ranks_that_send_tokens_to_experts_learn_like_one(
    ranks: RankPool, tmp_path: Path, family: str, sizes: dict[str, int], changes: dict[str, object]
) -> None:
    model = experts_model(tmp_path, family)
    found = ranks.run(num_ranks(sizes), train_divided, model, sizes, changes)
    assert largest_difference(found, trained_alone(ranks, model)) < 1e-5


def num_ranks(sizes: dict[str, int]) -> int:
    return prod(size for axis, size in sizes.items() if axis != "ep")


def trained_alone(ranks: RankPool, model: str, num_replayed: int = 0, balance: float = 0) -> Numbers:
    """What one rank learns, computed once for each family."""
    key = Path(model).name, num_replayed, balance
    if key not in ALONE:
        (ALONE[key],) = ranks.run(1, train_divided, model, {"dp": 1}, {}, num_replayed, balance)
    return ALONE[key]


ALONE: dict[tuple[str, int, float], Numbers] = {}


def learn_by_heart(model: str, sizes: dict[str, int], changes: dict[str, object], num_experts: int) -> Numbers:
    """The loss before each of four updates, the norm of the first gradient, and the first moments that come of it."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes)
    setup = replace(setup_of(transport, layout, model), model=ModelConfig(path=model, **changes))  # type: ignore[arg-type]
    engine, shard, shares = make_engine(setup), layout.shard_of(transport.rank), SHARES[layout.dp]
    assert isinstance(engine, FsdpEngine)
    rows = torch.arange(sum(shares[:shard]), sum(shares[: shard + 1]))
    batch, numbers = with_experts(random_samples(LENGTHS, siblings=3).select(rows), num_experts), Numbers()
    for update in range(4):
        loss = -engine.log_probs(batch).values.sum()
        numbers[f"loss.{update}"] = transport.world.sum(loss, "the loss") / 111
        add_gradients(engine, batch, lambda outputs, micro: -outputs.log_probs[: len(micro.targets)].sum() / 111)
        norm = engine.optimizer_step().grad_norm
        if not update:
            numbers["norm"] = torch.tensor(norm)
            moments = {name: value for name, value in engine.state().items() if name.startswith("optimizer.exp_avg.")}
            numbers |= {name: whole(value) for name, value in moments.items()}
    return numbers


@pytest.mark.parametrize(
    ("family", "num_experts"), [("qwen3_moe", 6), pytest.param("mixtral", 4, marks=pytest.mark.thorough)]
)
def test_ranks_with_the_same_experts_compute_in_bfloat16_up_to_rounding(
    ranks: RankPool, tmp_path: Path, family: str, num_experts: int
) -> None:
    model, half = experts_model(tmp_path, family), {"compute_dtype": "bfloat16"}
    (exact,), (alone,) = (
        ranks.run(1, learn_by_heart, model, {"dp": 1}, changes, num_experts) for changes in ({}, half)
    )
    (found, *_) = ranks.run(4, learn_by_heart, model, {"dp": 4, "ep": 2}, half, num_experts)
    errors = {
        name: [float((one[name] - value).norm() / value.norm()) for one in (alone, found)]
        for name, value in exact.items()
    }
    assert errors["optimizer.exp_avg.model.embed_tokens.weight"][1] > 1e-4, "it is rounded at all"
    for name, (own, other) in errors.items():
        assert other < max(1.5 * own, 1e-3) < 0.03, name
    losses = [float(found[f"loss.{update}"]) for update in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[3] > 0.01


def types_of_weights(model: str) -> set[torch.dtype]:
    """The types of the weights of choices where two ranks each have the same experts, in bfloat16."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, 4, ep=2), model)
    engine = make_engine(replace(setup, model=ModelConfig(path=model, compute_dtype="bfloat16")))
    assert isinstance(engine, FsdpEngine)
    assert engine.model.expert_parallel is not None
    found = set[torch.dtype]()
    for module in engine.model.expert_parallel.modules:
        module.register_forward_pre_hook(lambda _, arguments: found.add(arguments[2].dtype))
    engine.log_probs(random_samples([(2, 3)]))
    return found


def test_weights_of_choices_keep_their_type_where_ranks_have_the_same_experts(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(4, types_of_weights, experts_model(tmp_path, "mixtral")) == [{torch.float32}] * 4


@pytest.mark.parametrize(
    ("sizes", "changes", "num_replayed", "balance"),
    [
        pytest.param({"dp": 2, "ep": 2}, {"gradient_checkpointing": True}, 6, 0.0, marks=pytest.mark.thorough),
        pytest.param({"dp": 2, "ep": 2}, {"gradient_checkpointing": True}, 0, 0.5, marks=pytest.mark.thorough),
        ({"dp": 1, "cp": 2}, {}, 6, 0.5),
        pytest.param({"dp": 4}, {}, 6, 0.5, marks=pytest.mark.thorough),
        ({"dp": 2, "tp": 2, "ep": 2}, {}, 6, 0.5),
        # Earlier stages begin with other passes before they compute one again.
        ({"dp": 1, "pp": 2}, {"gradient_checkpointing": True}, 6, 0.5),
        ({"dp": 2, "pp": 2, "ep": 2}, {}, 0, 0.5),
    ],
    ids=str,
)
def test_replayed_and_balanced_experts_do_not_depend_on_ranks(
    ranks: RankPool,
    tmp_path: Path,
    sizes: dict[str, int],
    changes: dict[str, object],
    num_replayed: int,
    balance: float,
) -> None:
    model = experts_model(tmp_path, "qwen3_moe")
    expected = trained_alone(ranks, model, num_replayed, balance)
    assert largest_difference([trained_alone(ranks, model)], expected) > 1e-3
    found = ranks.run(num_ranks(sizes), train_divided, model, sizes, changes, num_replayed, balance)
    assert largest_difference(found, expected) < 1e-5


def test_a_run_continues_with_another_ep(ranks: RankPool, tmp_path: Path) -> None:
    model, samples = experts_model(tmp_path, "qwen3_moe"), random_samples(LENGTHS)
    others = {"dp": 1}, {"dp": 2}, {"dp": 1, "cp": 2, "ep": 2}, {"dp": 4, "ep": 2}
    parts = {"dp": 1, "tp": 2, "pp": 2, "ep": 2}, [{"dp": 4, "ep": 2}]
    check_continued(ranks, tmp_path, model, samples, loss_of, [({"dp": 2, "ep": 2}, others), parts])


def apply_first(size: int) -> Numbers:
    """Outputs and gradients where all tokens of all ranks go to the first expert, and other ranks get none."""
    transport = Transport(torch.device("cpu"), timeout_s=30)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"], experts_implementation="eager")
    layer = model.model.layers[0].mlp
    place, hidden = transport.rank, torch.randn(4, 32)
    inputs = hidden.chunk(size)[place].clone().requires_grad_()
    if size > 1:
        divide(model, transport.world)
    first = torch.zeros(len(inputs), 1, dtype=torch.int64)
    outputs = layer.experts(inputs, first, torch.full((len(inputs), 1), 0.5))
    (outputs * torch.linspace(-1, 1, 32)).sum().backward()
    assert inputs.grad is not None
    numbers = {f"{row}": value for row, value in enumerate(outputs.detach(), len(inputs) * place)}
    numbers |= {f"gradient.{row}": value for row, value in enumerate(inputs.grad, len(inputs) * place)}
    gradient = layer.experts.down_proj.grad
    assert gradient is not None
    return numbers | {"weights": torch.cat(transport.world.gather(gradient, "gradients"))}


def divide(model: PreTrainedModel, peers: ProcessGroup) -> None:
    """Divide the experts of a model over all ranks."""
    mesh = DeviceMesh.from_group(peers.torch_group, "cpu", mesh_dim_names=("ep",))
    ExpertParallel.divide(Decoder(model), peers, mesh, None, "models.policy")


def test_a_rank_whose_experts_get_no_tokens_leaves_no_other_alone(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, apply_first, 1)
    assert largest_difference(ranks.run(2, apply_first, 2), expected) < 1e-6


def apply_all(weights: list[float]) -> Numbers:
    """Output and gradient of a token that goes with these weights to experts that are all the same, in bfloat16."""
    transport = Transport(torch.device("cpu"), timeout_s=30)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["qwen3_moe"])
    layer = model.model.layers[0].mlp
    for weight in layer.experts.parameters():
        weight.data = weight.data[:1].expand_as(weight).clone()
    inputs = torch.randn(1, 32).bfloat16().requires_grad_()
    divide(model, transport.world)
    chosen = torch.arange(len(weights)).unsqueeze(0)
    output = layer.experts(inputs, chosen, torch.tensor([weights]).bfloat16())
    output.backward(torch.ones_like(output))
    assert inputs.grad is not None
    return {"output": output.detach(), "gradient": inputs.grad}


def test_what_the_experts_of_a_token_add_is_rounded_once(ranks: RankPool) -> None:
    small = [2.0**-9] * 5  # each alone is lost next to 1 in bfloat16
    (one,), (found,) = ranks.run(1, apply_all, [1.0]), ranks.run(1, apply_all, [1.0, *small])
    for name, value in one.items():
        torch.testing.assert_close(found[name], (value.float() * (1 + sum(small))).bfloat16(), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"ep": 3}, r"layout.policy.ep: ep=3 does not divide the 4 ranks of the node: it can be 1, 2, 4"),
        ({"pp": 2, "ep": 4}, r"layout.policy.ep: ep=4 does not divide the 2 ranks of each stage: it can be 1, 2"),
        ({"ep": 4}, r"layout.policy.ep: ep=4 does not divide the 6 experts of 'policy': it can be 1, 2, 3, 6"),
        ({"tp": 2}, r"layout.policy.ep: ranks along tp=2 divide attention, .*: set ep, as to 2, .*; or leave out tp"),
    ],
)
def test_ranks_that_cannot_divide_experts_are_refused(tmp_path: Path, layout: dict[str, int], message: str) -> None:
    models = {"policy": experts_model(tmp_path, "qwen3_moe")}
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 4, models=models, layout={"policy": layout})
    with pytest.raises(RecipeError, match="the model of 'policy' has no experts that ranks can divide"):
        plan_of("grpo", 4, models={"policy": write_model(tmp_path / "dense")}, layout={"policy": {"ep": 4}})


def test_ranks_that_would_divide_no_experts_are_refused(tmp_path: Path) -> None:
    models = {"policy": experts_model(tmp_path, "qwen3_moe")}
    for node, why in (("reward", "node 'reward' has no model whose"), ("rollout", "the engine 'native' of 'policy'")):
        with pytest.raises(RecipeError, match=rf"layout.{node}.ep: ep=2: {why}"):
            plan_of("grpo", 2, models=models, layout={node: {"ep": 2}})
    with pytest.raises(RecipeError, match=rf"layout.policy.ep: .* '{REPEATING}' of 'policy' does not divide experts"):
        plan_of("grpo", 2, models=models, layout={"policy": {"ep": 2}}, training={"backend": REPEATING})
    message = r"'policy' is divided as ranks 0-1 dp=2 for 'old' and as ranks 0-1 dp=2 ep=2 for 'policy'"
    layout = {"policy": {"ep": 2}, "old": {"ep": 1}}
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 2, models=models, layout=layout, batch={"updates_per_step": 2})


def test_experts_that_are_called_otherwise_cannot_be_divided() -> None:
    sizes = {**SIZES, "kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(JetMoeConfig(**sizes))
    assert any(hasattr(module, "num_experts") for module in model.modules())
    assert num_experts(model) == 0


def test_a_plan_counts_the_experts_that_are_not_gathered(tmp_path: Path) -> None:
    models = {"policy": experts_model(tmp_path, "qwen3_moe")}
    experts = 6 * 3 * 16 * 32

    def gathered(world_size: int, **sizes: int) -> int:
        plan = plan_of("grpo", world_size, models=models, layout={"policy": sizes})
        assert plan.memory is not None
        return plan.memory.cpu.phases["policy trains"]["gathered weights"]

    assert gathered(2) - gathered(2, ep=2) == 2 * 4 * experts
    assert gathered(4) - gathered(4, ep=2) == 4 * experts, "another rank has the same half"
    assert gathered(6, tp=2, ep=3) - gathered(6, tp=2, ep=6) == 2 * 4 * experts // 3, "whatever divides attention"
    assert gathered(2, pp=2) > 2 * 4 * experts, "those of two layers, as without stages"
    for num_layers, changes in [(2, {}), (1, {"gradient_checkpointing": True})]:
        model = {"path": models["policy"], "compute_dtype": "bfloat16", **changes}
        plan = plan_of("grpo", 2, models={"policy": model}, layout={"policy": {"ep": 2}})
        assert plan.memory is not None
        phases = plan.memory.cpu.phases
        assert phases["policy trains"]["converted experts"] == num_layers * experts // 2 * 2
    plan = plan_of("grpo", 4, models={"policy": model}, layout={"policy": {"ep": 2}})
    assert plan.memory is not None
    assert not plan.memory.cpu.phases["policy trains"].get("converted experts"), "they are gathered in half precision"


@pytest.mark.parametrize(
    ("family", "world_size", "changes"),
    [
        pytest.param("qwen3_moe", 2, {}, marks=pytest.mark.thorough),
        ("qwen3_moe", 4, {"gradient_checkpointing": True}),
        ("mixtral", 2, {}),
    ],
)
def test_ranks_that_divide_experts_learn_like_one(
    ranks: RankPool, tmp_path: Path, family: str, world_size: int, changes: dict[str, object]
) -> None:
    model = experts_model(tmp_path, family)
    (expected,) = ranks.run(1, train_one_update, model, 4096, {}, 2)
    experts = [name for name in expected if name.startswith("gradients.") and "experts" in name]
    assert len(experts) == 4
    assert all(expected[name].abs().sum() > 0 for name in experts)
    difference = largest_difference(ranks.run(world_size, train_one_update, model, 31, changes, 2), expected)
    assert difference < 1e-5

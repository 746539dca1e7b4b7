"""The contract of every training back end, built-in or a user's `package.module:function`."""

from __future__ import annotations

import re
import tempfile
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_critic import write_critic
from tests.distributed.test_training import LENGTHS, SHARES
from tests.end_to_end.cli import ROOT
from tests.end_to_end.test_many_ranks import merged, walk_steps
from tests.tiny import add_gradients, at_temperature, mixture_model, random_samples, tiny_model, write_recipe
from tests.unit.recipes import plan_of, write_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from leaderless import EngineSetup, train_backend
from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import TokenOutputs
from leaderless.planner import Layout
from leaderless.planner.engines import BUILTIN_BACKENDS
from leaderless.training.engine import Trainable, TrainEngine, ValueEngine, make_train_engine, make_value_engine
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch

OWN = "tests.contracts.replicated:make_engine"
MEGATRON = "tests.fakes.in_process:make_engine"
"""The back end `megatron`, with a stand-in for Megatron."""
VALUE_BACKENDS = [name for name, spec in BUILTIN_BACKENDS.items() if spec.values] + [OWN]
BACKENDS = [*VALUE_BACKENDS, MEGATRON]
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, epsilon=1e-3, weight_decay=0.1, warmup_updates=1, max_grad_norm=0.7)
"""Adam with such an epsilon moves weights by more where the gradient is larger."""
TEMPERATURE = 0.7
Numbers = dict[str, Tensor]


def setup_of(
    path: str,
    sizes: dict[str, int] | None = None,
    lora: LoraConfig | None = None,
    *,
    is_critic: bool = False,
    is_trained: bool = True,
    micro_batch_tokens: int = 40,
) -> EngineSetup:
    """The setup of a model on all ranks, which divide samples alone unless sizes of axes are given."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, **sizes or {"dp": transport.world.size})
    transport.add_axes([layout])
    return EngineSetup(
        role="critic" if is_critic else "policy",
        model=ModelConfig(path=path, lora=lora),
        is_critic=is_critic,
        layout=layout,
        process_group=transport.world,
        axis_groups=transport.axis_groups(layout) if sizes else {"dp": transport.world},
        device=torch.device("cpu"),
        optimizer=OPTIMIZER if is_trained else None,
        num_updates=4,
        micro_batch_tokens=micro_batch_tokens,
    )


def own_rows(engine: Trainable, sizes: dict[str, int] | None = None) -> Batch:
    """The samples of this rank's shard; one of four shards has none."""
    group = engine.process_group
    layout = Layout(group.ranks, **sizes or {"dp": group.size})
    shares, shard = SHARES[layout.dp], layout.shard_of(group.rank)
    first = sum(shares[:shard])
    return at_temperature(random_samples(LENGTHS, siblings=3), TEMPERATURE).select(
        torch.arange(first, first + shares[shard])
    )


def add_policy_gradient(engine: TrainEngine, sizes: dict[str, int] | None = None) -> None:
    """A loss that depends on sample and position, summed over micro-batches and ranks."""
    batch = own_rows(engine, sizes)
    gain = torch.repeat_interleave(
        (batch.ids % 5 - 2).float() / 50,
        torch.tensor([len(r) for r in batch.jagged("tokens").rows()], dtype=torch.int64),
    )

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        return -(gain[micro_batch.response_index] * outputs.log_probs).sum()

    add_gradients(engine, batch, loss)


def weights_of(engine: Trainable) -> Numbers:
    return {name: value.clone() for name, value in engine.full_weights()}


def same(weights: Numbers, other: Numbers) -> bool:
    return weights.keys() == other.keys() and all(torch.equal(weights[name], other[name]) for name in weights)


def train_twice(backend: str, path: str) -> Numbers:
    """Log-probs of own samples, the norms of two gradients and the weights that come of them."""
    engine = make_train_engine(backend, setup_of(path))
    batch, numbers = own_rows(engine), Numbers()
    for row, values in zip(batch.ids.tolist(), engine.log_probs(batch).rows(), strict=True):
        numbers[f"log_probs.{row}"] = values
    assert engine.policy_version == 0
    for update in range(2):
        add_policy_gradient(engine)
        info = engine.optimizer_step()
        assert info.is_made
        assert info.learning_rate == OPTIMIZER.learning_rate * (0.5 if update == 0 else 1)
        assert engine.policy_version == update + 1
        numbers[f"norm.{update}"] = torch.tensor(info.grad_norm)
    return numbers | weights_of(engine)


def naive_twice(path: str) -> Numbers:
    """The same with a module of `transformers`, one sample after the other."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    samples, numbers = random_samples(LENGTHS, siblings=3), Numbers()
    decayed = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1}]
    decayed.append({"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(decayed, betas=(0.9, 0.999), eps=1e-3)
    for update in range(2):
        rows = zip(samples.jagged("prompt_tokens").rows(), samples.jagged("tokens").rows(), strict=True)
        for row, (prompt, response) in enumerate(rows):
            scores = (model(torch.cat([prompt, response])[None]).logits[0] / TEMPERATURE).log_softmax(-1)
            chosen = scores[len(prompt) - 1 : -1].gather(1, response[:, None]).squeeze(1)
            if update == 0:
                numbers[f"log_probs.{row}"] = chosen.detach()
            (-(row % 5 - 2) / 50 * chosen.sum()).backward()
        numbers[f"norm.{update}"] = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (0.5 if update == 0 else 1)
        optimizer.step()
        optimizer.zero_grad()
    return numbers | {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_gradients_and_steps_are_those_of_a_plain_module(ranks: RankPool, backend: str, world_size: int) -> None:
    expected, found = naive_twice(tiny_model("qwen3")), Numbers()
    assert min(expected["norm.0"], expected["norm.1"]) > 0.7, "the gradient is clipped"
    for result in ranks.run(world_size, train_twice, backend, tiny_model("qwen3")):
        found |= result
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=1e-4, msg=name)


def refuse_and_discard(
    backend: str, path: str, sizes: dict[str, int] | None = None, lora: LoraConfig | None = None
) -> None:
    """Every way in which an update is not made leaves weights and version alone, and no gradient behind."""
    engine = make_train_engine(backend, setup_of(path, sizes, lora))
    before = weights_of(engine)
    asked: list[float] = []
    add_policy_gradient(engine, sizes)
    info = engine.optimizer_step(lambda norm: bool(asked.append(norm)))
    assert asked == [info.grad_norm]
    assert not info.is_made
    assert info.grad_norm > (0.1 if lora is None else 1e-3)
    add_policy_gradient(engine, sizes)
    again = engine.optimizer_step(lambda _: False)
    assert again.grad_norm == pytest.approx(info.grad_norm), "a refused gradient is gone"
    add_policy_gradient(engine, sizes)
    engine.discard_gradient()
    assert same(weights_of(engine), before)
    assert engine.policy_version == 0
    factor = float("nan") if sizes is None and engine.process_group.rank == 0 else 1.0
    add_gradients(engine, own_rows(engine, sizes), lambda out, _: factor * out.log_probs.sum())
    if sizes is not None and engine.process_group.rank == 1:
        spoil(engine)
    with pytest.raises(RuntimeError, match="gradient norm of update 0 is nan"):
        engine.optimizer_step()
    assert same(weights_of(engine), before)
    engine.discard_gradient()
    add_policy_gradient(engine, sizes)
    assert engine.optimizer_step(lambda norm: abs(norm - info.grad_norm) < 1e-6).is_made, "nothing was left behind"
    assert not same(weights_of(engine), before)


def spoil(engine: Trainable) -> None:
    """Make a gradient NaN that only this rank has: of the words if it has them twice, else of the largest part."""
    assert isinstance(engine, FsdpEngine)
    words = engine.model.shared_words
    weights = [weight for _, weight in engine.named_weights()] if words is None else [words]
    found = [local(weight.grad) for weight in weights if weight.grad is not None]
    max(found, key=Tensor.numel).fill_(float("nan"))


DIVIDED: dict[str, tuple[dict[str, int], LoraConfig | None]] = {
    "layers": ({"dp": 1, "tp": 2}, None),
    "stages, words twice": ({"dp": 1, "pp": 2}, None),
    "experts": ({"dp": 2, "ep": 2}, None),
    "adapters": ({"dp": 1, "tp": 2}, LoraConfig(rank=3)),
}
"""What two ranks divide."""


def divided_model(what: str) -> str:
    return mixture_model(tiny_model("qwen3")) if what == "experts" else tiny_model("qwen3")


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_that_is_not_made_leaves_nothing_behind(ranks: RankPool, backend: str, world_size: int) -> None:
    ranks.run(world_size, refuse_and_discard, backend, tiny_model())


@pytest.mark.parametrize("what", DIVIDED)
def test_an_update_that_one_rank_cannot_make_is_made_by_none(ranks: RankPool, what: str) -> None:
    ranks.run(2, refuse_and_discard, BACKENDS[0], divided_model(what), *DIVIDED[what])


def save_and_load(backend: str, path: str, sizes: dict[str, int] | None = None, lora: LoraConfig | None = None) -> None:
    """A new engine with the state of another one makes the same next update, bit for bit."""
    engine, other = (make_train_engine(backend, setup_of(path, sizes, lora)) for _ in range(2))
    add_policy_gradient(engine, sizes)
    engine.optimizer_step()
    saved = {name: local(value).clone() for name, value in engine.state().items()}
    is_whole = {f"weights.{name}" for name in engine.weight_shapes()} < saved.keys()
    assert is_whole != bool(sizes and "pp" in sizes), "a stage has the state of its own layers"
    for name, value in other.state().items():
        local(value).copy_(saved[name])
    other.state_loaded(engine.policy_version)
    assert other.policy_version == 1
    for trained in (engine, other):
        add_policy_gradient(trained, sizes)
        trained.optimizer_step()
    assert same(weights_of(engine), weights_of(other))


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.thorough), 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_training_continues_from_a_state_as_if_it_had_never_stopped(
    ranks: RankPool, backend: str, world_size: int
) -> None:
    ranks.run(world_size, save_and_load, backend, tiny_model())


@pytest.mark.parametrize("what", DIVIDED)
def test_what_ranks_divide_continues_from_a_state(ranks: RankPool, what: str) -> None:
    ranks.run(2, save_and_load, BACKENDS[0], divided_model(what), *DIVIDED[what])


def describe(backend: str, path: str) -> None:
    """Names, shapes and files are those of `transformers`."""
    engine = make_train_engine(backend, setup_of(path, is_trained=False))
    expected = {name: weight.shape for name, weight in AutoModelForCausalLM.from_pretrained(path).named_parameters()}
    assert list(engine.weight_shapes().items()) == list(expected.items())
    assert {name: weight.shape for name, weight in weights_of(engine).items()} == expected
    assert set(engine.state()) == {f"weights.{name}" for name in expected}, "a frozen model has no optimizer"
    assert engine.vocab_size == AutoConfig.from_pretrained(path).vocab_size
    assert not engine.is_value_model
    with tempfile.TemporaryDirectory() as folder:
        engine.write_description(Path(folder))
        assert AutoConfig.from_pretrained(folder).model_type == AutoConfig.from_pretrained(path).model_type


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_described_in_the_words_of_transformers(ranks: RankPool, backend: str) -> None:
    ranks.run(2, describe, backend, tiny_model())


def bound_passes(backend: str, path: str) -> list[int]:
    """Number of passes for a low bound, and for one that was raised afterwards."""
    engine = make_train_engine(backend, setup_of(path, is_trained=False, micro_batch_tokens=31))
    batch, counts = own_rows(engine), []
    for bound in (31, 4096):
        engine.micro_batch_tokens = bound
        sizes = [len(one.tokens) for one in engine.passes(batch)]
        assert all(size <= max(bound, 31) for size in sizes)
        counts.append(len(sizes))
    return counts


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_make_as_many_passes_as_the_bound_asks_for(ranks: RankPool, backend: str) -> None:
    first, second = ranks.run(2, bound_passes, backend, tiny_model())
    assert first == second
    assert first[0] > first[1] == 1


def predict(backend: str, path: str) -> Numbers:
    """Values of own samples, and the weights after an update."""
    engine = make_value_engine(backend, setup_of(path, is_critic=True))
    assert engine.is_value_model
    batch = own_rows(engine)
    values = zip(batch.ids.tolist(), engine.values(batch).rows(), strict=True)
    numbers = {f"values.{row}": value for row, value in values}
    add_gradients(engine, batch, lambda outputs, _: outputs.square().sum() / 100)
    engine.optimizer_step()
    return numbers | weights_of(engine)


@pytest.mark.parametrize("backend", VALUE_BACKENDS)
def test_values_are_those_of_a_plain_classifier(ranks: RankPool, tmp_path: Path, backend: str) -> None:
    path = write_critic(tmp_path)
    found: Numbers = {}
    for result in ranks.run(2, predict, backend, path):
        found |= result
    model = AutoModelForTokenClassification.from_pretrained(path, attn_implementation="eager")
    samples = random_samples(LENGTHS, siblings=3)
    rows = zip(samples.jagged("prompt_tokens").rows(), samples.jagged("tokens").rows(), strict=True)
    for row, (prompt, response) in enumerate(rows):
        values = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1, 0]
        torch.testing.assert_close(found[f"values.{row}"], values.detach(), atol=1e-5, rtol=1e-4)
    before = dict(model.named_parameters())
    assert not any(torch.equal(found[name], before[name]) for name in ("score.weight", "score.bias"))


def walk(ranks: RankPool, folder: Path, backend: str, workflow: str) -> list[list[dict[str, object]]]:
    """Two steps on two ranks."""
    folder.mkdir()
    changes = {
        "workflow": workflow,
        "training.backend": backend,
        "batch.updates_per_step": 2,
        "reward": {"tests.end_to_end.own_reward:own_reward": 1.0},
        "rollout.max_response_tokens": 8,
        **({"models.critic": tiny_model(num_layers=1)} if workflow == "ppo" else {}),
    }
    recipe = write_recipe(folder, tiny_model(num_layers=1), changes)
    return ranks.run(2, walk_steps, str(recipe), "walk", 2, init_group=False)


@pytest.mark.parametrize("workflow", ["grpo", "ppo"])
def test_a_run_gives_the_same_with_every_back_end(ranks: RankPool, tmp_path: Path, workflow: str) -> None:
    backends = VALUE_BACKENDS if workflow == "ppo" else BACKENDS
    expected, *results = (walk(ranks, tmp_path / str(n), backend, workflow) for n, backend in enumerate(backends))
    for step, result in product(range(2), results):
        ours, theirs = merged(result, step), merged(expected, step)
        assert ours["samples"] == theirs["samples"]
        assert theirs["numbers"]["policy/grad_norm"] > 1e-4, "there is something to learn"  # type: ignore[index]
        for name, value in theirs["numbers"].items():  # type: ignore[attr-defined]
            if name.startswith(("policy/", "critic/", "reward")):
                assert ours["numbers"][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name  # type: ignore[index]
        for name, weights in theirs["weights"].items():  # type: ignore[attr-defined]
            other = ours["weights"][name]  # type: ignore[index]
            assert float((other - weights).norm() / weights.norm().clamp(min=1e-3)) < 1e-5, name


@train_backend(trains=False)
def only_scores(setup: EngineSetup) -> TrainEngine:
    raise AssertionError("a plan imports it, but never calls it")


@train_backend(scores=False)
def only_trains(setup: EngineSetup) -> TrainEngine:
    raise AssertionError("a plan imports it, but never calls it")


@train_backend()
def no_critics(setup: EngineSetup) -> TrainEngine | ValueEngine:
    raise AssertionError("a plan imports it, but never calls it")


def undeclared(setup: EngineSetup) -> TrainEngine:
    raise AssertionError("a plan imports it, but never calls it")


def no_arguments() -> None:
    pass


@pytest.mark.parametrize(
    ("backend", "workflow", "message"),
    [
        ("fdsp", "grpo", "unknown back end 'fdsp' (did you mean 'fsdp'?)"),
        ("a b", "grpo", "must be the name of a back end"),
        ("tests.contracts.nowhere:make", "grpo", "module 'tests.contracts.nowhere' cannot be imported"),
        ("{own}:make", "grpo", "has no function 'make'"),
        ("{own}:no_arguments", "grpo", "must be callable with 1 positional argument"),
        ("{own}:undeclared", "grpo", "must be declared with @leaderless.train_backend"),
        ("{own}:only_scores", "grpo", "cannot train models, as role 'policy' needs"),
        ("{own}:only_trains", "kl", "cannot score tokens, as role 'reference' needs"),
        ("{own}:no_critics", "ppo", "cannot hold value models, as role 'critic' needs"),
    ],
)
def test_a_back_end_that_cannot_do_it_is_refused_by_the_plan(backend: str, workflow: str, message: str) -> None:
    sections: dict[str, object] = {"training": {"backend": backend.format(own=__name__)}}
    if workflow == "kl":
        workflow, sections["algorithm"] = "grpo", {"kl": {"coefficient": 0.1}}
    elif workflow == "ppo":
        sections["algorithm"] = {"advantage": {"type": "gae"}}
    with pytest.raises(Exception, match=re.escape(message)) as caught:
        plan_of(workflow, **sections)
    assert "training" in str(caught.value)


@pytest.mark.parametrize(("setting", "value"), [("keep_whole", "weights"), ("compile", True)])
def test_settings_of_the_own_back_end_are_refused_for_another(setting: str, value: object) -> None:
    other = {"training": {"backend": OWN, setting: value}}
    with pytest.raises(
        RecipeError, match=rf"^training.{setting}: '{value}' has no effect on other back ends than fsdp"
    ):
        plan_of("grpo", **other)
    with pytest.raises(RecipeError, match=rf"^roles.policy.training.{setting}: '{value}' has no effect"):
        plan_of("grpo", roles={"policy": other})


def test_a_role_may_have_a_back_end_of_its_own(tmp_path: Path) -> None:
    reference = {"algorithm": {"kl": {"coefficient": 0.1}}, "models": {"policy": write_model(tmp_path / "model")}}
    own = {"roles": {"reference": {"training": {"backend": f"{__name__}:only_scores"}}}}
    assert plan_of("grpo", **reference, **own).instances
    with pytest.raises(RecipeError, match=r"^roles.reference.training.backend: .*cannot score tokens"):
        plan_of("grpo", **reference, roles={"reference": {"training": {"backend": f"{__name__}:only_trains"}}})


def test_a_replicated_model_needs_the_whole_memory_on_every_rank(tmp_path: Path) -> None:
    sections = {"models": {"policy": write_model(tmp_path / "model")}}
    sharded = plan_of("grpo", 2, **sections).memory
    whole = plan_of("grpo", 2, **sections, training={"backend": OWN}).memory
    assert sharded is not None
    assert whole is not None
    for part in ("policy weights", "policy optimizer"):
        assert whole.cpu.resident[part] == pytest.approx(2 * sharded.cpu.resident[part], abs=8)


@train_backend()
def makes_nothing(setup: EngineSetup) -> TrainEngine:
    return object()  # type: ignore[return-value]


def make_nothing(path: str) -> None:
    with pytest.raises(RecipeError, match=r"made object for role 'policy', which is no TrainEngine: it lacks adapt_to"):
        make_train_engine(f"{__name__}:makes_nothing", setup_of(path))


def test_what_is_no_engine_is_refused_with_what_it_lacks(ranks: RankPool) -> None:
    ranks.run(1, make_nothing, tiny_model())


def test_no_module_outside_of_training_knows_which_back_end_runs() -> None:
    sources = ROOT / "src/leaderless"
    known = {sources / "planner/engines.py", sources / "config/models.py"}
    known |= {sources / "planner/checks" / name for name in ("capabilities.py", "optimizers.py")}
    """The table of built-in back ends, the default of the setting, and refusals that name what would work."""
    own = {sources / folder for folder in ("training", "embodied/training", "cli/convert_config")}
    """Engines, and the settings of other programs."""
    naming = {
        path
        for path in sources.rglob("*.py")
        if not own & {*path.parents}
        and re.search(r"fsdp|training\.sharded\b|fully_shard", path.read_text(encoding="utf-8"), re.IGNORECASE)
    }
    assert naming == known

"""Ranks that have some layers each compute what one rank does."""

from __future__ import annotations

import io
import math
import shutil
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.distributed.test_context_parallel import train
from tests.distributed.test_critic import write_critic
from tests.distributed.test_experts import experts_model
from tests.distributed.test_mesh import OPTIMIZER, setup_of
from tests.distributed.test_tensor_parallel import save_or_load
from tests.distributed.test_training import LENGTHS, Numbers, largest_difference, whole
from tests.tiny import add_gradients, random_samples, tiny_model
from tests.unit.recipes import plan_of, write_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from leaderless.config import RecipeError
from leaderless.distributed.errors import CollectiveError
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.models.parallel.pipeline import check_stages
from leaderless.observability.run_directory import list_checkpoints
from leaderless.planner import Layout, Plan
from leaderless.planner.show.text import print_plan
from leaderless.training.fsdp import FsdpEngine, make_engine
from leaderless.worker.checkpoint.export import export_model

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config, "tied": Qwen3Config}
SIZES = {"vocab_size": 84, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}


def write(folder: Path, family: str, num_layers: int = 3) -> str:
    """The folder of a model whose head is not its embedding, unless it is `tied`."""
    if family == "critic":
        return write_critic(folder)
    if family == "qwen3_moe":
        return experts_model(folder, family)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        sizes = SIZES | {"tie_word_embeddings": family == "tied"}
        model = AutoModelForCausalLM.from_config(FAMILIES[family](**sizes, num_hidden_layers=num_layers))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
    shutil.copytree(tiny_model("qwen3"), folder, dirs_exist_ok=True)  # a tokenizer
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("sizes", "family", "micro_batch_tokens", "changes"),
    [
        ({"dp": 1, "pp": 2}, "qwen2", 31, {}),  # three layers: two and one
        ({"dp": 1, "pp": 2}, "llama", 4096, {}),  # a single micro-batch
        ({"dp": 1, "pp": 3}, "qwen3", 9, {"gradient_checkpointing": True}),  # a stage between others
        ({"dp": 2, "pp": 2}, "qwen3", 31, {}),
        ({"dp": 1, "pp": 2, "tp": 2}, "llama", 31, {}),
        ({"dp": 1, "pp": 2, "cp": 2}, "qwen3", 9, {}),
        ({"dp": 1, "pp": 2}, "qwen3_moe", 31, {}),
        ({"dp": 1, "pp": 2}, "critic", 31, {"is_critic": True}),
        ({"dp": 1, "pp": 3}, "tied", 31, {}),
        ({"dp": 1, "pp": 2, "tp": 2}, "tied", 9, {}),
    ],
    ids=str,
)
def test_stages_score_and_learn_like_one_rank(
    ranks: RankPool,
    tmp_path: Path,
    sizes: dict[str, int],
    family: str,
    micro_batch_tokens: int,
    changes: dict[str, object],
) -> None:
    path = write(tmp_path, family)
    # Those of ranks along tp are no whole weights, and those of words that two stages have are not added up yet.
    changes = {**changes, "has_gradients": "tp" not in sizes and family != "tied"}
    (expected,) = ranks.run(1, train, path, {"dp": 1}, 64, {**changes})
    num_ranks = sizes["dp"] * sizes["pp"] * sizes.get("cp", 1) * sizes.get("tp", 1)
    found = ranks.run(num_ranks, train, path, sizes, micro_batch_tokens, {**changes})
    assert largest_difference(found, expected) < 1e-5


def test_stages_that_compute_in_bfloat16_differ_by_rounding_only(ranks: RankPool, tmp_path: Path) -> None:
    path, half = write(tmp_path, "llama"), {"compute_dtype": "bfloat16"}
    (exact,), (expected,) = (ranks.run(1, train, path, {"dp": 1}, 64, {**changes}) for changes in ({}, half))
    found = merged(ranks.run(2, train, path, {"dp": 1, "pp": 2}, 31, {**half}))

    def error(numbers: Numbers) -> float:
        return max(float((numbers[name] - exact[name]).norm()) for name in exact if name.startswith("scores"))

    assert error(expected) > 1e-4, "it is rounded at all"
    assert error(found) < 2 * error(expected)
    assert float(found["norm"] / exact["norm"]) == pytest.approx(1, abs=0.05)


def merged(results: list[Numbers]) -> Numbers:
    numbers = Numbers()
    for result in results:
        numbers |= result
    return numbers


@pytest.mark.parametrize("family", ["qwen3", "tied"])
def test_a_checkpoint_is_read_with_another_size_and_exported_whole(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    path = write(tmp_path / "model", family)
    (folder := tmp_path / "checkpoints").mkdir()
    [(expected, norm), *_] = ranks.run(4, save_or_load, str(folder), path, {"dp": 2, "pp": 2})
    for sizes in ({"dp": 1, "pp": 3}, {"dp": 1}, {"dp": 1, "tp": 2, "pp": 2}):
        for weights, found in ranks.run(math.prod(sizes.values()), save_or_load, str(folder), path, sizes):
            assert found == pytest.approx(norm, rel=1e-5)
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-5)
    (checkpoint,) = list_checkpoints(folder)
    exported = AutoModelForCausalLM.from_pretrained(export_model(checkpoint, "policy", tmp_path / "exported"))
    assert {name: value.shape for name, value in exported.named_parameters()} == {
        name: value.shape for name, value in expected.items()
    }
    (back := tmp_path / "back").mkdir()
    [(expected, norm)] = ranks.run(1, save_or_load, str(back), path, {"dp": 1})
    for weights, found in ranks.run(2, save_or_load, str(back), path, {"dp": 1, "pp": 2}):
        assert found == pytest.approx(norm, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-5)


def order_of_passes(path: str, fails_at: int | None) -> list[str] | str:
    """The forward and backward passes of this stage's last layer, in their order; or the error, if one stage fails."""
    transport = Transport(torch.device("cpu"), timeout_s=60 if fails_at is None else 2)
    setup = setup_of(transport, Layout(transport.world.ranks, dp=1, pp=3), path)
    engine = make_engine(replace(setup, micro_batch_tokens=9))
    assert isinstance(engine, FsdpEngine)
    passes, layer = list[str](), engine.model.text_model.layers[transport.rank]  # type: ignore[index]

    def forward(*_: object) -> None:
        if len(passes) == fails_at and transport.rank == 1:
            raise OverflowError("the second stage fails")
        passes.append("F")

    layer.register_forward_pre_hook(forward)
    layer.register_full_backward_hook(lambda *_: passes.append("B"))
    try:
        add_gradients(engine, random_samples(LENGTHS[:5]), lambda out, _: out.log_probs.sum())
        engine.optimizer_step()
    except (OverflowError, CollectiveError) as error:
        return str(error)
    return passes


def test_a_stage_is_ahead_by_the_number_of_stages_after_it(ranks: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path, "llama")
    for stage, passes in enumerate(ranks.run(3, order_of_passes, path, None)):
        count, ahead = len(passes) // 2, 2 - stage
        assert count >= 4
        assert "".join(passes) == "F" * ahead + "FB" * (count - ahead) + "B" * ahead


def wait_for_the_last(path: str) -> None:
    """The first stage begins its first backward pass only when the last one has begun its third micro-batch."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    setup = setup_of(transport, Layout(transport.world.ranks, dp=1, pp=3), path)
    engine = make_engine(replace(setup, micro_batch_tokens=9))
    store, begun = transport.store(), list[None]()
    layer = engine.model.text_model.layers[transport.rank]

    def forward(*_: object) -> None:
        begun.append(None)
        if len(begun) == 3 and transport.rank == 2:
            store.set("third", "")

    layer.register_forward_pre_hook(forward)
    if transport.rank == 0:
        layer.register_full_backward_pre_hook(lambda *_: store.wait(["third"], timedelta(seconds=10)))
    add_gradients(engine, random_samples(LENGTHS[:5]), lambda out, _: out.log_probs.sum())
    engine.optimizer_step()


def test_the_last_stage_does_not_wait_for_the_first(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(3, wait_for_the_last, write(tmp_path, "llama"))


Step = tuple[str, str, str, int, int]
"""What a rank does: it asks for a message, or waits for it; its process group, whether it is sent, the other rank, and
its number on this rank."""


def messages_of(path: str, micro_batch_tokens: int) -> tuple[list[Step], list[str]]:
    """The messages of this stage in log-probabilities and an update, in its order; names of the two process groups."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    layout = Layout(transport.world.ranks, dp=1, pp=transport.world.size)
    engine = make_engine(replace(setup_of(transport, layout, path), micro_batch_tokens=micro_batch_tokens))
    assert isinstance(engine, FsdpEngine)
    assert engine.line is not None
    steps, begun, batch, order = list[Step](), list[tuple[object, Step]](), ProcessGroup._batch, ProcessGroup._order

    def name(group: ProcessGroup) -> str:
        return str(group.torch_group.group_name)

    def watched_batch(self: ProcessGroup, sent: Messages, received: Messages, what: str) -> Sequence[dist.Work]:
        works = batch(self, sent, received, what)
        for is_sent, messages in (("sent", sent), ("received", received)):
            for peer, _ in messages:
                begun.append((works, ("asks", name(self), is_sent, peer, len(begun))))
                steps.append(begun[-1][1])
        return works

    def watched_order(self: ProcessGroup, works: Sequence[dist.Work], what: str, device: torch.device) -> None:
        steps.extend(("waits", *step[1:]) for one, step in begun if one is works)
        order(self, works, what, device)

    with patch.object(ProcessGroup, "_batch", watched_batch), patch.object(ProcessGroup, "_order", watched_order):
        samples = random_samples(LENGTHS)
        engine.log_probs(samples)
        add_gradients(engine, samples, lambda out, _: out.log_probs.sum())
        engine.optimizer_step()
    return steps, [name(group) for group in (engine.line.stages.forth, engine.line.stages.back)]


Messages = Sequence[tuple[int, Tensor]]


def waiting_for_ever(programs: Sequence[Sequence[Step]]) -> dict[int, Step]:
    """The step at which each rank stays where an accelerator sends and receives as NCCL does.

    The messages of a process group follow one another on each rank, and one ends on both of its ranks together.
    """
    left, queues, done = [deque(one) for one in programs], defaultdict(deque[Step]), set[tuple[int, int]]()
    while True:
        before = sum(map(len, left)), len(done)
        for rank, program in enumerate(left):
            while program and (program[0][0] == "asks" or (rank, program[0][4]) in done):
                if (step := program.popleft())[0] == "asks":
                    queues[rank, step[1]].append(step)
        for (rank, group), queue in list(queues.items()):
            if queue and queue[0][2] == "sent":
                other = queues[queue[0][3], group]
                if other and other[0][2:4] == ("received", rank):
                    done |= {(queue[0][3], other.popleft()[4]), (rank, queue.popleft()[4])}
        if before == (sum(map(len, left)), len(done)):
            return {rank: program[0] for rank, program in enumerate(left) if program}


@pytest.mark.parametrize(
    ("family", "num_stages", "micro_batch_tokens"), [("tied", 2, 9), ("tied", 3, 9), ("llama", 4, 31)]
)
def test_messages_that_wait_for_their_turn_and_their_other_end_never_wait_for_ever(
    ranks: RankPool, tmp_path: Path, family: str, num_stages: int, micro_batch_tokens: int
) -> None:
    path = write(tmp_path, family, num_layers=4)
    programs, names = zip(*ranks.run(num_stages, messages_of, path, micro_batch_tokens), strict=True)
    assert all(one == names[0] for one in names)
    forth, back = names[0]
    assert {step[1] for program in programs for step in program} == {forth, back}
    assert sum(step[0] == "waits" for step in programs[0]) == sum(step[0] == "asks" for step in programs[0]) > 20
    assert waiting_for_ever(programs) == {}
    in_one_group = [[(kind, "both", *step) for kind, _, *step in program] for program in programs]
    assert waiting_for_ever(in_one_group), "two process groups are needed"


def test_where_a_stage_fails_no_other_waits_for_long(ranks: RankPool, tmp_path: Path) -> None:
    before, failed, after = ranks.run(3, order_of_passes, write(tmp_path, "llama"), 3, timeout_s=2)
    assert failed == "the second stage fails"
    assert "rank 0 waited for gradients of hidden states of another stage with ranks [1, 2]" in before
    assert "rank 2 waited for hidden states of another stage with ranks [0, 1]" in after


def test_stages_that_cannot_be_are_refused(tmp_path: Path) -> None:
    def plan(model: Mapping[str, object], **layout: int) -> Plan:
        return plan_of("grpo", 4, models={"policy": model}, layout={"policy": layout})

    untied = {"path": write_model(tmp_path / "untied", num_hidden_layers=3, tie_word_embeddings=False)}
    with pytest.raises(RecipeError, match=r"layout.policy.pp: pp=4: there are only 3 layers, .* it can be 1 to 3"):
        plan(untied, pp=4)
    console = Console(file=io.StringIO(), width=200)
    print_plan(plan(untied, pp=2, tp=2), console)
    assert "is trained, has 2 stages of 2 and 1 layers" in console.file.getvalue()  # type: ignore[attr-defined]


def test_families_whose_layers_are_elsewhere_are_refused() -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "tie_word_embeddings": False}
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=88, tie_word_embeddings=False)
    with pytest.raises(RecipeError, match="gpt2 cannot be divided by pp: it is not known which stage"):
        check_stages(one := AutoModelForCausalLM.from_config(config), one, 2, "models.policy")
    gemma = GemmaConfig(**small, num_key_value_heads=2, head_dim=8, intermediate_size=48, vocab_size=88)
    model = AutoModelForCausalLM.from_config(gemma, attn_implementation="leaderless")
    check_stages(model, model, 2, "models.policy")
    granite = GraniteConfig(**SIZES, num_hidden_layers=2, embedding_multiplier=2.0)  # multiplies what enters a stage
    model = AutoModelForCausalLM.from_config(granite, attn_implementation="leaderless")
    with pytest.raises(RecipeError, match="granite cannot be divided by pp: stages give other hidden states, by "):
        check_stages(model, model, 2, "models.policy")


def words_of_both_ends(path: str) -> tuple[Tensor, ...]:
    """The embeddings, or the head, of this stage after some updates, and what the optimizer keeps of them."""
    transport = Transport(torch.device("cpu"), timeout_s=60)
    engine = make_engine(setup_of(transport, Layout(transport.world.ranks, dp=1, pp=3), path))
    assert isinstance(engine, FsdpEngine)
    assert engine._optimizer is not None
    assert engine.line is not None

    def update() -> float:
        add_gradients(engine, random_samples(LENGTHS), lambda out, _: out.log_probs.sum())
        return engine.optimizer_step().grad_norm

    norms = [update() for _ in range(3)]
    assert min(norms) > OPTIMIZER.max_grad_norm, "gradients are scaled down"
    if (words := engine.model.shared_words) is not None:
        moments = engine._optimizer.states(words)
        kept = words.detach(), moments["exp_avg"], moments["exp_avg_sq"]
        for one in kept if engine.line.stages.is_last else ():
            one.fill_(9.0)  # a checkpoint has those of the first stage
    engine.state_loaded(3)
    update()
    return () if words is None else tuple(whole(one) for one in kept)


def test_a_head_that_is_the_embedding_is_the_same_on_both_stages_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    path = write(tmp_path, "tied")
    first, between, last = ranks.run(3, words_of_both_ends, path)
    assert between == ()
    assert all(torch.equal(one, other) for one, other in zip(first, last, strict=True))
    before = AutoModelForCausalLM.from_pretrained(path).get_output_embeddings().weight
    assert (first[0] - before).abs().min() > 0


def test_memory_counts_words_that_two_stages_have_on_both(tmp_path: Path) -> None:
    found = []
    for is_tied in (False, True):
        sizes = {"vocab_size": 10_000, "num_hidden_layers": 4, "tie_word_embeddings": is_tied}
        model = {"policy": write_model(tmp_path / str(is_tied), **sizes)}
        memory = plan_of("grpo", 2, models=model, layout={"policy": {"pp": 2}}).memory
        assert memory is not None
        found.append((memory.cpu.resident["policy weights"], memory.cpu.resident["policy optimizer"]))
    assert found[0] == found[1]


def test_memory_counts_the_layers_and_micro_batches_of_a_stage(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 10_000, "num_attention_heads": 8}
    model = {"policy": write_model(tmp_path / "model", **sizes, num_hidden_layers=8, tie_word_embeddings=False)}

    def parts(micro_batch_tokens: int, world_size: int, **layout: int) -> dict[str, dict[str, int]]:
        batch = {"micro_batch_tokens": micro_batch_tokens, "prompts_per_step": 64}
        settings = {"layout": {"policy": layout}, "batch": batch, "rollout": {"max_sequences": 16}}
        memory = plan_of("grpo", world_size, models=model, **settings).memory
        assert memory is not None
        assert memory.cpu.peak == sum(memory.cpu.resident.values()) + sum(memory.cpu.phases["policy trains"].values())
        return {"resident": dict(memory.cpu.resident), **memory.cpu.phases}

    alone, staged = parts(1024, 1), parts(1024, 4, pp=4)
    whole, part = (one["resident"]["policy weights"] for one in (alone, staged))
    words = 10_000 * 512 * 4
    assert part == pytest.approx((whole - 2 * words) / 4 + words, rel=1e-3), "a quarter of the layers, and the words"
    kept = [one["policy trains"]["activations"] for one in (alone, staged)]
    assert kept[1] > 0.95 * kept[0], "the first stage holds as many micro-batches as there are stages"
    few, many = (parts(1 << 20, pp, pp=pp)["policy trains"]["activations"] for pp in (4, 2))
    assert few < 0.6 * many, "there is only one micro-batch to hold"

"""Seconds of models, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.planner.simulate.clusters import equal_rows, network
from tests.unit.recipes import make_recipe

from leaderless.config.judges import JudgeOptions
from leaderless.config.models import ModelConfig
from leaderless.planner import Layout
from leaderless.planner.assign.balance import sequence_cost
from leaderless.planner.memory.attention_kinds import FULL, AttentionKind
from leaderless.planner.memory.decoder_size import LayerSize, ModelSize
from leaderless.planner.memory.layer_parts import IndexerSize, RecurrenceSize
from leaderless.planner.simulate.compute import ModelCost, num_decoding_steps, tokenizing_seconds
from leaderless.planner.simulate.rows import SimulatedRows

MILLION = 10**6
SIZE = ModelSize(
    num_parameters=MILLION,
    num_layer_parameters=MILLION,
    num_layers=2,
    hidden_size=50,
    intermediate_size=100,
    vocab_size=1000,
    num_heads=2,
    num_kv_heads=1,
    head_dim=25,
    has_head_norms=False,
    max_positions=4096,
)
"""A million weights; attention costs 200 operations for each token's square; 100 numbers per token in the cache."""


def model(
    num_ranks=1, dtype="float32", *, tp=1, checkpointing=False, batch=None, rollout=None, keeps="auto", **constants
):
    config = ModelConfig(path="m", compute_dtype=dtype, gradient_checkpointing=checkpointing)
    batch = {"updates_per_step": 1, **(batch or {})}
    recipe = make_recipe(batch=batch, rollout=rollout or {}, training={"keep_whole": keeps})
    ranks = Layout(tuple(range(num_ranks)), num_ranks // tp, tp=tp)
    return ModelCost(SIZE, config, ranks, network(num_ranks, **constants), recipe)


def test_a_pass_takes_two_operations_a_weight_and_token_and_the_square_for_attention():
    flops = model().forward_flops(equal_rows(1, prompt=10, response=90), np.zeros(1, dtype=np.int64))
    assert flops.tolist() == [2 * MILLION * 100 + 2 * 2 * 50 * 100**2]


WINDOW, RECURRENT = AttentionKind(window=8), AttentionKind(is_recurrent=True, has_attention=False)
RECURRENCE = RecurrenceSize(num_convolved=30, num_states=400, num_operations=700)


def size_with(*kinds: AttentionKind, indexer: IndexerSize | None = None) -> ModelSize:
    """A million weights in layers that attend or recur in some ways; with an indexer, all of them choose keys."""
    layers = (LayerSize(0, 0, 100, 0, has_indexer=indexer is not None),) * len(kinds)
    return replace(
        SIZE, num_layers=len(kinds), kinds=kinds, layers=layers, recurrence=RECURRENCE, indexer=indexer, is_plain=False
    )


@pytest.mark.parametrize("length", [1, 7, 8, 9, 100])
def test_a_window_bounds_the_operations_of_attention_and_a_recurrence_takes_the_same_for_each_token(length):
    rows, shards = equal_rows(1, prompt=0, response=length), np.zeros(1, dtype=np.int64)
    cost = replace(model(), size=size_with(FULL, WINDOW, RECURRENT))
    weights = 2 * MILLION * length
    full = 4 * 50 * length**2 / 2
    # Of the first eight tokens each sees half of them on average, and of the others all eight.
    seen = min(length, 8) ** 2 / 2 + 8 * max(0, length - 8)
    assert cost.forward_flops(rows, shards).tolist() == [weights + full + 4 * 50 * seen + 700 * length]


def test_a_shared_prompt_is_read_once_in_layers_of_all_kinds():
    rows = equal_rows(1, siblings=2, prompt=20, response=30)
    cost = replace(model(2), size=size_with(FULL, WINDOW, RECURRENT))
    whole, rest = cost.forward_flops(rows, np.zeros(2, dtype=np.int64)).tolist()
    alone = cost.forward_flops(rows, np.arange(2)).tolist()
    prompt = cost.forward_flops(equal_rows(1, prompt=0, response=20), np.zeros(1, dtype=np.int64))
    assert alone == [whole, whole]
    assert rest == pytest.approx(whole - float(prompt[0]))


def test_an_indexer_scores_all_keys_and_tokens_attend_to_those_that_are_chosen():
    rows, shards = equal_rows(1, prompt=0, response=100), np.zeros(1, dtype=np.int64)
    cost = replace(model(), size=size_with(FULL, FULL, indexer=IndexerSize(3, 5, 8)))
    attended, scored = 8**2 / 2 + 8 * 92, 100**2 / 2
    expected = 2 * MILLION * 100 + 2 * 4 * 50 * attended + 2 * 2 * 15 * scored
    assert cost.forward_flops(rows, shards).tolist() == [expected]


@pytest.mark.parametrize(("prompt", "response"), [(0, 3), (3, 30), (20, 5), (8, 1), (7, 2)])
def test_decoding_reads_the_keys_that_tokens_see_and_moves_states(prompt, response):
    rows, shards = equal_rows(1, prompt=prompt, response=response), np.zeros(1, dtype=np.int64)
    cost = replace(model(), size=size_with(FULL, WINDOW, RECURRENT))
    places = range(prompt + 1, prompt + response + 1)
    keys = sum(places) + sum(min(8, place) for place in places)
    states = response * 2 * (30 * 4 + 400 * 4)
    compute = prompt * (2 * MILLION + 700) / 0.25e12
    memory = (response * 4 * MILLION + keys * 2 * 25 * 4 + states) / 5e9
    assert cost.generation_seconds(rows, shards).tolist() == [pytest.approx(memory + compute)]


def test_engines_that_keep_latents_read_fewer_numbers():
    rows, shards = equal_rows(1, prompt=10, response=3), np.zeros(1, dtype=np.int64)
    size = replace(size_with(FULL, FULL, indexer=IndexerSize(3, 5, 8)), num_latents=6)
    own = replace(model(), size=size)
    saved = own.generation_seconds(rows, shards) - replace(own, keeps_latents=True).generation_seconds(rows, shards)
    assert saved.tolist() == [pytest.approx(3 * 8 * 2 * (50 - 6) * 4 / 5e9)]


@pytest.mark.parametrize(
    "size",
    [
        size_with(FULL, WINDOW, RECURRENT),
        size_with(WINDOW, RECURRENT),
        size_with(FULL, FULL, indexer=IndexerSize(4, 10, 8)),
    ],
    ids=["all kinds", "never quadratic", "an indexer"],
)
def test_rows_are_balanced_by_what_layers_of_several_kinds_take(size):
    size = replace(size, num_parameters=100)  # beside which windows and recurrence count
    lengths = np.array([100, 300, 1000, 10_000])
    rows = SimulatedRows(np.arange(4), np.zeros(4, dtype=np.int64), lengths, are_samples=False)
    flops = replace(model(), size=size).forward_flops(rows, np.zeros(4, dtype=np.int64))
    costs = sequence_cost(lengths, size.quadratic_tokens)
    assert costs / costs[0] == pytest.approx(flops / flops[0], rel=0.05)


@pytest.mark.parametrize("changes", [{}, {"head_dim": 100}, {"num_experts": 8, "num_expert_parameters": 800_000}])
def test_rows_are_balanced_by_what_a_pass_over_them_takes(changes):
    size = replace(SIZE, num_parameters=10 * MILLION, num_chosen_experts=2, **changes)
    lengths = np.array([10, 100, 1000, 10_000, 100_000, 1_000_000])
    rows = SimulatedRows(np.arange(6), np.zeros(6, dtype=np.int64), lengths, are_samples=False)
    flops = replace(model(), size=size).forward_flops(rows, np.zeros(6, dtype=np.int64))
    costs = sequence_cost(lengths, size.quadratic_tokens)
    assert costs == pytest.approx(flops / (2 * size.num_active_parameters), rel=1e-4, abs=1)


def test_a_shard_reads_the_prompt_of_siblings_once():
    rows, alone = equal_rows(1, siblings=3, prompt=10, response=90), 2 * MILLION * 100 + 2 * 2 * 50 * 100**2
    besides = 2 * MILLION * 90 + 2 * 2 * 50 * (100**2 - 10**2)
    assert model(2).forward_flops(rows, np.array([0, 0, 1])).tolist() == [alone, besides, alone]


def test_scoring_waits_for_the_fullest_shard():
    rows = equal_rows(3, response=1000)
    flops = float(model().forward_flops(rows, np.arange(3))[0])
    seconds = model(2).scoring_seconds(rows, np.array([0, 0, 1]))
    assert seconds == pytest.approx(2 * flops / (1e12 * 0.25))


def test_scoring_waits_for_weights_where_there_is_little_to_compute():
    rows = equal_rows(2, response=1)
    seconds = model(2, batch={"micro_batch_tokens": 4096}).scoring_seconds(rows, np.array([0, 1]))
    assert seconds == pytest.approx(4 * MILLION / 2 / 10e9)


def test_ranks_that_divide_layers_divide_the_work_and_wait_for_their_sums():
    rows, shards = equal_rows(1, response=1000), np.zeros(1, dtype=np.int64)
    flops, divided = float(model().forward_flops(rows, shards)[0]), model(2, tp=2)
    one_way = divided.sum_seconds(1000)
    assert one_way == pytest.approx(2 * 2 * 2 * (1000 * 50 * 4 / 2) / 10e9), "two sums a layer, there and back"
    assert divided.scoring_seconds(rows, shards) == pytest.approx(flops / (1e12 * 0.25 * 2) + one_way)
    assert divided.part_seconds() == 0, "each rank has all of its part"
    held = model(4, tp=2)
    assert held.part_seconds() == pytest.approx(
        held.network.gather_seconds(SIZE.part(2).num_parameters * 4, np.array([0, 2]))
    )
    training = divided.training_seconds(rows, shards)
    assert training == pytest.approx(3 * flops / (1e12 * 0.5 * 2) + 2 * one_way)


def test_each_epoch_takes_as_long_as_the_first():
    rows, shards = equal_rows(4, response=1000), np.zeros(4, dtype=np.int64)
    once = model(batch={"updates_per_step": 2}).training_seconds(rows, shards)
    again = model(batch={"updates_per_step": 6, "epochs_per_step": 3}).training_seconds(rows, shards)
    assert again == pytest.approx(3 * once)


def test_training_takes_three_passes_or_four_where_activations_are_computed_again():
    rows, shards = equal_rows(4, response=1000), np.zeros(4, dtype=np.int64)
    flops = float(model().forward_flops(rows, shards).sum())
    assert model().training_seconds(rows, shards) == pytest.approx(3 * flops / 0.5e12)
    assert model(checkpointing=True).training_seconds(rows, shards) == pytest.approx(4 * flops / 0.5e12)


def test_shards_wait_for_each_other_at_every_update():
    rows = equal_rows(4, response=1000)
    shards = np.array([0, 0, 1, 1])
    flops = float(model().forward_flops(rows, shards)[0])
    together = model(2).training_seconds(rows, shards)
    apart = model(2, batch={"updates_per_step": 2}).training_seconds(rows, shards)
    assert together == pytest.approx(3 * 2 * flops / 0.5e12)
    assert apart == pytest.approx(2 * together), "the first update is all on shard 0, the second all on shard 1"


def test_every_pass_of_training_gathers_weights_twice_and_sums_gradients_once():
    rows = equal_rows(2, response=100)
    slow = model(2, "bfloat16", batch={"micro_batch_tokens": 50}, links__host__bandwidth_gb_per_s=0.001)
    one_pass = (2 * 2 * MILLION / 2 + 4 * MILLION / 2) / 1e6
    assert slow.training_seconds(rows, np.array([0, 1])) == pytest.approx(2 * one_pass)


@pytest.mark.parametrize(("keeps", "gathered", "summed"), [("nothing", 8, 4), ("weights", 4, 4), ("all", 4, 2)])
def test_ranks_that_keep_weights_or_gradients_whole_send_them_less_often(keeps, gathered, summed):
    """Two updates, each of two passes."""
    rows, shards = equal_rows(8, response=100), np.arange(8) % 2
    batch = {"micro_batch_tokens": 100, "updates_per_step": 2}
    slow = model(2, "bfloat16", keeps=keeps, batch=batch, links__host__bandwidth_gb_per_s=0.001)
    seconds = (gathered * 2 * MILLION / 2 + summed * 4 * MILLION / 2) / 1e6
    assert slow.training_seconds(rows, shards) == pytest.approx(seconds)
    num_gathers = 4 if keeps == "nothing" else 1
    assert slow.scoring_seconds(rows, shards) == pytest.approx(num_gathers * 2 * MILLION / 2 / 1e6)


@pytest.mark.parametrize(
    ("options", "shown", "times"), [({}, 10 + 90, 1), ({"pairwise": {"opponents": 1}}, 10 + 180, 2)]
)
def test_a_judge_reads_what_it_is_shown_and_writes_as_much_as_it_may(options, shown, times):
    rows = equal_rows(2, siblings=3, prompt=10, response=90)
    judge, shards = model(2, rollout={"max_sequences": 64}), np.array([0, 0, 0, 1, 1, 1])
    judged = judge.judging_seconds(JudgeOptions(role="judge", max_answer_tokens=5, **options), rows, shards)
    asked = equal_rows(6 * times, prompt=shown, response=5)
    assert judged == pytest.approx(judge.generation_seconds(asked, np.repeat([0, 1], 3 * times)))
    assert judged.min() > 0


def test_decoding_reads_the_weights_at_each_step_and_all_that_went_before():
    rows = equal_rows(1, siblings=2, prompt=10, response=3)
    seconds = model().generation_seconds(rows, np.zeros(2, dtype=np.int64))
    cached = 2 * (11 + 12 + 13) * 100 * 4
    prompts = 2 * MILLION * 10 / 0.25e12
    assert seconds.tolist() == [pytest.approx((3 * 4 * MILLION + cached) / 5e9 + prompts)]


def test_decoding_many_sequences_is_bound_by_operations():
    rows = equal_rows(1000, response=3)
    fast = {"device__memory_bandwidth_gb_per_s": 1e6}
    seconds = model(rollout={"max_sequences": 1000}, **fast).generation_seconds(rows, np.zeros(1000, dtype=np.int64))
    assert seconds.tolist() == [pytest.approx(2 * MILLION * 3000 / 0.25e12)]


def test_generation_gathers_sharded_weights_once_on_every_shard():
    rows = equal_rows(2, response=3)
    one = model(1).generation_seconds(rows, np.zeros(2, dtype=np.int64))[0]
    two = model(2, rollout={"max_sequences": 2}).generation_seconds(rows, np.zeros(2, dtype=np.int64))
    assert two[0] == pytest.approx(one + 4 * MILLION / 2 / 10e9)
    assert two[1] == pytest.approx(4 * MILLION / 2 / 10e9), "a shard without rows has its part in the gather"


def test_ranks_of_one_engine_divide_its_time():
    rows, shards = equal_rows(1, siblings=2, prompt=10, response=3), np.zeros(2, dtype=np.int64)
    one = model(1).generation_seconds(rows, shards)[0]
    two = replace(model(2), layout=Layout((0, 1), 1, tp=2)).generation_seconds(rows, shards)
    assert two.tolist() == [pytest.approx(one / 2 + 4 * MILLION / 2 / 10e9)]


@pytest.mark.parametrize(("places", "steps"), [(1, 14), (2, 9), (3, 6), (4, 6), (9, 6)])
def test_a_free_place_takes_the_next_response(places, steps):
    lengths = np.array([3, 3, 6, 2])
    assert num_decoding_steps(lengths, np.zeros(4, dtype=np.int64), 1, places).tolist() == [steps]


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 8))
def test_steps_are_between_the_longest_response_and_all_in_a_row(lengths, places):
    rows = np.array(lengths)
    steps = int(num_decoding_steps(rows, np.zeros(len(rows), dtype=np.int64), 1, places)[0])
    assert max(rows.max(), -(-rows.sum() // places)) <= steps <= rows.sum()
    assert steps >= num_decoding_steps(rows, np.zeros(len(rows), dtype=np.int64), 1, 1000)[0]


def test_every_shard_tokenizes_its_own_prompts():
    rows = SimulatedRows(np.arange(3), np.array([100, 200, 400]), np.zeros(3, dtype=np.int64), are_samples=False)
    assert tokenizing_seconds(rows, 100.0, np.array([0, 0, 1]), 2).tolist() == [3.0, 4.0]


def test_tokens_go_through_the_experts_that_are_chosen_and_are_sent_to_them():
    experts = replace(SIZE, num_experts=8, num_expert_parameters=800_000, num_chosen_experts=2)
    rows, shards = equal_rows(8, response=1000), np.arange(8)
    dense, gathered = model(8), replace(model(8), size=experts)
    fewer = 2 * 600_000 * 1000.0
    assert (dense.forward_flops(rows, shards) - gathered.forward_flops(rows, shards)).tolist() == [fewer] * 8
    divided = replace(gathered, layout=Layout(tuple(range(8)), 8, ep=8))
    assert divided.part_seconds() < gathered.part_seconds()
    sent = 1000 * 2 * 50 * 4
    once = divided.network.exchange_seconds(sent, np.arange(8))
    assert divided.exchange_seconds(1000) == pytest.approx(2 * 2 * once)
    more = divided.scoring_seconds(rows, shards) - gathered.scoring_seconds(rows, shards)
    assert more == pytest.approx(2 * 2 * once)
    in_pairs, links = replace(gathered, layout=Layout(tuple(range(8)), 8, ep=2)), divided.network
    assert in_pairs.exchange_seconds(1000) == pytest.approx(2 * 2 * links.exchange_seconds(sent, np.arange(2)))
    copies = links.gather_seconds(400_000 * 4, np.array([0, 2, 4, 6]))
    assert in_pairs.part_seconds() == pytest.approx(divided.part_seconds() + copies)
    shared = replace(gathered, layout=Layout(tuple(range(8)), 4, tp=2, ep=2))
    assert shared.exchange_seconds(2000) == in_pairs.exchange_seconds(1000), "each of two ranks sends a half"
    staged, peers = replace(gathered, layout=Layout(tuple(range(8)), 4, pp=2, ep=2)), np.array([0, 2])
    assert staged.exchange_seconds(1000) == pytest.approx(2 * links.exchange_seconds(sent, peers)), "one of two layers"


def test_an_exchange_takes_what_leaves_a_host_through_its_interfaces():
    links = network(8)
    within, across = links.cluster.links.host, links.cluster.links.network
    devices, interfaces = links.cluster.host.devices, links.cluster.host.interfaces
    assert links.exchange_seconds(1e9, np.arange(1)) == 0
    one_host = links.exchange_seconds(1e9, np.arange(devices))
    inside = (devices - 1) / devices / within.bandwidth_gb_per_s + (devices - 1) * within.latency_us * 1e-6
    assert one_host == pytest.approx(inside)
    ranks = np.arange(2 * devices)
    outside = 0.5 / (across.bandwidth_gb_per_s * interfaces / devices) + (2 * devices - 1) * across.latency_us * 1e-6
    assert links.exchange_seconds(1e9, ranks) == pytest.approx(outside)

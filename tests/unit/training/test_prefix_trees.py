"""Rows in the tree of what they begin with: compared with sets of prefixes, and with each row computed for itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.engines import ALONE
from tests.tiny import add_gradients, at_temperature, tiny_model, tree_samples
from tests.tiny_families import tiny_config, write_family
from torch import Tensor

from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.data.prompts.images import PromptImage, pack_images
from leaderless.models.attention.shared_prompts import Family, blocks_of, sequences_of
from leaderless.models.causal_lm import TokenOutputs, load_causal_lm
from leaderless.models.routers import UNKNOWN
from leaderless.training import micro_batches
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch, longest_sample, make_micro_batches, token_keys
from leaderless.training.prefix_trees import TreeOrder, family_of, tree_order

TEXTS = st.lists(st.lists(st.integers(1, 2), max_size=12), min_size=1, max_size=12)
"""Texts of two words, which have much in common."""


def prefixes(texts: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(text[:count]) for text in texts for count in range(1, len(text) + 1)}


@given(TEXTS)
def test_each_common_beginning_is_there_once(texts: list[list[int]]) -> None:
    order = tree_order([np.array(text, dtype=np.int64) for text in texts], least=1)
    assert sorted(order.texts) == [*range(len(texts))]
    lengths = [len(texts[number]) for number in order.texts]
    assert sum(lengths) - sum(order.shared) == len(prefixes(texts)), "as many tokens as there are prefixes"
    family = family_of(3, lengths, order.shared)
    assert family.num_tokens == 3 + len(prefixes(texts))


@given(TEXTS, st.integers(1, 5))
@example([[1, 1, 1, 1], [1, 1, 1, 2], [1, 1, 2]], 2)
def test_parts_are_as_long_as_asked_and_make_up_the_texts(texts: list[list[int]], least: int) -> None:
    order = tree_order([np.array(text, dtype=np.int64) for text in texts], least)
    rows = [texts[number] for number in order.texts]
    for (one, other), count in zip(pairwise(rows), order.shared[1:], strict=True):
        assert one[:count] == other[:count]
    family = family_of(1, [len(row) for row in rows], order.shared)
    parents = family.parents or (-1,) * len(family.continuations)
    for number in {parent for parent in parents if parent >= 0}:
        assert family.continuations[number] >= least
        assert parents.count(number) > 1 or any(len(row) == depth_of(family, number) for row in rows), (
            "a part ends where texts part, or one ends"
        )
    tokens = [0] * family.num_tokens
    ends = [1, *accumulate(family.continuations, initial=1)][1:]
    found = set[tuple[int, ...]]()
    for row, places in zip(rows, places_of(family, rows, order), strict=True):
        for place, token in zip(places, row, strict=True):
            assert tokens[place] in {0, token}, "texts that share a place have the same token there"
            tokens[place] = token
    assert ends[-1] == len(tokens)
    for places in sequences_of([family]):
        found.add(tuple(tokens[place] for place in places.tolist()[1:]))
    assert {text for text in found if text} <= {tuple(row) for row in rows}
    assert prefixes([[*text] for text in found]) == prefixes(texts)


def depth_of(family: Family, number: int) -> int:
    """Tokens behind the prompt up to the end of a continuation."""
    parents, depth = family.parents or (-1,) * len(family.continuations), 0
    while number >= 0:
        depth, number = depth + family.continuations[number], parents[number]
    return depth


def places_of(family: Family, rows: list[list[int]], order: TreeOrder) -> list[list[int]]:
    """Places of the tokens of each text, of which each adds to those of the one before it."""
    places, found, end = list[int](), list[list[int]](), family.prompt
    for row, count in zip(rows, order.shared, strict=True):
        places = [*places[:count], *range(end, end + len(row) - count)]
        end += len(row) - count
        found.append(places)
    return found


def test_a_tree_by_hand() -> None:
    texts = [[1, 2, 3, 4], [9], [1, 2, 5], [1, 2, 3], [1, 2, 3, 4, 6, 7], []]
    order = tree_order([np.array(text, dtype=np.int64) for text in texts], least=1)
    assert order == TreeOrder([4, 0, 3, 2, 1, 5], [0, 4, 3, 2, 0, 0]), "what has most tokens comes first"
    family = family_of(5, [6, 4, 3, 3, 1, 0], order.shared)
    assert family == Family(5, (2, 1, 1, 2, 1, 1), (-1, 0, 1, 2, 0, -1))
    assert [(block.before, block.own) for block in blocks_of([family])] == [
        ((), range(5)),
        ((range(5),), range(5, 7)),
        ((range(5), range(5, 7)), range(7, 11)),  # nothing else continues 3, or 4
        ((range(5), range(5, 7)), range(11, 12)),
        ((range(5),), range(12, 13)),
    ]
    assert family.longest == 11


def test_a_tree_of_any_depth_is_no_deep_recursion() -> None:
    texts = [np.ones(count, dtype=np.int64) for count in range(1, 3000)]
    order = tree_order(texts, least=1)
    family = family_of(1, [len(texts[number]) for number in order.texts], order.shared)
    assert (family.num_tokens, family.longest) == (3000, 3000)


@pytest.fixture(autouse=True, scope="module")
def _short_parts() -> Iterator[None]:
    """Trees of few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(micro_batches, "tree_order", lambda texts: tree_order(texts, least=2))
        yield


def rows_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rows share their prompts alone."""
    monkeypatch.setattr(micro_batches, "tree_order", lambda texts: tree_order(texts, least=10**6))


@given(st.integers(0, 1000), st.integers(20, 90))
@settings(max_examples=30)
@example(32, 22)
@example(54, 22)
def test_passes_have_each_sample_whole_and_each_part_once(seed: int, budget: int) -> None:
    batch = tree_samples(seed, prompts=3, rows=5)
    pieces = make_micro_batches(batch, budget, ALONE)
    assert all(len(piece.tokens) <= max(budget, longest_sample(batch)) for piece in pieces)
    prompts, tokens, masks = (batch.jagged(name).to_lists() for name in ("prompt_tokens", "tokens", "response_mask"))
    of_row, seen, begun = {}, dict[int, list[int]](), 0
    for row, mask in enumerate(masks):
        for place, is_sampled in enumerate(mask):
            if is_sampled:
                of_row[begun] = (row, place)
                begun += 1
    for piece in pieces:
        before = context_of(piece)
        for index, target, place in zip(
            piece.response_index.tolist(), piece.targets.tolist(), piece.select.tolist(), strict=True
        ):
            row, at = of_row[index]
            assert target == tokens[row][at]
            assert before[place] == (*prompts[row], *tokens[row][:at]), "it is predicted from what is before it"
            seen.setdefault(row, []).append(at)
    assert {row: [at for at, own in enumerate(mask) if own] for row, mask in enumerate(masks) if any(mask)} == seen
    (whole,) = make_micro_batches(batch, 10**6, ALONE)
    assert len(whole.tokens) <= sum(len(piece.tokens) for piece in pieces)
    for piece in make_micro_batches(batch, budget, ALONE, has_copies=True):
        lengths = [
            one.prompt + sum(len(places) - one.prompt for places in sequences_of([one])) for one in piece.families
        ]
        assert sum(lengths) <= max(budget, longest_sample(batch))


def context_of(piece: MicroBatch) -> list[tuple[int, ...]]:
    """For each token of a pass, the tokens of its sequence up to it."""
    found: list[tuple[int, ...]] = [()] * len(piece.tokens)
    for places in sequences_of(piece.families):
        text = tuple(piece.tokens[places].tolist())
        assert piece.positions[places].tolist() == [*range(len(text))]
        for count, place in enumerate(places.tolist(), start=1):
            assert found[place] in {(), text[:count]}
            found[place] = text[:count]
    return found


Numbers = dict[str, Tensor]


def learned(path: str, batch: Batch, budget: int, **changes: object) -> tuple[Numbers, int]:
    """Scores, the gradient of a weighted sum of them and of entropies, and the tokens of all passes."""
    config = ModelConfig(path=path, **changes)  # type: ignore[arg-type]
    model = load_causal_lm(config, "policy")
    engine = FsdpEngine(model, config, ALONE, torch.device("cpu"), budget, optimizer=OptimizerConfig(), num_updates=1)
    count = int(batch.jagged("response_mask").values.sum())
    gain, batch = torch.linspace(-1, 2, count), at_temperature(batch, torch.linspace(0.5, 1.5, count))
    numbers = {"scores": engine.log_probs(batch).values}

    def loss(outputs: TokenOutputs, micro_batch: MicroBatch) -> Tensor:
        return (gain[micro_batch.response_index] * (outputs.log_probs + 0.3 * outputs.entropies)).sum()

    pieces = engine.micro_batches(batch)
    engine.forward = lambda one, forward=engine.forward: forward(one, "gradient")  # type: ignore[method-assign]
    add_gradients(engine, batch, loss)
    grads = {name: parameter.grad for name, parameter in engine.named_weights() if parameter.grad is not None}
    assert len(grads) > 10 or changes
    return numbers | grads, sum(len(piece.tokens) for piece in pieces)


FAMILIES = ["qwen3", "gpt_oss", "gemma3_text", "llama4_text", "qwen3_5_text", "lfm2", "bamba", "mamba", "kimi_linear"]
"""Full attention, windows, sinks, chunks, linear attention, convolutions and state spaces, some of them together."""


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_score_and_learn_as_rows_apart(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_family(tiny_config(family), tmp_path)
    batch = tree_samples(3, prompts=2, rows=6, longest=9)
    results = [learned(str(tmp_path), batch, budget) for budget in (10**6, 60)]
    rows_apart(monkeypatch)
    expected, num_tokens = learned(str(tmp_path), batch, 10**6)
    for numbers, count in results:
        assert numbers.keys() == expected.keys()
        for name, value in expected.items():
            assert (numbers[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-3), name
        assert count < num_tokens


@given(st.integers(0, 10**6), st.integers(22, 200))
@settings(max_examples=8)
def test_any_tree_scores_and_learns_as_rows_apart(seed: int, budget: int) -> None:
    batch = tree_samples(seed, prompts=2, rows=6)
    if not bool(batch.jagged("response_mask").values.any()):
        return
    found, _ = learned(tiny_model("qwen3"), batch, budget)
    with pytest.MonkeyPatch.context() as patch:
        rows_apart(patch)
        expected, _ = learned(tiny_model("qwen3"), batch, 10**6)
    for name, value in expected.items():
        assert (found[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-3), name


@pytest.mark.parametrize("changes", [{"gradient_checkpointing": True}, {"lora": LoraConfig(rank=2, dropout=0.2)}])
def test_trees_learn_the_same_when_layers_are_recomputed_and_with_dropout(
    tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_family(tiny_config("qwen3"), tmp_path)
    batch = tree_samples(5, prompts=2, rows=6, longest=9)
    results = [learned(str(tmp_path), batch, budget, **changes)[0] for budget in (10**6, 60)]
    rows_apart(monkeypatch)
    expected, _ = learned(str(tmp_path), batch, 10**6, **changes)
    for numbers in results:
        for name, value in expected.items():
            assert (numbers[name] - value).norm() <= 1e-5 * value.norm().clamp(min=1e-3), name


def test_tokens_have_the_keys_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, found = tree_samples(7, prompts=3, rows=5), list[dict[tuple[int, ...], int]]()
    for budget, is_tree in ((10**6, True), (40, True), (10**6, False)):
        if not is_tree:
            rows_apart(monkeypatch)
        keys = dict[tuple[int, ...], int]()
        for piece in make_micro_batches(batch, budget, ALONE):
            for context, key in zip(context_of(piece), token_keys(piece, 1, 2).tolist(), strict=True):
                assert keys.setdefault(context, key) == key
        found.append(keys)
    assert found[0] == found[1] == found[2]
    assert len({*found[0].values()}) == len(found[0]), "tokens with another text before them have another key"


def test_images_are_shared_only_with_the_same_ones() -> None:
    """Three rows have the same tokens; the first two have the same image, too."""
    image, other = (PromptImage(4, 1, 2, data) for data in (b"first", b"other"))
    tokens = [[3, 3, 7, 7, 5, 6, 8]] * 3
    prompts = Batch(torch.tensor([0]), {"prompt_tokens": Jagged.from_lists([[1, 2]], torch.int64, "prompt_tokens")})
    columns = {
        "tokens": Jagged.from_lists(tokens, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists([[0, 0, 0, 0, 1, 1, 1]] * 3, torch.bool, "tokens"),
        "later_images": Jagged.from_lists(
            [list(pack_images([one])) for one in (image, image, other)], torch.uint8, "later_image_bytes"
        ),
    }
    (piece,) = make_micro_batches(Batch(torch.arange(3), columns, prompts, torch.zeros(3).long()), 100, ALONE)
    assert piece.families == [Family(2, (2, 4, 4), (-1, 0, 0))]
    assert piece.images == (image, other._replace(place=8))
    assert piece.select.tolist() == [5, 6, 7, 5, 6, 7, 9, 10, 11]


def test_experts_are_those_of_the_first_row_that_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "tree_order", lambda texts: tree_order(texts, least=1))
    tokens = [[3, 4, 5, 6, 7], [3, 4, 5, 8], [3, 4, 5, 6, 9]]
    prompts = Batch(torch.tensor([0]), {"prompt_tokens": Jagged.from_lists([[1, 2]], torch.int64, "prompt_tokens")})
    experts = [[1, 1, 11, 12, UNKNOWN, UNKNOWN], [], [3, 3, 31, 32, 33, 34]]
    columns = {
        "tokens": Jagged.from_lists(tokens, torch.int64, "tokens"),
        "response_mask": Jagged.from_lists([[True] * len(row) for row in tokens], torch.bool, "tokens"),
        "experts": Jagged.from_lists(experts, torch.uint8, "experts"),
    }
    (piece,) = make_micro_batches(Batch(torch.arange(3), columns, prompts, torch.zeros(3).long()), 100, ALONE)
    assert piece.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert piece.experts is not None
    assert piece.experts.flatten().tolist() == [1, 1, 11, 12, 33, 34]
    assert piece.origin_of(4) == ("what follows the prompt in sample 0", range(2, 6))
    assert replace(piece, origins=None).origin_of(4) == ("no sample", range(6))

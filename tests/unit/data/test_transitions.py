"""The basis of the benchmark of the data coordinator: rows, shares, fingerprints and tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.data_coordinator import Journal, cases, turns
from benchmarks.transitions.case import KINDS, RESPONSES, Case, Kind, Way
from benchmarks.transitions.contents import Contents
from benchmarks.transitions.padded import contents, pad, share_out
from benchmarks.transitions.report import draw, load, save, tables
from benchmarks.transitions.transition import Results, Transition
from hypothesis import given
from hypothesis import strategies as st

from leaderless.data.batch import Batch, Jagged
from leaderless.planner.assign.balance import sequence_cost
from leaderless.planner.entries import QUADRATIC_TOKENS

CASE = Case(kind="balance", hosts=4, prompts=36, max_tokens=64)


def rows_of(case: Case, host: int) -> Batch:
    rows = case.make_rows(host)
    assert rows is not None
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_all_rows_are_held_once(kind: Kind) -> None:
    case = CASE.model_copy(update={"kind": kind})
    ids = [rows_of(case, host).ids for host in case.action.source_layout.ranks]
    assert torch.equal(torch.cat(ids), case.ids)
    counts = [len(part) for part in ids]
    if kind == "balance":
        assert counts == [RESPONSES * n for n in (6, 8, 10, 12)]  # the last host has twice as many rows as the first
    else:
        assert counts == [RESPONSES * 18] * 2
        assert case.make_rows(3) is None


def test_lengths_have_a_heavy_tail_and_a_cap() -> None:
    lengths = Case(kind="pools", hosts=2, prompts=1024, max_tokens=1000).response_lengths
    assert int(lengths.max()) == 1000
    assert int(lengths.min()) >= 1
    assert 230 < int(lengths.median()) < 270
    assert 300 < float(lengths.float().mean()) < 350
    assert 0.02 < float((lengths == 1000).float().mean()) < 0.06


def test_padding_keeps_the_contents() -> None:
    rows = rows_of(CASE, 1)
    padded = pad(CASE, rows)
    assert padded["tokens"].shape == (len(rows), CASE.max_tokens)
    assert contents(padded) == Contents.of_batch(rows)
    assert contents(None) == Contents.of_batch(None) == Contents()


def test_contents_of_parts_sum_to_those_of_the_whole_in_any_order() -> None:
    rows = rows_of(CASE, 0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    parts = [Contents.of_batch(rows.select(index)) for index in order.split(13)]
    assert sum(parts, Contents()) == Contents.of_batch(rows)
    lengths = rows.jagged("prompt_tokens").lengths + rows.jagged("tokens").lengths
    assert Contents.of_batch(rows).cost == int(sequence_cost(lengths.numpy(), QUADRATIC_TOKENS).sum())


@pytest.mark.parametrize("column", ["tokens", "response_mask", "old_log_probs", "rewards", "prompt_tokens"])
def test_a_changed_value_changes_the_fingerprint(column: str) -> None:
    rows = rows_of(CASE, 0)
    changed = rows[column]
    values = changed.values.clone() if isinstance(changed, Jagged) else rows.dense(column).clone()
    values[5] = ~values[5] if values.dtype == torch.bool else values[5] + 1
    other = Jagged(values, changed.lengths, changed.axis) if isinstance(changed, Jagged) else values
    assert Contents.of_batch(rows.with_columns({column: other})).fingerprint != Contents.of_batch(rows).fingerprint


def test_rows_that_swap_their_values_change_the_fingerprint() -> None:
    rows = rows_of(CASE, 0)
    swapped = rows.with_columns(rewards=rows.dense("rewards").flip(0))
    assert Contents.of_batch(swapped).fingerprint != Contents.of_batch(rows).fingerprint


@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 1000))
def test_a_controller_gives_equal_numbers_of_rows_and_about_equal_work(rounds: int, shares: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5000, (rounds * shares,), generator=random)
    members = share_out(torch.ones_like(lengths), lengths, shares)
    assert [len(index) for index in members] == [rounds] * shares
    assert sorted(torch.cat(members).tolist()) == list(range(rounds * shares))
    costs = torch.from_numpy(sequence_cost((lengths + 1).numpy(), QUADRATIC_TOKENS))
    work = [int(costs[index].sum()) for index in members]
    assert max(work) - min(work) <= int(costs.max())


def test_cases_that_a_controller_cannot_share_out_are_refused() -> None:
    with pytest.raises(ValueError, match="hosts=3"):
        Case(kind="pools", hosts=3, prompts=8, max_tokens=8)
    with pytest.raises(ValueError, match="prompts=1"):
        Case(kind="pools", hosts=16, prompts=1, max_tokens=8)


def transition(way: Way, repeat: int, seconds: float, megabytes: int) -> Transition:
    return Transition(
        way=way,
        case=CASE,
        repeat=repeat,
        seconds=seconds,
        sent=(megabytes * 1_000_000, 1),
        received=(0, 1),
        busiest_bytes=megabytes * 1_000_000,
        peak_bytes=20_000_000,
        balance=1.25,
        busy_cores=0.5,
    )


def results() -> Results:
    seconds = {"ours": (1.0, 2.0, 4.0), "gloo": (3.0, 4.0, 20.0)}
    measured = [
        transition(way, repeat, seconds[way][repeat], 5 if way == "ours" else 40)
        for repeat in range(3)
        for way in ("ours", "gloo")
    ]
    return Results(mbit_per_s=500, cores=2, versions={"torch": "2"}, transitions=tuple(measured))


def test_tables_hold_medians_and_ratios_of_the_same_repeat() -> None:
    text = tables(results())
    for value in (4, 36, 64):  # hosts, prompts, longest response
        assert f"| same ranks, uneven rows | {value} | seconds | 2.00 (1.00 to 4.00) | 3.00 (2.00 to 5.00) |" in text
        assert f"| same ranks, uneven rows | {value} | busiest interface, MB | 5.00 | 8.00 |" in text
        assert f"| same ranks, uneven rows | {value} | busiest process, MB | 20 | 1.00 |" in text
    assert "500 Mbit/s" in text
    assert "| controller, gloo | 1.250 | 0.50 |" in text


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert load(tmp_path / "there/results.json") is None
    save(results(), tmp_path / "there/results.json")
    assert load(tmp_path / "there/results.json") == results()


def test_an_interrupted_benchmark_goes_on_if_the_same_is_asked_for(tmp_path: Path) -> None:
    first, second, *_ = results().transitions
    path = tmp_path / "there/measured.jsonl"
    Journal(path, {"repeats": "3"}).add(first)
    again = Journal(path, {"repeats": "3"})
    assert again.has(first.way, first.case, first.repeat)
    assert not again.has(second.way, second.case, second.repeat)
    again.add(second)
    assert Journal(path, {"repeats": "3"}).transitions == [first, second]
    assert not Journal(path, {"repeats": "4"}).transitions
    assert not Journal(path, {"repeats": "3"}).transitions  # started again by the line before
    Journal(path, {"repeats": "3"}).remove()
    assert not path.exists()


def test_ways_take_turns_and_each_is_first_once() -> None:
    order = list(turns([CASE], ("ours", "gloo"), 2))
    assert [(way, repeat) for way, _, repeat in order] == [("ours", 0), ("gloo", 0), ("gloo", 1), ("ours", 1)]


def test_batch_and_context_grow_on_most_hosts_only() -> None:
    planned = cases((2, 8), quick=False)
    sizes = {hosts: [(case.prompts, case.max_tokens) for case in some] for hosts, some in planned.items()}
    assert set(sizes[2]) == {(1024, 1024)}
    assert {prompts for prompts, longest in sizes[8] if longest == 1024} == {256, 512, 1024, 2048}
    assert {longest for prompts, longest in sizes[8] if prompts == 256} == {1024, 2048, 4096, 8192}


def test_a_picture_for_each_axis_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(results(), tmp_path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {f"scaling-{name}.png" for name in ("hosts", "batch", "context")}
    assert max(sizes.values()) < 150_000

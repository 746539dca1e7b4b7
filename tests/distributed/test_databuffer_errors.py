"""What the databuffer refuses, its messages; and that nobody waits forever."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankPool
from tests.distributed.user_stages import Loop, recipe_of, sample, short_workflow, whole_workflow

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.data.buffer.reshard import reshard
from leaderless.distributed.transport import CollectiveError, Round
from leaderless.planner import Reshard

SAMPLE = "node 'sample' (stage 'tests.distributed.user_stages:sample')"
APART: dict[str, Json] = {"sample": {"ranks": "0-1"}, "last": {"ranks": "2-3"}}


def error_of(action: Callable[[], object]) -> str:
    """The type and the message of the error that an action raises."""
    try:
        action()
    except (ValueError, RuntimeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# One rank writes what it must not


def noted(value: object) -> Callable[[Batch], Batch]:
    """Puts a value into an object column."""
    return lambda batch: batch.with_columns(note=tuple([value] * len(batch)))


FAULTS: dict[str, tuple[str, Callable[[Batch], object]]] = {
    "nothing comes back": ("score", lambda _: None),
    "columns alone come back": ("score", lambda batch: dict(batch.columns)),
    "a column is a list": ("sample", lambda batch: batch.with_columns(note=["a"] * len(batch))),
    "a key is a number": ("sample", noted({"a": [{1: 2}]})),
    "a key is nothing": ("sample", noted({None: 2})),
    "a value is a tuple": ("sample", noted([1, (2, 3)])),
    "a value is bytes": ("sample", noted(b"ab")),
    "a value is of numpy": ("sample", noted(np.float64(0.5))),
    "a column is missing": ("score", lambda batch: batch.only(["tokens"])),
    "a row is missing": ("score", lambda batch: batch.select(torch.arange(len(batch) - 1))),
    "a row has another id": ("score", lambda batch: Batch(batch.ids + 1, {"score": batch["score"]})),
    "a row is there twice": ("sample", lambda batch: batch.select(torch.tensor([0, 1, 1, 2]))),
    "samples have no prompts": ("sample", lambda batch: Batch(batch.ids, batch.columns)),
    "samples have strange prompts": (
        "sample",
        lambda batch: Batch(
            batch.ids, batch.columns, Batch(torch.arange(100, 112), batch.prompts.columns), batch.prompt_index
        ),
    ),
    "a filter makes rows up": (
        "positive",
        lambda batch: Batch(batch.ids + 1, batch.columns, batch.prompts, batch.prompt_index),
    ),
    "a filter loses a column": ("positive", lambda batch: batch.only(["tokens", "note", "score", "centred"])),
}


def put_fault(fault: str) -> str:
    """Runs a workflow in which one node fails."""
    name, spoil = FAULTS[fault]
    loop = Loop(recipe_of({}), whole_workflow(), 1)
    stage = loop.stages[name]
    loop.stages[name] = lambda batch, context: spoil(stage(batch, context))
    return error_of(loop.step)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "nothing comes back",
            "node 'score' (stage 'tests.distributed.user_stages:score') returned NoneType, not a Batch: end the stage",
        ),
        ("columns alone come back", "returned dict, not a Batch"),
        ("a column is a list", "column 'note' is list, but must be a tensor, a Jagged or a tuple of values"),
        ("a key is a number", "column 'note' holds key 1 of a dict, which would arrive as something else on another"),
        ("a key is nothing", "column 'note' holds key None of a dict"),
        ("a value is a tuple", "column 'note' holds tuple (2, 3), which would arrive"),
        ("a value is bytes", "column 'note' holds bytes b'ab', which would arrive"),
        ("a value is of numpy", "column 'note' holds float64 "),
        ("a column is missing", "node 'score' (stage 'tests.distributed.user_stages:score') did not write its column"),
        ("a row is missing", "node 'score' must keep its 48 rows, but gave 47 others"),
        ("a row has another id", "node 'score' must keep its 48 rows, but gave 48 others"),
        ("a row is there twice", "node 'sample' put out row 1 twice"),
        ("samples have no prompts", "put out samples that point to no prompts: give Batch its prompts"),
        ("samples have strange prompts", "put out prompt 100, which it was not given"),
        ("a filter makes rows up", "put out row 4, which it was not given"),
        (
            "a filter loses a column",
            "lost column 'rows', which node 'collect' reads: a stage that changes rows hands on",
        ),
    ],
)
def test_a_stage_that_breaks_its_word_is_told_so(ranks: RankPool, fault: str, message: str) -> None:
    (error,) = ranks.run(1, put_fault, fault)
    assert error.startswith("ValueError: ")
    assert message in error


# Ranks that do not agree


def spoil_on_rank_one(kind: str) -> str:
    """Rank 1 of the producers writes something that does not agree with rank 0."""
    layout = {**APART, "sample": {"ranks": "0-1", "tp": 2}} if kind.startswith("replica") else APART
    loop = Loop(recipe_of(layout), short_workflow("use_tokens"), 4, timeout_s=2.5)

    def spoiled(batch: Batch, context: object) -> Batch:
        made = sample(batch, loop.context)
        if dist.get_rank() == 1:
            match kind:
                case "type":
                    tokens = made.jagged("tokens")
                    wrong = type(tokens)(tokens.values.int(), tokens.lengths, tokens.axis)
                    return made.with_columns(tokens=wrong)
                case "same rows":
                    first = sample(Batch(batch.ids - 6, batch.columns), loop.context)
                    return Batch(first.ids, made.columns, made.prompts, made.prompt_index)
                case "replica":
                    return made.select(torch.arange(1, len(made)))
        return made

    loop.stages["sample"] = spoiled
    return error_of(loop.step)


@pytest.mark.parametrize(
    ("kind", "message", "on_rank_one"),
    [
        (
            "type",
            f"{SAMPLE}: rank 1 put out columns of another type than rank 0",
            ": 'tokens' (jagged int32 along tokens) instead of 'tokens' (jagged int64 along tokens)",
        ),
        ("same rows", "edge sample->2-3: row 0 is held by two shards", ""),
        (
            "replica",
            f"{SAMPLE}: ranks 0 and 1 hold one shard, but put out different rows: the stage must",
            "",
        ),
    ],
)
def test_all_ranks_are_told_what_they_do_not_agree_on(
    ranks: RankPool, kind: str, message: str, on_rank_one: str
) -> None:
    # The receiver does not learn what was never sent, and waits until its time limit.
    errors = ranks.run(4, spoil_on_rank_one, kind, timeout_s=2.5)
    for error in errors if kind == "same rows" else errors[:2]:
        assert error.startswith(f"RuntimeError: {message}")
    assert on_rank_one in errors[1]
    assert kind != "type" or errors[0] == f"RuntimeError: {message}"


def ask_for_other_rows() -> str:
    """The target already has rows, but not those of the source."""
    loop = Loop(recipe_of(APART), short_workflow("use_tokens"), 4)
    loop.step(stop_before="last")
    (action,) = (entry for entry in loop.plan.schedule if isinstance(entry, Reshard))
    rank = dist.get_rank()
    held = Batch(torch.tensor([rank])) if rank < 2 else None
    wanted = Batch(torch.tensor([rank - 1])) if rank > 1 else None
    late = replace(action, is_late=True)
    return error_of(lambda: reshard(late, loop.transport.process_group(action.ranks), held, wanted))


def test_rows_that_are_not_there_cannot_be_wanted(ranks: RankPool) -> None:
    for error in ranks.run(4, ask_for_other_rows):
        assert error.startswith(
            "RuntimeError: edge sample->2-3: 2 rows are held, but 2 are wanted, or they are not the"
        )


# Peers that are late or missing


STALL_S = 6.0
"""Longer than a rank waits, and than it then asks who else is waiting."""


def stall(rounds: Iterable[Round], what: str) -> None:
    """Is late, and then stops: every part of an exchange would be late again."""
    time.sleep(STALL_S)
    raise RuntimeError("too late")


def meet_a_bad_peer(how: str) -> tuple[str, float]:
    """Rank 1 of the producers does not do its part; returns each rank's error, and how long it waited."""
    loop = Loop(recipe_of(APART), short_workflow("use_tokens"), 4, timeout_s=2.5)
    if dist.get_rank() == 1:
        if how == "stalls before":
            loop.step(stop_before="sample")
            time.sleep(STALL_S)
            return "", 0.0
        if how == "stalls between":
            loop.transport.process_group((0, 1, 2, 3)).exchange_rounds = stall
            error_of(loop.step)
            return "", 0.0
        loop.step(stop_before="sample")
        dist.destroy_process_group()
        return "", 0.0
    begin = time.monotonic()
    try:
        loop.step()
    except CollectiveError as error:
        return str(error), time.monotonic() - begin
    return "no error", time.monotonic() - begin


@pytest.mark.parametrize("how", ["stalls before", "stalls between", "is gone"])
def test_a_missing_peer_ends_the_wait_with_its_name(ranks: RankPool, how: str) -> None:
    results = ranks.run(4, meet_a_bad_peer, how, timeout_s=2.5)
    for rank, (error, seconds) in enumerate(results):
        if rank != 1:
            others = ", ".join(str(other) for other in range(4) if other != rank)
            assert error.startswith(f"rank {rank} waited for "), error
            if rank == 0 and how != "stalls between":  # ranks that make the same rows meet before these are sent
                assert "what ranks put out of node 'sample' with ranks [1]; nothing is heard of rank 1: " in error
            else:  # on a busy machine others may be late in reporting that they have given up
                assert re.search(
                    rf"edge sample->2-3 with ranks \[{others}\]; nothing is heard of ranks? (0,)?1[:,]", error
                )
            assert seconds < STALL_S


def leave_one_rank_without_rows() -> list[Json]:
    layout: dict[str, Json] = {"sample": {"ranks": "0-1"}, "collect": {"ranks": "2"}}
    loop = Loop(recipe_of(layout, prompts=2), whole_workflow(), 3)
    loop.stages["positive"] = keep_of_rank_zero
    loop.step()
    return [row["id"] for row in loop.context.collected if "centred" in row]


def keep_of_rank_zero(batch: Batch, context: object) -> Batch:
    """Leaves nothing on other ranks, not even the types of columns."""
    if dist.get_rank() == 0:
        return batch
    nothing = batch.select(torch.tensor([], dtype=torch.int64))
    return nothing.with_columns(centred=torch.tensor([], dtype=torch.int64))


def test_a_rank_without_rows_need_not_know_their_types(ranks: RankPool) -> None:
    assert ranks.run(3, leave_one_rank_without_rows)[2] == [0, 1, 2, 3]

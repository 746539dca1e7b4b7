"""What ranks that generate continuously have begun: in checkpoints, in the journal, and after a restart."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import TypedDict, cast

import torch
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.data.transport import ProcessGroup
from leaderless.observability.line_file import LineFile
from leaderless.observability.run_directory import RunDirectory, read_lines
from leaderless.planner.layout import in_proportion, places_of_shard

AHEAD_FILE = "ahead-{}-{}.json"
"""Name of the file of a checkpoint about a rank that generates, by its loop and its shard."""


class Line(TypedDict):
    """What the journal says about a share.

    Attributes:
        iteration: Iteration of the share.
        start: Number of earlier starts of the run.
        trained: Iteration whose weights the engine had when work on the share began.
        steps: Steps that the engine had taken since the start when the share was complete.
        events: Events meanwhile, each with the steps of the engine before it, its kind and its subject; see `Events`.
        groups: Groups of the share, ascending.
        canceled: Groups that were given up, and begun again later.
    """

    iteration: int
    start: int
    trained: int
    steps: int
    events: list[list[int | str]]
    groups: list[int]
    canceled: list[int]


@dataclass(frozen=True)
class Ahead:
    """What a rank has done beyond the last training iteration.

    Attributes:
        iteration: Shares that it has handed over.
        loaded: Iterations whose prompts it has loaded.
        shard: Its place among the ranks that generate.
        portions: Relative shares of the prompts of an iteration of these ranks.
        open: Groups that are in no share yet.
        shares: Groups of the shares that have not been trained, by iteration.
    """

    iteration: int
    loaded: int
    shard: int
    portions: Sequence[int]
    open: Sequence[int]
    shares: Mapping[str, Sequence[int]]

    def to_json(self) -> str:
        """The state as JSON."""
        return json.dumps(asdict(self))

    def owed(self, made: int, loaded: int, prompts_per_step: int) -> list[int]:
        """Groups of this rank's shard that are to be begun again, if all ranks continue at the same place.

        Args:
            made: Shares that all ranks have handed over.
            loaded: Iterations whose prompts some rank has loaded.
            prompts_per_step: Prompts of an iteration, over all ranks.
        """
        lost = [group for iteration, groups in self.shares.items() if int(iteration) > made for group in groups]
        places = places_of_shard(self.shard, self.portions, prompts_per_step)
        unread = [load * prompts_per_step + place for load in range(self.loaded, loaded) for place in places]
        return [*self.open, *lost, *unread]


@dataclass(frozen=True)
class Owed:
    """The prompts that a rank has yet to begin.

    Attributes:
        first: Iteration of the oldest of them.
        until: Last iteration of which some prompts may have been trained.
        groups: Those up to that iteration, of this rank's shard.
        num_left: Number of groups that the rank begins until the end of the run.
        start: Number of earlier starts of the run.
        prompts_per_step: Prompts of an iteration, over all ranks.
    """

    first: int
    until: int
    groups: frozenset[int]
    num_left: int
    start: int
    prompts_per_step: int

    def wants(self, iteration: int, groups: Tensor) -> Tensor:
        """Which of the prompts of an iteration are to be begun, [n] bool; `groups` are their ids [n] int64."""
        if iteration > self.until:
            return torch.ones(len(groups), dtype=torch.bool)
        return torch.tensor([group in self.groups for group in groups.tolist()], dtype=torch.bool)

    def left_from(self, iteration: int) -> list[int]:
        """Those that come with an iteration or a later one, up to `until`."""
        begin = (iteration - 1) * self.prompts_per_step
        return [group for group in self.groups if group >= begin]


def nothing_done(size: int, prompts_per_step: int, steps: int, start: int) -> Owed:
    """What a rank owes at the beginning of a run that gives it `size` prompts of each iteration."""
    return Owed(1, 0, frozenset(), size * steps, start, prompts_per_step)


@dataclass(frozen=True)
class Division:
    """How the ranks of a loop divide the prompts of the iterations of a run.

    Attributes:
        portions: Their parts, in proportion.
        prompts_per_step: Prompts of an iteration.
        steps: Iterations of the whole run.
    """

    portions: Sequence[int]
    prompts_per_step: int
    steps: int

    def places(self, shard: int | None) -> range:
        """The places of a shard among the prompts of an iteration; none without a shard."""
        return range(0) if shard is None else places_of_shard(shard, self.portions, self.prompts_per_step)


def read_ahead(
    checkpoint: Path, loop: str, ranks: ProcessGroup, division: Division, *, start: int, logged: int
) -> tuple[int, Owed]:
    """Find what a rank owes after a checkpoint. All ranks of the loop call it together.

    Groups belong to shards by their places in an iteration, so that the ranks may be more or fewer than before.

    Args:
        checkpoint: Folder of the checkpoint.
        loop: Name of the loop.
        ranks: Its ranks.
        division: Division of the prompts among them.
        start: Number of earlier starts of the run.
        logged: Last iteration that this rank has logged, if it does; what is behind it is made again.

    Returns:
        Number of iterations that all ranks had handed over, and what this rank owes.

    Raises:
        RecipeError: The checkpoint does not say so, or the ranks cannot divide what is owed.
    """
    shard, num_shards = ranks.ranks.index(ranks.rank), ranks.size
    before = _read(checkpoint, loop, 0).portions
    read = [_read(checkpoint, loop, place) for place in range(shard, len(before), num_shards)]
    made, owed, differs = owed_after(read, ranks, shard, division, start=start, logged=logged)
    if differs and num_shards > 1 and not in_proportion(division.portions, before):
        raise RecipeError.at(
            f"channels.{loop}",
            f"{checkpoint} was written by {len(before)} ranks that generate, with groups in another order than "
            f"that of the prompts, which {num_shards} cannot divide as they should: go on with the same, and portions",
        )
    return made, owed


def owed_after(
    known: Sequence[Ahead], ranks: ProcessGroup, shard: int | None, division: Division, *, start: int, logged: int
) -> tuple[int, Owed, bool]:
    """Share out what is to be begun again. All of some ranks call it together.

    Args:
        known: Earlier work of ranks, each known to one of these ranks.
        ranks: These ranks, with all that generate from now on.
        shard: Place of this rank among those that generate; None if it does not generate.
        division: Division of the prompts among the generating ranks.
        start: Number of earlier starts of the run.
        logged: Last iteration that this rank has logged, if it does; what is behind it is made again.

    Returns:
        Number of iterations that all ranks had handed over, what this rank owes, and whether that is more or less than
        what some rank hands over until the end.
    """
    what, prompts, steps = "what ranks that generate have begun", division.prompts_per_step, division.steps
    numbers = torch.tensor([[-one.iteration, one.loaded] for one in known] + [[-logged, 0]]).amax(0)
    made, loaded = (int(number) for number in ranks.max(numbers, what))
    made = -made
    own = torch.tensor([group for one in known for group in one.owed(made, loaded, prompts)])
    owed = torch.cat(ranks.gather(own.to(torch.int64), what)).tolist()
    places = division.places(shard)
    mine = [group for group in owed if group % prompts in places]
    needed, there = len(places) * (steps - made), len(mine) + len(places) * max(0, steps - loaded)
    differs = bool(ranks.max(torch.tensor([abs(needed - there)]), what))
    oldest = min(owed, default=loaded * prompts) // prompts
    return made, Owed(oldest + 1, loaded, frozenset(mine), needed, start, prompts), differs


def _read(checkpoint: Path, loop: str, shard: int) -> Ahead:
    file = checkpoint / AHEAD_FILE.format(loop, shard)
    try:
        return Ahead(**json.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RecipeError.at(
            f"channels.{loop}.mode",
            f"is continuous, but {checkpoint} is of a run that did not generate '{loop}' so: leave the mode as it was, "
            "or pass --fresh to begin anew",
        ) from None


def journal_file(folder: Path, loop: str, shard: int) -> Path:
    """The journal of a rank that generates continuously, in the folder of a run's journals."""
    return folder / f"{loop}-shard-{shard:05d}.jsonl"


def cut_journals(directory: RunDirectory, loop: str, shard: int, num_shards: int, made: int) -> None:
    """Drop what is made again from the journals of a shard, and of those that there are no more, which ranks share."""
    for place in count(shard, num_shards):
        file = journal_file(directory.journal, loop, place)
        if not file.exists() and place > shard:
            return
        LineFile(file, "iteration", directory.may_fail).cut_after(made)


def read_script(folder: Path, loop: str, shard: int, num_shards: int, first: int) -> Iterator[Line]:
    """The lines of the journal of a rank from an iteration on, from a run that is followed.

    Raises:
        RecipeError: There are none, or they are of another number of ranks.
    """
    if not _has_line(journal_file(folder, loop, shard), first) or _has_line(
        journal_file(folder, loop, num_shards), first
    ):
        known = sum(_has_line(file, first) for file in folder.glob(f"{loop}-shard-*.jsonl"))
        found = f"{known} ranks have generated '{loop}' continuously" if known else "there is no journal of such ranks"
        raise RecipeError.at(
            "run.follow",
            f"in {folder} {found} from iteration {first} on, but here {num_shards} do: follow it on as many ranks",
        )
    for line in read_lines(journal_file(folder, loop, shard), "iteration"):
        if int(str(line["iteration"])) >= first:
            yield cast("Line", line)


def _has_line(journal: Path, iteration: int) -> bool:
    """Whether a rank has handed over the share of an iteration."""
    lines = read_lines(journal, "iteration") if journal.exists() else ()
    return any(line["iteration"] == iteration for line in lines)

"""Stages as a user writes them, and a worker's loop without models: the databuffer in a real workflow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from leaderless.base.named_functions import load_function
from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.data.batch import Batch, Jagged, make_sample_ids
from leaderless.data.buffer.databuffer import Databuffer
from leaderless.distributed.transport import Transport
from leaderless.planner import Cluster, Load, Plan, Reshard, RunNode, make_plan
from leaderless.planner.workflow import Workflow, stage

HERE = "tests.distributed.user_stages"


@dataclass
class Context:
    """The context of these stages.

    Attributes:
        collected: Values that `collect` received.
        recipe: Recipe, which names the number of siblings.
    """

    recipe: Recipe
    collected: list[dict[str, Json]] = field(default_factory=list)


@stage(reads=["prompt_tokens"], writes=["tokens", "note", "unread"], rows="expand")
def sample(batch: Batch, context: Context) -> Batch:
    """Answers whose length differs from sample to sample, but not with the layout."""
    siblings = context.recipe.batch.responses_per_prompt
    index = torch.arange(len(batch)).repeat_interleave(siblings)
    ids = make_sample_ids(batch.ids[index], torch.arange(siblings).repeat(len(batch)))
    answers = [[row % 17 + step for step in range(row % 5)] for row in ids.tolist()]
    tokens = Jagged.from_lists(answers, torch.int64, "tokens")
    notes = tuple(f"answer {row}" for row in ids.tolist())
    return Batch(ids, {"tokens": tokens, "note": notes, "unread": torch.zeros(len(ids))}, batch, index)


@stage(reads=["tokens", "prompt_tokens"], writes=["score"])
def score(batch: Batch, context: Context) -> Batch:
    """The sum of the answer and of its prompt, in whole numbers, so that the order of addition does not matter."""
    answers, prompts = batch.jagged("tokens").rows(), batch.jagged("prompt_tokens").rows()
    sums = [float(answer.sum() + prompt.sum()) for answer, prompt in zip(answers, prompts, strict=True)]
    return batch.with_columns(score=torch.tensor(sums))


@stage(reads=["score"], writes=["score"])
def double(batch: Batch, context: Context) -> Batch:
    """Another version of the same column."""
    return batch.with_columns(score=2 * batch.dense("score"))


@stage(reads=["score"], writes=["centred"], needs_whole_groups=True)
def center(batch: Batch, context: Context) -> Batch:
    """The score minus the mean of its group, times the size of the group."""
    groups, index = torch.unique(batch.group_ids, return_inverse=True)
    sums = torch.zeros(len(groups)).index_add_(0, index, batch.dense("score"))
    return batch.with_columns(centred=context.recipe.batch.responses_per_prompt * batch.dense("score") - sums[index])


@stage(reads=["centred"], rows="filter")
def positive(batch: Batch, context: Context) -> Batch:
    """The better half, which may be empty on some ranks."""
    return batch.select(batch.dense("centred") > 0)


@stage(reads=["rows", "tokens", "note", "score", "centred"], has_effect=True)
def collect(batch: Batch, context: Context) -> Batch:
    """Collect what has arrived, row by row."""
    for place, row in enumerate(batch.ids.tolist()):
        context.collected.append(
            {
                "id": row,
                "group": int(batch.group_ids[place]),
                "rows": batch.objects("rows")[place],
                "tokens": batch.jagged("tokens").to_lists()[place],
                "note": batch.objects("note")[place],
                "score": float(batch.dense("score")[place]),
                "centred": float(batch.dense("centred")[place]),
            }
        )
    return batch


@stage(reads=["score"], has_effect=True)
def look(batch: Batch, context: Context) -> Batch:
    """Read the first version of the score."""
    context.collected.extend(
        {"id": row, "first score": value}
        for row, value in zip(batch.ids.tolist(), batch.dense("score").tolist(), strict=True)
    )
    return batch


@stage(reads=["prompt_tokens", "rows"], has_effect=True)
def use_prompts(batch: Batch, context: Context) -> Batch:
    """Read only prompts."""
    return batch


@stage(reads=["tokens"], has_effect=True)
def use_tokens(batch: Batch, context: Context) -> Batch:
    """Read only answers."""
    return batch


@stage(reads=["note"], has_effect=True)
def use_notes(batch: Batch, context: Context) -> Batch:
    """Read only texts."""
    return batch


def recipe_of(
    layout: Mapping[str, Json], prompts: int = 12, responses: int = 4, train: Mapping[str, Json] | None = None
) -> Recipe:
    """A recipe for the nodes of these stages; `layout` and `train`, the data, as in YAML."""
    return Recipe.model_validate(
        {
            "name": "stages",
            "workflow": "stages",
            "models": {},
            "steps": 1,
            "data": {"train": train or {"path": "none.jsonl"}},
            "batch": {"prompts_per_step": prompts, "responses_per_prompt": responses},
            "layout": layout,
        }
    )


def whole_workflow() -> Workflow:
    """A fork, a join, two versions of a column, a filter."""
    return (
        Workflow("whole")
        .node("sample", run=f"{HERE}:sample")
        .node("score", run=f"{HERE}:score", after="sample")
        .node("look", run=f"{HERE}:look", after="score")
        .node("double", run=f"{HERE}:double", after="score")
        .node("center", run=f"{HERE}:center", after="double")
        .node("positive", run=f"{HERE}:positive", after="center")
        .node("collect", run=f"{HERE}:collect", after="positive")
    )


def short_workflow(last: str) -> Workflow:
    """Answers, and one node that uses them."""
    return Workflow("short").node("sample", run=f"{HERE}:sample").node("last", run=f"{HERE}:{last}", after="sample")


def prompts_of(first: int, last: int) -> Batch:
    """Prompts at some positions."""
    tokens = [[place, *range(place % 3)] for place in range(first, last)]
    columns = {
        "prompt_tokens": Jagged.from_lists(tokens, torch.int64, "prompt_tokens"),
        "rows": tuple({"question": f"{place} + 1?", "tags": [None, "数"]} for place in range(first, last)),
    }
    return Batch(torch.arange(first, last), columns)


class Loop:
    """A rank's execution of its chain.

    Attributes:
        read: Function that gives the prompts at some positions.
    """

    read: Callable[[int, int], Batch] = staticmethod(prompts_of)

    def __init__(self, recipe: Recipe, workflow: Workflow, world_size: int, timeout_s: float = 20) -> None:
        self.recipe = recipe
        self.plan: Plan = make_plan(recipe, workflow, Cluster(world_size))
        self.transport = Transport(torch.device("cpu"), timeout_s)
        for action in self.plan.schedule:
            self.transport.add_process_group(self.plan.ranks_of(action))
        self.buffer = Databuffer(self.plan, self.transport)
        self.context = Context(recipe)
        self.stages: dict[str, Callable[..., Batch]] = {
            node.name: load_function(node.node.run, "", 2) for node in self.plan.nodes
        }

    def step(self, stop_before: str | None = None) -> None:
        """Execute the chain, to its end or up to a node."""
        for action in self.plan.chain(self.transport.rank):
            match action:
                case Load(layout, _):
                    shard, total = layout.shard_of(self.transport.rank), self.recipe.batch.prompts_per_step
                    self.buffer.load(action, self.read(total * shard // layout.dp, total * (shard + 1) // layout.dp))
                case RunNode(name):
                    if name == stop_before:
                        return
                    self.buffer.put(name, self.stages[name](self.buffer.get(name), self.context))
                case Reshard():
                    self.buffer.reshard(action)
            self.buffer.release(action)

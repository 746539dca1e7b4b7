"""The judges of a rank that are models of the plan: what asks them, here or on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from leaderless.config import Json, Recipe
from leaderless.data.transport import ProcessGroup, Transport
from leaderless.planner import Layout, Plan, PlannedNode, RoleInstance
from leaderless.planner.judges import judge_of, longest_question, shares_ranks
from leaderless.planner.layout import all_ranks
from leaderless.rewards.judges.asking import Asker, Question, Reply
from leaderless.rewards.judges.judge import verdict_reader
from leaderless.rewards.judges.prompts import Message
from leaderless.rewards.pool import RewardPool
from leaderless.rollout.serving import Colocated
from leaderless.stages.context import Grader, ModelRole
from leaderless.stages.judging import EngineAsker, Terms, key_of_question
from leaderless.worker.roles import Roles


class Judging:
    """Grades responses, and has those judges asked that are models of the plan.

    Attributes:
        transport: Connection to the other ranks.
        roles: Models of this rank.
    """

    def __init__(self, recipe: Recipe, plan: Plan, transport: Transport, roles: Roles, pool: RewardPool) -> None:
        """Ask nothing yet."""
        self._recipe, self._plan, self._pool = recipe, plan, pool
        self.transport, self.roles = transport, roles
        self._askers: dict[tuple[str, Layout], EngineAsker] = {}

    def under(self, plan: Plan) -> Judging:
        """The same under another plan, which `roles` have adopted."""
        return Judging(self._recipe, plan, self.transport, self.roles, self._pool)

    def grader(self, node: PlannedNode) -> Grader:
        """What grades the rows of a node; all of its ranks call it together if they have judges."""
        askers: dict[str, Asker] = {name: self._asker(name, role, node.layout) for name, role in node.node.judges}
        return partial(self._pool.grade, askers=askers)

    def grader_of_evaluation(self, answers: RoleInstance) -> Grader:
        """What grades responses of a model to held-out prompts; ranks without it help with `helper`."""
        askers = {name: self._asker_for(answers, name, role) for name, role in self._recipe.reward.roles().items()}
        return partial(self._pool.grade, askers=askers)

    def helper(self, answers: RoleInstance) -> JudgeHelper | None:
        """The part in evaluations of a rank without the model that answers; None if it judges nothing there."""
        roles = self._recipe.reward.roles()
        mine = [
            self._asker_for(answers, name, role)
            for name, role in roles.items()
            if (judge := judge_of(self._plan.instances, role)) and self.transport.rank in judge.layout
        ]
        return JudgeHelper(mine) if mine else None

    def _asker(self, name: str, role: str, layout: Layout) -> EngineAsker:
        if (name, layout) not in self._askers:
            options, config = self._recipe.reward.judges()[name], self._recipe.models[role]
            group, shard = self.transport.process_group, layout.shard(self.transport.rank)
            model = self.roles.of(role, layout)
            assert isinstance(model, ModelRole), "a judge is a language model"
            if isinstance(model.serving, Colocated):
                model.serving.is_released = shares_ranks(self._plan.instances, role, layout)
            self._askers[name, layout] = EngineAsker(
                Terms(options, config, longest_question(self._recipe, options), self._recipe.seed),
                model,
                self.roles.tokenizers[role],
                self._pool.kept_answers,
                group(layout.ranks),
                group(shard) if len(shard) > 1 else ProcessGroup(shard, shard[0]),
            )
        return self._askers[name, layout]

    def _asker_for(self, answers: RoleInstance, name: str, role: str) -> Asker:
        """What asks about responses of a model, on its ranks and those of the judge."""
        judge = judge_of(self._plan.instances, role)
        assert judge is not None, "a plan that evaluates has all judges of its rewards"
        layout = judge.serving_layout
        is_here = self.transport.rank in layout
        if layout.holds_rows_like(answers.serving_layout):
            return self._asker(name, role, layout)
        options, rank = self._recipe.reward.judges()[name], self.transport.rank
        return AskerOfOthers(
            self.transport.process_group(all_ranks(answers.layout, judge.layout)),
            self._asker(name, role, layout) if is_here else None,
            layout.shard_of(rank) if is_here else 0,
            layout.dp,
            verdict_reader(options, f"reward.{name}"),
        )


class AskerOfOthers:
    """Asks a judge that may be on other ranks. All ranks that ask or judge call it together. See `Asker`.

    Who answers a question follows from the question, so that equal ones are asked once, whoever has them.
    """

    def __init__(
        self,
        ranks: ProcessGroup,
        judge: EngineAsker | None,
        shard: int,
        num_shards: int,
        read: Callable[[str], object],
    ) -> None:
        """Ask nothing yet.

        Args:
            ranks: Ranks that ask or judge.
            judge: Asker of the judge's engine, on its ranks; None elsewhere.
            shard: Number of this rank's engine.
            num_shards: Number of engines.
            read: Function that finds the verdict in what the judge says.
        """
        self._ranks, self._judge, self._shard, self._num_shards = ranks, judge, shard, num_shards
        self._read = read

    def ask(self, questions: Sequence[Question], on_news: Callable[[], None]) -> list[Reply]:
        """See `Asker`."""
        keys = [key_of_question(question.messages) for question in questions]
        mine: dict[str, Json] = {
            key: [dict(message) for message in question.messages] for key, question in zip(keys, questions, strict=True)
        }
        asked = self._gathered(mine, "questions to a judge")
        answered: dict[str, Json] = {}
        if self._judge is not None:
            here = sorted(key for key in asked if int(key, 16) % self._num_shards == self._shard)
            wanted = [Question(_messages(asked[key]), self._read) for key in here]
            answered = {key: asdict(reply) for key, reply in zip(here, self._judge.ask(wanted, on_news), strict=True)}
        known = self._gathered(answered, "answers of a judge")
        return [_received(known[key]) for key in keys]

    def _gathered(self, mine: Mapping[str, Json], what: str) -> dict[str, Json]:
        """What all ranks have."""
        text = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
        found: dict[str, Json] = {}
        for part in self._ranks.gather(text, what):
            found |= json.loads(bytes(part.numpy()))
        return found


def _messages(value: Json) -> tuple[Message, ...]:
    assert isinstance(value, Sequence), "as they were sent"
    return tuple({name: str(text) for name, text in one.items()} for one in value if isinstance(one, Mapping))


def _received(value: Json) -> Reply:
    """A reply as it was sent. Its verdict was read where the question was answered, and is not read again."""
    assert isinstance(value, dict), "as it was sent"
    return Reply(**value)


@dataclass(frozen=True)
class JudgeHelper:
    """The part in evaluations of ranks that do not answer, but judge what others have answered."""

    askers: Sequence[Asker]

    def run(self, progress: Callable[[float], None], *_: object) -> dict[str, float]:
        """Judge. All ranks that answer or judge call it together; see `Evaluator.run`.

        Args:
            progress: Function that receives the finished fraction, here as a sign of life.

        Returns:
            Nothing: those that answer have the scores.
        """
        for asker in self.askers:
            asker.ask([], partial(progress, 0.0))
        return {}

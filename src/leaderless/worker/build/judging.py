"""The judges of a rank that are models of the plan: what asks them, here or on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.data.buffer.block_exchange import exchange_unannounced
from leaderless.distributed.transport import ProcessGroup, Transport
from leaderless.planner import Layout, Plan, PlannedNode, RoleInstance
from leaderless.planner.graph.judges import judge_of, longest_question, shares_ranks
from leaderless.planner.layout import all_ranks
from leaderless.rewards.judges.asking import Asker, JudgeQuestion, JudgeReply
from leaderless.rewards.judges.judge import verdict_reader
from leaderless.rewards.judges.verdicts import Message
from leaderless.rewards.pool import RewardPool
from leaderless.rollout.weight_sources import Colocated
from leaderless.stages.context import Grader, ModelRole
from leaderless.stages.judging import EngineAsker, Terms, key_of_question
from leaderless.worker.build.roles import Roles


class Judging:
    """Grades responses, and has those judges asked that are models of the plan.

    Attributes:
        transport: Connection to the other ranks.
        roles: Models of this rank.
    """

    def __init__(self, recipe: Recipe, plan: Plan, transport: Transport, roles: Roles, pool: RewardPool) -> None:
        self._recipe, self._plan, self._pool = recipe, plan, pool
        self.transport, self.roles = transport, roles
        self._askers: dict[tuple[str, Layout], EngineAsker] = {}

    def under(self, plan: Plan) -> Judging:
        """The same under another plan, which `roles` have adopted."""
        return Judging(self._recipe, plan, self.transport, self.roles, self._pool)

    def grader(self, node: PlannedNode) -> Grader:
        """Grader of the rows of a node; all of its ranks call it together if they have judges."""
        askers: dict[str, Asker] = {name: self._asker(name, role, node.layout) for name, role in node.node.judges}
        return partial(self._pool.grade, askers=askers)

    def grader_of_evaluation(self, answers: RoleInstance) -> Grader:
        """Grader of responses of a model to held-out prompts; ranks without it help with `helper`."""
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
        """Asker about responses of a model, on its ranks and the judge's."""
        judge = judge_of(self._plan.instances, role)
        assert judge is not None, "a plan that evaluates has all judges of its rewards"
        layout = judge.serving_layout
        is_here = self.transport.rank in layout
        if layout.holds_rows_like(answers.serving_layout):
            return self._asker(name, role, layout)
        return AskerOfOthers(
            self.transport.process_group(all_ranks(answers.layout, judge.layout)),
            layout.ranks,
            self._asker(name, role, layout) if is_here else None,
            verdict_reader(self._recipe.reward.judges()[name], f"reward.{name}"),
        )


class AskerOfOthers:
    """Asks a judge that may be on other ranks. All ranks that ask or judge call it together. See `Asker`.

    Which rank is sent a question follows from the question, so that equal ones meet there and are asked once, whoever
    has them. It sends the answer straight back. No rank knows the questions of all.
    """

    def __init__(
        self,
        ranks: ProcessGroup,
        judging: Sequence[int],
        judge: EngineAsker | None,
        read: Callable[[str], object],
    ) -> None:
        """Ask nothing yet.

        Args:
            ranks: Ranks that ask or judge.
            judging: Ranks of the judge, as numbered in the whole run.
            judge: Asker of the judge's engine, on its ranks; None elsewhere.
            read: Function that finds the verdict in what the judge says.
        """
        self._ranks, self._judging, self._judge, self._read = ranks, judging, judge, read

    def ask(self, questions: Sequence[JudgeQuestion], on_news: Callable[[], None]) -> list[JudgeReply]:
        """Send each question once to the rank of the judge that owns it."""
        keys = [key_of_question(question.messages) for question in questions]
        mine = {key: question.messages for key, question in zip(keys, questions, strict=True)}
        sent: dict[int, dict[str, Json]] = {}
        for key, messages in mine.items():
            sent.setdefault(self._home(key), {})[key] = [dict(message) for message in messages]
        parcels = {rank: _packed(some) for rank, some in sent.items()}
        arrived = exchange_unannounced(parcels, self._ranks, "questions to a judge")
        asked = {rank: _unpacked(parcel) for rank, parcel in arrived.items()}
        answered = self._answered([*asked.values()], on_news)
        replies = {rank: _packed({key: answered[key] for key in some}) for rank, some in asked.items()}
        return self._returned(replies, [*sent], keys)

    def _home(self, key: str) -> int:
        """The rank that is sent a question."""
        return self._judging[int(key, 16) % len(self._judging)]

    def _answered(self, parts: Sequence[Mapping[str, Json]], on_news: Callable[[], None]) -> dict[str, Json]:
        """The replies to what this rank was sent, and to what others were that make one engine with it."""
        if self._judge is None:
            return {}
        here = {key: messages for part in parts for key, messages in part.items()}
        parcels = self._judge.shard.gather(_packed(here), "questions to an engine of a judge")
        asked = {key: messages for parcel in parcels for key, messages in _unpacked(parcel).items()}
        order = sorted(asked)  # ranks of one engine ask it the same
        replies = self._judge.ask([JudgeQuestion(_messages(asked[key]), self._read) for key in order], on_news)
        return {key: asdict(reply) for key, reply in zip(order, replies, strict=True)}

    def _returned(self, replies: dict[int, Tensor], homes: Sequence[int], keys: Sequence[str]) -> list[JudgeReply]:
        """Send replies to those that have asked; returns those to this rank's questions."""
        own, group = self._ranks.rank, replace(self._ranks, payload_device=torch.device("cpu"))
        here = {own: replies.pop(own)} if own in replies else {}
        arrived = group.exchange(replies, sorted({*homes} - {own}), "answers of a judge")
        known: dict[str, Json] = {}
        for parcel in {**arrived, **here}.values():
            known |= _unpacked(parcel)
        return [_received(known[key]) for key in keys]


def _packed(values: Mapping[str, Json]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def _unpacked(parcel: Tensor) -> dict[str, Json]:
    values = json.loads(bytes(parcel.numpy()))
    assert isinstance(values, dict), "as it was sent"
    return values


def _messages(value: Json) -> tuple[Message, ...]:
    assert isinstance(value, Sequence), "as they were sent"
    return tuple({name: str(text) for name, text in one.items()} for one in value if isinstance(one, Mapping))


def _received(value: Json) -> JudgeReply:
    """A reply as it was sent. Its verdict was read where the question was answered, and is not read again."""
    assert isinstance(value, dict), "as it was sent"
    return JudgeReply(**value)


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

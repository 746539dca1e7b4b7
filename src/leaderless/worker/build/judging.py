"""The judges of a rank that are models of the plan: what asks them, here or on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, cast

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
    """Grades responses, and has those judges asked that are models of the plan."""

    def __init__(self, recipe: Recipe, plan: Plan, transport: Transport, roles: Roles, pool: RewardPool) -> None:
        self._recipe, self._plan, self._pool = recipe, plan, pool
        self.transport, self.roles = transport, roles
        self._askers: dict[tuple[str, Layout], EngineAsker] = {}

    def grader(self, node: PlannedNode) -> Grader:
        """Grader of the rows of a node; all of its ranks call it together if they have judges."""
        askers: dict[str, Asker] = {name: self._asker(name, role, node.layout) for name, role in node.node.judges}
        return partial(self._pool.grade, askers=askers)

    def grader_of_evaluation(self, answers: RoleInstance) -> Grader:
        """Grader of responses of a model to held-out prompts; ranks without it have `askers_of_judge`."""
        askers = {name: self._asker_for(answers, name, role) for name, role in self._recipe.reward.roles().items()}
        return partial(self._pool.grade, askers=askers)

    def askers_of_judge(self, answers: RoleInstance) -> list[Asker]:
        """What a rank without the model that answers has to ask in evaluations: its judges of what others answer."""
        return [
            self._asker_for(answers, name, role)
            for name, role in self._recipe.reward.roles().items()
            if (judge := judge_of(self._plan.instances, role)) and self.transport.rank in judge.layout
        ]

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

    Args:
        ranks: Ranks that ask or judge.
        judging: Ranks of the judge, as numbered in the whole run.
        judge: Asker of the judge's engine, on its ranks; None elsewhere.
        read: Function that finds the verdict in what the judge says.
    """

    def __init__(
        self, ranks: ProcessGroup, judging: Sequence[int], judge: EngineAsker | None, read: Callable[[str], object]
    ) -> None:
        self._ranks, self._judging, self._judge, self._read = ranks, judging, judge, read

    def ask(self, questions: Sequence[JudgeQuestion], on_news: Callable[[str], None]) -> list[JudgeReply]:
        """Send each question once to the rank of the judge that owns it."""
        keys = [key_of_question(question.messages) for question in questions]
        sent: dict[int, dict[str, Json]] = {}
        for key, question in zip(keys, questions, strict=True):
            home = self._judging[int(key, 16) % len(self._judging)]
            sent.setdefault(home, {})[key] = [dict(message) for message in question.messages]
        parcels = {rank: _packed(some) for rank, some in sent.items()}
        arrived = exchange_unannounced(parcels, self._ranks, "questions to a judge")
        asked = {rank: _unpacked(parcel) for rank, parcel in arrived.items()}
        answered = self._answered([*asked.values()], on_news)
        replies = {rank: _packed({key: answered[key] for key in some}) for rank, some in asked.items()}
        own, group = self._ranks.rank, replace(self._ranks, payload_device=torch.device("cpu"))
        here = {own: replies.pop(own)} if own in replies else {}
        returned = group.exchange(replies, sorted({*sent} - {own}), "answers of a judge")
        known = {
            key: reply for parcel in (*returned.values(), *here.values()) for key, reply in _unpacked(parcel).items()
        }
        # Verdicts were read where the questions were answered, and are not read again.
        return [JudgeReply(**cast("dict[str, Any]", known[key])) for key in keys]

    def _answered(self, parts: Sequence[Mapping[str, Json]], on_news: Callable[[str], None]) -> dict[str, Json]:
        """The replies to what this rank was sent, and to what others were that make one engine with it."""
        if self._judge is None:
            return {}
        here = {key: messages for part in parts for key, messages in part.items()}
        parcels = self._judge.shard.gather(_packed(here), "questions to an engine of a judge")
        asked = {key: messages for parcel in parcels for key, messages in _unpacked(parcel).items()}
        order = sorted(asked)  # ranks of one engine ask it the same
        questions = [JudgeQuestion(tuple(cast("list[Message]", asked[key])), self._read) for key in order]
        replies = self._judge.ask(questions, on_news)
        return {key: asdict(reply) for key, reply in zip(order, replies, strict=True)}


def _packed(values: Mapping[str, Json]) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8)


def _unpacked(parcel: Tensor) -> dict[str, Json]:
    values: dict[str, Json] = json.loads(bytes(parcel.numpy()))
    return values

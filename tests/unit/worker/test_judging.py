"""Judges that are models of the plan: what their engines are asked, and what comes of it."""

from __future__ import annotations

import json
import re
import string
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.end_to_end.own_reward import points_of
from tests.tiny import judge_model
from tests.unit.recipes import make_recipe, plan_of
from tests.unit.serving.api.engines import ScriptedEngine, ScriptedServing
from torch import Tensor

from leaderless.config.judges import JudgeOptions
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import ProcessGroup, Round
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tiny import write_tiny_model
from leaderless.models.loading.tokenizer import load_chat_tokenizer
from leaderless.rewards.judges.asking import JudgeQuestion, JudgeReply
from leaderless.rewards.judges.client import AnswerCache
from leaderless.rewards.judges.judge import Judge, Judged
from leaderless.rewards.judges.verdicts import VerdictError
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import Delta, Request, SamplingParams
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.weight_sources import Colocated
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.stages.context import ModelRole
from leaderless.stages.judging import EngineAsker, Terms
from leaderless.worker.build.judging import AskerOfOthers, Judging

MODEL = ModelConfig(path=judge_model())
TOKENIZER = load_chat_tokenizer(MODEL, "judge")


def read_points(said: str) -> int:
    try:
        return points_of(said)
    except ValueError as error:
        raise VerdictError(str(error)) from error


def read_nothing(said: str) -> int:
    raise VerdictError(f"there is none in {said}")


def questions(count: int, read: Callable[[str], object] = read_points) -> list[JudgeQuestion]:
    return [JudgeQuestion(({"role": "user", "content": f"how good is {number}"},), read) for number in range(count)]


class NativeServing(ScriptedServing):
    """See `Serving`. A judge with a real engine."""

    def __init__(self) -> None:
        model = load_causal_lm(MODEL, "judge").eval()
        self.engine = NativeEngine(model, TOKENIZER, frozenset({0}), 8, torch.device("cpu"))  # type: ignore[assignment]
        self.policy_version, self.num_phases = 0, 0

    @property
    def num_requests(self) -> int:
        return self.engine._num_requests  # type: ignore[attr-defined, no-any-return]

    @contextmanager
    def phase(self):  # type: ignore[no-untyped-def]
        self.num_phases += 1
        yield self.engine


class Meeting:
    """A place where threads that stand for ranks wait for one another."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=20)
        self._brought: dict[int, object] = {}

    def bring(self, rank: int, what: object) -> list[object]:
        """What all ranks have brought, in their order."""
        self._brought[rank] = what
        self._barrier.wait()
        brought = [self._brought[one] for one in sorted(self._brought)]
        self._barrier.wait()
        return brought


@dataclass
class ThreadGroup(ProcessGroup):
    """Ranks that are threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, rows: Tensor, what: str) -> list[Tensor]:  # noqa: ARG002
        return self.meeting.bring(self.rank, rows)  # type: ignore[return-value]

    def max(self, values: Tensor, what: str) -> Tensor:
        return torch.stack(self.gather(values, what)).amax(0)

    def exchange(self, messages: Mapping[int, Tensor], senders: Sequence[int], what: str) -> dict[int, Tensor]:  # noqa: ARG002
        brought = dict(zip(self.ranks, self.meeting.bring(self.rank, messages), strict=True))
        return {sender: brought[sender][self.rank] for sender in senders}  # type: ignore[index]

    def exchange_rounds(self, rounds: Iterable[Round], what: str) -> None:
        for sent, received in rounds:
            arrived = self.exchange(dict(sent), [sender for sender, _ in received], what)
            for sender, message in received:
                message.copy_(arrived[sender])

    def broadcast_text(self, text: str, source: int, what: str) -> str:  # noqa: ARG002
        return str(self.meeting.bring(self.rank, text)[self.ranks.index(source)])


def together(count: int, call: Callable[[ThreadGroup], list[JudgeReply]]) -> list[list[JudgeReply]]:
    """What a function returns on each of some ranks."""
    meeting, ranks = Meeting(count), tuple(range(count))
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda rank: call(ThreadGroup(ranks, rank, meeting=meeting)), ranks))


def asker(
    serving: ScriptedServing,
    kept: AnswerCache | None = None,
    longest: int = 200,
    ranks: ProcessGroup = ALONE,
    shard: ProcessGroup = ALONE,
    **options: object,
) -> EngineAsker:
    settings = JudgeOptions.model_validate(
        {"role": "judge", "temperature": 1.0, "max_answer_tokens": 4, "retries": 1, **options}
    )
    terms, kept = Terms(settings, MODEL, longest, seed=5), kept or AnswerCache(None, 100)
    return EngineAsker(terms, ModelRole(None, serving), TOKENIZER, kept, ranks, shard)


def ask(one: EngineAsker, some: Sequence[JudgeQuestion]) -> list[JudgeReply]:
    return one.ask(some, list[str]().append)


def worth(replies: Sequence[JudgeReply]) -> list[tuple[object, str, bool]]:
    return [(reply.verdict, reply.said, reply.error is None) for reply in replies]


def test_what_a_judge_says_depends_on_the_question_alone() -> None:
    some = questions(24)
    together = ask(asker(NativeServing()), some)
    assert {reply.num_requests for reply in together} == {1, 2}, "some are reminded of the form"
    assert {reply.error is None for reply in together} == {True, False}
    assert len({reply.said for reply in together}) > 10
    for error in (reply.error for reply in together if reply.error):
        assert "it has no opinion in what the judge says" in error
    assert all(reply.verdict is None for reply in together if reply.error)
    one_by_one = ask(asker(NativeServing(), max_requests=1), some[::-1])[::-1]
    assert worth(one_by_one) == worth(together)


def test_equal_questions_are_asked_once() -> None:
    first, *others = ask(asker(NativeServing()), questions(1) * 3)
    assert first.num_requests
    assert {reply.num_requests for reply in others} == {0}
    assert worth(others) == worth([first, first])


def test_what_was_said_before_a_restart_is_not_asked_again(tmp_path: Path) -> None:
    some, file = questions(12), tmp_path / "answers/rank-0.jsonl"
    before = ask(asker(NativeServing(), AnswerCache(file, 100)), some[:8])
    again = NativeServing()
    after = ask(asker(again, AnswerCache(file, 100)), some[:8])
    assert worth(after) == worth(before)
    assert {reply.num_requests for reply in after} == {0}
    assert again.num_phases == 0, "its weights and memory are not needed"
    assert worth(ask(asker(NativeServing(), AnswerCache(file, 100)), some)) == worth(ask(asker(NativeServing()), some))


def test_an_answer_is_that_of_a_model_and_of_all_that_it_is_asked_with() -> None:
    options, (question,) = JudgeOptions(role="judge"), questions(1)
    terms = [
        Terms(options, MODEL, 200, seed=5),
        Terms(options, MODEL, 200, seed=6),
        Terms(options, ModelConfig(path="other"), 200, seed=5),
        Terms(options, ModelConfig(path=MODEL.path, revision="new"), 200, seed=5),
        Terms(options, ModelConfig(path=MODEL.path, compute_dtype="bfloat16"), 200, seed=5),
        Terms(JudgeOptions(role="judge", temperature=0.5), MODEL, 200, seed=5),
        Terms(JudgeOptions(role="judge", max_answer_tokens=9), MODEL, 200, seed=5),
    ]
    assert len({one.key(question.messages) for one in terms}) == len(terms)
    same = Terms(JudgeOptions(role="other", timeout_s=9), MODEL, 100, seed=5)
    assert same.key(question.messages) == terms[0].key(question.messages)


def test_a_question_that_is_too_long_fails_alone() -> None:
    short, long = questions(2)
    long = JudgeQuestion(({"role": "user", "content": "a" * 300},), lambda _: 1)
    good, bad = ask(asker(NativeServing()), [JudgeQuestion(short.messages, lambda _: 1), long])
    assert good.verdict == 1
    assert bad.error is not None
    assert "306 tokens for role 'judge', more than max_question_tokens=200" in bad.error
    assert bad.num_requests == 0


def test_late_answers_fail_and_then_no_more_are_asked() -> None:
    serving = ScriptedServing(ScriptedEngine())
    replies = ask(asker(serving, timeout_s=1e-9, max_requests=2, max_answer_tokens=99), questions(20))
    errors = [reply.error or "" for reply in replies]
    assert all("no answer in time (timeout_s=1e-09)" in error for error in errors[:8])
    assert all("not asked, as 8 questions in a row had no answer" in error for error in errors[8:])
    assert sorted(serving.engine.aborted) == list(range(1, 9))


def test_an_answer_that_the_engine_ends_fails_without_a_word_about_time() -> None:
    serving = ScriptedServing(ScriptedEngine())
    serving.engine.before_step = lambda: [serving.engine.abort(number) for number in list(serving.engine.under_way)]
    (reply,) = ask(asker(serving), questions(1))
    assert reply.verdict is None
    assert reply.error == "RuntimeError: the engine has ended the answer early: see its log"


def test_a_reminder_that_is_too_long_is_named() -> None:
    (question,) = questions(1, read_nothing)  # of 18 tokens
    (reply,) = ask(asker(NativeServing(), longest=18), [question])
    assert "the reminder of the form of its verdict has" in (reply.error or "")
    assert reply.num_requests == 1


def test_ranks_that_make_one_engine_ask_it_the_same() -> None:
    """Else some would wait for the others in the engine: they keep other answers, and some find no verdict in time."""
    some = questions(12)
    kept = [AnswerCache(None, 100) for _ in range(2)]
    expected = ask(asker(NativeServing()), some)
    ask(asker(NativeServing(), kept[0]), some[:4])
    ask(asker(NativeServing(), kept[1]), some[2:9])
    asked: list[list[tuple[object, ...]]] = [[], []]
    servings = [NativeServing(), NativeServing()]

    def on_rank(group: ThreadGroup) -> list[JudgeReply]:
        serving = servings[group.rank]
        submit = serving.engine.submit

        def noted(request: Request, params: SamplingParams) -> int:
            asked[group.rank].append((tuple(request.prompt), tuple(request.sample_ids)))
            return submit(request, params)

        serving.engine.submit = noted  # type: ignore[method-assign]
        read = read_points if group.rank == 0 else read_nothing
        return ask(asker(serving, kept[group.rank], ranks=group, shard=group), questions(12, read))

    first, second = together(2, on_rank)
    assert worth(first) == worth(second) == worth(expected)
    assert asked[0] == asked[1]
    assert len(asked[0]) >= 8, "what the first rank does not keep is asked"


def test_a_rank_without_questions_takes_part() -> None:
    servings = [NativeServing(), NativeServing()]

    def on_rank(group: ThreadGroup) -> list[JudgeReply]:
        return ask(asker(servings[group.rank], ranks=group), questions(3 * group.rank))

    nothing, replies = together(2, on_rank)
    assert nothing == []
    assert worth(replies) == worth(ask(asker(NativeServing()), questions(3)))
    assert [one.num_phases for one in servings] == [1, 1]


def test_judges_of_other_ranks_say_the_same_and_read_it_once() -> None:
    """Rank 0 asks, ranks 1 and 2 judge, and share the questions."""
    some = questions(20)
    servings = [NativeServing() for _ in range(3)]
    judges = Meeting(2)

    def on_rank(group: ThreadGroup) -> list[JudgeReply]:
        own = None
        if group.rank:
            own = asker(servings[group.rank], ranks=ThreadGroup((1, 2), group.rank, meeting=judges))
        others = AskerOfOthers(group, (1, 2), own, read_points)
        unread = questions(20, read_nothing)  # those that ask do not read
        return others.ask([*unread, *unread[:2]] if group.rank == 0 else [], list[str]().append)

    replies, *nothing = together(3, on_rank)
    assert nothing == [[], []]
    alone = NativeServing()
    assert worth(replies) == worth(ask(asker(alone), [*some, *some[:2]]))
    asked = [one.num_requests for one in servings]
    assert asked[0] == 0
    assert min(asked[1:]) > 0
    assert sum(asked) == alone.num_requests, "each question is asked by one engine"


@pytest.mark.parametrize(("rollout", "is_released"), [("0-1", True), ("0", False)])
def test_a_judge_keeps_its_weights_where_no_other_model_is(rollout: str, *, is_released: bool) -> None:
    """Else the plan would have to count them next to the cache of the policy's engine."""
    layout = {"rollout": rollout, "reward": "1", "advantage": "2", "policy": "2"}
    sections = {
        "models": {"policy": "/no/such/model", "judge": "/no/such/judge"},
        "reward": {"judge": {"role": "judge"}},
        "layout": {node: {"ranks": ranks} for node, ranks in layout.items()},
    }
    plan = plan_of("grpo", 3, **sections)
    serving = Colocated.__new__(Colocated)
    roles = SimpleNamespace(of=lambda *_: ModelRole(None, serving), tokenizers={"judge": TOKENIZER})
    transport = SimpleNamespace(rank=1, process_group=lambda ranks: ProcessGroup(ranks, 1))
    pool = SimpleNamespace(kept_answers=AnswerCache(None, 0), grade=list)
    judging = Judging(make_recipe(**sections), plan, transport, roles, pool)  # type: ignore[arg-type]
    judging.grader(plan["reward"])
    assert serving.is_released == is_released


class SpeakingEngine(ScriptedEngine):
    """Answers each question with what a function says of it."""

    def __init__(self, folder: Path, say: Callable[[str], str]) -> None:
        super().__init__()
        template = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
        path = write_tiny_model(folder, string.printable, hidden_size=8, num_layers=1, chat_template=template)
        self.model = ModelConfig(path=str(path))
        self.tokenizer = load_chat_tokenizer(self.model, "judge")
        self.say, self.asked = say, list[str]()

    def step(self) -> list[Delta]:
        deltas = []
        for number, (request, _, _) in self.under_way.items():
            self.asked.append(self.tokenizer.decode(request.prompt))
            tokens = tuple(self.tokenizer.encode(self.say(self.asked[-1])))
            deltas.append(Delta(number, 0, tokens, (-0.5,) * len(tokens), "stop", 0))
        self.under_way.clear()
        return deltas


def judged_by(engine: SpeakingEngine, responses: Sequence[str], **options: object) -> list[Judged]:
    """What a judge that is a role says the responses to one prompt are worth."""
    settings = JudgeOptions.model_validate({"role": "judge", **options})
    terms = Terms(settings, engine.model, 4000, seed=5)
    serving = ScriptedServing(engine)
    answers = EngineAsker(terms, ModelRole(None, serving), engine.tokenizer, AnswerCache(None, 100), ALONE, ALONE)
    samples = [RewardInput("How are you?", response, "", {}, is_truncated=False, group=0) for response in responses]
    return Judge(settings, None).grade(samples, asker=answers)


def shown(question: str) -> list[str]:
    """The responses in a question, in their order."""
    return re.findall(r"<response[^>]*>\n(.*?)\n</response>", question)


def test_a_role_grades_by_a_rubric(tmp_path: Path) -> None:
    def say(question: str) -> str:
        (response,) = shown(question)
        scores = {"kind": 8 if response == "well" else 2, "short": 10}
        is_first = "must be a number" not in question
        return json.dumps({**scores, "kind": "much"} if response == "ill" and is_first else scores)

    engine = SpeakingEngine(tmp_path, say)
    rubric = {"kind": {"text": "Is it kind?", "weight": 3.0}, "short": "Is it short?"}
    graded = judged_by(engine, ["well", "ill", "well"], rubric=rubric)
    assert [one.outcome.error for one in graded] == [None] * 3
    assert [one.outcome.value for one in graded] == pytest.approx([0.85, 0.4, 0.85])  # (3 x 0.8 + 1) / 4
    assert graded[1].notes["criteria"] == {"kind": 0.2, "short": 1.0}
    assert [one.asked.requests for one in graded] == [1, 2, 0], "it is reminded of the form, and equal ones are known"
    assert all("- kind: Is it kind?\n- short: Is it short?" in question for question in engine.asked)


def test_a_role_compares_two_responses_in_both_places(tmp_path: Path) -> None:
    def say(question: str) -> str:
        first, second = shown(question)
        return f"Better: {'A' if len(first) > len(second) else 'B'}"

    engine = SpeakingEngine(tmp_path, say)
    responses = ["a", "aaa", "aa"]
    graded = judged_by(engine, responses, pairwise={})
    assert [one.outcome.value for one in graded] == [0.0, 1.0, 0.5]
    assert sum(one.asked.pairs for one in graded) == 3
    assert sum(one.asked.contradictions for one in graded) == 0
    orders = {tuple(shown(question)) for question in engine.asked}
    assert orders == {(one, other) for one in responses for other in responses if one != other}
    assert len(engine.asked) == 6


def test_a_role_that_prefers_a_place_finds_ties(tmp_path: Path) -> None:
    graded = judged_by(SpeakingEngine(tmp_path, lambda _: "Better: A"), ["a", "aaa", "aa"], pairwise={})
    assert [one.outcome.value for one in graded] == [0.5] * 3
    assert sum(one.asked.contradictions for one in graded) == 3

"""What clients may say about responses, and which of them a step takes."""

from __future__ import annotations

from collections import deque

import pytest

from leaderless.config.environment import OnlineConfig
from leaderless.environments.episode import Said, Trace
from leaderless.serving.http_server import ApiError
from leaderless.serving.online.feedback_ledger import ReplyChoice, ReplyLedger, percentile_95


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def choice_of(*versions: int) -> ReplyChoice:
    trace = Trace()
    prompt = trace.add(None, [1], [])
    trace.add(prompt, [2] * len(versions), [], Said([-1.0] * len(versions), versions, 0))
    return ReplyChoice(trace, 0.5)


def ledger_of(group_size: int = 2, **settings: object) -> tuple[ReplyLedger, Clock]:
    clock = Clock()
    return ReplyLedger(OnlineConfig.model_validate(settings), group_size, clock), clock


def add(ledger: ReplyLedger, identity: str, num: int = 1, *, arrived_s: float = 0.0, version: int = 0) -> None:
    ledger.add(identity, arrived_s, [choice_of(version) for _ in range(num)])


def refusal(ledger: ReplyLedger, **posted: object) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ledger.judge(posted)  # type: ignore[arg-type]
    return caught.value


def taken(ledger: ReplyLedger, num_groups: int) -> list[list[tuple[str, int, float | None]]]:
    return [[(reply.id, number, choice.reward) for reply, number, choice in group] for group in ledger.take(num_groups)]


def test_the_last_feedback_before_a_step_takes_the_response_counts() -> None:
    ledger, _ = ledger_of(feedback={"good": 2.0, "bad": -1.0})
    add(ledger, "a", 2)
    assert ledger.judge({"id": "a", "feedback": "bad"}) == -1.0
    assert ledger.judge({"id": "a", "choice": 1, "reward": 0.25}) == 0.25
    assert ledger.judge({"id": "a", "choice": 0, "feedback": "good"}) == 2.0
    assert (ledger.num_judged(), ledger.num_groups()) == (2, 1)
    assert taken(ledger, 1) == [[("a", 0, 2.0), ("a", 1, 0.25)]]
    assert (ledger.num_judged(), ledger.num_groups()) == (0, 0)
    late = refusal(ledger, id="a", feedback="good")
    assert (late.status, late.param) == (409, "id")
    assert "a step has been trained with it" in late.message


@pytest.mark.parametrize(
    ("posted", "status", "text"),
    [
        ({"id": "b", "feedback": "accepted"}, 404, "the address that gave the reply"),
        ({"id": 3, "feedback": "accepted"}, 400, "`id` of a reply"),
        ({"id": "a", "feedback": "accept"}, 400, "accepted, edited, rejected (did you mean 'accepted'?)"),
        ({"id": "a", "feedback": 1}, 400, "accepted, edited, rejected"),
        ({"id": "a"}, 400, "either feedback, a word, or reward, a number"),
        ({"id": "a", "feedback": "accepted", "reward": 1.0}, 400, "either feedback"),
        ({"id": "a", "reward": float("inf")}, 400, "must be a finite number"),
        ({"id": "a", "reward": float("nan")}, 400, "must be a finite number"),
        ({"id": "a", "reward": 10**400}, 400, "must be a finite number, at most 1e+30"),
        ({"id": "a", "reward": True}, 400, "must be a finite number"),
        ({"id": "a", "reward": "1"}, 400, "must be a finite number"),
        ({"id": "a", "reward": 1, "choice": 1}, 400, "index of a choice of the reply: 0"),
        ({"id": "a", "reward": 1, "choice": True}, 400, "index of a choice"),
        ({"id": "a", "reward": 1, "index": 0}, 400, "unknown field index"),
    ],
)
def test_feedback_that_cannot_be_understood_is_refused(posted: dict[str, object], status: int, text: str) -> None:
    ledger, _ = ledger_of()
    add(ledger, "a")
    error = refusal(ledger, **posted)
    assert error.status == status
    assert text in error.message
    assert ledger.num_judged() == 0


def test_groups_follow_the_order_of_requests_among_those_with_feedback() -> None:
    ledger, _ = ledger_of()
    for number, identity in enumerate("abcde"):
        add(ledger, identity, arrived_s=number)
    for identity in "ecab":
        ledger.judge({"id": identity, "reward": 1})
    assert ledger.num_groups() == 2
    assert [[identity for identity, _, _ in group] for group in taken(ledger, 1)] == [["a", "b"]]
    ledger.judge({"id": "d", "reward": 1})
    assert [[identity for identity, _, _ in group] for group in taken(ledger, 1)] == [["c", "d"]]
    assert ledger.num_judged() == 1


def test_a_request_waits_for_feedback_on_all_of_its_choices_and_drops_those_without() -> None:
    ledger, clock = ledger_of(feedback_timeout_s=10)
    add(ledger, "a", 2)
    add(ledger, "b")
    ledger.judge({"id": "a", "choice": 1, "reward": 1})
    ledger.judge({"id": "b", "reward": 0})
    clock.now_s = 10.0
    ledger.sweep(0)
    assert ledger.num_groups() == 0
    add(ledger, "c")
    clock.now_s = 10.1
    ledger.sweep(0)
    assert taken(ledger, 1) == [[("a", 1, 1.0), ("b", 0, 0.0)]]
    clock.now_s = 21.0
    ledger.sweep(0)
    gone = refusal(ledger, id="c", reward=1)
    assert gone.status == 410
    assert "no feedback came for 10 s; online.feedback_timeout_s" in gone.message
    counts = ledger.counts.take()
    assert (counts.without_feedback, counts.stale) == (2, 0)


def test_a_choice_that_was_dropped_says_so_while_others_of_its_reply_wait() -> None:
    ledger, clock = ledger_of(feedback_timeout_s=10)
    add(ledger, "a", 2)
    ledger.judge({"id": "a", "choice": None, "feedback": None, "reward": 0.25})
    assert ledger.num_judged() == 1
    clock.now_s = 11
    ledger.sweep(0)
    gone = refusal(ledger, id="a", choice=1, feedback="accepted")
    assert (gone.status, "no feedback came for 10 s" in gone.message) == (410, True)
    assert refusal(ledger, id="a", choice=2, feedback="accepted").status == 400
    ledger.judge({"id": "a", "reward": 0.75})
    assert ledger.num_judged() == 1, "the same response again"
    add(ledger, "b")
    ledger.judge({"id": "b", "feedback": "rejected"})
    ((first, second),) = ledger.take(1)
    assert (first[2].feedback, second[2].feedback) == (0.75, "rejected")
    assert ledger.num_judged() == 0


def test_words_are_worth_what_a_float32_number_can_hold() -> None:
    with pytest.raises(ValueError, match=r"gives 'good' 1e\+31, but a reward is at most 1e\+30"):
        OnlineConfig(feedback={"good": 1e31})


def test_the_oldest_token_decides_whether_a_response_is_too_old() -> None:
    ledger, _ = ledger_of(max_staleness=2)
    ledger.add("old", 0.0, [choice_of(3, 4, 5)])
    ledger.add("new", 0.0, [choice_of(4, 5)])
    for identity in ("old", "new"):
        ledger.judge({"id": identity, "reward": 1})
    ledger.sweep(5)
    assert ledger.num_judged() == 2
    ledger.sweep(6)
    assert ledger.num_judged() == 1
    assert "older than 2 optimizer steps" in refusal(ledger, id="old", reward=1).message
    counts = ledger.counts.take()
    assert (counts.stale, counts.interrupted, counts.without_feedback) == (1, 2, 0)
    assert ledger.counts.take().stale == 0


def test_latencies_are_counted_apart_where_training_came_between() -> None:
    ledger, _ = ledger_of()
    ledger.counts.replied(0.1, is_crossed=False)
    ledger.counts.replied(2.0, is_crossed=True)
    counts = ledger.counts.take()
    assert (*counts.latencies_s, *counts.latencies_training_s) == (0.1, 2.0)
    assert ledger.counts.take().latencies_s == deque()


def test_the_percentile_is_one_of_the_values() -> None:
    assert percentile_95([]) == 0
    assert percentile_95([3.0]) == 3
    assert percentile_95([float(value) for value in range(100)]) == 94
    assert percentile_95([float(value) for value in range(20)]) == 18

"""Every token that was sampled is trained exactly once, however an episode branches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from leaderless.environments.episode import Said, Trace, TraceNode


def said(count: int, turn: int, agent: str = "") -> Said:
    return Said([-float(turn)] * count, [turn] * count, turn, agent, reward=float(turn))


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Trees of messages, each of up to three tokens that no other message has."""
    trace, numbers = Trace(), iter(range(10_000))
    nodes: list[TraceNode | None] = [None]
    for turn in range(draw(st.integers(0, 9))):
        parent = draw(st.sampled_from(nodes))
        tokens = [next(numbers) for _ in range(draw(st.integers(1, 3)))]
        is_said = parent is not None and draw(st.booleans())
        agent = draw(st.sampled_from("ab"))
        nodes.append(trace.add(parent, tokens, [], said(len(tokens), turn, agent) if is_said else None))
    return trace


@given(traces())
def test_each_sampled_token_is_trained_once_and_no_other_is(trace: Trace) -> None:
    samples = trace.samples()
    assert [s.turns[-1] for s in samples] == sorted(s.turns[-1] for s in samples), "the last sample has the last turn"
    trained = [t for s in samples for t, mask in zip(s.tokens, s.is_trained, strict=True) if mask]
    assert sorted(trained) == sorted(token for node in trace.said() for token in node.tokens)
    facts = [fact for s in samples for fact in zip(s.log_probs, s.policy_versions, s.turns, strict=True)]
    owner = {token: node for node in trace.said() for token in node.tokens}
    assert facts == [(-float(s.turn), s.turn, s.turn) for token in trained if (s := owner[token].said) is not None], (
        "log-probs, versions and turns are those of the token"
    )


@given(traces())
def test_a_sample_is_one_branch_of_one_agent(trace: Trace) -> None:
    contexts = [node.context() for node in trace.nodes]
    for sample in trace.samples():
        assert any(context[: len(sample.tokens)] == sample.tokens for context in contexts)
        assert sample.is_trained[-1], "what an agent is told last is not part of its sample"
        assert not sample.is_trained[0], "the first token follows on nothing"
        owners = {node.said.agent for node in trace.said() if node.said and node.tokens[0] in sample.tokens}
        assert sample.agent in owners


@given(traces())
def test_the_reward_of_a_turn_is_at_its_last_token(trace: Trace) -> None:
    total = sum(value for sample in trace.samples() for value in sample.rewards)
    assert total == sum(node.said.reward for node in trace.said() if node.said)
    ends = {node.tokens[-1]: node.said.reward for node in trace.said() if node.said}
    for sample in trace.samples():
        trained = [t for t, mask in zip(sample.tokens, sample.is_trained, strict=True) if mask]
        assert sample.rewards == [ends.get(token, 0.0) for token in trained]


def test_a_response_that_branches_share_is_trained_in_the_first() -> None:
    trace = Trace()
    root = trace.add(None, [1], [])
    first = trace.add(root, [2, 3], [], said(2, 0))
    trace.add(trace.add(first, [4], []), [5], [], said(1, 1))
    trace.add(trace.add(first, [6], []), [7], [], said(1, 2))
    left, right = trace.samples()
    assert (left.tokens, left.is_trained) == ([1, 2, 3, 4, 5], [False, True, True, False, True])
    assert (right.tokens, right.is_trained) == ([1, 2, 3, 6, 7], [False, False, False, False, True])

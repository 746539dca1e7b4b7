"""Replies do not depend on how an engine groups its tokens."""

from __future__ import annotations

import pytest
from tests.tiny import tiny_model

from leaderless.config.models import ModelConfig
from leaderless.models.loading.tokenizer import byte_tokenizer, load_tokenizer
from leaderless.rollout.engine import Delta
from leaderless.serving.api.chat_requests import ChatQuestion, Message
from leaderless.serving.api.requests import CompletionQuestion
from leaderless.serving.api.responses import ChatComposer, CompletionComposer
from leaderless.serving.api.text_stream import REPLACEMENT
from leaderless.serving.http_server import ApiError

TOKENIZER = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
ASKED = CompletionQuestion(model="m", prompt="1", n=2, logprobs=0, return_token_ids=True, stop="ok")
CHAT = ChatQuestion(model="m", messages=[Message(role="user", content="1")], n=2, logprobs=True)


def deltas(size: int) -> list[Delta]:
    """Two responses, with this number of tokens at a time."""
    given: list[Delta] = []
    for sibling, text in enumerate(("say ok now", "1+1=2")):
        tokens = TOKENIZER.encode(text)
        for i in range(0, len(tokens), size):
            part = tokens[i : i + size]
            reason = "length" if i + size >= len(tokens) else None
            given.append(Delta(0, sibling, part, [-float(i + j) for j in range(len(part))], reason))  # type: ignore[arg-type]
    return given


def test_tokens_may_come_several_at_a_time() -> None:
    replies = []
    for size in (1, 2, 3, 99):
        for composer in (CompletionComposer(ASKED, [[5]], TOKENIZER), ChatComposer(CHAT, [[5]], TOKENIZER)):
            reply = composer.whole([composer.take(delta) for delta in deltas(size)])
            replies.append({name: value for name, value in reply.items() if name not in {"id", "created"}})
    assert replies[::2] == [replies[0]] * 4
    assert replies[1::2] == [replies[1]] * 4
    texts = [(choice["text"], choice["finish_reason"]) for choice in replies[0]["choices"]]
    assert texts == [("say ", "stop"), ("1+1=2", "length")]


def test_a_response_that_the_engine_gives_up_is_an_error() -> None:
    with pytest.raises(ApiError, match="the engine has given up the response") as caught:
        CompletionComposer(ASKED, [[5]], TOKENIZER).take(Delta(0, 0, (), (), "aborted"))
    assert caught.value.status == 503


def test_tokens_with_the_same_text_are_shown_as_the_likeliest_of_them() -> None:
    """Parts of characters have the same text: a client that compares with the likeliest token must not miss it."""
    tokenizer = byte_tokenizer()
    one, other = [token for token in range(len(tokenizer)) if tokenizer.decode([token]) == REPLACEMENT][:2]
    asked = CompletionQuestion(model="m", prompt="1", logprobs=1)
    for token, log_prob in ((one, -3.0), (other, -0.5)):
        composer = CompletionComposer(asked, [[5]], tokenizer)
        part = composer.take(Delta(0, 0, [token], [log_prob], "length", likely=[[(other, -0.5)]]))
        (choice,) = composer.whole([part])["choices"]
        assert choice["logprobs"]["token_logprobs"] == [log_prob]
        assert choice["logprobs"]["top_logprobs"] == [{REPLACEMENT: -0.5}]

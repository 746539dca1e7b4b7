"""Retrievers, their wire format, and the environment of Search-R1; servers listen on this machine only."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import uvicorn

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.protocol import EpisodeFailed, Turn
from leaderless.environments.search.retriever import (
    Bm25Retriever,
    Hit,
    Page,
    RemoteRetriever,
    Retriever,
    RetrieverError,
    open_pages,
)
from leaderless.environments.search.search_r1 import INVALID, SearchR1
from leaderless.serving.listen import take_port
from leaderless.serving.retrieval_server import make_retriever_app

PAGES = [
    Page("Baro\nBaro is a country. Its currency is the Mino.", "1"),
    Page("Tiko\nTiko is the capital of Baro.", "2"),
    Page("Zemu\nZemu is an element. It was discovered in Kela.", "3"),
    Page("Kela\nKela is a country. Its currency is the Dova.", "4"),
]


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    path = tmp_path / "pages.jsonl"
    path.write_text("".join(json.dumps({"id": page.id, "contents": page.contents}) + "\n" for page in PAGES))
    return path


@contextmanager
def serving(retriever: Retriever) -> Iterator[str]:
    """The address of a retriever's server, which runs in a thread."""
    config = uvicorn.Config(make_retriever_app(retriever), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    with take_port("127.0.0.1", 0, None) as listener:
        listener.listen()
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def answering(reply: bytes | None) -> Iterator[str]:
    """The address of a program that sends the same bytes to whoever connects, or nothing at all."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ends: list[socket.socket] = []

        def answer() -> None:
            end, _ = listener.accept()
            ends.append(end)
            end.recv(1 << 16)
            if reply is not None:
                end.sendall(reply)
                end.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
        finally:
            thread.join()
            for end in ends:
                end.close()


def http(body: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n{body}".encode()


def test_the_page_with_the_words_of_the_query_is_found_first() -> None:
    retriever = Bm25Retriever(PAGES)
    assert [hit.page.id for hit in retriever.search("capital of Baro", 2)] == ["2", "1"]
    assert [hit.page.title for hit in retriever.search("ZEMU", 3)] == ["Zemu"], "pages without a word are not found"
    assert retriever.search("the of", 3) == [], "words that are everywhere"
    assert retriever.search("nowhere", 3) == retriever.search("", 3) == []


def test_pages_of_equal_score_keep_their_order() -> None:
    retriever = Bm25Retriever([Page(f"Name\ncommon word{place}") for place in range(50)])
    assert [hit.page.text for hit in retriever.search("common", 5)] == [f"common word{place}" for place in range(5)]


def test_a_file_of_pages_is_indexed_once_and_again_when_it_changes(pages: Path) -> None:
    first = open_pages(str(pages))
    assert open_pages(str(pages)) is first
    pages.write_text('{"contents": "Other\\nNew text."}\n')
    assert [hit.page for hit in open_pages(str(pages)).search("new text", 1)] == [Page("Other\nNew text.")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there are no pages"),
        ("{\n", r"pages\.jsonl:1 is not JSON"),
        ('\n{"text": "a"}', r"pages\.jsonl:2 is no page: .*'contents'"),
        ("[1]", "is no page"),
    ],
)
def test_a_file_that_has_no_pages_is_refused_by_its_line(pages: Path, text: str, words: str) -> None:
    pages.write_text(text)
    with pytest.raises(RecipeError, match=words):
        open_pages(str(pages))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(RecipeError, match=r"'no/pages\.jsonl' cannot be read: No such file"):
        open_pages("no/pages.jsonl")


def test_a_server_finds_what_the_retriever_behind_it_finds() -> None:
    retriever = Bm25Retriever(PAGES)
    with serving(retriever) as address:
        remote = RemoteRetriever(address)
        for query, topk in (("capital of Baro", 3), ("country", 1), ("nowhere", 3), ("ünïcödé \u2713", 1)):
            assert remote.search(query, topk) == retriever.search(query, topk)


def test_the_wire_format_is_that_of_search_r1() -> None:
    class One:
        def search(self, query: str, topk: int) -> list[Hit]:  # noqa: ARG002
            return [Hit(PAGES[1], 1.5)] * topk

    document: Json = {"id": "2", "contents": "Tiko\nTiko is the capital of Baro."}
    scored: Json = {"document": document, "score": 1.5}
    for asked, answer in (
        ({"queries": ["a", "b"], "topk": 1, "return_scores": True}, [[scored], [scored]]),
        ({"queries": ["a"], "topk": 2, "return_scores": False}, [[document, document]]),
        ({"queries": ["a"], "return_scores": True}, [[scored] * 3]),
        ({"queries": ["a"], "topk": None}, [[document] * 3]),
    ):
        assert post(One(), asked) == (200, {"result": answer})


def test_a_malformed_request_is_refused_with_the_reason() -> None:
    retriever = Bm25Retriever(PAGES)
    for asked, words in (
        ({"queries": "a"}, "'queries' must be a list of texts"),
        ({"queries": [1]}, "'queries' must be a list of texts"),
        ({"queries": ["a"], "topk": 0}, "topk=0 must be a whole number"),
        ([], "must be an object"),
    ):
        status, answer = post(retriever, asked)
        assert status == 422
        assert words in str(answer)


def post(retriever: Retriever, asked: Json) -> tuple[int, Json]:
    """Status and answer of a request, without a network."""
    sent: list[dict[str, object]] = []

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": json.dumps(asked).encode(), "more_body": False}

    async def send(message: object) -> None:
        assert isinstance(message, dict)
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/retrieve", "headers": headers, "query_string": b""}
    asyncio.run(make_retriever_app(retriever)({**scope, "root_path": ""}, receive, send))  # type: ignore[arg-type]
    status, body = sent[0]["status"], sent[1]["body"]
    assert isinstance(status, int)
    assert isinstance(body, bytes)
    return status, json.loads(body)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (http("no", "503 Service Unavailable"), "status 503: no"),
        (http("<html>"), "not in the format of Search-R1"),
        (http('{"result": []}'), "one entry for each of 1 queries"),
        (http('{"result": [["text"]]}'), "a document must be like"),
        (http('{"result": [[{"document": {"contents": "a"}, "score": NaN}]]}'), "score=nan must be a finite number"),
        (b"", "the connection broke|closed connection"),
        (None, r"no answer within 0\.2 s; raise timeout_s"),
    ],
)
def test_a_server_that_answers_wrongly_is_named_with_the_reason(reply: bytes | None, words: str) -> None:
    with answering(reply) as address, pytest.raises(RetrieverError, match=words) as caught:
        RemoteRetriever(address, timeout_s=0.2 if reply is None else 30.0).search("a", 1)
    assert address in str(caught.value)


def test_a_server_that_is_not_there_is_named_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}/retrieve"
    with pytest.raises(RetrieverError, match=f"{address}: .*refused; is it running"):
        RemoteRetriever(address).search("a", 1)
    with pytest.raises(RecipeError, match="must be like http"):
        RemoteRetriever("localhost:8000")


def begin(pages: Path, **options: object) -> SearchR1:
    environment = SearchR1(pages=str(pages), **options)  # type: ignore[arg-type]
    environment.reset({"question": "What is the capital of Baro?"}, Random(0))
    return environment


def test_an_episode_of_search_r1(pages: Path) -> None:
    environment = SearchR1(pages=str(pages), topk=2)
    first = environment.reset({"question": "What is the capital of Baro?"}, Random(0))
    assert first.startswith("Answer the given question.")
    assert first.endswith("Question: What is the capital of Baro?\n")
    found = environment.act("<think> I look. </think> <search> capital of Baro </search>")
    assert found == Turn(
        "\n\n<information>Doc 1(Title: Tiko) Tiko is the capital of Baro.\n"
        "Doc 2(Title: Baro) Baro is a country. Its currency is the Mino.</information>\n\n",
        info={"query": "capital of Baro"},
    )
    assert environment.act("<answer> Tiko </answer>") == Turn(done=True, info={"answer": "Tiko"})


@pytest.mark.parametrize(
    "text",
    ["", "Tiko", "<search> Baro", "<search></search>", "<search> \n </search>", "<search> Baro </answer>", "</search>"],
)
def test_what_is_neither_a_search_nor_an_answer_is_invalid(pages: Path, text: str) -> None:
    assert begin(pages).act(text) == Turn(INVALID)


def test_the_first_action_of_a_message_counts(pages: Path) -> None:
    environment = begin(pages)
    assert environment.act("<search>Zemu</search><answer>Kela</answer>").info == {"query": "Zemu"}
    assert environment.act("<answer>Kela</answer><search>Zemu</search>").done


def test_after_the_last_search_only_an_answer_is_possible(pages: Path) -> None:
    for text in ("<search> Baro </search>", "nothing"):
        environment = begin(pages, search_turns=4)
        assert not any(environment.act(text).done for _ in range(4))
        assert environment.act("<search> Baro </search>") == Turn(done=True), "not searched any more"
    environment = begin(pages, search_turns=1)
    environment.act("<search> Baro </search>")
    assert environment.act("<answer> Tiko </answer>").info == {"answer": "Tiko"}
    assert begin(pages, search_turns=0).act("<search> Baro </search>") == Turn(done=True)


def test_what_is_found_is_cut_before_its_closing_tag(pages: Path, tmp_path: Path) -> None:
    text = begin(pages, max_information_tokens=5).act("<search> Tiko </search>").observation
    assert text == "\n\n<information>Doc 1(Title: Tiko) T</information>\n\n", "20 characters"
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text(words_as_tokens())
    text = begin(pages, max_information_tokens=5, tokenizer=str(tmp_path)).act("<search> Tiko </search>").observation
    assert text == "\n\n<information>Doc 1(Title: Tiko) Tiko is</information>\n\n"
    text = begin(pages, max_information_tokens=50, tokenizer=str(tmp_path)).act("<search> Tiko </search>").observation
    assert text == "\n\n<information>Doc 1(Title: Tiko) Tiko is the capital of Baro.</information>\n\n"


def words_as_tokens() -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    text: str = tokenizer.to_str()
    return text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either pages, a file, or address"),
        ({"pages": "a", "address": "b"}, "either pages, a file, or address"),
        ({"pages": "a", "topk": 0}, "topk: is 0, but must be at least 1"),
        ({"pages": "a", "search_turns": -1}, "search_turns: is -1, but must be at least 0"),
        ({"pages": "a", "prompt": "Answer!"}, r"must have the place \{question\}"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        SearchR1(**options)  # type: ignore[arg-type]


def test_a_row_without_a_question_makes_the_episode_fail(pages: Path) -> None:
    with pytest.raises(EpisodeFailed, match="no text in its column 'question'"):
        SearchR1(pages=str(pages)).reset({"prompt": "?"}, Random(0))

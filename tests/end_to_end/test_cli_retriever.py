"""`leaderless retriever` as a command: what it finds, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from tests.end_to_end.alone import refused, run_alone

from leaderless.environments.search.retriever import Hit, Page, RemoteRetriever, RetrieverError

DEADLINE_S = 60.0


def test_pages_are_found_until_a_signal_comes(tmp_path: Path) -> None:
    (tmp_path / "pages.jsonl").write_text('{"id": "7", "contents": "Baro\\nA country."}\n')
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found: list[list[Hit]] = []

    def client() -> None:
        try:
            found.append(ask(f"http://127.0.0.1:{port}/retrieve"))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    outcome = run_alone(tmp_path, "retriever", "pages.jsonl", "--port", port)
    thread.join()
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert outcome.output == f"1 pages can be searched at http://127.0.0.1:{port}/retrieve; Ctrl-C ends it\nstopped\n"
    assert [hit.page for hit in found[0]] == [Page("Baro\nA country.", "7")]


def test_what_cannot_be_searched_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "'nothing.jsonl' cannot be read" in refused(tmp_path, "retriever", "nothing.jsonl", "--port", 0)
    monkeypatch.setattr("leaderless.environments.search.retriever.find_spec", {}.get)
    (tmp_path / "pages.jsonl").write_text('{"contents": "a"}\n')
    assert "'.[search]'" in refused(tmp_path, "retriever", "pages.jsonl", "--port", 0)
    monkeypatch.setattr("leaderless.config.packaged_files.find_spec", {}.get)
    assert "'.[serve,search]'" in refused(tmp_path, "retriever", "pages.jsonl")


def ask(address: str) -> list[Hit]:
    """What a server finds as soon as it answers."""
    end = time.monotonic() + DEADLINE_S
    while True:
        try:
            return RemoteRetriever(address).search("country", 1)
        except RetrieverError:
            assert time.monotonic() < end
            time.sleep(0.02)

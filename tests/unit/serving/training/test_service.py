"""Bad input to the training service, sent without Tinker's client: floods, silence, forged names, other versions."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from tests.unit.serving.training.services import BASE, served
from tests.unit.serving.training.test_wire import datum, tensor

from leaderless.serving.training.app import KeyGuard
from leaderless.serving.training.protobuf import field, fields
from leaderless.serving.training.service import ClientLimits, TrainingService

Answer = dict[str, object]
LIMITS = ClientLimits(max_tenants=3, max_waiting=4, silence_s=30.0)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, TrainingService]]:
    with served(tmp_path_factory.mktemp("service"), LIMITS) as found:
        yield found


@pytest.fixture
def url(service: tuple[str, TrainingService]) -> Iterator[str]:
    """The address of the service, whose clients end with the test."""
    yield f"{service[0]}/api/v1"
    for session in service[1].sessions():
        ask(f"{service[0]}/api/v1", f"sessions/{session.session_id}/finish")


def send(url: str, path: str, body: bytes, kind: str = "application/json", **headers: str) -> tuple[int, bytes, str]:
    """Status, body and `retry-after` of an answer."""
    request = urllib.request.Request(f"{url}/{path}", body, {"content-type": kind, **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read(), ""
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers.get("retry-after", "")


def ask(url: str, path: str, **body: object) -> tuple[int, Answer]:
    status, found, _ = send(url, path, json.dumps(body).encode())
    return status, json.loads(found)


def message(answer: Answer) -> str:
    error = answer["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def session(url: str) -> str:
    return str(ask(url, "create_session", tags=[], sdk_version="0.38.0")[1]["session_id"])


def model(url: str, session_id: str, number: int = 0, rank: int = 2, seed: int | None = None) -> tuple[int, Answer]:
    lora = {"rank": rank, "seed": seed}
    return ask(url, "create_model", session_id=session_id, model_seq_id=number, base_model=BASE, lora_config=lora)


def created(url: str) -> str:
    """The name of new adapters of a new client."""
    status, answer = model(url, session(url))
    assert status == 200
    return str(result(url, str(answer["request_id"]))["model_id"])


def result(url: str, request_id: str) -> Answer:
    status, answer = ask(url, "retrieve_future", request_id=request_id)
    assert status == 200, answer
    return answer


def passes(model_id: str, seq: int, tokens: tuple[int, ...] = (5, 6)) -> bytes:
    """A request for a pass over a sequence."""
    count = len(tokens)
    targets = tensor(struct.pack(f"<{count}q", *tokens), 2, count)
    weights = tensor(struct.pack(f"<{count}f", *([1.0] * count)), 1, count)
    body = field(3, datum([*tokens], target_tokens=targets, weights=weights))
    return field(1, model_id) + field(2, seq) + field(4, "cross_entropy") + body


def send_pass(url: str, model_id: str, seq: int, tokens: tuple[int, ...] = (5, 6)) -> tuple[int, bytes, str]:
    return send(url, "forward_backward", passes(model_id, seq, tokens), "application/x-protobuf")


def loss(url: str, request_id: str) -> float:
    """The loss of a pass that has been carried out."""
    status, body, _ = send(url, "retrieve_future", json.dumps({"request_id": request_id}).encode())
    assert status == 200
    metric = next(value for number, value in fields(body) if number == 3)
    assert isinstance(metric, bytes)
    return float(dict(fields(metric))[2])


def test_a_flood_is_told_when_to_ask_again_and_others_are_unhurt(url: str) -> None:
    flooding, other = created(url), created(url)
    answers = [send_pass(url, flooding, seq) for seq in range(2, 12)]  # the first one is missing, so that all wait
    assert [status for status, *_ in answers] == [200] * 4 + [429] * 6
    assert {retry for status, _, retry in answers if status == 429} == {"1"}
    assert "4 requests of this client" in message(json.loads(answers[-1][1]))
    status, body, _ = send_pass(url, other, 1)
    assert status == 200
    expected = loss(url, json.loads(body)["request_id"])
    status, body, _ = send_pass(url, flooding, 1)
    assert status == 200, "the request that the others wait for is always taken"
    assert loss(url, json.loads(body)["request_id"]) == expected
    assert loss(url, json.loads(answers[3][1])["request_id"]) == expected
    assert send_pass(url, flooding, 6)[0] == 200


def test_a_request_that_comes_twice_is_carried_out_once(url: str) -> None:
    model_id = created(url)
    first, again = (json.loads(send_pass(url, model_id, 1)[1]) for _ in range(2))
    assert first == again
    loss(url, first["request_id"])
    status, body, _ = send_pass(url, model_id, 1, (7, 8))
    assert status == 400
    assert "does another client use this name?" in message(json.loads(body))


def test_two_clients_cannot_have_adapters_of_one_name(url: str) -> None:
    session_id = session(url)
    assert model(url, session_id, rank=2)[0] == 200
    assert model(url, session_id, rank=2)[0] == 200, "the same request, again"
    status, answer = model(url, session_id, rank=3)
    assert (status, "does another client use this name?" in message(answer)) == (400, True)


def test_there_are_at_most_so_many_adapters_until_a_client_ends(url: str) -> None:
    session_id = session(url)
    for number in range(3):
        assert model(url, session_id, number)[0] == 200
    status, answer = model(url, session(url))
    assert (status, "higher --max-tenants" in message(answer)) == (400, True)
    assert ask(url, f"sessions/{session_id}/finish", reason={"type": "success"})[0] == 200
    assert model(url, session(url))[0] == 200
    assert ask(url, "session_heartbeat", session_id=session_id)[0] == 410


def test_a_silent_client_is_ended_and_others_are_not(url: str, service: tuple[str, TrainingService]) -> None:
    silent, other = created(url), created(url)
    waiting = json.loads(send_pass(url, silent, 2)[1])["request_id"]  # of which the first never comes
    service[1].session(silent).last_seen -= 31
    deadline = time.monotonic() + 60
    while ask(url, "get_info", model_id=silent)[0] == 200 and time.monotonic() < deadline:
        service[1].session(silent).last_seen -= 31
        time.sleep(0.1)
    status, answer = ask(url, "retrieve_future", request_id=waiting)
    assert (status, "was silent for 30 s" in message(answer)) == (404, True)
    assert ask(url, "get_info", model_id=other)[0] == 200


@pytest.mark.parametrize("path", ["client/config", "create_session"])
def test_a_client_with_an_older_protocol_is_told_what_to_install(url: str, path: str) -> None:
    status, answer = ask(url, path, sdk_version="0.18.2")
    assert status == 400
    assert "tinker 0.18.2 has an older protocol than this server, that of 0.38: pip install 'tinker>=0.38'" in message(
        answer
    )


def test_a_client_with_a_newer_protocol_is_warned_and_a_field_that_it_adds_is_refused(url: str) -> None:
    status, answer = ask(url, "create_session", sdk_version="0.40.1")
    assert (status, answer["warning_message"]) == (200, "this server was tested with tinker 0.38, and not with 0.40.1")
    status, answer = ask(url, "create_session", sdk_version="0.40.1", tier="gold")
    assert (status, "tier is not known to this server" in message(answer)) == (400, True)
    assert ask(url, "new_endpoint")[0] == 404


def test_a_request_of_an_older_protocol_uses_up_its_number(url: str) -> None:
    model_id = created(url)
    wrong = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": -1.0}}
    status, answer = ask(url, "optim_step", **wrong)
    assert status == 200
    said = result(url, str(answer["request_id"]))
    assert said["category"] == "user"
    assert "adam_params.learning_rate=-1.0" in message(said)
    assert loss(url, json.loads(send_pass(url, model_id, 2)[1])["request_id"]) > 0
    status, body, _ = send(url, "forward_backward", b"{}")
    assert (status, "must be sent as application/x-protobuf" in message(json.loads(body))) == (415, True)
    status, body, _ = send(url, "forward_backward", b"\xff\xff", "application/x-protobuf")
    assert status == 400


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("get_info", {"model_id": "x:train:0"}, 404),
        ("optim_step", {"model_id": "x:train:0", "seq_id": 1, "adam_params": {}}, 404),
        ("retrieve_future", {"request_id": "x:train:0:1"}, 404),
        ("asample", {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}, 404),
        ("weights_info", {"tinker_path": "tinker://x/weights/a"}, 404),
        ("create_session", [], 400),
        ("create_model", {}, 400),
    ],
)
def test_what_is_not_there_is_refused(url: str, path: str, body: object, status: int) -> None:
    assert send(url, path, json.dumps(body).encode())[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "tml-secret"}, 200),
        ({"x-api-key": "tml-secre"}, 401),
        ({"x-api-key": "secret"}, 401),
        ({"authorization": "Bearer secret"}, 401),
        ({}, 401),
    ],
)
def test_a_server_with_a_token_wants_it_as_the_key(headers: dict[str, str], status: int) -> None:
    assert asyncio.run(passed(KeyGuard(ok, "secret"), {"host": "far.example", **headers})) == status


def test_a_server_without_a_token_answers_who_means_this_machine() -> None:
    assert asyncio.run(passed(KeyGuard(ok, None), {"host": "localhost:80"})) == 200
    assert asyncio.run(passed(KeyGuard(ok, None), {"host": "far.example"})) == 403
    assert asyncio.run(passed(KeyGuard(ok, None), {"host": "localhost", "content-type": "text/plain"})) == 415


async def ok(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("")(scope, receive, send)


async def passed(guard: KeyGuard, headers: dict[str, str]) -> int:
    """Status of the answer to a request with some headers."""
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def note(message: Message) -> None:
        sent.append(message)

    given = {"content-type": "application/json", **headers}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    await guard({"type": "http", "method": "POST", "path": "/api/v1/x", "headers": raw}, receive, note)
    return int(sent[0]["status"])

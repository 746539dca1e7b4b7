"""`leaderless serve` as a command: what it serves, and how it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import openai
import pytest
from openai import OpenAI
from tests.end_to_end.alone import refused, run_alone
from tests.end_to_end.cli import Outcome
from tests.engines import fake_sglang_python
from tests.tiny import tiny_model, write_recipe

from leaderless.observability.run_directory import RunDirectory

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with two checkpoints, of which the newer one is damaged."""
    folder = tmp_path_factory.mktemp("run")
    reward = {"format": {"pattern": r".*\d.*\d.*"}}  # an untrained model earns it now and then
    changes = {"reward": reward, "checkpoint": {"every_steps": 1}, "optimizer.learning_rate": 0.05}
    outcome = run_alone(folder, "train", write_recipe(folder, tiny_model(), changes))
    assert outcome.code == 0, outcome
    with (folder / "runs/tiny/checkpoints/step-000002/policy/role.json").open("a") as file:
        file.write(" ")
    return folder / "runs/tiny"


def test_a_run_a_checkpoint_and_a_model_are_answered_for_until_a_signal_comes(tmp_path: Path, run: Path) -> None:
    first, second = run / "checkpoints/step-000001", run / "checkpoints/step-000002"
    answers = {}
    for target in (run, first, Path(tiny_model())):
        outcome, answers[target] = serve_and_ask(tmp_path, target)
        assert outcome.code == 128 + signal.SIGINT, outcome
        assert outcome.output.endswith("; Ctrl-C ends it\nstopped\n")
        assert ("step-000002 is damaged and skipped" in outcome.output) == (target == run)
        assert not outcome.errors
    assert answers[run] == answers[first] != answers[Path(tiny_model())]
    assert second.exists(), "it may be somebody else's run: nothing is renamed"


def test_a_server_says_what_it_has_answered_if_there_is_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leaderless.observability.console.STATUS_EVERY_S", 0.0)

    def ask_and_wait(url: str, has_ended: threading.Event) -> str:
        answer = answer_of(url, has_ended)
        time.sleep(3.5)  # it looks every second
        return answer

    outcome, _ = serve_and_ask(tmp_path, Path(tiny_model()), asks=ask_and_wait)
    said = re.findall(
        r"(?m)^in progress: (\d+) prompts; done: (\d+) responses with (\d+) tokens  0:00:\d\d$", outcome.output
    )
    assert said[-1][:2] == ("0", "1")
    assert int(said[-1][2]) > 0
    assert len(set(said)) == len(said) <= 2


def test_an_engine_of_another_environment_answers_with_the_weights_of_a_run(tmp_path: Path, run: Path) -> None:
    options = ("--engine", "sglang", "--engine-python", fake_sglang_python(tmp_path))
    outcome, answer = serve_and_ask(tmp_path, run, *options)
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert answer == serve_and_ask(tmp_path, run, "--engine", "native")[1]
    assert "/update_weights_from_tensor" in (tmp_path / "calls.jsonl").read_text()


def test_what_cannot_be_served_is_refused_in_words(tmp_path: Path, run: Path) -> None:
    (tmp_path / "nothing").mkdir()
    model = tiny_model()
    for arguments, words in (
        ((run / "checkpoints/step-000002",), "is damaged"),
        ((run, "--role", "critic"), "has no role 'critic' (known: policy)"),
        ((tmp_path / "nothing",), "is neither a model, nor a checkpoint, nor the folder of a run"),
        ((tmp_path / "nowhere",), "does not exist"),
        ((model, "--host", "0.0.0.0"), "--host 0.0.0.0: can be reached from other machines, so clients need a token"),
        ((model, "--token", "two words"), "must consist of printable ASCII characters, without blanks"),
        ((model, "--engine", "sglang"), "rollout.external.python: must name the interpreter of an environment"),
        ((model, "--engine", "vllm", "--full"), "is for the native engine, and not for --engine vllm"),
        ((model, "--max-context", 513), "is 513, but the model takes at most 512 tokens"),
    ):
        assert words in " ".join(refused(tmp_path, "serve", *arguments, "--port", 0).split())


def test_without_its_packages_the_command_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderless.config.packaged_files.find_spec", {}.get)
    assert "pip install --editable '.[serve]'" in refused(tmp_path, "serve", tiny_model())


def serve_and_ask(
    folder: Path, target: Path, *options: str, asks: Callable[[str, threading.Event], str] | None = None
) -> tuple[Outcome, str]:
    """The output of the command until Ctrl-C, and its answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers: list[str] = []
    has_ended = threading.Event()

    def client() -> None:
        try:
            answers.append((asks or answer_of)(f"http://127.0.0.1:{port}", has_ended))
        finally:
            if not has_ended.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=client)
    thread.start()
    try:
        outcome = run_alone(folder, "serve", target, *options, "--port", port, "--name", "mine", "--token", "secret")
    finally:
        has_ended.set()
        thread.join()
    assert answers, outcome
    return outcome, answers[0]


def answer_of(url: str, has_ended: threading.Event) -> str:
    """The answer of a server as soon as it gives one, unless it has ended."""
    end = time.monotonic() + DEADLINE_S
    while not is_healthy(url):
        assert time.monotonic() < end
        assert not has_ended.is_set()
        time.sleep(0.02)
    client = OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0, timeout=DEADLINE_S)
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    return client.completions.create(model="mine", prompt="1+1=", temperature=0).choices[0].text


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--directory", "d"], "--directory: is for --train"),
        (["--max-tenants", "2"], "--max-tenants: is for --train"),
        (["--pass-tokens", "64"], "--pass-tokens: is for --train"),
        (["--train", "--engine", "vllm"], "--engine: is for serving alone"),
        (["--train", "--max-context", "100000"], "--max-context: is 100000, but the model takes at most 512"),
    ],
)
def test_options_of_a_training_service_are_for_it_alone(tmp_path: Path, options: list[str], message: str) -> None:
    assert message in refused(tmp_path, "serve", tiny_model(), "--port", "0", *options)


def test_a_checkpoint_is_not_trained_on_and_a_folder_in_use_is_not_taken(tmp_path: Path, run: Path) -> None:
    assert "is a checkpoint: export it" in refused(tmp_path, "serve", run, "--train", "--port", "0")
    with RunDirectory(tmp_path / "d").held():
        said = refused(tmp_path, "serve", tiny_model(), "--train", "--port", "0", "--directory", tmp_path / "d")
    assert "is in use by process" in said

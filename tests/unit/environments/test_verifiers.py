"""Environments of verifiers, played by a process of another Python."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.environments.led import END, lead

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.adapters import verifiers_programs
from leaderless.environments.adapters.verifiers_programs import PackageWorker, make_rows, shared
from leaderless.environments.adapters.verifiers_worker import VerifiersPlayer
from leaderless.environments.guarded_environment import EnvironmentFailure
from leaderless.environments.programs.program_environment import program_maker
from leaderless.environments.protocol import EpisodeFailed

PYTHON = os.environ.get("LEADERLESS_VERIFIERS_PYTHON", "")
SETTINGS: dict[str, object] = {"type": "verifiers", "act_timeout_s": 120}
"""Loading the package takes a while."""
needs_verifiers = pytest.mark.skipif(
    not PYTHON, reason="LEADERLESS_VERIFIERS_PYTHON names no Python with verifiers>=0.3,<0.4, which lives apart"
)
ENVIRONMENTS = '''
import verifiers as vf
from datasets import Dataset

def double(number: int) -> str:
    """Twice a number.

    Args:
        number: The number.
    """
    return str(2 * number)

class Again(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"again {len(state['trajectory'])}"}]

def load_environment(kind):
    print("an environment may print")
    rows = [{"question": f"{kind} {i}", "answer": str(i)} for i in range(3)]

    async def right(completion, answer):
        return float(str(completion[-1]["content"]).strip().endswith(answer))

    async def messages(completion):
        return float(len(completion))

    rubric = vf.Rubric(funcs=[right, messages], weights=[1.0, 0.0])
    if kind == "tool":
        return vf.ToolEnv(tools=[double], dataset=Dataset.from_list(rows), rubric=rubric, max_turns=4)
    if kind == "turns":
        return Again(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=3)
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
'''
ANSWERS = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    if "cancel" in question:
        open(question.get("file", sys.argv[1]), "w").write(str(question["cancel"]))
    elif question["what"] == "end":
        print(json.dumps({"fatal": "it was told to"}), flush=True)
        sys.exit(3)
    elif question["what"] != "nothing":
        print(json.dumps({"number": question["number"], "echo": question["what"]}), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> PackageWorker:
    return PackageWorker([sys.executable, "-c", ANSWERS, str(tmp_path / "canceled")])


def test_a_worker_answers_in_one_event_loop_after_the_other(worker: PackageWorker) -> None:
    async def ask(*words: str) -> list[Json]:
        return [found["echo"] for found in await asyncio.gather(*(worker.ask({"what": word}) for word in words))]

    assert asyncio.run(ask("a", "b", "c")) == ["a", "b", "c"]
    assert asyncio.run(ask("d")) == ["d"]


def test_all_who_wait_are_told_why_a_worker_has_ended(worker: PackageWorker) -> None:
    async def ask() -> list[object]:
        waiting = [asyncio.create_task(worker.ask({"what": word})) for word in ("nothing", "nothing", "end")]
        return await asyncio.gather(*waiting, return_exceptions=True)

    for error in asyncio.run(ask()):
        assert isinstance(error, EnvironmentFailure)
        assert error.kind == "infrastructure"
        assert "exit code 3: it was told to" in str(error)
    assert worker.has_ended
    with pytest.raises(EnvironmentFailure, match="it was told to"):
        asyncio.run(worker.ask({"what": "a"}))


def test_who_gives_up_cancels_the_question(worker: PackageWorker, tmp_path: Path) -> None:
    async def ask() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.ask({"what": "nothing"}), 0.2)
        await worker.ask({"what": "until the cancel was read"})

    asyncio.run(ask())
    assert (tmp_path / "canceled").read_text() == "0"


def test_a_worker_is_shared_until_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ANSWERS, str(tmp_path / "canceled")]
    worker = shared(command)
    assert shared(command) is worker
    with pytest.raises(EnvironmentFailure):
        asyncio.run(worker.ask({"what": "end"}))
    another = shared(command)
    assert another is not worker
    assert asyncio.run(another.ask({"what": "a"}))["echo"] == "a"


def test_a_worker_ends_with_whoever_has_started_it(tmp_path: Path) -> None:
    worker = PackageWorker([sys.executable, "-c", ANSWERS, str(tmp_path / "canceled")])
    process = worker._process
    del worker
    assert process.wait(5) == 0


def test_a_python_without_the_package_is_refused_with_the_remedy() -> None:
    for python, words in (
        (sys.executable, "has no package verifiers: python -m venv"),
        ("/no/python", "give the path"),
    ):
        config = EnvironmentConfig(type="verifiers", options={"environment": "x", "python": python})
        with pytest.raises(RecipeError, match=words) as refused:
            program_maker(config)
        assert "environment.options.python" in str(refused.value)


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Json]:
    folder = tmp_path_factory.mktemp("environments")
    (folder / "of_tests.py").write_text(ENVIRONMENTS)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {"environment": "of-tests", "python": PYTHON}


@needs_verifiers
def test_examples_are_rows_that_are_played_and_rewarded(options: dict[str, Json]) -> None:
    rows = list(make_rows("of-tests", 2, first=1, args={"kind": "single"}, python=PYTHON))
    assert [{"question": f"single {n}", "answer": str(n), "split": "train", "example": n} for n in (1, 2)] == rows
    config = SETTINGS | {"options": options | {"args": {"kind": "single"}}}
    episodes, engine = lead(tasks=rows, say=lambda _: f"1{END}", **config)
    assert [episode.error for episode in episodes] == [""] * 2
    assert [sum(sample.rewards) for episode in episodes for sample in episode.trace.samples()] == [1.0, 0.0]
    assert len(engine.said) == 2


@needs_verifiers
def test_turns_and_tools_of_verifiers_are_parts_of_one_conversation(options: dict[str, Json]) -> None:
    task = {"example": 2, "split": "train"}
    config = SETTINGS | {"options": options | {"args": {"kind": "turns"}}}
    (episode,), engine = lead(tasks=[task], say=lambda context: f"{context.count('again')}{END}", **config)
    assert not episode.error
    (sample,) = episode.trace.samples()
    assert (len(engine.said), sum(sample.rewards)) == (3, 1.0), "the third answer is 2"
    assert episode.info["metrics"] == {"right": 1.0, "messages": 5.0, "num_turns": 3.0}

    def use(context: str) -> str:
        call = json.dumps({"name": "double", "arguments": {"number": 1}})
        return (
            f"it is 2{END}" if context.count("<|im_start|>assistant") > 1 else f"<tool_call>\n{call}\n</tool_call>{END}"
        )

    config["options"] = options | {"args": {"kind": "tool"}}
    (episode,), engine = lead(tasks=[task], say=use, **config)
    assert not episode.error
    (sample,) = episode.trace.samples()
    assert (len(engine.said), sum(sample.rewards)) == (2, 1.0)


@needs_verifiers
def test_an_empty_answer_is_graded_and_no_failure(options: dict[str, Json]) -> None:
    config = SETTINGS | {"options": options | {"args": {"kind": "turns"}}}
    (episode,), _ = lead(tasks=[{"example": 0, "split": "train"}], say=lambda _: END, **config)
    assert not episode.error
    assert episode.info["metrics"]["messages"] == 0.0
    (sample,) = episode.trace.samples()
    assert sum(sample.rewards) == 0.0


@needs_verifiers
def test_what_goes_wrong_in_verifiers_ends_its_episode(options: dict[str, Json]) -> None:
    task = {"example": 2, "split": "train"}
    config = SETTINGS | {"options": options | {"args": {"kind": "turns"}}}
    tasks = [task, {"example": 7, "split": "train"}, {"question": "no example"}]
    cut, missing, other = lead(tasks=tasks, max_turns=2, **config)[0]
    assert not cut.error
    assert cut.is_cut
    assert "has 3 examples" in missing.error
    assert "make rows with make_rows" in other.error
    config["options"] = options | {"args": {"kind": "single", "wrong": 1}}
    assert "unexpected keyword argument 'wrong'" in lead(tasks=[task], **config)[0][0].error


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ToolCallError", "tool"),
        ("SandboxError", "sandbox"),
        ("InfraError", "infrastructure"),
        ("ModelError", "infrastructure"),
        ("KernelProtocolError", None),
        ("ToolParseError", "graded"),
        ("EmptyModelResponseError", "graded"),
    ],
)
def test_an_error_of_verifiers_has_a_kind_unless_it_is_the_policys(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str | None
) -> None:
    class Dataset(list[dict[str, Json]]):
        pass

    class World:
        def get_dataset(self) -> Dataset:
            return Dataset([{"prompt": "?"}])

        async def run_rollout(self, *_: object) -> dict[str, Json]:
            error: Json = {"error": name, "error_chain_str": "it broke"}
            return {"reward": 0.25, "metrics": {}, "error": error}

    package = SimpleNamespace(OpenAIChatCompletionsClient=lambda client: client)
    player = VerifiersPlayer(package, World())  # type: ignore[arg-type]

    class Worker:
        async def ask(self, question: dict[str, Json]) -> Json:
            return await player._outcome(question)

    monkeypatch.setattr(verifiers_programs, "shared", lambda _: Worker())
    program = object.__new__(verifiers_programs.Verifiers)
    program._command = []
    chat = SimpleNamespace(base_url="http://127.0.0.1:9", api_key="x", overflow=None)
    found = program({"example": 0, "split": "train"}, chat)  # type: ignore[arg-type]
    if kind == "graded":
        assert asyncio.run(found)["reward"] == 0.25
        return
    with pytest.raises(EpisodeFailed, match=f"verifiers: {name}: it broke") as failed:
        asyncio.run(found)
    assert failed.value.kind == kind

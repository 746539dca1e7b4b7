"""Environments of verifiers by address, with the servers and the client of the package: `make test-verifiers`."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.by_address import trained
from tests.unit.environments.led import END, Speaker, lead

from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.episode import Episode
from leaderless.environments.programs.program_environment import program_maker
from leaderless.environments.registry import try_environment

pytestmark = pytest.mark.skipif(find_spec("verifiers") is None, reason="no package verifiers: make test-verifiers")
TASKSETS = Path(__file__).parents[1] / "fakes/verifiers_tasksets"
CALL = '<tool_call>\n{"name": "sums_add", "arguments": {"a": %d, "b": 2}}\n</tool_call>'


def settings(taskset: str, harness: Mapping[str, Any] | str = "null", **more: Any) -> dict[str, Any]:
    """Settings of an environment with one agent."""
    found = {"id": harness} if isinstance(harness, str) else dict(harness)
    return {"taskset": {"id": taskset}, "agent": {"harness": found, "runtime": {"type": "subprocess"}, **more}}


def inside(count: int = 1) -> dict[str, Any]:
    """A harness without a process, for speed."""
    return {"id": "asking", "is_inside": True, "count": count}


AGENT = settings("letters", inside())["agent"]


@pytest.fixture(scope="module", autouse=True)
def tasksets_are_known() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(TASKSETS))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TASKSETS), os.environ.get("PYTHONPATH", "")]))
        # Where uv is, which the package's own harnesses need.
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        yield


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextmanager
def served(environment: Mapping[str, Any], *, port: int = 0, **env: str) -> Iterator[str]:
    """The address of a server of the package in a process of its own."""
    url = f"tcp://127.0.0.1:{port or free_port()}"
    with running(["-m", "tests.fakes.verifiers_served", url, json.dumps(environment)], url, **env):
        yield url


@contextmanager
def running(arguments: list[str], url: str, **env: str) -> Iterator[None]:
    """A process of Python that listens at an address."""
    process = subprocess.Popen([sys.executable, *arguments], env=os.environ | env)
    try:
        for _ in range(600):
            with suppress(OSError):
                socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))).close()
                break
            assert process.poll() is None
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(20)


def rows_of(environment: Mapping[str, Any], count: int = 3, **more: Any) -> list[dict[str, Any]]:
    from leaderless.environments.adapters.verifiers_tasks import make_rows

    return list(make_rows(environment, count, **more))


def played(
    environment: Mapping[str, Any], url: str, say: Any = lambda _: f"aab{END}", count: int = 3, **more: Any
) -> tuple[list[Episode], Speaker]:
    """Episodes of the first tasks of an environment."""
    options = {"url": url, **more.pop("options", {})}
    more.setdefault("act_timeout_s", 60)
    tasks = more.pop("tasks", None) or rows_of(environment, count)
    return lead(tasks=tasks, say=say, type="verifiers", options=options, **more)


def rewards_of(episode: Episode) -> float:
    (sample,) = episode.trace.samples()
    return sum(sample.rewards)


def test_rows_are_the_tasks_of_a_taskset() -> None:
    rows = rows_of(settings("letters"), 2, first=2)
    assert [row["question"] for row in rows] == ["say c", "say a"]
    data = json.loads(rows[0]["task"])
    assert (data["idx"], data["letter"], data["prompt"]) == (2, "c", "say c")
    assert [json.loads(row["task"])["answer"] for row in rows_of(settings("sums"), 2)] == ["2", "3"]


@pytest.mark.parametrize(
    ("environment", "count", "words"),
    [
        (settings("sums"), 5, "is 5 from task 0 on, but 'sums' has only 4"),
        (settings("unrewarded"), 1, "UnrewardedTask of 'unrewarded' gives no reward: give it a method with @vf.reward"),
        (settings("nowhere"), 1, "taskset 'nowhere' not found"),
        ({"taskset": {"id": "letters", "accidents": ""}}, 1, "accidents"),
    ],
)
def test_a_taskset_that_cannot_be_used_is_refused(environment: dict[str, Any], count: int, words: str) -> None:
    with pytest.raises(RecipeError, match=words.replace("(", r"\(")):
        rows_of(environment, count)


def test_a_task_of_one_message_is_rewarded_by_its_rubric() -> None:
    environment = settings("letters")
    with served(environment) as url:
        episodes, engine = played(environment, url)
    assert [(episode.cause, episode.error) for episode in episodes] == [("", "")] * 3
    assert [rewards_of(episode) for episode in episodes] == pytest.approx([2 / 3, 1 / 3, 0])
    assert episodes[0].info["metrics"] == {"length": 3.0}
    assert episodes[0].info["stop"] == "agent_completed"
    assert len(engine.said) == 3


def test_the_server_of_the_example_has_processes_that_play() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    with running(["examples/verifiers/serve.py", "letters", url], url):
        episodes, _ = played({"taskset": {"id": "letters"}}, url, act_timeout_s=120)
    assert [(episode.cause, episode.error) for episode in episodes] == [("", "")] * 3


def test_calls_of_a_toolset_are_turns_of_one_sample_with_the_tokens_that_were_sampled() -> None:
    def say(context: str) -> str:
        turn = context.count("<|im_start|>assistant") - 1
        # It says "ab" as two tokens, which the tokenizer would encode as one.
        return (CALL % 0, CALL % 13, "ab2")[turn] + END

    environment = settings("sums")
    with served(environment) as url:
        (episode,), engine = played(environment, url, say, 1)
    assert (episode.cause, episode.error) == ("", "")
    (sample,) = episode.trace.samples()
    assert episode.info["rewards"] == {"calls": 1.0, "right": 1.0}, "a call that fails leaves no trace in the state"
    assert sum(sample.rewards) == 1.5
    sampled = [token for token, is_own in zip(sample.tokens, sample.is_trained, strict=True) if is_own]
    assert sampled == [token for tokens in engine.said for token in tokens]
    assert len(engine.said) == 3
    results = [node.messages[0] for node in episode.trace.nodes if node.messages[0]["role"] == "tool"]
    assert results[0]["content"] == "2"
    assert "unlucky" in str(results[1]["content"]), "the policy is told what a tool raises"


def test_a_harness_asks_the_policy_and_its_own_sampling_is_left_out() -> None:
    environment = settings("letters", {"id": "asking", "count": 3})
    with served(environment) as url:
        episodes, engine = played(environment, url)
    assert [(episode.cause, episode.error) for episode in episodes] == [("", "")] * 3
    assert len(engine.said) == 9
    for episode in episodes:
        (sample,) = episode.trace.samples()
        assert sum(sample.is_trained) == sum(len(tokens) for tokens in engine.said) / 3
        assert [node.said.temperature for node in episode.trace.said() if node.said] == [1.0] * 3


@pytest.mark.parametrize(
    ("environment", "kind", "words"),
    [
        (
            {**settings("letters", inside()), "taskset": {"id": "letters", "accident": "grader"}},
            "environment",
            "verifiers: TaskError: .*the grader is broken",
        ),
        (
            {
                **settings("letters", inside(), timeout={"scoring": 0.5}),
                "taskset": {"id": "letters", "accident": "late"},
            },
            "deadline",
            "verifiers: scoring_timeout: raise env.agent.timeout of the server",
        ),
        (
            settings("letters", {"id": "asking", "end": "fail"}),
            "environment",
            "verifiers: HarnessError: .*the program gives up",
        ),
        (
            {**settings("letters", inside()), "taskset": {"id": "letters", "accident": "sandbox"}},
            "sandbox",
            "verifiers: SandboxError: ",
        ),
        (settings("letters", inside(), model="other"), "environment", "no agent of the environment asks the policy"),
        (
            {"id": "pairs", "taskset": {"id": "letters"}, **dict.fromkeys(("solver", "judge"), AGENT)},
            "environment",
            "the policy plays 2 agents of an episode \\('solver', 'judge'\\)",
        ),
        (
            {"id": "pairs", "taskset": {"id": "letters"}, "is_alone": True, "solver": AGENT, "judge": AGENT},
            "environment",
            "the policy plays the agent 'judge', which the environment does not train",
        ),
    ],
)
def test_what_goes_wrong_at_the_server_has_a_kind(environment: dict[str, Any], kind: str, words: str) -> None:
    with served(environment) as url:
        (episode,), _ = played(environment, url, count=1, max_attempts=1)
    assert episode.cause == kind, episode.error
    assert re.search(words, episode.error, re.DOTALL), episode.error


def test_a_task_without_a_reward_fails_with_the_remedy() -> None:
    environment = settings("unrewarded", inside())
    task = {"question": "say a", "task": json.dumps({"prompt": "say a"})}
    with served(environment) as url:
        (episode,), _ = played(environment, url, tasks=[task])
    assert episode.cause == "environment"
    assert "a task of type UnrewardedTask has no reward: give its class a method with @vf.reward" in episode.error


def test_a_harness_that_never_ends_is_ended_and_others_are_unhurt(tmp_path: Path) -> None:
    environment, file = settings("letters", {"id": "asking", "end": "sleep"}), tmp_path / "process"
    environment["agent"]["harness"]["env"] = {"ASKING_FILE": str(file)}
    with served(environment) as url:
        say = lambda context: ("sleep" if "say b" in context else "aa") + END  # noqa: E731
        episodes, _ = played(environment, url, say, act_timeout_s=6)
        assert [episode.cause for episode in episodes] == ["", "deadline", ""]
        assert "has neither asked anything nor ended for 6 s: raise environment.act_timeout_s" in episodes[1].error
        for _ in range(100):
            if not Path(f"/proc/{file.read_text()}").exists():
                break
            time.sleep(0.1)
        assert not Path(f"/proc/{file.read_text()}").exists(), "the server has ended its program"
        assert not played(environment, url, lambda _: f"a{END}", 1)[0][0].error, "it plays on"


def test_a_server_that_ends_fails_its_episodes_which_are_tried_again() -> None:
    environment = settings("letters", inside()) | {"taskset": {"id": "letters", "accident": "die"}}
    with served(environment) as url:
        (episode,), _ = played(environment, url, count=1, max_attempts=2, options={"wait_s": 1})
    assert (episode.cause, episode.attempts) == ("infrastructure", 2)
    first, second = episode.failures
    assert f"the verifiers server {url} has ended: see its log, and start it again" in first.error
    assert "cannot be reached: it has not answered for 1 s; start it, or correct" in second.error


def test_a_server_that_is_back_is_used_again() -> None:
    environment, port = settings("letters", inside()), free_port()
    for _ in range(2):
        with served(environment, port=port) as url:
            assert [episode.error for episode in played(environment, url)[0]] == [""] * 3


def test_a_row_of_another_taskset_is_refused() -> None:
    with served(settings("letters", inside())) as url:
        tasks = [*rows_of(settings("sums"), 1), {"question": "a row of something else"}]
        first, second = played({}, url, tasks=tasks)[0]
    assert first.cause == second.cause == "environment"
    assert "refuses the task (ValidationError: 1 validation error for LetterData" in first.error
    assert "make rows of the taskset that it serves" in first.error
    assert "the row is no task of verifiers: make rows with make_rows" in second.error


def test_limits_of_the_recipe_cut_an_episode_and_limits_of_the_server_let_it_be_graded() -> None:
    environment = settings("letters", inside(3))
    with served(environment) as url:
        (cut,), _ = played(environment, url, lambda _: f"a{END}", 1, max_turns=2)
        (long,), _ = played(environment, url, lambda _: f"a{END}", 1, max_tokens=70)
    for episode in (cut, long):
        assert (episode.cause, episode.error, episode.is_cut) == ("", "", True)
        assert rewards_of(episode) == 0.0
    assert [failure.kind for failure in long.failures] == ["policy"]
    environment["agent"]["max_turns"] = 2
    with served(environment) as url:
        (graded,), engine = played(environment, url, lambda _: f"a{END}", 1)
    assert (graded.error, graded.is_cut, graded.info["stop"]) == ("", False, "max_turns")
    assert (rewards_of(graded), len(engine.said)) == (1.0, 2)


def test_a_server_of_another_version_is_refused_with_the_remedy() -> None:
    environment = settings("letters", inside())
    with served(environment, FAKE_VERSION="0.5.1") as url:
        (episode,), _ = played(environment, url, count=1)
    assert episode.cause == "environment"
    assert "it runs verifiers 0.5.1; run it with verifiers of the same version as here (0.4" in episode.error


def test_what_is_no_server_is_refused_before_a_run() -> None:
    def config(url: object) -> EnvironmentConfig:
        return EnvironmentConfig(type="verifiers", options={"url": url})  # type: ignore[dict-item]

    with pytest.raises(RecipeError, match=r"cannot be reached: .*Connection refused; start it, or correct env"):
        try_environment(config(f"tcp://127.0.0.1:{free_port()}"))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RecipeError, match=f"{url} is no verifiers server that this client understands: .*version"):
            try_environment(config(url))
    for other in ("tcp://10.0.0.1:5000", "http://127.0.0.1:5000", "127.0.0.1:5000", "tcp://127.0.0.1", 5000):
        with pytest.raises(RecipeError, match="must be an address of this machine") as refused:
            program_maker(config(other))
        assert "environment.options.url" in str(refused.value)
    with served(settings("letters", inside())) as url:
        try_environment(config(url))


def test_an_answer_in_another_form_is_of_another_protocol() -> None:
    """Release 0.3 had answers of two parts; here a server says that it is there, and plays in another way."""
    import msgpack
    import zmq

    router = zmq.Context.instance().socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    end = threading.Event()

    def answer() -> None:
        while not end.is_set():
            if router.poll(100):
                client, request, method, _ = router.recv_multipart()
                body: dict[str, object] = {"success": True}
                if method == b"run":
                    body |= {"head": {"rollouts": []}, "traces": []}
                router.send_multipart([client, request, b"reply", msgpack.packb(body)])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        (episode,), _ = played({}, f"tcp://127.0.0.1:{port}", tasks=rows_of(settings("letters"), 1))
    finally:
        end.set()
        thread.join()
        router.close(0)
    assert episode.cause == "environment"
    assert "that this client understands: its answer cannot be read (" in episode.error


def tasks_in(folder: Path) -> dict[str, str]:
    """Settings of data whose rows are written into a folder."""
    rows = [row | {"answer": ""} for row in rows_of(settings("letters"), 192)[::3]]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(folder / "tasks.jsonl"), "prompt": "question", "answer": "answer", "template": "plain"}


def test_a_recipe_trains_by_address(tmp_path: Path) -> None:
    with served(settings("letters", inside(2))) as url:
        changes = {"steps": 20, "optimizer.learning_rate": 1e-2, "data.train": tasks_in(tmp_path)}
        steps, printed = trained(tmp_path, "verifiers", url, **changes)
    assert len(steps) == 20, printed[-3000:]
    assert all(step["episode/failed"] == 0 and step["episode/turns"] == 2 for step in steps)
    means = [step["reward/mean"] for step in steps]
    print(f"share of the letter that is asked for: {means[0]:.2f} in the first step, {means[-1]:.2f} in the last")
    assert sum(means[-3:]) > 1.5 * sum(means[:3]), "it learns what the server rewards"


def test_a_recipe_without_its_server_is_refused(tmp_path: Path) -> None:
    steps, printed = trained(
        tmp_path, "verifiers", f"tcp://127.0.0.1:{free_port()}", **{"data.train": tasks_in(tmp_path)}
    )
    assert steps == []
    assert "cannot be reached: [Errno 111] Connection refused; start it, or" in " ".join(printed.split())

"""Programs in other processes ask the policy in the format of OpenAI's API, and are rewarded, watched and ended."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import openai
import psutil
import pytest
from tests.unit.environments.led import END, Speaker, lead, text_of, tokens_of
from tests.unit.environments.test_programs import TOOL, trained_tokens

from leaderless.environments.episode import Episode
from leaderless.environments.programs import Chat
from leaderless.environments.programs.command import Confinement
from leaderless.environments.protocol import Task
from leaderless.rewards.sandbox.sandboxes import bubblewrap_refusal

CURL = """
ask() {
    curl --silent --show-error --fail-with-body -H "Authorization: Bearer $OPENAI_API_KEY" \\
        -H 'Content-Type: application/json' -d "$2" "$OPENAI_BASE_URL/$1"
}
"""
QUESTION = '{"model": "any", "messages": [{"role": "user", "content": "one"}]}'


def is_running(*command: str) -> bool:
    """Whether a process with these arguments runs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-len(command) :] == list(command):
                return True
    return False


def client_of(chat: Chat) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0)


def run_script(text: str, **settings: object) -> Episode:
    """An episode that a shell script leads."""
    (episode,), _ = lead(type="command", options={"command": ["bash", "-c", CURL + text]}, **settings)
    return episode


async def agent(task: Task, chat: Chat) -> float:
    """A loop as people write it: the client's own objects are sent back."""
    async with client_of(chat) as client:
        messages: list[object] = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
        for _ in range(5):
            answer = await client.chat.completions.create(
                model="gpt-x",
                messages=messages,  # type: ignore[arg-type]
                tools=[TOOL],  # type: ignore[list-item]
                temperature=1.0,
                max_tokens=500,
            )
            message = answer.choices[0].message
            messages.append(message if task["text"] == "object" else message.model_dump())
            if not message.tool_calls:
                return float(message.content == "blue")
            for call in message.tool_calls:
                assert json.loads(call.function.arguments) == {"word": "ab"}
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "seventh"})
    return -1.0


def look_up(context: str) -> str:
    call = '<tool_call>{"name": "look_up", "arguments": {"word": "ab"}}</tool_call>'
    return f"blue{END}" if context.count("seventh") == 2 else f"Wait.\n{call}{END}"


@pytest.mark.parametrize("form", ["object", "dictionary"])
def test_an_agent_with_the_openai_package_is_one_sample_of_what_was_sampled(form: str) -> None:
    (episode,), engine = lead(agent, look_up, [{"text": form}])
    assert not episode.error
    assert len(list(episode.trace.samples())) == 1
    assert trained_tokens(episode) == engine.said
    assert [len(node.tokens) for node in episode.trace.said()] == [len(said) for said in engine.said]
    assert episode.trace.said()[-1].said.reward == 1.0
    assert [call for node in episode.trace.said() for call in node.said.log_probs] == [-0.5] * sum(
        map(len, engine.said)
    )


def test_replies_have_what_was_asked_for() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            question = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
            reply = await client.chat.completions.create(
                **question, n=2, logprobs=True, extra_body={"return_token_ids": True}
            )
            tokens = [*tokens_of("a"), *tokens_of("b"), *tokens_of(END)]
            assert [choice.message.content for choice in reply.choices] == ["ab", "ab"]
            assert [choice.token_ids for choice in reply.choices] == [tokens, tokens]
            assert [part.logprob for part in reply.choices[0].logprobs.content] == [-0.5] * 3
            assert text_of(reply.prompt_token_ids).endswith("assistant\n")
            assert (reply.usage.completion_tokens, reply.usage.prompt_tokens) == (6, len(reply.prompt_token_ids))
            stream = await client.chat.completions.create(
                **question, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "ab"
            assert chunks[-1].usage.completion_tokens == 3
            stream = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "call"}], tools=[TOOL], stream=True
            )
            deltas = [chunk.choices[0] async for chunk in stream]
            assert [call.function.name for delta in deltas for call in delta.delta.tool_calls or []] == ["look_up"]
            assert deltas[-1].finish_reason == "tool_calls"
            texts = await client.completions.create(model="m", prompt=["x", "y"], max_tokens=2)
            assert [(choice.text, choice.finish_reason) for choice in texts.choices] == [("ab", "length")] * 2
            assert [model.id async for model in client.models.list()] == ["policy"]
        return 1.0

    (episode,), engine = lead(solve, lambda text: look_up("") if "call" in text else f"ab{END}")
    assert not episode.error
    assert len(episode.trace.said()) == len(engine.said) == 6


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.7}, "temperature=0.7 differs from the recipe's 1, .*set rollout.temperature"),
        ({"top_p": 0.9}, "top_p=0.9 differs from the recipe's 1, .*set rollout.top_p"),
        ({"seed": 3}, "seed=3 differs from the recipe's 5"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice must be auto or none"),
        ({"presence_penalty": 1.0}, "presence_penalty is not supported here: .*another distribution"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported here"),
        ({"logprobs": True, "top_logprobs": 1}, "top_logprobs is not supported here: .*sampled token only"),
        ({"messages": []}, "messages=.*at least 1 item"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages must end with a message of another role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "list of parts of type text or image"),
    ],
)
def test_what_would_change_the_numbers_is_refused_with_the_remedy(fields: dict[str, object], words: str) -> None:
    async def solve(task: Task, chat: Chat) -> float:
        await chat.ask("first")
        async with client_of(chat) as client:
            question = {"model": "m", "messages": [{"role": "user", "content": "a"}], **fields}
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(**question)
        return 1.0

    (episode,), _ = lead(solve)
    assert not episode.error


def test_each_episode_has_an_address_and_a_key_of_its_own_until_it_ends() -> None:
    addresses: dict[str, tuple[str, str]] = {}

    async def solve(task: Task, chat: Chat) -> float:
        addresses[task["text"]] = (chat.base_url, chat.api_key)
        await chat.ask("?")
        if task["text"] == "late":
            await asyncio.sleep(0.1)  # the other one has ended
            key = chat.api_key
            async with openai.AsyncOpenAI(base_url=addresses["early"][0], api_key=key, max_retries=0) as client:
                with pytest.raises(openai.NotFoundError, match="is not played here: it has ended"):
                    await client.post("/reward", body={"reward": 1.0}, cast_to=dict)
            async with openai.AsyncOpenAI(base_url=chat.base_url, api_key=addresses["early"][1]) as client:
                with pytest.raises(openai.AuthenticationError, match="send OPENAI_API_KEY"):
                    await client.models.list()
            async with client_of(chat) as client:
                with pytest.raises(openai.BadRequestError, match="must be a number"):
                    await client.post("/reward", body={"score": 1.0}, cast_to=dict)
        return 1.0

    episodes, _ = lead(solve, tasks=[{"text": "early"}, {"text": "late"}])
    assert not any(episode.error for episode in episodes)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(addresses["late"][0].split(":")[2].split("/")[0])))


def test_a_client_that_leaves_is_sampled_for_no_longer() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        async with client_of(chat) as client:
            question = {"model": "m", "messages": [{"role": "user", "content": "long"}]}
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(**question, timeout=0.2)
            while chat.idle_s == 0:
                await asyncio.sleep(0.01)
        await chat.ask("?")
        return 1.0

    class SlowSpeaker(Speaker):
        def step(self):  # type: ignore[no-untyped-def]
            time.sleep(0.01)
            return super().step()

    engine = SlowSpeaker(lambda context: "x" * (200 if "long" in context else 1))
    (episode,), _ = lead(solve, engine=engine)
    assert not episode.error
    assert len(engine.aborted) == 1
    assert len(episode.trace.said()) == 1


def test_a_refused_question_ends_those_that_were_asked_with_it() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        await chat.ask("?")
        async with client_of(chat) as client:
            question = {"model": "m", "messages": [{"role": "user", "content": "long"}], "n": 2}
            with pytest.raises(openai.BadRequestError, match="may do so 2 times"):
                await client.chat.completions.create(**question)
        while chat.idle_s == 0:
            await asyncio.sleep(0.01)
        return 1.0

    (episode,), engine = lead(solve, lambda context: "x" * (200 if "long" in context else 1), max_turns=2)
    assert not episode.error
    assert len(engine.aborted) == 1
    assert len(episode.trace.said()) == 1


def test_questions_under_way_at_the_end_of_an_episode_are_told_so() -> None:
    pending: list[asyncio.Task[object]] = []

    async def solve(task: Task, chat: Chat) -> float:
        client = client_of(chat)
        if task["text"] == "late":
            while not pending or not pending[0].done():
                await chat.ask("on")
            with pytest.raises(openai.InternalServerError, match="the episode has ended"):
                await pending[0]
            return 1.0
        await chat.ask("?")
        pending.append(asyncio.ensure_future(client.completions.create(model="m", prompt="long", max_tokens=200)))
        while chat.idle_s:
            await asyncio.sleep(0.01)
        return 1.0

    class SlowSpeaker(Speaker):
        def step(self):  # type: ignore[no-untyped-def]
            time.sleep(0.005)
            return super().step()

    engine = SlowSpeaker(lambda context: "x" * (200 if "long" in context else 1))
    episodes, _ = lead(solve, tasks=[{"text": "early"}, {"text": "late"}], engine=engine, max_turns=10_000)
    assert [episode.error for episode in episodes] == ["", ""]


def test_a_shell_script_leads_an_episode() -> None:
    episode = run_script(f"""
        set -e
        answer=$(ask chat/completions '{QUESTION}')
        [[ $answer == *'"content":"0"'* ]]
        ask completions '{{"model": "any", "prompt": "two"}}' > /dev/null
        [[ $LEADERLESS_TASK == '{{"text": "a"}}' && $LEADERLESS_SEED == 5/0 ]]
        echo "thinking"
        echo '{{"reward": 0.5, "steps": 2}}'
        echo
    """)
    assert not episode.error
    assert episode.trace.said()[-1].said.reward == 0.5
    assert episode.info == {"steps": 2}
    assert len(episode.trace.said()) == 2


def test_a_reward_may_be_posted() -> None:
    episode = run_script(f"ask chat/completions '{QUESTION}' && ask reward '{{\"reward\": -2}}'")
    assert not episode.error
    assert episode.trace.said()[-1].said.reward == -2.0


@pytest.mark.parametrize(
    ("script", "cause", "words"),
    [
        ("echo lost >&2; exit 3", "environment", "ended with exit code 3: .*lost"),
        ("kill -9 $$", "infrastructure", "the signal SIGKILL"),
        ("sleep 1000", "deadline", "for 1 s: raise environment.act_timeout_s"),
        ("echo fine", "environment", "gave no reward; its last line is 'fine'"),
        ("echo '{\"reward\": true}'", "environment", "gave the reward True: it must be a finite number"),
    ],
)
def test_a_script_that_fails_is_counted_by_cause(script: str, cause: str, words: str) -> None:
    episode = run_script(
        f"ask chat/completions '{QUESTION}' > /dev/null\n{script}", act_timeout_s=1 if cause == "deadline" else 30
    )
    assert episode.cause == cause
    assert re.search(words, episode.error, re.DOTALL), episode.error


def test_a_task_that_no_variable_holds_fails_with_the_remedy() -> None:
    question = f"ask chat/completions '{QUESTION}' > /dev/null && echo '{{\"reward\": 1}}'"
    options = {"command": ["bash", "-c", CURL + question]}
    room = 2**17 - len('LEADERLESS_TASK={"text": ""}') - 1
    fits, too_long = lead(type="command", options=options, tasks=[{"text": "x" * room}, {"text": "x" * (room + 1)}])[0]
    assert not fits.error
    assert "holds 131,055: leave out columns" in too_long.error


def test_a_failed_engine_ends_the_programs_that_wait_for_it() -> None:
    class Broken(Speaker):
        def step(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("out of order")

    def plain(task: Task, chat: Chat) -> float:
        with openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key, max_retries=0) as client:
            client.completions.create(model="m", prompt="x")
        return 1.0

    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="out of order"):
        lead(plain, engine=Broken(lambda _: ""))
    script = f"sleep 4714 & ask chat/completions '{QUESTION}'; wait"
    with pytest.raises(RuntimeError, match="out of order"):
        lead(type="command", options={"command": ["bash", "-c", CURL + script]}, engine=Broken(lambda _: ""))
    assert time.monotonic() - begin < 10
    assert not is_running("sleep", "4714")


def test_nothing_that_a_command_has_started_is_left() -> None:
    begin = time.monotonic()
    episode = run_script(f"ask chat/completions '{QUESTION}' > /dev/null; sleep 4711 & echo '{{\"reward\": 1}}'")
    assert not episode.error
    assert time.monotonic() - begin < 5
    assert not is_running("sleep", "4711")
    episode = run_script("sleep 4711 & wait", act_timeout_s=0.3)
    assert episode.cause == "deadline"
    assert not is_running("sleep", "4711")


def test_a_confinement_leaves_no_connection_open(tmp_path: Path) -> None:
    async def check() -> None:
        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.read(3))
            writer.write_eof()
            await reader.read()
            writer.close()

        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Confinement(str(tmp_path), f"http://127.0.0.1:{port}/v1"):
            for is_whole in (True, False):
                reader, writer = await asyncio.open_unix_connection(tmp_path / "door")
                if is_whole:
                    writer.write(b"one")
                    assert await reader.read() == b"one"
                else:
                    writer.write(b"o")
                    await asyncio.sleep(0.05)
                writer.close()
        await asyncio.sleep(0.05)
        found = psutil.Process().net_connections("tcp")
        assert not [one for one in found if one.raddr and one.raddr.port == port]

    asyncio.run(check())


@pytest.mark.skipif(bool(bubblewrap_refusal()), reason=str(bubblewrap_refusal()))
def test_a_confined_command_reaches_the_policy_and_nothing_else(tmp_path: Path) -> None:
    other = socket.create_server(("127.0.0.1", 0))
    reached: list[object] = []
    threading.Thread(target=lambda: reached.append(other.accept()), daemon=True).start()
    script = f"""
        set -e
        ask chat/completions '{QUESTION}' > /dev/null
        ! curl --silent --max-time 2 http://127.0.0.1:{other.getsockname()[1]}
        ! touch {tmp_path}/mine
        ! touch {Path(__file__).parent}/mine
        ! kill -0 {psutil.Process().pid}
        ! test -e {tmp_path}/secret
        touch $HOME/mine /tmp/mine
        test -z "$SECRET_OF_THE_RUN"
        test "$GIVEN" = yes
        sleep 4712 &
        echo '{{"reward": 1}}'
    """
    (tmp_path / "secret").touch()
    options = {"command": ["bash", "-c", CURL + script], "confine": True, "env": {"GIVEN": "yes"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_RUN", "4711")
        (episode,), _ = lead(type="command", options=options)
    assert not episode.error
    assert episode.trace.said()[-1].said.reward == 1.0
    assert not reached
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    assert not is_running("sleep", "4712")
    options = {"command": [sys.executable, "-c", "import time; time.sleep(4713)"], "confine": True}
    (episode,), _ = lead(type="command", options=options, act_timeout_s=0.5)
    assert episode.cause == "deadline"
    assert not is_running("-c", "import time; time.sleep(4713)")
    other.close()

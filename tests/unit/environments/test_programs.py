"""What programs ask becomes samples whose tokens are those that were sampled."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
from tests.templates import CHATML, tokenizer_with
from tests.unit.environments.led import END, Speaker, lead, text_of, tokens_of

from leaderless.config import RecipeError, packaged_files
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode, Trace
from leaderless.environments.programs import AskRefusedError, Chat
from leaderless.environments.programs.conversations import ProgramConversations
from leaderless.environments.programs.program_environment import Solve, program_maker
from leaderless.environments.protocol import EpisodeFailed, Message, Task
from leaderless.stages.episode_samples import has_drifted

TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up.", "parameters": {"type": "object", "default": None}},
}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def texts_of(episode: Episode) -> list[str]:
    """Each sample with what is trained in brackets."""
    shown = []
    for sample in episode.trace.samples():
        pieces, was = [], False
        for token, is_trained in zip(sample.tokens, sample.is_trained, strict=True):
            pieces.append(("[" if is_trained else "]") * (is_trained != was) + text_of([token]))
            was = is_trained
        shown.append("".join(pieces) + "]" * was)
    return shown


def trained_tokens(episode: Episode) -> list[list[int]]:
    return [list(node.tokens) for node in episode.trace.said()]


def turn(role: str, text: str, *, is_open: bool = False) -> str:
    return f"<|im_start|>{role}\n{text}" + ("" if is_open else f"{END}\n")


async def twice(task: Task, chat: Chat) -> float:
    """Ask, and ask again with the answer."""
    messages = [user("one")]
    for text in ("two", "three"):
        answer = await chat.ask(messages)
        messages += [answer.message, user(text)]
    assert (await chat.ask(messages)).content == "2"
    return 1.5


def test_a_conversation_is_one_sample_of_the_tokens_that_were_sampled() -> None:
    (episode,), engine = lead(twice)
    assert not episode.error
    turns = [f"{turn('user', name)}<|im_start|>assistant\n[{i}{END}]" for i, name in enumerate(("one", "two", "three"))]
    assert texts_of(episode) == ["\n".join(turns)]
    assert trained_tokens(episode) == engine.said
    (sample,) = episode.trace.samples()
    assert sample.rewards == [0.0] * 5 + [1.5]
    assert len({request.conversation for request in engine.requests}) == 1
    assert engine.requests[0].conversation in engine.forgotten


async def trim(task: Task, chat: Chat) -> float:
    """Ask again with the answer as a program may have cleaned it up."""
    answer = await chat.ask("one")
    assert answer.content == "ab"
    await chat.ask(
        [user("one"), {"role": "assistant", "content": f" {answer.content}\n", "tool_calls": []}, user("ab")]
    )
    return 1.0


def test_what_was_sampled_is_never_encoded_again() -> None:
    (episode,), engine = lead(trim, lambda _: f"ab{END}")
    assert not episode.error
    apart, together = [*tokens_of("a"), *tokens_of("b")], tokens_of("ab")
    assert apart != together
    assert trained_tokens(episode) == engine.said == [[*apart, *tokens_of(END)]] * 2
    first, second = (list(request.prompt) for request in engine.requests)
    assert second[: len(first) + 3] == [*first, *apart, *tokens_of(END)]
    assert together[0] in second[len(first) + 3 :], "what the program has written is encoded"
    assert len(texts_of(episode)) == 1


def test_a_program_drifts_if_the_template_would_write_something_else() -> None:
    async def go_on(_task: Task, chat: Chat) -> float:
        answer = await chat.ask("one")
        await chat.ask([user("one"), answer.message, user("two")])
        return 1.0

    async def use_tools(_task: Task, chat: Chat) -> float:
        await chat.ask("one", tools=[TOOL])
        return 1.0

    async def continue_a_text(_task: Task, chat: Chat) -> float:
        await chat.complete("one")
        return 1.0

    def drift(program: Solve, says: str) -> bool | None:
        (episode,), _ = lead(program, lambda _: f"{says}{END}")
        assert not episode.error
        assert episode.place is not None
        return has_drifted(episode, episode.place.writer)

    assert drift(go_on, "yes") is False
    assert drift(go_on, "ab") is True, "two tokens were sampled, of which the tokenizer makes one"
    assert drift(use_tools, "yes") is None
    assert drift(continue_a_text, "yes") is None


async def branches(task: Task, chat: Chat) -> dict[str, float]:
    first = [user("plan"), (await chat.ask([user("plan")])).message]
    answers = await asyncio.gather(*(chat.ask([*first, user(name)]) for name in ("left", "right")))
    return {"reward": 1.0, "answers": len(answers)}


def test_questions_at_the_same_time_are_branches_that_train_their_beginning_once() -> None:
    (episode,), engine = lead(branches)
    assert not episode.error
    begin = f"{turn('user', 'plan')}<|im_start|>assistant\n"
    branch = [f"\n{turn('user', name)}<|im_start|>assistant\n[1{END}]" for name in ("left", "right")]
    assert sorted(texts_of(episode)) == sorted([f"{begin}[0{END}]{branch[0]}", f"{begin}0{END}{branch[1]}"])
    assert episode.info == {"answers": 2}
    assert sum(sum(sample.is_trained) for sample in episode.trace.samples()) == 6
    assert len({request.conversation for request in engine.requests}) == 2, "a conversation has one question at a time"


def test_what_is_sampled_depends_on_the_context_and_not_on_the_order_of_questions() -> None:
    def noise(names: tuple[str, ...]) -> dict[str, int]:
        async def solve(task: Task, chat: Chat) -> float:
            await asyncio.gather(*(chat.ask(name) for name in names))
            return 0.0

        _, engine = lead(solve)
        return {text_of(request.prompt): request.sample_ids[0] for request in engine.requests}

    assert noise(("a", "b", "c")) == noise(("c", "a", "b"))
    assert len(set(noise(("a", "b")).values())) == 2

    async def same(task: Task, chat: Chat) -> float:
        await asyncio.gather(*(chat.ask("a") for _ in range(3)))
        return 0.0

    (episode,), engine = lead(same)
    assert len({request.sample_ids[0] for request in engine.requests}) == 3
    assert len(list(episode.trace.samples())) == 3


def test_an_edited_context_begins_a_new_sample() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        first = await chat.ask([user("one")])
        await chat.ask([user("one"), {"role": "assistant", "content": "something else"}, user("two")])
        await chat.ask([{"role": "system", "content": "be brief"}, user("one"), first.message, user("two")])
        return 1.0

    (episode,), _ = lead(solve)
    assert not episode.error
    edited = f"{turn('user', 'one')}{turn('assistant', 'something else')}{turn('user', 'two')}<|im_start|>assistant\n"
    system = f"{turn('system', 'be brief')}{turn('user', 'one')}{turn('assistant', '0')}{turn('user', 'two')}"
    assert texts_of(episode) == [
        f"{turn('user', 'one')}<|im_start|>assistant\n[0{END}]",
        f"{edited}[1{END}]",
        f"{system}<|im_start|>assistant\n[1{END}]",
    ]


def test_calls_of_tools_are_read_and_their_results_continue_the_conversation() -> None:
    def say(context: str) -> str:
        if "seventh" in context:
            return f"blue{END}"
        return f'Wait.\n<tool_call>{{"name": "look_up", "arguments": {{"word": "é"}}}}</tool_call>{END}'

    async def solve(task: Task, chat: Chat) -> float:
        messages: list[Message] = [user("?")]
        answer = await chat.ask(messages, tools=[TOOL])
        (call,) = answer.tool_calls
        assert call["function"] == {"name": "look_up", "arguments": '{"word": "é"}'}
        assert (answer.content, answer.finish_reason) == ("Wait.", "tool_calls")
        messages += [answer.message, {"role": "tool", "tool_call_id": call["id"], "content": "seventh"}]
        return float((await chat.ask(messages, tools=[TOOL])).content == "blue")

    (episode,), engine = lead(solve, say)
    assert not episode.error
    (sample,) = episode.trace.samples()
    assert sample.rewards[-1] == 1.0
    assert trained_tokens(episode) == engine.said
    assert '"default": null' in text_of(engine.requests[0].prompt), "schemas are shown as they are"


def test_a_call_that_cannot_be_read_stays_a_text() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        answer = await chat.ask("?", tools=[TOOL])
        assert (answer.tool_calls, answer.finish_reason) == ([], "stop")
        assert answer.content == "<tool_call>{nothing"
        return 0.0

    assert not lead(solve, lambda _: f"<tool_call>{{nothing{END}")[0][0].error


def test_texts_are_continued_like_messages() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        first = await chat.complete("1+1=", stop=["\n"])
        assert first.content == "2"
        second = await chat.complete(f"1+1={first.content}, 2+2=")
        third = await chat.complete([*second.prompt_tokens, *second.tokens, *tokens_of("!")])
        assert third.content == "2\n3"
        return 1.0

    (episode,), engine = lead(solve, lambda _: "2\n3", is_chat=False)
    assert not episode.error
    assert texts_of(episode) == ["1+1=[2\n3], 2+2=[2\n3]![2\n3]"]
    assert trained_tokens(episode) == engine.said


def test_token_ids_are_continued_in_any_sequence_and_texts_only_from_their_beginning() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        first = await chat.complete("1+1=")
        second = await chat.complete((*first.prompt_tokens, *first.tokens, *tokens_of("!")))
        await chat.complete("!2")
        await chat.complete(f"1+1={first.content}!{second.content}?")
        return 1.0

    (episode,), _ = lead(solve, lambda _: "2", is_chat=False)
    assert not episode.error
    assert texts_of(episode) == ["!2[2]", "1+1=[2]![2]?[2]"]


def test_the_last_sample_is_the_one_with_the_last_answer() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        first = await chat.ask("first")
        await chat.ask("last")
        with pytest.raises(AskRefusedError):
            await chat.ask([user("first"), first.message, user("too long " * 100)])
        return 1.0

    (episode,), _ = lead(solve, max_tokens=200)
    assert [text.partition("<|im_end|>")[0][-5:] for text in texts_of(episode)] == ["first", "\nlast"]


def test_limits_refuse_questions_and_the_program_goes_on() -> None:
    async def solve(task: Task, chat: Chat) -> float:
        messages = [user("one")]
        for _ in range(10):
            try:
                answer = await chat.ask(messages)
            except AskRefusedError as error:
                return float(error.code == task["text"])
            messages += [answer.message, user("more " * 4)]
        return -1.0

    for code, limits in {"max_turns": {"max_turns": 3}, "context_length_exceeded": {"max_tokens": 100}}.items():
        (episode,), _ = lead(solve, tasks=[{"text": code}], **limits)  # type: ignore[arg-type]
        assert (episode.cause, episode.is_cut) == ("", True)
        assert episode.trace.said()[-1].said.reward == 1.0
        assert [one.kind for one in episode.failures] == ["policy"] * (code == "context_length_exceeded")


async def fail(task: Task, chat: Chat) -> object:
    answer = await chat.ask("?")
    match task["text"]:
        case "raises":
            raise KeyError("lost")
        case "gives up":
            raise EpisodeFailed("the site is down")
        case "hangs":
            await asyncio.sleep(60)
        case "no reward":
            return None
        case "nan":
            return {"reward": float("nan")}
        case "ends with the assistant":
            await chat.ask([user("?"), answer.message])
        case "wrong message":
            await chat.ask([{"text": "?"}])
    return 1.0


def no_question(task: Task, chat: Chat) -> float:
    return 1.0


FAILURES = {
    "raises": ("environment", "solve raised KeyError: 'lost'"),
    "gives up": ("environment", "the site is down"),
    "hangs": ("deadline", "solve has neither asked anything nor ended for 1 s: raise environment.act_timeout_s"),
    "no reward": ("environment", "solve gave the reward None: it must be a finite number"),
    "nan": ("environment", "solve gave the reward nan"),
    "ends with the assistant": ("environment", "messages must end with a message of another role than 'assistant'"),
    "wrong message": ("environment", "a message must have a 'role' and a 'content'"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failed_program_is_counted_by_cause_and_harms_no_other(how: str) -> None:
    cause, text = FAILURES[how]
    patience_s = 1.0 if how == "hangs" else 30.0
    (bad, good), engine = lead(fail, tasks=[{"text": how}, {"text": "fine"}], act_timeout_s=patience_s)
    assert (bad.cause, good.cause) == (cause, "")
    assert text in bad.error
    assert len(engine.forgotten) >= 2


@pytest.mark.parametrize("posted", [None, 0.25])
def test_a_program_that_gives_up_at_a_limit_has_the_rewards_so_far(posted: float | None) -> None:
    async def solve(task: Task, chat: Chat) -> float:
        chat.reward = posted
        for _ in range(10):
            await chat.ask("?")
        return 1.0

    async def late(task: Task, chat: Chat) -> float:
        with pytest.raises(AskRefusedError):
            await solve(task, chat)
        raise EpisodeFailed("the site is down", "infrastructure")

    (episode,), _ = lead(solve, max_turns=2)
    assert (episode.cause, episode.is_cut, len(episode.trace.said())) == ("", True, 2)
    assert episode.trace.said()[-1].said.reward == (posted or 0.0)
    (episode,), _ = lead(late, max_turns=2, max_attempts=1)
    assert episode.cause == "infrastructure", "which is not the policy's"


def test_a_program_that_asks_nothing_has_nothing_to_train() -> None:
    (episode,), _ = lead(no_question)
    assert episode.cause == "environment"
    assert "has not asked the policy anything" in episode.error


def test_waiting_for_the_policy_is_not_the_programs_time() -> None:
    class Slow(Speaker):
        def step(self):  # type: ignore[no-untyped-def]
            time.sleep(0.1)
            return super().step()

    async def solve(task: Task, chat: Chat) -> float:
        await chat.ask("?")
        return 1.0

    (episode,), _ = lead(solve, engine=Slow(lambda _: "a" * 15), act_timeout_s=1.0)
    assert not episode.cause
    assert episode.seconds["model"] > 1.4


KEPT: list[Chat] = []


async def leave(task: Task, chat: Chat) -> float:
    """Ask once, and keep the chat for later."""
    KEPT.append(chat)
    await chat.ask("one")
    return 1.0


def test_an_episode_that_is_over_answers_nothing() -> None:
    (episode,), _ = lead(leave, lambda _: "yes")
    for question in (KEPT[-1].ask("two"), KEPT[-1].complete("two")):
        with pytest.raises(AskRefusedError, match="the episode is over"):
            asyncio.run(question)  # type: ignore[arg-type]
    assert len(episode.trace.said()) == 1
    assert len(episode.trace.leaves()) == 1


def test_what_is_asked_when_an_episode_ends_is_canceled() -> None:
    pending: list[asyncio.Task[object]] = []

    async def solve(task: Task, chat: Chat) -> float:
        if task["text"] == "b":
            for _ in range(20):
                await chat.ask("on")
            return 1.0
        await chat.ask("?")
        pending.append(asyncio.ensure_future(chat.ask("never")))
        for _ in range(5):
            await asyncio.sleep(0)
        return 1.0

    def say(context: str) -> str:
        return "x" * (10_000 if "never" in context else 3)

    (episode, other), engine = lead(solve, say, [{"text": "a"}, {"text": "b"}], max_turns=30, max_tokens=100_000)
    assert (episode.cause, other.cause) == ("", "")
    assert len(engine.aborted) == 1
    assert pending[0].cancelled()
    assert len(episode.trace.said()) == 1


def test_plain_functions_reach_the_policy_by_its_address() -> None:
    def solve(task: Task, chat: Chat) -> float:
        with openai.OpenAI(base_url=chat.base_url, api_key=chat.api_key) as client:
            answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "one"}])
        return float(answer.choices[0].message.content == "0") + chat.rng.random() * 0

    (episode,), _ = lead(solve)
    assert not episode.error
    assert episode.trace.said()[-1].said.reward == 1.0


HERE = __name__


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"type": f"{HERE}:text_of"}, r"text_of\(.* must be callable as text_of\(task, chat, \*\*options\)"),
        ({"type": f"{HERE}:fail", "options": {"level": 1}}, "must be callable as fail"),
        ({"type": f"{HERE}:fail", "isolation": "process"}, "use type=command, which has a process of its own"),
        ({"type": f"{HERE}:nothing"}, "has no class or function 'nothing'"),
        ({"type": "command"}, "does not take them: missing a required argument: 'command'"),
        ({"type": "command", "options": {"command": "sh a"}}, r"must be a list of texts, such as \[sh, agent.sh\]"),
        ({"type": "command", "options": {"command": ["no-such-program"]}}, "is no program that can be run"),
    ],
)
def test_a_program_that_cannot_be_used_is_refused_before_the_run(settings: dict[str, object], text: str) -> None:
    with pytest.raises(RecipeError, match=text):
        program_maker(EnvironmentConfig.model_validate(settings))


def test_programs_without_a_web_server_are_told_what_they_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_files, "find_spec", lambda _: None)
    install = r"needs the package starlette and uvicorn: .* pip install --editable '.\[serve\]'"
    with pytest.raises(RecipeError, match=f"{install}; or let no_question be `async`"):
        program_maker(EnvironmentConfig(type=f"{HERE}:no_question"))
    with pytest.raises(RecipeError, match=f"{install}$"):
        program_maker(EnvironmentConfig(type="command", options={"command": ["sh"]}))
    assert program_maker(EnvironmentConfig(type=f"{HERE}:fail")) is not None


def test_classes_are_environments_and_no_programs() -> None:
    assert program_maker(EnvironmentConfig(type="tests.unit.environments.scripted:Count")) is None
    assert json.dumps(TOOL)


def test_other_arguments_of_the_template_are_another_conversation() -> None:
    writer = ChatWriter(tokenizer_with(CHATML + "{{ mode or '' }}"), is_chat=True)
    conversations = ProgramConversations(Trace(), writer)
    plain, other, again = (conversations.of_messages([user("a")], (), given) for given in (None, {"mode": "x"}, {}))
    assert text_of(other.tokens) == text_of(plain.tokens) + "x"
    assert plain.end is again.end
    assert plain.end is not other.end

"""Episodes that programs lead, with a policy that a test scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.templates import CHATML, tokenizer_with
from tests.unit.environments.scripted import ScriptedEngine

from leaderless.config.environment import EnvironmentConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.player import play_all
from leaderless.environments.programs.program_environment import ProgramEnvironment, Solve, program_maker
from leaderless.rollout.engine import Request, SamplingParams

TOKENIZER = tokenizer_with(CHATML, merges=[("a", "b")])
END = "<|im_end|>"


def text_of(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(tokens)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Speaker(ScriptedEngine):
    """Says what a function makes of the text of the context, and notes which tokens that were."""

    def __init__(self, say: Callable[[str], str]) -> None:
        super().__init__(self._tokens)
        self.say = say
        self.said: list[list[int]] = []

    def _tokens(self, request: Request) -> list[int]:
        # One token for each character, although the tokenizer would merge some: encoding the text again gives others.
        text, end, _ = self.say(text_of(request.prompt)).partition(END)
        tokens = [token for character in text for token in tokens_of(character)] + tokens_of(end)
        self.said.append(list(tokens))
        return tokens


def last_number(context: str) -> str:
    """Say how many times something was said before."""
    return f"{context.count('<|im_start|>assistant') - 1}{END}"


def lead(
    solve: Solve | None = None,
    say: Callable[[str], str] = last_number,
    tasks: Sequence[dict[str, str]] = ({"text": "a"},),
    *,
    max_tokens: int = 1000,
    is_chat: bool = True,
    engine: Speaker | None = None,
    **settings: object,
) -> tuple[list[Episode], Speaker]:
    """Play an episode of each task with a function, or with the program that the settings name."""
    engine = engine or Speaker(say)
    config = EnvironmentConfig.model_validate({"type": "x:y", "act_timeout_s": 20, **settings})
    params = SamplingParams(SamplingConfig(temperature=1.0), 200, (), 5)
    writer = ChatWriter(TOKENIZER, is_chat)
    places = [EpisodePosition(100 + n, f"5/{n}", task, writer, params) for n, task in enumerate(tasks)]

    def open_world() -> ProgramEnvironment:
        if solve is not None:
            return ProgramEnvironment(solve, "solve", config.act_timeout_s)
        make = program_maker(config)
        assert make is not None
        return make()

    return play_all(engine, config, open_world, places, max_tokens, lambda _: None)[0], engine

"""Whether a chat template is append-only: whether a longer conversation begins with the tokens of the shorter one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

from jinja2 import TemplateError

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.models.chat_templates.report import (
    Cause,
    TemplateDifference,
    TemplatePiece,
    TemplateReport,
    TemplateTrial,
)
from leaderless.models.chat_templates.trials import (
    END_OF_THINK,
    SYSTEM,
    Conversation,
    Message,
    chat,
    content_of,
    is_reasoning_open,
    reasoning_of,
    tool_chat,
    visible_text,
    without_reasoning,
)

NUM_SHOWN_TOKENS = 8
"""Number of tokens of each side that a difference shows."""


def check_template(tokenizer: Tokenizer, ends: Collection[int] = ()) -> TemplateReport:
    """Render synthetic conversations turn by turn, and compare each prompt with what came before.

    A turn of the model is what the template writes for it while it is the last one. If that lacks a part of the
    message, such as its reasoning, the message itself counts: the model has written it.

    Args:
        tokenizer: Tokenizer with a chat template.
        ends: Tokens that end a response, besides the tokenizer's own.

    Raises:
        RecipeError: There is no chat template, or it cannot render a question and its answer.
    """
    if tokenizer.chat_template is None:
        raise RecipeError.at("", "the tokenizer has no chat template: set its chat_template, or train on plain prompts")
    renderer = _Renderer(tokenizer)
    refused = {}
    question = chat(has_system=False, has_reasoning=False).messages[:1]
    prompt = renderer.required(question, "user")
    renderer.required(chat(has_system=False, has_reasoning=False).messages, "assistant")
    system_refusal = renderer.refusal(Conversation("", (SYSTEM, *question)))
    if system_refusal:
        refused["system"] = system_refusal
    has_system = not system_refusal
    tool_refusal = renderer.refusal(tool_chat(has_system=has_system, has_reasoning=False))
    if tool_refusal:
        refused["tools"] = tool_refusal
    kinds = (True,) if is_reasoning_open(prompt) else (False, True)
    makers = (chat,) if tool_refusal else (chat, tool_chat)
    conversations = [make(has_system=has_system, has_reasoning=kind) for make in makers for kind in kinds]
    end_token = _find_end(renderer, ends)
    end = "" if end_token is None else tokenizer.decode([end_token])
    trials = []
    for conversation in conversations:
        try:
            trials.append(_try(renderer, conversation, end))
        except RecipeError as error:
            if not conversation.tools:
                raise
            refused["tools"] = str(error)
    return TemplateReport(end, end_token, refused, tuple(trials))


class _Renderer:
    """Texts and tokens of conversations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def text(self, messages: Sequence[Message], tools: Sequence[Json] = (), *, is_prompt: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools or None, add_generation_prompt=is_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            problem = f"cannot render a conversation of the roles {roles}: {type(error).__name__}: {error}"
            raise RecipeError.at("", f"the chat template {problem}") from error

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text_of(self, tokens: Sequence[int], first: int, after: int) -> str:
        """The text of some of the tokens; alone, they may lose the blank before them."""
        return self.tokenizer.decode(tokens[:after])[len(self.tokenizer.decode(tokens[:first])) :]

    def required(self, messages: Sequence[Message], role: str) -> str:
        """The text of a prompt that each template must be able to write."""
        problem = self.refusal(Conversation("", tuple(messages)))
        if problem:
            raise RecipeError.at(
                "", f"role '{role}': {problem}; questions and answers are needed: correct the template"
            )
        return self.text(messages, is_prompt=True)

    def refusal(self, conversation: Conversation) -> str:
        """Why a conversation cannot be rendered; empty if it can."""
        try:
            text = self.text(conversation.messages, conversation.tools, is_prompt=True)
        except RecipeError as error:
            return str(error)
        missing = [message for message in conversation.messages if visible_text(message) not in text]
        return f"the chat template leaves out what a message of the role '{missing[0]['role']}' says" if missing else ""

    def split(self, text: str, parts: Sequence[tuple[str, bool, int]], begin: int) -> Iterator[TemplatePiece]:
        """Tokens of a text from a place on; parts have a name, whether they are scaffold, and the place of the end.

        A token with characters of two parts belongs to the later one.
        """
        tokens = self.tokens(text)
        first = _num_equal(tokens, self.tokens(text[:begin]))
        for index, (place, is_scaffold, end) in enumerate(parts):
            is_last = index == len(parts) - 1
            after = len(tokens) if is_last else max(first, _num_equal(tokens, self.tokens(text[:end])))
            if after > first:
                yield TemplatePiece(place, is_scaffold, tuple(tokens[first:after]), self.text_of(tokens, first, after))
            first = after


def _find_end(renderer: _Renderer, ends: Collection[int]) -> int | None:
    """The token with which the template ends an answer, or else of the tokenizer's end token."""
    messages = chat(has_system=False, has_reasoning=False).messages[:2]
    after = renderer.text(messages, is_prompt=False).rpartition(visible_text(messages[1]))[2]
    tokenizer = renderer.tokenizer
    tokens = renderer.tokens(after)
    known = {*ends, tokenizer.eos_token_id}
    special = set(tokenizer.get_added_vocab().values()) | known
    found = [token for token in tokens if token in known] or [token for token in tokens if token in special]
    return found[0] if found else tokenizer.eos_token_id


def _try(renderer: _Renderer, conversation: Conversation, end: str) -> TemplateTrial:
    messages, tools, turns = conversation.messages, conversation.tools, conversation.turns()
    prompt = renderer.text(messages[: turns[0]], tools, is_prompt=True)
    pieces = list(_added(renderer, conversation, range(turns[0]), prompt, 0))
    differences = []
    for number, (place, following) in enumerate(pairwise(turns), 2):
        answer = messages[place]
        rendered = renderer.text(messages[: place + 1], tools, is_prompt=False)
        written = _written(prompt, rendered, answer, end)
        history_tokens = renderer.tokens(prompt + written)
        prompt_tokens = renderer.tokens(prompt)
        if history_tokens[: len(prompt_tokens)] != prompt_tokens:  # the model would not see the two as one text
            history_tokens = prompt_tokens + renderer.tokens(written)
        seen, prompt = prompt, renderer.text(messages[:following], tools, is_prompt=True)
        now = renderer.tokens(prompt)
        if now[: len(history_tokens)] == history_tokens:
            sampled = history_tokens[len(prompt_tokens) :]
            pieces.append(TemplatePiece("assistant", False, tuple(sampled), written))
            begin = len(seen + written)
        else:
            position = _num_equal(history_tokens, now)
            stop = position + NUM_SHOWN_TOKENS
            was, instead = tuple(history_tokens[position:stop]), tuple(now[position:stop])
            cause = _cause(seen + written, prompt, messages[:following], end)
            texts = [renderer.text_of(tokens, position, stop) for tokens in (history_tokens, now)]
            role = str(messages[following - 1]["role"])
            differences.append(TemplateDifference(number, role, position, was, texts[0], instead, texts[1], cause))
            begin = _end_of_turn(prompt, answer, end)
        trailing = rendered.rpartition(end)[2] if end and end in rendered else ""
        pieces += _added(renderer, conversation, range(place + 1, following), prompt, begin, trailing)
    return TemplateTrial(conversation.name, tuple(pieces), tuple(differences))


def _written(prompt: str, rendered: str, answer: Message, end: str) -> str:
    """Text that the model writes in a turn, up to and including the end token."""
    visible = visible_text(answer)
    common = _num_equal(prompt, rendered)
    turn = rendered[common:]
    found = turn.find(visible)
    stop = turn.find(end, max(found, 0)) if end else -1
    turn = turn[: stop + len(end)] if stop >= 0 else turn.rstrip() + end
    if common == len(prompt) and found >= 0 and content_of(answer).strip() in turn:
        return turn
    call = turn.rpartition(END_OF_THINK)[2].lstrip() if "tool_calls" in answer else end
    text = content_of(answer) + call
    begun = next(count for count in range(len(text), -1, -1) if prompt.endswith(text[:count]))
    return text[begun:]


def _end_of_turn(prompt: str, answer: Message, end: str) -> int:
    """Place behind an answer in a later prompt."""
    visible = visible_text(answer)
    place = max(prompt.rfind(visible), 0) + len(visible)
    stop = prompt.find(end, place) if end else -1
    return place if stop < 0 else stop + len(end)


def _added(
    renderer: _Renderer, conversation: Conversation, new: range, prompt: str, begin: int, trailing: str = ""
) -> Iterator[TemplatePiece]:
    """Pieces of a prompt that came with new messages, after a place and the rest of the turn before it."""
    parts, place = [], begin
    if trailing and prompt.startswith(trailing, begin):
        place += len(trailing)
        parts.append(("after the end token", True, place))
    for index in new:
        role, visible = str(conversation.messages[index]["role"]), visible_text(conversation.messages[index])
        start = prompt.find(visible, place)
        if start < 0:  # the template has moved it
            continue
        place = start + len(visible)
        name = {"user": "a user message", "tool": "a tool result"}.get(role, f"the {role} message")
        parts += [(f"before {name}", True, start), (role, False, place)]
        try:
            shorter = renderer.text(conversation.messages[: index + 1], conversation.tools, is_prompt=False)
        except RecipeError:  # a system message alone, for example; what follows it is before the next message
            continue
        if prompt.startswith(shorter) and len(shorter) > place:
            place = len(shorter)
            parts.append((f"after {name}", True, place))
    parts.append(("before an answer", True, len(prompt)))
    yield from renderer.split(prompt, parts, begin)


def _cause(history: str, prompt: str, messages: Sequence[Message], end: str) -> Cause:
    if prompt.startswith(history):
        return "characters of two turns become one token"
    if "".join(prompt.split()).startswith("".join(history.split())):
        return "white space is changed"
    thoughts = [reasoning_of(message) for message in messages if message["role"] == "assistant"]
    if any(thought in history and thought not in prompt for thought in filter(None, thoughts)):
        return "earlier reasoning is dropped"
    if without_reasoning(prompt).startswith(without_reasoning(history)):  # an empty block
        return "earlier reasoning is dropped"
    if end and prompt.startswith(history.removesuffix(end)):
        return "the end token is missing"
    return "text is rewritten"


def _num_equal(first: Sequence[object], second: Sequence[object]) -> int:
    """Number of equal tokens or characters at the beginning of both."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )

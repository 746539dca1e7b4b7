"""What programs say: checks of messages, and where they continue what was said before.

Nothing that was sampled is encoded again, and the engine learns what it has already read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from leaderless.base.values import Json
from leaderless.data.prompts.images import other_than_text
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode import Said, Trace, TraceNode
from leaderless.environments.pictures import is_image, message_with_files
from leaderless.environments.protocol import Message
from leaderless.environments.tools.calls import Call, offered_parameters, typed_arguments

if TYPE_CHECKING:
    from leaderless.data.prompts.images import PromptImage
    from leaderless.environments.engine_scheduler import EngineScheduler


class Lines:
    """Numbers of conversations for the engine: growing sequences, in each of which one answer is sampled at a time."""

    def __init__(self, prefix: str, pump: EngineScheduler) -> None:
        self._prefix, self._pump = prefix, pump
        self._ends: dict[int, TraceNode | None] = {}  # None while an answer is sampled

    def take(self, end: TraceNode) -> tuple[int, int]:
        """The conversation that a context continues, perhaps a new one, and the number of tokens that it has."""
        last = end.parent if end.said is None else end
        for line, newest in self._ends.items():
            if newest is not None and newest is last:
                self._ends[line] = None
                return line, len(newest.context())
        line = number_of(f"{self._prefix}/line/{len(self._ends)}")
        self._ends[line] = None
        return line, 0

    def free(self, line: int, end: TraceNode) -> None:
        """End the turn of a conversation, at the node of its answer; one without an answer is never continued."""
        self._ends[line] = end

    def close(self) -> None:
        """Let the engine forget all conversations."""
        for line in self._ends:
            self._pump.forget(line)


def number_of(text: str) -> int:
    """63 bits that follow from a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


OUT_OF_TOKENS = "context_length_exceeded"
"""Code of a question that is refused because the conversation is as long as it may be."""


class AskRefusedError(ValueError):
    """The policy is not asked; the text says why.

    Attributes:
        code: Word for programs; `context_length_exceeded` and `max_turns` are the ends of an episode's limits.
    """

    def __init__(self, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.code = code


def checked(message: Message, *, sees_images: bool = False, known: set[str] | None = None) -> Message:
    """A message as chat templates know it; images are parts of it, where the policy sees them.

    Args:
        message: Message in the format of OpenAI's API.
        sees_images: Whether the policy sees images.
        known: Data URLs that were checked before, to which the message's are added: programs send a whole
            conversation with each question, and an image is decoded once.

    Raises:
        AskRefusedError: The message is malformed, or an image cannot be used.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise AskRefusedError(f"a message must have a 'role' and a 'content', not {message!r:.80}")
    kept: dict[str, Json] = {name: value for name, value in message.items() if value is not None}
    content = kept.get("content", "")
    parts = content if sees_images and isinstance(content, list | tuple) else ()
    if any(isinstance(part, Mapping) and is_image(part) for part in parts):
        if problem := other_than_text(kept, has_images=True):
            raise AskRefusedError(f"content holds {problem}, which the policy does not read: describe it in words")
        try:
            kept["content"] = message_with_files(kept, takes_paths=False, known=known)["content"]
        except ValueError as error:
            raise AskRefusedError(f"an image cannot be used: {error}") from error
    else:
        kept["content"] = _text(content)
    calls = kept.get("tool_calls")
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise AskRefusedError("tool_calls must be a list of objects with 'function'")
        kept["tool_calls"] = [_templated(call) for call in calls if isinstance(call, Mapping)]
    return kept


def _text(content: Json) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content):
            return "\n".join(map(str, texts))
    raise AskRefusedError(f"content must be a text, or a list of parts of type 'text', not {content!r:.80}")


def _templated(call: Mapping[str, Json]) -> Mapping[str, Json]:
    """A call with arguments as an object, as chat templates want them; OpenAI's API has them as a text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise AskRefusedError(f"a call of a tool must have a 'function' with a 'name', not {function!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # then it is shown as it is
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def call_of(identity: str, call: Call, tools: Sequence[Json]) -> Mapping[str, Json]:
    """A call of one of some tools in the format of OpenAI's API."""
    arguments = typed_arguments(call, offered_parameters(call.name, tools))
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": text}}


Key = str | tuple[int, ...]
"""Key by which a message or a text is compared."""


class Context(NamedTuple):
    """Where an answer belongs.

    Attributes:
        end: Node that the answer follows.
        tokens: Token ids of the whole context.
    """

    end: TraceNode
    tokens: list[int]


@dataclass
class ProgramConversations:
    """The conversations of an episode as a program knows them.

    A context that begins with an answer as it was given, and all that came before it, continues with the tokens that
    were sampled; what follows is added. Any other context is a conversation of its own.

    Attributes:
        trace: Messages of the episode; nodes are added to it.
        writer: Writer of messages without tools.
    """

    trace: Trace
    writer: ChatWriter
    _keys: dict[int, Sequence[Key]] = field(default_factory=dict)  # messages of each node, as the program knows them
    _tools: dict[int, str] = field(default_factory=dict)  # tools of each first node
    _texts: dict[int, str] = field(default_factory=dict)  # of completions: all up to the end of each answer
    _followers: dict[int | None, list[TraceNode]] = field(default_factory=dict)
    _writers: dict[str, ChatWriter] = field(default_factory=dict)

    def of_messages(
        self, messages: Sequence[Message], tools: Sequence[Json], template: Mapping[str, Json] | None = None
    ) -> Context:
        """The context of the answer to messages; with other tools or arguments of the template it is another one.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        keys, offered = [_key(message) for message in messages], json.dumps([tools, template or {}], sort_keys=True)
        found, num_known = self._longest(keys, offered)
        rest, left = messages[num_known:], keys[num_known:]
        node = self._same(found, left, offered)
        if node is None:
            if offered not in self._writers:
                self._writers[offered] = replace(self.writer, tools=tools, options=template or {})
            writer = self._writers[offered]
            tokens = writer.begin(rest)[1] if found is None else writer.add(rest, found.tokens)
            node = self._add(found, tokens, rest, left, offered, images=writer.images(rest, tokens))
        return Context(node, node.context())

    def of_prompt(self, prompt: str | Sequence[int]) -> Context:
        """The context of the answer to a text or to token ids."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        # An answer in a chat has no text that a prompt could begin with.
        is_text, said = isinstance(prompt, str), self.trace.said()
        known = [(node, self._texts.get(id(node)) if is_text else node.context()) for node in said]
        begun = [(node, text) for node, text in known if text is not None and prompt[: len(text)] == text]
        found, text = max(begun, key=lambda pair: len(pair[1]), default=(None, ""))
        rest = prompt[len(text) :]
        key: Key = rest if isinstance(rest, str) else tuple(rest)
        same = self._same(found, [key])
        if same is None:
            encode = self.writer.tokenizer.encode
            tokens = encode(rest, add_special_tokens=found is None) if isinstance(rest, str) else list(rest)
            shown = rest if isinstance(rest, str) else self.writer.text(rest, is_plain=False)
            same = self._add(found, tokens, [{"role": "user", "content": shown}], [key])
            before = "" if found is None else self._texts.get(id(found))
            if before is not None:
                self._texts[id(same)] = before + shown
        return Context(same, same.context())

    def answer(self, context: Context, tokens: Sequence[int], message: Message, said: Said) -> TraceNode:
        """Add an answer, as it was sampled and as the program is given it."""
        node = self._add(context.end, tokens, [message], [_key(message)], said=said)
        if id(context.end) in self._texts:
            self._texts[id(node)] = self._texts[id(context.end)] + str(message["content"])
        return node

    def _longest(self, keys: Sequence[Key], offered: str) -> tuple[TraceNode | None, int]:
        """The last answer with which messages begin, with all that came before; and the number of messages up to it."""
        found: tuple[TraceNode | None, int] = (None, 0)
        open_nodes = [(node, 0) for node in self._followers.get(None, ()) if self._tools.get(id(node)) == offered]
        while open_nodes:
            node, begin = open_nodes.pop()
            own = self._keys[id(node)]
            end = begin + len(own)
            if list(keys[begin:end]) != list(own) or end == len(keys):  # something has to follow an answer
                continue
            if node.said and end > found[1]:
                found = (node, end)
            open_nodes += [(follower, end) for follower in self._followers.get(id(node), ())]
        return found

    def _same(self, parent: TraceNode | None, keys: Sequence[Key], offered: str | None = None) -> TraceNode | None:
        """Node that was added behind another one before, if it is the same."""
        followers = self._followers.get(parent if parent is None else id(parent), ())
        same = (
            node
            for node in followers
            if not node.said
            and list(self._keys[id(node)]) == list(keys)
            and (parent is not None or self._tools.get(id(node)) == offered)
        )
        return next(same, None)

    def _add(
        self,
        parent: TraceNode | None,
        tokens: Sequence[int],
        messages: Sequence[Message],
        keys: Sequence[Key],
        offered: str | None = None,
        *,
        said: Said | None = None,
        images: Sequence[PromptImage] = (),
    ) -> TraceNode:
        node = self.trace.add(parent, tokens, messages, said, images)
        self._keys[id(node)] = keys
        if parent is None and offered is not None:
            self._tools[id(node)] = offered
        self._followers.setdefault(parent if parent is None else id(parent), []).append(node)
        return node


def _key(message: Message) -> Key:
    """Key by which a message is compared: programs leave out what is empty, and trim what an agent has said."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return json.dumps({**message, "content": content}, sort_keys=True)
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, Sequence)
    named = [_same_numbers(call["function"]) for call in calls if isinstance(call, Mapping)]
    return json.dumps(["assistant", str(content).strip(), named], sort_keys=True)


def _same_numbers(value: Json) -> Json:
    """A value with numbers as JavaScript has them: programs in it send 1.0 back as 1, and long integers rounded."""
    if isinstance(value, Mapping):
        return {name: _same_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_same_numbers(one) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        with suppress(OverflowError):
            return float(value)
    return value

"""Finds what a program says in what was said before, so that nothing that was sampled is encoded again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from leaderless.base.values import Json
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode_trace import Said, Trace, TraceNode
from leaderless.environments.protocol import Message

if TYPE_CHECKING:
    from leaderless.data.prompts.images import PromptImage

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

    def of_messages(self, messages: Sequence[Message], tools: Sequence[Json]) -> Context:
        """The context of the answer to messages.

        Raises:
            RecipeError: The chat template cannot write them.
        """
        keys, offered = [_key(message) for message in messages], json.dumps(tools, sort_keys=True)
        found, num_known = self._longest(keys, offered)
        rest, left = messages[num_known:], keys[num_known:]
        writer = self._writer(offered, tools)
        if found is not None:
            assert found.said is not None
            node = self._same(found, left)
            if node is None:
                tokens = writer.add(rest, found.tokens)
                node = self._add(found, tokens, rest, left, images=writer.images(rest, tokens))
        else:
            node = self._same(None, left, offered)
            if node is None:
                tokens = writer.begin(rest)[1]
                node = self._add(None, tokens, rest, left, offered, images=writer.images(rest, tokens))
        return Context(node, node.context())

    def of_prompt(self, prompt: str | Sequence[int]) -> Context:
        """The context of the answer to a text or to token ids."""
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        known = [(node, self._known(node, is_text=isinstance(prompt, str))) for node in self.trace.said()]
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
            if before is not None:  # an answer in a chat has no text that a prompt could begin with
                self._texts[id(same)] = before + shown
        return Context(same, same.context())

    def answer(self, context: Context, tokens: Sequence[int], message: Message, said: Said) -> TraceNode:
        """Add an answer, as it was sampled and as the program is given it."""
        node = self._add(context.end, tokens, [message], [_key(message)], said=said)
        if id(context.end) in self._texts:
            self._texts[id(node)] = self._texts[id(context.end)] + str(message["content"])
        return node

    def _known(self, node: TraceNode, *, is_text: bool) -> str | list[int] | None:
        """All up to the end of an answer as the program knows it; None for an answer in a chat, as a text."""
        return self._texts.get(id(node)) if is_text else node.context()

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
        followers: Iterator[TraceNode] = (
            node
            for node in self._followers.get(parent if parent is None else id(parent), ())
            if not node.said
            and list(self._keys[id(node)]) == list(keys)
            and (parent is not None or self._tools.get(id(node)) == offered)
        )
        return next(followers, None)

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
        if offered is not None:
            self._tools[id(node)] = offered
        self._followers.setdefault(parent if parent is None else id(parent), []).append(node)
        return node

    def _writer(self, offered: str, tools: Sequence[Json]) -> ChatWriter:
        if offered not in self._writers:
            self._writers[offered] = replace(self.writer, tools=tools)
        return self._writers[offered]


def _key(message: Message) -> Key:
    """Key by which a message is compared: programs leave out what is empty, and trim what an agent has said."""
    content = message.get("content") or ""
    if message["role"] != "assistant":
        return json.dumps({**message, "content": content}, sort_keys=True)
    calls = message.get("tool_calls") or ()
    assert isinstance(calls, Sequence)
    named = [call["function"] for call in calls if isinstance(call, Mapping)]
    return json.dumps(["assistant", str(content).strip(), named], sort_keys=True)

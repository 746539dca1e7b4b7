"""JSON schemas that answers have to follow, by llguidance, which says before each token which ones may come."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config.packaged_files import how_to_install
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.tools.formats import FORMATS, Reader, read_hermes, read_llama
from leaderless.rollout.shaping import Grammar, GrammarState
from leaderless.serving.http_server import ApiError

if TYPE_CHECKING:
    from llguidance import JsonCompileOptions, LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerFast

ANY_OBJECT: Json = {"type": "object"}
"""Schema of any JSON object."""
WHITE_SPACE = r"[\x20\x0A]{1,40}"
"""White space between parts; without a bound, some models write nothing else."""


FORCED_CALLS: Mapping[Reader, tuple[str, str, str]] = {
    read_hermes: ("<tool_call>\n", "\n</tool_call>", "arguments"),
    read_llama: ("", "", "parameters"),
}
"""Texts around a call in the formats that can be enforced, and the key of its arguments."""


class _State:
    """The state of one response; only the engine's thread uses it."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, list(ends)
        self._mask = np.zeros((1, -(-vocabulary // 32)), dtype=np.int32)

    def allowed(self) -> Tensor:
        """See `GrammarState`."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        bits = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")[: self._vocabulary]
        if self._matcher.is_error() or not bits.any():  # a limit of the grammar's was reached: nothing can be said
            bits[:] = 0
            bits[self._ends] = 1
        return torch.from_numpy(bits.astype(bool))

    def take(self, token: int) -> None:
        """See `GrammarState`."""
        self._matcher.consume_token(token)


class _Compiled:
    """A schema that is ready for any number of responses."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, ends: Sequence[int]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, ends

    def begin(self) -> GrammarState:
        """See `Grammar`."""
        return _State(self._matcher.deep_copy(), self._vocabulary, self._ends)


class Grammars:
    """Compiles schemas for one model; threads may share it."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Collection[int], vocabulary: int) -> None:
        """Prepare nothing yet: a tokenizer takes a second, and most clients want no schema."""
        self._tokenizer, self._end_tokens, self._vocabulary = tokenizer, sorted(end_tokens), vocabulary
        self._known: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, schema: Json, field: str) -> Grammar:
        """Make the grammar of a JSON schema.

        Raises:
            ApiError: The schema, a field of the request, cannot be compiled; or llguidance is missing.
        """
        _check_installed(field)
        from llguidance import LLMatcher

        options: JsonCompileOptions = {"whitespace_pattern": WHITE_SPACE}
        try:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        except ValueError as error:
            raise ApiError(400, f"{field} is no JSON schema: {error}", field) from error
        return self._compiled(grammar, field)

    def compile_calls(self, read: Reader, tools: Sequence[Json], *, may_repeat: bool) -> Grammar:
        """Make the grammar of answers that only call some tools, at least once.

        Raises:
            ApiError: Calls are in a format that cannot be enforced, or see above.
        """
        written = FORCED_CALLS.get(read)
        if written is None:
            formats = ", ".join(name for name, one in FORMATS.items() if one in FORCED_CALLS)
            reason = f"calls can be enforced in the formats {formats}, and the chat template writes another one"
            raise ApiError(400, f"tool_choice: {reason}; use auto", "tool_choice")
        _check_installed("tool_choice")
        from llguidance import LLMatcher

        begin, end, key = written
        calls: Json = {
            "anyOf": [_call_schema(tool, key) for tool in tools],
            "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
        }
        call = f"{self._literal(begin)} json {self._literal(end)}" if begin else "json"
        repeated = f'start: call ("\\n" call)*\ncall: {call}' if may_repeat and begin else f"start: {call}"
        return self._compiled(LLMatcher.grammar_from_lark(f"{repeated}\njson: %json {json.dumps(calls)}"), "tools")

    def _literal(self, text: str) -> str:
        """A text in a grammar of llguidance, where tokens that no other tokens make up are written by their numbers."""
        known, words = self._tokenizer_of(), self._tokenizer.get_added_vocab()
        added = {word: token for word, token in words.items() if known.is_special_token(token)}
        if not added:
            return json.dumps(text)
        parts = re.split(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})", text)
        return " ".join(f"<[{added[part]}]>" if part in added else json.dumps(part) for part in parts if part)

    def _compiled(self, grammar: str, field: str) -> Grammar:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer_of(), grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().splitlines()[0]
            raise ApiError(400, f"{field} cannot be compiled: {reason}", field)
        return _Compiled(matcher, self._vocabulary, self._end_tokens)

    def _tokenizer_of(self) -> LLTokenizer:
        with self._lock:
            if self._known is None:
                from llguidance.hf import from_tokenizer

                fast = cast("PreTrainedTokenizerFast", self._tokenizer)
                try:
                    self._known = from_tokenizer(fast, n_vocab=self._vocabulary, eos_token=self._end_tokens)
                except ValueError as error:
                    raise ApiError(501, f"this model's tokenizer can follow no grammar: {error}") from error
            return self._known


def _check_installed(field: str) -> None:
    if find_spec("llguidance") is None:
        raise ApiError(501, f"{field} needs the package llguidance: {how_to_install('serve')}", field)


def _call_schema(tool: Json, key: str) -> Json:
    """The schema of a call of a tool in the format of OpenAI's API."""
    assert isinstance(tool, Mapping)
    function = tool["function"]
    assert isinstance(function, Mapping)
    properties = {"name": {"const": function["name"]}, key: function.get("parameters") or {"type": "object"}}
    return {"type": "object", "properties": properties, "required": ["name", key], "additionalProperties": False}

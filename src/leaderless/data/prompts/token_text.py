"""The bytes that tokens stand for, by which words of two tokenizers are compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import islice

from tokenizers import pre_tokenizers

from leaderless.data.prompts.encode import Tokenizer

PROBE = "Tom has 34 apples,\nand (5 + 7) naïve cafés."
"""A text of words, digits and accents."""
_BLANK, _BYTE = "▁", re.compile(r"<0x([0-9A-F]{2})>")
"""What SentencePiece writes for a blank, and for a byte that is no character."""


class TokenText:
    """The bytes of the tokens of a tokenizer.

    Attributes:
        tokenizer: The tokenizer.
        end: Token that ends a response.
        adds_blank: Whether a text gets a blank before it, which does not count; some add none before another one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read the vocabulary of a tokenizer that has an end."""
        assert tokenizer.eos_token_id is not None, "checked where prompts are encoded"
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token_id
        added, special = tokenizer.get_added_vocab(), {*tokenizer.all_special_tokens}
        own = {name: token for name, token in tokenizer.get_vocab().items() if name not in added}
        symbols = _symbols()
        is_byte_level = all(character in symbols for name in own for character in name)
        self._bytes = {
            token: bytes(symbols[character] for character in name) if is_byte_level else _of_piece(name)
            for name, token in own.items()
            if name not in special
        }
        self._fallbacks = {token for name, token in own.items() if _BYTE.fullmatch(name)}
        self._bytes |= {token: name.encode() for name, token in added.items() if name not in special}
        self.adds_blank = b"".join(self.of(token) or b"" for token in self.encode("a"))[:1] == b" "

    def of(self, token: int) -> bytes | None:
        """The bytes of a token; None for one that is no text, as those that separate messages."""
        return self._bytes.get(token)

    @cached_property
    def tokens(self) -> dict[bytes, int]:
        """Tokens by their bytes; of several, the first that does not stand for a single byte of a character."""
        texts = self._bytes.items()
        found = {text: token for token, text in sorted(texts, reverse=True) if token in self._fallbacks}
        return found | {text: token for token, text in sorted(texts, reverse=True) if token not in self._fallbacks}

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, which may begin in the middle of a line."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pieces(self, tokens: Sequence[int], text: bytes) -> list[bytes]:
        """The bytes of the tokens of a text, up to where they are no longer those of the text."""
        whole = self._pieces(tokens, text, b"")
        if not self.adds_blank:
            return whole
        return max(whole, self._pieces(tokens, text, b" "), key=lambda pieces: sum(map(len, pieces)))

    def _pieces(self, tokens: Sequence[int], text: bytes, blank: bytes) -> list[bytes]:
        """The same, without what was put before the text."""
        found, length = list[bytes](), 0
        for token in tokens:
            piece = self.of(token)
            if piece is None:
                break
            piece = piece if found else piece.removeprefix(blank)
            if not text.startswith(piece, length):
                break
            found.append(piece)
            length += len(piece)
        return found

    def is_known(self) -> bool:
        """Whether the bytes of its tokens are those of the texts that it makes tokens of."""
        ascii_words = (text.decode() for text in self._bytes.values() if text.isascii())
        return any(self._reads(text) for text in (PROBE, "".join(islice(filter(str.isprintable, ascii_words), 100))))

    def _reads(self, text: str) -> bool:
        whole = text.encode()
        return bool(whole) and b"".join(self.pieces(self.encode(text), whole)) == whole


def _symbols() -> dict[str, int]:
    """The byte for which each symbol stands in vocabularies of bytes, as GPT-2's.

    Printable bytes stand for themselves, and the others follow from 256 on. Source: Radford et al., 2019, "Language
    Models are Unsupervised Multitask Learners", section 2.2, and the alphabet of the library `tokenizers`.
    """
    alphabet = {*pre_tokenizers.ByteLevel.alphabet()}
    own = {symbol: ord(symbol) for symbol in alphabet if ord(symbol) < 256}
    rest = sorted({*range(256)} - {*own.values()})
    return own | dict(zip(sorted(alphabet - own.keys()), rest, strict=True))


def _of_piece(name: str) -> bytes:
    """The bytes of a piece of SentencePiece, or of a word as it is written."""
    if byte := _BYTE.fullmatch(name):
        return bytes([int(byte[1], 16)])
    return name.replace(_BLANK, " ").encode()

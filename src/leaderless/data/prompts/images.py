"""Images in prompts: where they come from, and the column in which they go to the ranks that use them. No torch.

A prompt's images are one value of the column `images`: bytes that hold, for each image, where its tokens are in the
prompt, how they are laid out, and the encoded file. They are sent as they were read, and become pixels on the rank that
computes with them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol

_HEADER = struct.Struct("<IHHI")
"""Place, rows and columns of tokens, and bytes of the file."""


Sized = tuple[int, int, bytes]
"""Rows and columns of tokens of an image, and its file."""


class PromptImage(NamedTuple):
    """An image of a prompt, or of several prompts that are computed together.

    Attributes:
        place: Index of the first of its tokens, which are `rows * columns`.
        rows: Rows of tokens.
        columns: Tokens of a row.
        data: The encoded file.
    """

    place: int
    rows: int
    columns: int
    data: bytes

    @property
    def num_tokens(self) -> int:
        """Number of its tokens."""
        return self.rows * self.columns

    @property
    def num_saved(self) -> int:
        """Positions that it takes less than it has tokens."""
        return self.num_tokens - max(self.rows, self.columns)

    def moved(self, by: int) -> PromptImage:
        """The same image with its tokens elsewhere."""
        return self._replace(place=self.place + by)


class ImageReader(Protocol):
    """Facts about a model that are needed to put images into its prompts.

    Attributes:
        token: Id of the token that stands for each part of an image.
        marker: Text that stands for a whole image where there is no chat template.
        reserved: Ids of tokens that no response may have: they would be taken for images.
        fingerprint: Text that differs where images become other tokens.
    """

    token: int
    marker: str
    reserved: frozenset[int]
    fingerprint: str

    def arranged(self, tokens: list[int]) -> list[int]:
        """A prompt, with one token for each image, as the model was trained with it.

        Raises:
            ValueError: The model does not take images where they are.
        """

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image of some pixels.

        Raises:
            ValueError: The model does not take images of this shape.
        """


def pack_images(images: Iterable[PromptImage]) -> bytes:
    """The value of a prompt in the column `images`."""
    return b"".join(_HEADER.pack(*image[:3], len(image.data)) + image.data for image in images)


def unpack_images(packed: bytes) -> tuple[PromptImage, ...]:
    """The images of a prompt, from its value in the column `images`."""
    images: list[PromptImage] = []
    begin = 0
    while begin < len(packed):
        place, rows, columns, size = _HEADER.unpack_from(packed, begin)
        begin += _HEADER.size + size
        images.append(PromptImage(place, rows, columns, packed[begin - size : begin]))
    return tuple(images)


def collapsed(tokens: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """A prompt's tokens with one for each image, in place of one for each of its parts."""
    result = list(tokens)
    for image in reversed(images):
        del result[image.place + 1 : image.place + image.num_tokens]
    return result


def num_alike(first: Sequence[PromptImage], second: Sequence[PromptImage], num_tokens: int) -> int:
    """Number of the `num_tokens` common first tokens of two texts that stand for the same."""
    for one, other in zip_longest(first, second):
        if one != other:
            return min(num_tokens, *(image.place for image in (one, other) if image is not None))
    return num_tokens


def expanded(tokens: Sequence[int], reader: ImageReader, pictures: Sequence[Sized]) -> list[int]:
    """A prompt's tokens with one for each part of an image, in place of one for each image.

    Args:
        tokens: Tokens of the prompt.
        reader: Facts about how the model reads images.
        pictures: Rows and columns of tokens, and the file, of each image.

    Raises:
        ValueError: The prompt has not exactly one token for each image.
    """
    found = sum(token == reader.token for token in tokens)
    if found != len(pictures):
        raise ValueError(
            f"its prompt has {found} tokens that stand for an image, but there are {len(pictures)} images: the text "
            "must not have such tokens itself, and the chat template must write one for each image"
        )
    sizes = iter(pictures)
    result: list[int] = []
    for token in tokens:
        rows, columns = next(sizes)[:2] if token == reader.token else (1, 1)
        result += [token] * (rows * columns)
    return result


def placed(tokens: Sequence[int], reader: ImageReader, pictures: Sequence[Sized]) -> tuple[PromptImage, ...]:
    """The images of a prompt whose tokens come from `expanded`, with their places."""
    images: list[PromptImage] = []
    place = 0
    for rows, columns, data in pictures:
        place = tokens.index(reader.token, place)
        images.append(PromptImage(place, rows, columns, data))
        place += rows * columns
    return tuple(images)

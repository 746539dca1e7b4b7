"""Images in prompts: where they come from, and the column in which they go to the ranks that use them. No torch.

A prompt's images are one value of the column `images`: bytes that hold, for each image, where its tokens are in the
prompt, how they are laid out, and the encoded file. They are sent as they were read, and become pixels on the rank that
computes with them.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple, Protocol

from leaderless.base.image_files import decode_image, image_size, read_image
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.data.sources.row_sources import Row

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

    @property
    def digest(self) -> int:
        """Number of 64 bits that another image hardly has, wherever its tokens are."""
        shape = struct.pack("<HH", self.rows, self.columns)
        return int.from_bytes(hashlib.blake2b(shape + self.data, digest_size=8).digest(), "little", signed=True)

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


_MEDIA = {"image": "an image", "video": "a video", "audio": "audio", "file": "a file"}
MARK = "<image>"
"""Mark of an image in a text."""
_PLACE: dict[str, Json] = {"type": "image"}
"""Mark of an image among the parts of a message, as chat templates read it."""


def other_than_text(message: Mapping[str, Json], *, has_images: bool = False) -> str | None:
    """Find the first part of a message that the model does not read.

    The chat templates of text models leave such parts out, or write them as if they were text, without an error: a
    model would be trained on answers to content that it has not seen.

    Args:
        message: Message of a chat, whose content may be a list of parts.
        has_images: Whether the model sees images.

    Returns:
        What errors call the part, such as `an image`; None for a message that the model reads.
    """
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        medium = _medium(part) if isinstance(part, Mapping) else None
        if medium and not (has_images and medium == _MEDIA["image"]):
            return medium
    return None


def _medium(part: Mapping[str, Json]) -> str | None:
    """The medium that a part's type names, as `image_url`, else that its keys name; in Parquet files some are null."""
    kind = part.get("type")
    words = [kind] if isinstance(kind, str) else [key for key, value in part.items() if value is not None]
    for word in words:
        medium = word.removeprefix("input_").removesuffix("_url")
        if medium in _MEDIA:
            return _MEDIA[medium]
    return None


def with_places(messages: Sequence[Mapping[str, Json]], num_images: int) -> list[Mapping[str, Json]]:
    """Messages with a part for each image of a row, in place of marks `<image>` in their text.

    Without any mark or part for an image, images come before the text of the first message of the user.

    Raises:
        ValueError: There are more or fewer places than images, or a part gives an image itself.
    """
    contents = [_parts(message.get("content")) for message in messages]
    places = sum(part == _PLACE for content in contents for part in content)
    if not places and num_images:
        first = next((place for place, message in enumerate(messages) if message.get("role") == "user"), 0)
        contents[first] = [_PLACE] * num_images + contents[first]
        places = num_images
    if places != num_images:
        raise ValueError(f"its text has places for {places} images ({MARK}), but the row has {num_images}")
    pairs = zip(messages, contents, strict=True)
    return [{**message, "content": content} if _PLACE in content else message for message, content in pairs]


def _parts(content: Json) -> list[Json]:
    """The content of a message as parts, one of them for each image."""
    if isinstance(content, str):
        texts: list[list[Json]] = [[{"type": "text", "text": text}] if text else [] for text in content.split(MARK)]
        return [part for number, text in enumerate(texts) for part in ([_PLACE] * bool(number) + text)]
    parts: list[Json] = []
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict):
            parts.append(part)
        elif _medium(part) == _MEDIA["image"]:
            given = [key for key, value in part.items() if key != "type" and value is not None]
            if given:
                raise ValueError(f"a part of a message gives an image itself, by '{given[0]}': put it into the column")
            parts.append(_PLACE)
        else:
            parts += _parts(part["text"]) if isinstance(part.get("text"), str) else [part]
    return parts


def image_folder(path: str) -> Path:
    """The folder at which the paths of a dataset's images begin: the folder of its files.

    Args:
        path: The setting `path` of the dataset.
    """
    folder = Path(path)
    while any(character in folder.name for character in "*?["):
        folder = folder.parent
    return folder if folder.is_dir() else folder.parent


class ImagePrompts:
    """Conversion of images of rows into parts of their prompts.

    Attributes:
        reader: Facts about how the model reads images.
    """

    def __init__(self, reader: ImageReader, column: str, folder: Path, key: str) -> None:
        """Take images from a column; paths begin at a folder, and `key` is the setting of the column, for errors."""
        self.reader, self._column, self._folder, self._key = reader, column, folder, key

    @contextmanager
    def _named(self, place: str) -> Iterator[None]:
        """Say where a row is that has a problem."""
        try:
            yield
        except ValueError as error:
            raise RecipeError.at(self._key, f"{place}: {error}") from error

    def pictures(self, row: Row, place: str, *, are_decoded: bool) -> list[Sized]:
        """The images of a row, with their rows and columns of tokens.

        Args:
            row: The row.
            place: Name of its place, for errors.
            are_decoded: Whether images are decoded, to find those that are damaged.

        Raises:
            RecipeError: There is no such column, or an image cannot be used.
        """
        if self._column not in row:
            raise RecipeError.at(self._key, f"{place} has no column '{self._column}'{nearest(self._column, row)}")
        value = row[self._column]
        found: list[Sized] = []
        for source in value if isinstance(value, list) else [] if value is None else [value]:
            with self._named(place):
                data = read_image(source, self._folder)
                if are_decoded:
                    decode_image(data)
                found.append((*self.reader.grid(*image_size(data)), data))
        return found

    def marked(self, text: str, num_images: int, place: str) -> str:
        """A prompt that is no chat, with the model's own mark for each image; errors as of `messages`."""
        with self._named(place):
            parts = with_places([{"content": text}], num_images)[0]["content"]
        if not isinstance(parts, list):
            return text
        return "".join(str(part.get("text", self.reader.marker)) for part in parts if isinstance(part, dict))

    def messages(self, messages: Sequence[Json], num_images: int, place: str) -> list[Json]:
        """A chat with a part for each image.

        Raises:
            RecipeError: It has places for more or fewer images than the row has.
        """
        with self._named(place):
            return [dict(one) for one in with_places([m for m in messages if isinstance(m, Mapping)], num_images)]

    def expanded(
        self, tokens: list[int], pictures: Sequence[Sized], place: str
    ) -> tuple[list[int], tuple[PromptImage, ...]]:
        """A prompt's tokens with one for each part of an image, and the images with their places.

        Raises:
            RecipeError: The prompt has not exactly one token for each image.
        """
        with self._named(place):
            result = expanded(self.reader.arranged(tokens), self.reader, pictures)
        return result, placed(result, self.reader, pictures)

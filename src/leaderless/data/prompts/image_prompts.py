"""The images of a dataset's rows, and the places that prompts have for them. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from leaderless.base.image_files import decode_image, image_size, read_image
from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.data.prompts.images import ImageReader, PromptImage, Sized, expanded, placed
from leaderless.data.prompts.media import with_places
from leaderless.data.sources.row_sources import Row


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

"""Images in prompts: where they come from, and the column in which they go to the ranks that use them. No torch.

A prompt's images are one value of the column `images`: bytes that hold, for each image, where its tokens are in the
prompt, how they are laid out, and the encoded file. They are sent as they were read, and become pixels on the rank that
computes with them.
"""

from __future__ import annotations

import base64
import binascii
import io
import struct
import warnings
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from leaderless.config import Json

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

MAX_SIDE = 10_000
"""Most pixels along a side: a larger image would be decoded whole, to be shrunk to a small part of its size."""
ORIENTATION = 0x0112
"""Tag of a photograph that says how it is turned."""
TURNED = range(5, 9)
"""Values of the tag for which height and width are exchanged."""
DEEP = ("I", "F")
"""How the names of forms of pixels begin that have more than 8 bits; the rest of their names says how many."""
THUMBNAIL_SIDE = 256
"""Most pixels along a side of what reports show."""
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
    """What has to be known of a model to put images into its prompts.

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


def read_image(source: Json, folder: Path) -> bytes:
    """The encoded file of an image, as it is: a path, from some folder on; a data URL; or what Parquet files hold.

    Raises:
        ValueError: There is none.
    """
    if isinstance(source, dict):  # an image of the library `datasets`, or a part of a message
        given = next((source[key] for key in ("bytes", "url", "path") if source.get(key) is not None), None)
        is_base64 = given is not None and source.get("bytes") is given
        return _decoded(str(given)) if is_base64 else read_image(given, folder)
    if not isinstance(source, str) or not source:
        raise ValueError(f"an image must be a path or a data URL, not {source!r:.60}")
    scheme, _, rest = source.partition(":")
    if scheme == "data":
        return _decoded(rest.partition(",")[2])
    if scheme in {"http", "https"}:
        raise ValueError(f"{source:.100} is on the network: download images before training")
    try:
        return (folder / source.removeprefix("file://")).read_bytes()
    except OSError as error:
        raise ValueError(f"{folder / source} cannot be read: {error.strerror}") from error


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"an image is no base64: {error}") from error


def open_image(data: bytes) -> Picture:
    """Open an encoded image without decoding it yet.

    Raises:
        ValueError: It is no image, has more than one frame or more than 8 bits a number, or is too large.
    """
    from PIL import Image, UnidentifiedImageError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit here is lower
        try:
            picture = Image.open(io.BytesIO(data))
        except UnidentifiedImageError:
            raise ValueError(f"{len(data):,} bytes that begin with {data[:8]!r} are no image") from None
        except Image.DecompressionBombError as error:
            raise ValueError(f"an image is too large: {error}") from error
        except (OSError, SyntaxError, ValueError) as error:
            raise ValueError(f"an image cannot be opened: {error}") from error
    width, height = picture.size
    if max(width, height) > MAX_SIDE:
        raise ValueError(f"an image has {width:,} x {height:,} pixels; at most {MAX_SIDE:,} a side: shrink it")
    if picture.mode.startswith(DEEP):
        raise ValueError(f"an image has more than 8 bits a number (mode {picture.mode}): convert it to 8 bits")
    # What phones write in this form is a photograph, with others for other uses behind it.
    if (num_frames := getattr(picture, "n_frames", 1)) > 1 and picture.format != "MPO":
        raise ValueError(f"a file of {num_frames} frames is a video, which is not supported")
    return picture


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width of an image as it is seen: photographs may say that they are turned.

    Raises:
        ValueError: As for `open_image`.
    """
    picture = open_image(data)
    is_turned = picture.getexif().get(ORIENTATION) in TURNED
    return (picture.width, picture.height) if is_turned else (picture.height, picture.width)


def decode_image(data: bytes) -> Picture:
    """The pixels of an encoded image, in red, green and blue; what is transparent becomes white.

    Raises:
        ValueError: It cannot be decoded.
    """
    from PIL import Image, ImageOps

    picture = open_image(data)
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode in {"RGBA", "LA", "PA"} or "transparency" in picture.info:
            picture = picture.convert("RGBA")
            picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        return picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, struct.error) as error:
        raise ValueError(f"an image of {picture.width} x {picture.height} pixels is damaged: {error}") from error


def plain_file(data: bytes) -> bytes:
    """A file that any program decodes to the same pixels as `decode_image`: the same, unless it says to change them."""
    picture = open_image(data)
    if picture.mode == "RGB" and picture.getexif().get(ORIENTATION, 1) == 1 and "transparency" not in picture.info:
        return data
    file = io.BytesIO()
    decode_image(data).save(file, "PNG")
    return file.getvalue()


def collapsed(tokens: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """A prompt's tokens with one for each image, in place of one for each of its parts."""
    result = list(tokens)
    for image in reversed(images):
        del result[image.place + 1 : image.place + image.num_tokens]
    return result


def num_alike(first: Sequence[PromptImage], second: Sequence[PromptImage], num_tokens: int) -> int:
    """How many of the tokens that two texts begin with, of which they have so many in common, stand for the same."""
    for one, other in zip_longest(first, second):
        if one != other:
            return min(num_tokens, *(image.place for image in (one, other) if image is not None))
    return num_tokens


def thumbnail(data: bytes) -> str:
    """A data URL of an image of at most 256 pixels a side, for a page; a small one stays as it is."""
    picture = decode_image(data)
    form, options = ("PNG", {}) if max(picture.size) <= THUMBNAIL_SIDE else ("JPEG", {"quality": 80})
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    picture.save(file, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


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

"""Files of images: read from where a row or a message says, opened, decoded and made small. Imports no torch."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

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


def read_image(source: object, folder: Path) -> bytes:
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


def thumbnail(data: bytes) -> str:
    """A data URL of an image of at most 256 pixels a side, for a page; a small one stays as it is."""
    picture = decode_image(data)
    form, options = ("PNG", {}) if max(picture.size) <= THUMBNAIL_SIDE else ("JPEG", {"quality": 80})
    picture.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    picture.save(file, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"

"""Images in what environments show and programs ask: parts of messages, each with its file as a data URL. No torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from leaderless.base.image_files import decode_image, open_image, read_image
from leaderless.base.values import Json

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image as Picture

    from leaderless.environments.protocol import Observation

KEY = "image"
"""Where a part of a message has its image."""


def is_image(part: Mapping[str, Json]) -> bool:
    """Whether a part of a message is an image."""
    return part.get("type") in {"image", "image_url", "input_image"}


def with_files(observation: Observation) -> Observation:
    """Observation with the file of each image as a data URL, which JSON can hold.

    A part `{"type": "image", "image": ...}` may give a picture of PIL, an array [height, width, 3] of uint8, an encoded
    file, a data URL or a path; `{"type": "image_url", "image_url": {"url": ...}}` a data URL.

    Raises:
        ValueError: An image cannot be read or decoded.
    """
    if not isinstance(observation, list | tuple):
        return observation
    return [message_with_files(one, takes_paths=True) if isinstance(one, Mapping) else one for one in observation]


def message_with_files(
    message: Mapping[str, Json], *, takes_paths: bool, known: set[str] | None = None
) -> Mapping[str, Json]:
    """A message with the files of its images; see `with_files`.

    Args:
        message: The message.
        takes_paths: Whether an image may be a path of this machine.
        known: Data URLs that were checked before, which are taken as they are; new ones are added.

    Raises:
        ValueError: An image cannot be read or decoded.
    """
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return message
    parts, known = list[Json](), set() if known is None else known
    for part in content:
        if not isinstance(part, Mapping) or not is_image(part):
            parts.append(part)
            continue
        image = _given(part)
        if not takes_paths and not (isinstance(image, str) and image.startswith("data:")):
            raise ValueError(
                f"{image!s:.60} is no data URL: addresses and paths are not read; send the image itself, as "
                "data:image/png;base64,..."
            )
        url = image if isinstance(image, str) and image in known else data_url(image)
        known.add(url)
        parts.append({"type": "image", KEY: url})
    return {**message, "content": parts}


def _given(part: Mapping[str, object]) -> object:
    """The image that a part gives."""
    value = next((part[key] for key in (KEY, "image_url", "url", "data", "path") if part.get(key) is not None), None)
    if value is None:
        raise ValueError(f"a part of a message gives no image, but only {', '.join(map(str, part))}: give '{KEY}'")
    return value["url"] if isinstance(value, Mapping) and "url" in value else value


def data_url(image: object) -> str:
    """An image as a data URL; see `with_files` for what it may be.

    Raises:
        ValueError: It cannot be read or decoded.
    """
    if isinstance(image, bytes):
        data = image
    elif hasattr(image, "shape") or hasattr(image, "save"):
        data = _encoded(image)
    else:
        data = read_image(str(image) if isinstance(image, Path) else cast("Json", image), Path())
    form = (open_image(data).format or "PNG").lower()
    decode_image(data)  # what is damaged is found here, and not by an engine
    url = f"data:image/{form};base64,{base64.b64encode(data).decode()}"
    return image if isinstance(image, str) and image == url else url  # one text, and not two of the same


def _encoded(image: object) -> bytes:
    """A picture or an array as a file without loss."""
    from PIL import Image

    picture = cast("Picture", image)
    if hasattr(image, "shape"):
        array = cast("np.ndarray", image)
        if str(array.dtype) != "uint8" or array.ndim != 3 or array.shape[2] != 3:
            raise ValueError(
                f"an image is an array of {array.dtype} and the shape {tuple(array.shape)}: it must be [height, "
                "width, 3] of uint8"
            )
        picture = Image.fromarray(array)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def taken_out(value: Json, images: dict[str, int]) -> Json:
    """Content of messages or answers, with numbers in place of images; new images are added to `images`."""
    if isinstance(value, list | tuple):
        return [taken_out(one, images) for one in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(url := value.get(KEY), str) and is_image(value):
        return {**value, KEY: images.setdefault(url, len(images))}
    return {key: taken_out(one, images) for key, one in value.items()}


def put_back(value: Json, images: Sequence[Json]) -> Json:
    """The same with the images in their places again.

    Raises:
        IndexError: There are fewer images.
    """
    if not images:
        return value
    if isinstance(value, list | tuple):
        return [put_back(one, images) for one in value]
    if not isinstance(value, Mapping):
        return value
    if isinstance(number := value.get(KEY), int) and is_image(value):
        return {**value, KEY: images[number]}
    return {key: put_back(one, images) for key, one in value.items()}


def data_of(part: Mapping[str, Json]) -> bytes:
    """The file of an image in a message that came from `with_files`."""
    return base64.b64decode(str(part[KEY]).partition(",")[2])

"""Parts of messages other than text. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.base.values import Json

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

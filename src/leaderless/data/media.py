"""Parts of messages that models do not read. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.config import Json

_MEDIA = {"image": "an image", "video": "a video", "audio": "audio", "file": "a file"}


def other_than_text(message: Mapping[str, Json]) -> str | None:
    """Find the first part of a message that no text model reads.

    The chat templates of text models leave such parts out, or write them as if they were text, without an error: a
    model would be trained on answers to what it has not seen.

    Args:
        message: Message of a chat, whose content may be a list of parts.

    Returns:
        What errors call the part, such as `an image`; None for a message of text alone.
    """
    content = message.get("content")
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping) and (medium := _medium(part)):
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

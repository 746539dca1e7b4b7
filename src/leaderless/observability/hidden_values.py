"""Keeps secrets of the environment out of what is written and shown."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import unquote

_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY(?![A-Z])", re.IGNORECASE)
_MIN_LENGTH = 8
"""Length of the shortest value that counts; shorter ones, such as `true`, occur in any text."""


def without_secrets(text: str) -> str:
    """A text in which the values of environment variables whose names look secret are replaced by these names."""
    secrets = {value: name for name, value in _secrets() if len(value) >= _MIN_LENGTH}
    # The longest first, as one may be a part of another.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"<{secrets[value]}>")
    return text


def _secrets() -> Iterator[tuple[str, str]]:
    """Names of variables, each with a value, or a part of it, that is to be hidden."""
    for name, value in os.environ.items():
        if _NAME.search(name):
            yield name, value
        if name.endswith("_HEADERS"):  # of OpenTelemetry: `authorization=Bearer%20TOKEN,other=VALUE`
            for pair in value.split(","):
                encoded = pair.partition("=")[2].strip()
                yield from ((name, part) for part in (encoded, unquote(encoded), *unquote(encoded).split()))

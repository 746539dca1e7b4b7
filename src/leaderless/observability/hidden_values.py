"""Keeps secrets of the environment out of what is written and shown."""

from __future__ import annotations

import os
import re

_NAME = re.compile(r"TOKEN|SECRET|PASSW|CREDENTIAL|(?<![A-Z])KEY(?![A-Z])", re.IGNORECASE)
_MIN_LENGTH = 8
"""Length of the shortest value that counts; shorter ones, such as `true`, occur in any text."""


def without_secrets(text: str) -> str:
    """A text in which the values of environment variables whose names look secret are replaced by these names."""
    secrets = {value: name for name, value in os.environ.items() if len(value) >= _MIN_LENGTH and _NAME.search(name)}
    # The longest first, as one may be a part of another.
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"<{secrets[value]}>")
    return text

"""Keys and values of earlier tokens, as models of `transformers` take them."""

from __future__ import annotations

import transformers
from packaging.version import Version

_NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def with_cache(cache: object) -> dict[str, object]:
    """The argument for keys and values of earlier tokens, under the name that this version of `transformers` has."""
    return {_NAME: cache}

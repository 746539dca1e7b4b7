"""Questions to a judge: templates, filled with a response and its row. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from leaderless.base.values import Json
from leaderless.config.judges import PLACE, JudgeOptions
from leaderless.rewards.protocol import RewardInput

Message = Mapping[str, str]
"""A message of a chat: its `role` and `content`."""


def messages_for(options: JudgeOptions, sample: RewardInput, more: Mapping[str, str]) -> tuple[Message, ...]:
    """Question to a judge about a response.

    Args:
        options: Settings of the judge.
        sample: Response, with its row.
        more: Texts for other places of the template.

    Raises:
        ValueError: The row lacks something that the template shows.
    """
    system = [{"role": "system", "content": _filled(options.system, sample, more)}] if options.system else []
    return (*system, {"role": "user", "content": _filled(options.template, sample, more)})


def scale_of(options: JudgeOptions) -> dict[str, str]:
    """Texts for the places of a scale."""
    low, high = options.scale
    return {"low": f"{low:g}", "high": f"{high:g}"}


def rubric_of(options: JudgeOptions) -> dict[str, str]:
    """Texts for the places of a rubric: its criteria, and a JSON object with a number for each."""
    criteria = "\n".join(f"- {name}: {one.text}" for name, one in options.rubric.items())
    low, high = options.scale
    return {"rubric": criteria, "form": json.dumps({name: _plain((low + high) / 2) for name in options.rubric})}


def _plain(number: float) -> float:
    return int(number) if number.is_integer() else number


def _filled(template: str, sample: RewardInput, more: Mapping[str, str]) -> str:
    """A template with texts in its places; what a text has in braces stays as it is."""

    def text(found: re.Match[str]) -> str:
        doubled, name = found.groups()
        if doubled is not None:
            return f"{{{doubled}}}"
        return more[name] if name in more else _text_at(name, sample)

    return PLACE.sub(text, template)


def _text_at(name: str, sample: RewardInput) -> str:
    if name == "prompt":
        return text_of(sample.prompt)
    if name == "response":
        return sample.response
    if name == "transcript":
        parts = sample.transcript
        if len(parts) == 1:
            return parts[0].text
        return "\n\n".join(f"[{'policy' if one.is_sampled else 'environment'}]\n{one.text}" for one in parts)
    if name == "answer":
        if sample.answer is None:
            raise ValueError("the judge is shown {answer}, but the row has none: name its column as `answer` of data")
        return text_of(sample.answer)
    if name not in sample.row:
        known = ", ".join(sample.row) or "none"
        raise ValueError(f"the judge is shown {{{name}}}, but the row has no such column (it has {known})")
    return text_of(sample.row[name])


def text_of(value: Json) -> str:
    """A value of a row as a judge reads it: text as it is, messages one below the other, all else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(_is_message(one) for one in value):
        return "\n\n".join(f"[{one['role']}]\n{_content(one['content'])}" for one in value if isinstance(one, Mapping))
    return json.dumps(value, ensure_ascii=False)


def _is_message(value: Json) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= value.keys()


def _content(value: Json) -> str:
    """The text of a message; images are left out."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [one.get("text", "") for one in value if isinstance(one, Mapping)]
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    return text_of(value)

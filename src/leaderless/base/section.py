"""The common base of all sections of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, field_validator, model_validator
from pydantic_core import CoreSchema


class Section(BaseModel):
    """A part of a recipe: typed, frozen, and closed to keys it does not know."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, validate_default=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _switch_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """YAML reads `yes` and `on` as true, which pydantic would take for the number 1."""
        annotation = cls.model_fields[info.field_name].annotation if info.field_name else None
        if isinstance(value, bool) and annotation in {int, float, int | None, float | None}:
            raise ValueError("must be a number")
        return value


class ShorthandSection(Section):
    """A section that may be written as a single value, which sets the field named by `shorthand`."""

    shorthand: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        if value is None or isinstance(value, Mapping | cls):
            return value
        is_text = cls._is_text()
        if isinstance(value, str) and not is_text:
            with suppress(ValueError):  # YAML takes `1e-1` for text
                return {cls.shorthand: float(value)}
        elif isinstance(value, str if is_text else int | float) and not isinstance(value, bool):
            return {cls.shorthand: value}
        needs_more = any(field.is_required() for name, field in cls.model_fields.items() if name != cls.shorthand)
        short = "" if needs_more else f"{'text' if is_text else 'a number'} (its {cls.shorthand}) or "
        raise ValueError(f"must be {short}a section of settings")

    @classmethod
    def _is_text(cls) -> bool:
        return cls.model_fields[cls.shorthand].annotation is str

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        """The JSON Schema allows both forms, where one value is enough."""
        schema = handler.resolve_ref_schema(handler(core_schema))
        if set(schema.get("required", ())) - {cls.shorthand}:
            return schema
        return {"title": cls.__name__, "anyOf": [schema, {"type": "string" if cls._is_text() else "number"}]}

"""The schema for editors and the reference of settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from pydantic import BaseModel, ValidationError

from leaderless.config import Recipe, all_keys
from leaderless.config.judges import RewardOptions

OWN = "tests.unit.algorithms.test_custom_classes:Harmonic"
MINIMAL = {"name": "a", "workflow": "w", "models": {"policy": "m"}, "data": {"train": {"path": "x"}}, "steps": 1}


def all_sections(section: type[BaseModel] = Recipe):
    """All sections of a recipe, each with the fields it has."""
    found = {section}
    for field in section.model_fields.values():
        inner = [field.annotation]
        while inner:
            annotation = inner.pop()
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                found |= all_sections(annotation)
            inner += getattr(annotation, "__args__", ())
    return found


def test_every_setting_has_a_description():
    found = all_sections()
    assert {section.__name__ for section in found} >= {
        "LayoutConfig",
        "ModelConfig",
        "OptimizerConfig",
        "FormatOptions",
    }
    for section in (*found, RewardOptions):
        for name, field in section.model_fields.items():
            assert field.description or name == "type", f"{section.__name__}.{name}"
            assert re.search(r"[.:]$", field.description or "."), f"{section.__name__}.{name}: {field.description!r}"


def test_all_keys_are_named_once():
    keys = all_keys()
    assert len(keys) == len(set(keys))
    assert {"name", "models", "batch.prompts_per_step", "algorithm.kl.coefficient", "reward.format.pattern"} <= set(
        keys
    )


def accepts(schema: Mapping[str, object] | bool, value: object, root: Mapping[str, object]) -> bool:
    """Whether a JSON Schema, of the keywords that pydantic writes, accepts the shape of a value."""
    if isinstance(schema, bool):
        return schema
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].removeprefix("#/$defs/")], value, root)
    if "anyOf" in schema:
        return any(accepts(option, value, root) for option in schema["anyOf"])
    if "oneOf" in schema:
        return sum(accepts(option, value, root) for option in schema["oneOf"]) == 1
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    kinds |= {"array": (list, tuple), "object": dict}
    allowed = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    if not any(isinstance(value, kinds[kind]) and (kind == "boolean" or value is not True) for kind in allowed):
        return False
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return False
    if isinstance(value, dict):
        known, extra = schema.get("properties", {}), schema.get("additionalProperties", False)
        named = schema.get("patternProperties", {})
        inner = [
            (next((rule for form, rule in named.items() if re.search(form, key)), known.get(key, extra)), item)
            for key, item in value.items()
        ]
        has_all = set(schema.get("required", ())) <= set(value)
        return has_all and all(accepts(rule, item, root) for rule, item in inner)
    return not isinstance(value, list) or all(accepts(schema["items"], item, root) for item in value)


@pytest.mark.parametrize(
    ("change", "is_valid"),
    [
        ({}, True),
        ({"models": {"policy": {"path": "a", "compute_dtype": "bfloat16"}}}, True),
        ({"models": {"policy": "a"}, "roles": {"critic": {"optimizer": {"beta1": 0.5}}}}, True),
        ({"models": {"policy": 3}}, False),
        ({"models": {"policy": {}}}, False),
        ({"models": {"policy": {"path": "a", "dtype": "x"}}}, False),
        ({"reward": {"math": {"weight": 2, "sources": ["a"]}, "my.module:f": 1.5}}, True),
        ({"reward": {"math": "much"}}, False),
        ({"reward": {"my.module:f": {"weights": 1}}}, False),
        ({"reward": {"format": {"pattern": "x"}}}, True),
        ({"reward": {"format": 1.0}}, False),
        ({"reward": {"judge": {"url": "http://a/v1", "model": "m", "parse": "(x)", "pairwise": {}}}}, True),
        ({"reward": {"judge": 1.0}}, False),
        ({"models": {"policy": "m", "judge": "j"}, "reward": {"judge": {"role": "judge"}}}, True),
        ({"reward": {"judge": {"url": "http://a/v1", "model": "m", "parse": {"regex": "x"}}}}, False),
        ({"reward": {"format-boxed": {"pattern": "x"}, "math-1": 2.0}}, True),
        ({"reward": {"format-boxed": 2.0}}, False),
        ({"layout": {"rollout": {"ranks": "0-3", "tp": 2}, "policy": {"ranks": 4}}}, True),
        ({"layout": {"rollout": {"ranks": [0]}}}, False),
        ({"optimizer": {"schedule": "other"}}, False),
        ({"algorithm": {"advantage": {"epsilon": 0.5}}}, True),
        ({"algorithm": {"advantage": {"type": "gae", "epsilon": 0.5, "decay": 0.9}}}, True),
        ({"algorithm": {"advantage": {"type": "gae", "k": 2}}}, False),
        ({"algorithm": {"advantage": {"type": "gea"}}}, False),
        ({"algorithm": {"advantage": {"type": OWN, "power": 3}, "policy_loss": {"type": "sapo"}}}, True),
        ({"stepz": 3}, False),
        ({"data": {"train": {"path": "x", "curriculum": "level", "streaming": False}}}, True),
        ({"data": {"train": {"path": "x", "weight": 2.0}}}, False),
        ({"data": {"train": {"a": {"path": "x"}, "b": {"path": "y", "weight": 2.0}}}}, True),
        ({"data": {"train": {"a": {"path": "x"}, "path": "y"}}}, False),
    ],
)
def test_the_json_schema_accepts_what_the_loader_accepts(change, is_valid):
    schema = Recipe.model_json_schema()
    settings = MINIMAL | change
    assert accepts(schema, settings, schema) == is_valid
    try:
        Recipe.model_validate(settings)
    except ValidationError:
        assert not is_valid
    else:
        assert is_valid


def test_the_json_schema_describes_settings():
    fields = Recipe.model_json_schema()["$defs"]["BatchConfig"]["properties"]
    assert fields["prompts_per_step"]["description"].startswith("Prompts (for supervised fine-tuning: rows)")

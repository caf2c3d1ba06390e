"""Whether a model's arguments are those of a tool, by its JSON schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a JSON value is what a schema asks for, as far as type hints and most tools' schemas go: types, enum,
    anyOf, items, prefixItems, properties, required, additionalProperties, nullable."""
    if value is None and schema.get("nullable"):
        return True
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema and value not in schema["enum"]:
        return False
    if not _of_type(value, schema.get("type")):
        return False
    if isinstance(value, list):
        if (first := schema.get("prefixItems")) is not None:
            return len(value) == len(first) and all(map(fits, value, first))
        return all(fits(one, schema.get("items") or {}) for one in value)
    return not isinstance(value, dict) or _object_fits(value, schema)


def takes(parameters: Mapping[str, Any]) -> str:
    """What a tool takes, in one line for the model."""
    needed = parameters.get("required", ())
    described = [
        f"{name}: {_type_in_words(schema)}{'' if name in needed else ' (optional)'}"
        for name, schema in parameters.get("properties", {}).items()
    ]
    return ", ".join(described) or "no arguments"


def _of_type(value: Any, type_: str | list[str] | None) -> bool:
    """Whether a value is of a schema's type, one of several, or of one that JSON does not have."""
    if isinstance(type_, list):
        return any(_of_type(value, one) for one in type_)
    if type_ not in TYPES:
        return True
    return isinstance(value, TYPES[type_]) and (type_ == "boolean" or not isinstance(value, bool))


def _object_fits(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    known, more = schema.get("properties"), schema.get("additionalProperties")
    if not all(name in value for name in schema.get("required", ())):
        return False
    if known is None:
        return more in (None, True, False) or all(fits(one, more) for one in value.values())
    return all(fits(one, known[name]) if name in known else bool(more) for name, one in value.items())


def _type_in_words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(map(_type_in_words, schema["anyOf"]))
    type_ = schema.get("type", "any")
    return " or ".join(type_) if isinstance(type_, list) else type_

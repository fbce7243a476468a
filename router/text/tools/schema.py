"""JSON Schemas for the output of a model that has to call a function."""

import json
from collections.abc import Mapping
from typing import Any

from kvrelay.router.errors import InvalidRequest

DEFINITIONS = ("$defs", "definitions")
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def parameters_schema(parameters: Mapping[str, Any] | None) -> str:
    """The arguments of one function."""
    return json.dumps(parameters or ANY_OBJECT)


def calls_schema(tools: Mapping[str, Mapping[str, Any] | None], *, single: bool) -> str:
    """A list of calls, of one if `single`. The definitions of all parameters' schemas move to its top, where their
    references point.

    Args:
        tools: the schema of each function's parameters, by its name.

    Raises:
        InvalidRequest: two functions have different definitions of one name.
    """
    definitions: dict[str, dict[str, Any]] = {key: {} for key in DEFINITIONS}
    options = []
    for at, (name, given) in enumerate(tools.items()):
        parameters = dict(given or ANY_OBJECT)
        for key in DEFINITIONS:
            for title, schema in dict(parameters.pop(key, {})).items():
                if definitions[key].setdefault(title, schema) != schema:
                    field = f"tools[{at}].function.parameters.{key}"
                    raise InvalidRequest(field, title, "a name that no other tool defines otherwise")
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": options}}
    limit = {"maxItems": 1} if single else {}
    return json.dumps({**schema, **limit, **{key: found for key, found in definitions.items() if found}})

"""Random JSON Schemas of what applications ask for: objects, arrays, strings, numbers, enums, alternatives."""

import random
from typing import Any

NAMES = ("name", "id", "tags", "größe", "a b", "x_1", 'quo"te', "values")


def random_schema(random_: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema whose values are short: strings, arrays and numbers have bounds."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    if depth > 0:
        kinds = ["object", "object", "array", "anyOf", *kinds] if depth < 3 else ["object"]
    match random_.choice(kinds):
        case "object":
            names = random_.sample(NAMES, random_.randint(1, 4))
            properties = {name: random_schema(random_, depth - 1) for name in names}
            required = [name for name in names if random_.random() < 0.7]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            least = random_.randint(0, 2)
            items = random_schema(random_, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + random_.randint(0, 2)}
        case "anyOf":
            return {"anyOf": [random_schema(random_, depth - 1) for _ in range(random_.randint(2, 3))]}
        case "string":
            least = random_.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + random_.randint(1, 8)}
        case "integer":
            least = random_.randint(-1000, 1000)
            return {"type": "integer", "minimum": least, "maximum": least + random_.randint(0, 5000)}
        case "number":
            return {"type": "number", "minimum": random_.randint(-5, 0), "maximum": random_.randint(1, 5)}
        case "enum":
            return {"enum": random_.sample(["red", 3, None, "grün", True, -1.5, "", 'a"b'], random_.randint(1, 4))}
        case "const":
            return {"const": random_.choice(["fixed", 7, False, "\n\t"])}
        case "pattern":
            return {"type": "string", "pattern": random_.choice([r"^[a-z]{2,5}$", r"^\d{3}-\d{2}$", r"^(on|off)$"])}
        case kind:
            return {"type": kind}

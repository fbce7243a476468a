"""What an option's type tells pydantic, which is imported only where pydantic asks for it.

Automatic  the option may be left to kvrelay: the word `auto` in a file, AUTO in the classes of options
Removed    a value that the option had in an earlier version, and what to write instead
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

AUTO = 0
"""Value of a number that the worker chooses by its device."""


@dataclass(frozen=True, slots=True)
class Automatic:
    """Tells pydantic that a number may also be `auto`."""

    allowed: str
    """Text of the error message: what is allowed."""

    least: float = 1
    """The smallest number."""

    most: float | None = None
    """The largest number; None is no limit."""

    sizes: bool = False
    """Whether a number of bytes may be given as text, such as 8GiB."""

    word: object = AUTO
    """What `auto` becomes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic import ByteSize, TypeAdapter
        from pydantic_core import core_schema as schemas

        word = self.word
        number: schemas.CoreSchema
        if int in (source, *get_args(source)):
            number = schemas.int_schema(ge=int(self.least), strict=True)
        else:
            number = schemas.float_schema(ge=self.least, le=self.most, allow_inf_nan=False)
        auto = schemas.no_info_after_validator_function(lambda _: word, schemas.literal_schema(["auto"]))
        choices: list[schemas.CoreSchema | tuple[schemas.CoreSchema, str]] = [auto, number]
        if self.sizes:
            parse = TypeAdapter(ByteSize).validate_python
            text = schemas.str_schema(pattern=r"^\d*\.?\d+\s*[A-Za-z]+$", strict=True)
            choices.append(schemas.no_info_after_validator_function(lambda size: int(parse(size)), text))
        shown = schemas.plain_serializer_function_ser_schema(lambda value: "auto" if value == word else value)
        return schemas.union_schema(
            choices,
            mode="left_to_right",
            custom_error_type="automatic",
            custom_error_message=self.allowed,
            serialization=shown,
        )


@dataclass(frozen=True, slots=True)
class Removed:
    """Tells pydantic to refuse a value with what to write instead of it."""

    value: str
    """The value, which the option no longer has."""

    instead: str
    """Text of the error message: what to write."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core import PydanticCustomError
        from pydantic_core import core_schema as schemas

        def check(value: object) -> object:
            if value == self.value:
                text = "Input should be {instead}; {value} was removed"
                raise PydanticCustomError("removed", text, {"instead": self.instead, "value": self.value})
            return value

        return schemas.no_info_before_validator_function(check, handler(source))

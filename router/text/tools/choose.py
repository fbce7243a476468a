"""Chooses the parsers of a model: by its options, or by what its chat template writes into a conversation."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from kvrelay.router.text.tools.calls import ToolParser
from kvrelay.router.text.tools.hermes import OPEN as HERMES_TAG
from kvrelay.router.text.tools.hermes import HermesParser
from kvrelay.router.text.tools.llama3 import TAG as LLAMA3_TAG
from kvrelay.router.text.tools.llama3 import Llama3Parser
from kvrelay.router.text.tools.mistral import OPEN as MISTRAL_TAG
from kvrelay.router.text.tools.mistral import SPECIAL as MISTRAL_SPECIAL
from kvrelay.router.text.tools.mistral import MistralParser
from kvrelay.router.text.tools.reasoning import OPEN as THINK_TAG

ToolParserName = Literal["auto", "none", "hermes", "llama3", "mistral"]
ReasoningParserName = Literal["auto", "none", "think"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a model writes tool calls."""

    name: str
    signs: tuple[str, ...]
    """Texts of which a template of the format has one."""
    parser: Callable[[Collection[str]], ToolParser]
    """Makes the parser of one completion from the names of the functions."""
    special: tuple[str, ...] = ()
    """Special tokens whose text the parser needs."""


FORMATS = (
    ToolFormat("hermes", (HERMES_TAG,), lambda names: HermesParser()),
    ToolFormat("mistral", (MISTRAL_TAG,), lambda names: MistralParser(), MISTRAL_SPECIAL),
    ToolFormat("llama3", (LLAMA3_TAG, "Environment: ipython"), Llama3Parser, (LLAMA3_TAG,)),
)


def tool_format(name: ToolParserName, template: str) -> ToolFormat | None:
    """The format of a model's tool calls; None if it has none."""
    if name == "auto":
        return next((format_ for format_ in FORMATS if any(sign in template for sign in format_.signs)), None)
    return next((format_ for format_ in FORMATS if format_.name == name), None)


def reasons(name: ReasoningParserName, template: str) -> bool:
    """Whether a model's reasoning is split from its answers."""
    return name == "think" or (name == "auto" and THINK_TAG in template)

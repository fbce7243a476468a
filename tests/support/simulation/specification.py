"""The tables in the docstring of `kvrelay.transfer.protocol.table`, read as data."""

import re
import typing

from kvrelay.transfer.protocol import events, messages
from kvrelay.transfer.protocol import table as protocol
from kvrelay.transfer.protocol.events import State

Transition = tuple[str, str, str, str]
"""(machine, state, event, next state), states as in `State`'s values."""

EVENTS = {kind.__name__ for kind in typing.get_args(events.SendEvent | events.ReceiveEvent)} | {"Deadline"}
ACTIONS = {
    kind.__name__
    for kind in typing.get_args(events.SendAction | events.ReceiveAction) + typing.get_args(messages.Message)
}


def _words(cell: str) -> set[str]:
    return set(re.findall("[A-Za-z]+", cell))


def specified() -> dict[Transition, set[str]]:
    """The actions that each transition may return. Any other transition changes nothing and returns no action."""
    transitions: dict[Transition, set[str]] = {}
    machine = ""
    states: list[State] = []
    live: list[State] = []
    for line in (protocol.__doc__ or "").splitlines():
        if line.count("|") != 3 or line.startswith("--"):
            continue
        left, event, becomes, actions = line.split("|")
        if event.strip() == "event":
            machine, live = left.strip().lower(), []
            continue
        if left.startswith("any of these"):
            states = live
        elif left.startswith("ended"):
            states = [state for state in State if state.over]
        elif left[0] != " ":
            states = [State[left.split()[0]]]
            live = live + states
        for state in states:
            after = state if becomes.strip() == "same" else State[becomes.strip()]
            for name in EVENTS & _words(event):
                allowed = transitions.setdefault((machine, state.value, name, after.value), set())
                allowed |= ACTIONS & _words(actions)
    return transitions

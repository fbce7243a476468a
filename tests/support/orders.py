"""Orders to workers on the hash model while they run: a file of JSON, which a worker reads again when it has changed.

    {"rules": ["prefill.after_chunk,chunk=1,request=one:kill", "sent,index=0:lose"], "HASH_STEP_SECONDS": 0.01}

`rules` are those of `kvrelay.transfer.failpoints` and of `support.damage`; with the condition `rank`, they are for
those ranks of workers only. A number that the file doesn't have is the environment's.
"""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")
VARIABLE = "HASH_ORDERS"
"""Environment variable with the path of the file."""
_RANK = re.compile(",rank=([0-9]+)")


def give(path: Path, rules: Sequence[str], numbers: Mapping[str, float]) -> None:
    """Replaces the orders; workers obey from their next look on."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"rules": list(rules), **numbers}))
    fresh.replace(path)


class Orders:
    """The orders as of now. Safe to use from any thread."""

    def __init__(self) -> None:
        self.revision = 0
        """Number of times that the file was read."""
        self._seen = (0, 0)
        self._orders: dict[str, Any] = {}
        self._lock = threading.Lock()

    def get(self, name: str, default: Any = None) -> Any:
        with self._lock:
            if path := os.environ.get(VARIABLE):
                found = os.stat(path)
                if (seen := (found.st_mtime_ns, found.st_ino)) != self._seen:
                    self._orders, self._seen = json.loads(Path(path).read_text()), seen
                    self.revision += 1
        return self._orders.get(name, default)

    def number(self, variable: str) -> float:
        return float(self.get(variable, os.environ.get(variable, "0")))


class OrderedRules(Sequence[T], Generic[T]):
    """The ordered rules that one parser knows; their counts begin again with each change of the orders."""

    def __init__(
        self, orders: Orders, parse: Callable[[str], Sequence[T]], known: Callable[[str], bool], rank: int = 0
    ) -> None:
        """
        Args:
            parse: makes rules of text, with semicolons between them.
            known: whether the parser knows a rule.
            rank: this process's among its worker's.
        """
        self._orders = orders
        self._rank = str(rank)
        self._parse = parse
        self._known = known
        self._revision = -1
        self._rules: Sequence[T] = ()
        self._lock = threading.Lock()

    def _now(self) -> Sequence[T]:
        rules = self._orders.get("rules", [])
        with self._lock:
            if self._revision != self._orders.revision:
                own = [rule for rule in rules if self._known(rule) and set(_RANK.findall(rule)) <= {self._rank}]
                text = ";".join(_RANK.sub("", rule) for rule in own)
                self._revision, self._rules = self._orders.revision, self._parse(text)
            return self._rules

    def __len__(self) -> int:
        return len(self._now())

    def __iter__(self) -> Iterator[T]:
        return iter(self._now())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._now()[index]

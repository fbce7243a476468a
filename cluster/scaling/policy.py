"""Decides how many workers each role has. No I/O: signals and time go in, a decision or none comes out.

    steady      all predicted latencies are within their targets, or no other split is better by enough
    short       a target will be missed, and another split would be better: for CONFIRM_SECONDS it must stay so
    changing    until all desired workers serve in their roles, and that has had time to show its effect
    grown, shrunk   no split can meet the targets, or fewer workers have met them for long

Nothing is decided on one look, for a small gain, or before the last change has shown what it does; the way back takes
longer than the way on, and longer still each time. So traffic that only varies changes nothing.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.cluster.scaling.config import ScalingConfig
from kvrelay.cluster.scaling.forecast import HORIZON_SECONDS, Forecast, Split, forecast
from kvrelay.cluster.scaling.signals import POOLS, PoolRole, Signals, requests_of
from kvrelay.internal.v1.supervisor_pb2 import MEMBER_STATE_READY, ROLE_DECODE, ROLE_PREFILL, MemberStatus

GAIN = 0.1
"""Share of the forecast's cost that a change of roles must be expected to take away."""
CONFIRM_SECONDS = 1.0
"""Seconds for which a change must have been the right one."""
GROW_SECONDS = 10.0
"""Seconds for which no split must have been enough before a worker is added."""
ENOUGH = 0.75
"""Cost that fewer workers must be expected to stay under for one to be removed: that of a pressure of 0.6."""
CHANGE_SECONDS = 30.0
"""Longest time in seconds that workers still to come or to go hold up decisions: a replacement may be starting."""
REVERSALS_SECONDS = 600.0
"""Seconds for which a change of direction makes the next one wait longer."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A change, and why."""

    reason: str
    moves: Mapping[str, PoolRole] = field(default_factory=dict)
    """Workers that get another role, by name."""
    scale: Mapping[PoolRole, int] = field(default_factory=dict)
    """New numbers of workers."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The latest forecasts of the policy."""

    split: Split
    now: Forecast
    """Forecast with the present split."""
    best: Split
    """Best split; looked for only if a target will be missed."""
    then: Forecast
    """Forecast with the best split."""


class Policy:
    """One cluster's decisions; keeps when it has decided what."""

    def __init__(self, config: ScalingConfig) -> None:
        self.outlook: Outlook | None = None
        """Latest outlook; None while too little is known."""
        self.config = config
        self._wanted: tuple[Split, float] | None = None
        """Better split than the present one, and the time since which one in its direction has been found."""
        self._short: float | None = None
        """Time since which no split has been enough."""
        self._calm: float | None = None
        """Time since which fewer workers have been enough."""
        self._changing: float | None = None
        """Time since which the workers that serve are not the desired ones."""
        self._changed = -float("inf")
        """Time of the last change."""
        self._direction = 0
        """Direction of the last change: 1 towards prefill, -1 towards decode."""
        self._reversals: deque[float] = deque()

    def decide(self, signals: Signals, desired: Split, statuses: Sequence[MemberStatus], now: float) -> Decision | None:
        """The change that is due now; None for none. The caller changes the desired state accordingly.

        Args:
            desired: the split that the cluster is to have.
            statuses: of all members.
            now: seconds on a clock that never goes back.
        """
        split = Split(signals.prefill, signals.decode)
        if not (signals.complete and split.prefill and split.decode):
            self.outlook = None
            return None
        self.outlook = outlook = self._look(signals, split)
        if self._is_changing(split, desired, now):
            return None
        return self._moved(outlook, statuses, now) or self._resized(signals, outlook, now)

    def _look(self, signals: Signals, split: Split) -> Outlook:
        present = forecast(signals, split, self.config)
        best, then = split, present
        others = self._splits(split.total) if present.missed else ()
        for other in others:
            if other != split:
                expected = forecast(signals, other, self.config)
                # Among equally good splits, the one with the fewest moves wins.
                if (expected.cost, _distance(other, split)) < (then.cost, _distance(best, split)):
                    best, then = other, expected
        return Outlook(split, present, best, then)

    def _splits(self, total: int) -> Iterable[Split]:
        config = self.config
        least = max(config.min_prefill, total - config.max_decode)
        most = min(config.max_prefill, total - config.min_decode)
        return (Split(prefill, total - prefill) for prefill in range(least, most + 1))

    def _is_changing(self, split: Split, desired: Split, now: float) -> bool:
        """Whether desired workers are still to come or to go."""
        if split != desired:
            self._changing = now if self._changing is None else self._changing
            if now - self._changing < CHANGE_SECONDS:
                return True
        elif self._changing is not None:
            self._changing, self._changed = None, now
            self._wanted = self._short = self._calm = None
        return False

    def _moved(self, outlook: Outlook, statuses: Sequence[MemberStatus], now: float) -> Decision | None:
        """The change of roles that is due: if a target will be missed and the change helps."""
        missed = outlook.now.missed
        better = outlook.then.cost < (1 - GAIN) * outlook.now.cost
        direction = _direction(outlook.split, outlook.best)
        if not (missed and better and direction):
            self._wanted = None
            return None
        if self._wanted is None or _direction(outlook.split, self._wanted[0]) != direction:
            self._wanted = outlook.best, now
        if now - self._wanted[1] < CONFIRM_SECONDS or now - self._changed < self._wait(direction, now):
            return None
        moves = _moves(outlook, statuses)
        if not moves:
            return None
        if self._direction == -direction:
            self._reversals.append(now)
        self._direction, self._changed, self._changing = direction, now, None
        gained = direction * len(moves)
        target = Split(outlook.split.prefill + gained, outlook.split.decode - gained)
        short = "prefill" if direction > 0 else "decode"
        present, expected = (
            f"{getattr(each, short):.2f} of its target, {getattr(each, f'{short}_end'):.2f} after {HORIZON_SECONDS:g} s"
            for each in (outlook.now, outlook.then)
        )
        change = f"{outlook.split} to {target} (prefill:decode)"
        return Decision(f"{change}: {short} would be at {present}; with the change at {expected}", moves)

    def _wait(self, direction: int, now: float) -> float:
        """Seconds that must be between the last change and one in this direction."""
        while self._reversals and self._reversals[0] <= now - REVERSALS_SECONDS:
            self._reversals.popleft()
        if self._direction != -direction:
            return self.config.cooldown_seconds
        return float(self.config.reversal_seconds * 2 ** len(self._reversals))

    def _resized(self, signals: Signals, outlook: Outlook, now: float) -> Decision | None:
        """The change of numbers that is due: workers are added if no split is enough, and removed if fewer have long
        been enough."""
        total, cooled = outlook.split.total, now - self._changed >= self.config.cooldown_seconds
        if outlook.then.cost <= 1.0 or total >= self.config.max_workers:
            self._short = None
        elif self._short is None:
            self._short = now
        if self._short is not None and now - self._short >= GROW_SECONDS and cooled:
            return self._grown(signals, outlook, now)
        removable = 0 < self.config.min_workers < total
        fewer = self._best(signals, total - 1) if removable else None
        if fewer is None or fewer[1].cost > ENOUGH:
            self._calm = None
        elif self._calm is None:
            self._calm = now
        elif now - self._calm >= self.config.calm_seconds:
            spared, _ = fewer
            return self._scaled(outlook.split, spared, f"{spared} has been enough for {now - self._calm:.0f} s", now)
        return None

    def _grown(self, signals: Signals, outlook: Outlook, now: float) -> Decision | None:
        """The decision for the fewest further workers that are enough, or for all that are allowed."""
        config, low = self.config, outlook.split.total + 1
        high = min(config.max_workers, config.max_prefill + config.max_decode)
        more = self._best(signals, high) if low <= high else None
        if more is None or more[1].cost >= outlook.now.cost:
            return None
        # By halves: a thousand sizes with a thousand splits each would hold the event loop for a minute.
        while low < high and more[1].cost <= 1.0:
            middle = (low + high) // 2
            fewer = self._best(signals, middle)
            if fewer is not None and fewer[1].cost <= 1.0:
                high, more = middle, fewer
            else:
                low = middle + 1
        target, then = more
        reason = (
            f"no split of {outlook.split.total} workers is enough: the best would be at "
            f"{outlook.then.worst:.2f} of a target, {target} at {then.worst:.2f}"
        )
        return self._scaled(outlook.split, target, reason, now)

    def _best(self, signals: Signals, total: int) -> tuple[Split, Forecast] | None:
        found = [(split, forecast(signals, split, self.config)) for split in self._splits(total)]
        return min(found, key=lambda each: each[1].cost, default=None)

    def _scaled(self, split: Split, target: Split, reason: str, now: float) -> Decision:
        self._direction, self._changed, self._changing = 0, now, None
        text = f"{split} to {target} (prefill:decode): {reason}"
        return Decision(text, scale={"prefill": target.prefill, "decode": target.decode})


def _moves(outlook: Outlook, statuses: Sequence[MemberStatus]) -> dict[str, PoolRole]:
    """The workers that change their role: the ones with the least to do."""
    count = outlook.best.prefill - outlook.split.prefill
    donor, taker = (ROLE_DECODE, ROLE_PREFILL) if count > 0 else (ROLE_PREFILL, ROLE_DECODE)
    able = [
        status
        for status in statuses
        if status.member.role == donor and status.member.state == MEMBER_STATE_READY and taker in status.member.roles
    ]
    able.sort(key=lambda status: (requests_of(status.load), status.load.pending_tokens, status.member.name))
    return {status.member.name: POOLS[taker] for status in able[: abs(count)]}


def _direction(split: Split, other: Split) -> int:
    return (other.prefill > split.prefill) - (other.prefill < split.prefill)


def _distance(split: Split, other: Split) -> int:
    return abs(split.prefill - other.prefill)

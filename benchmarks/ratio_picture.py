"""The picture of `ratio.py`: the split, the pressures and the goodput over time, as SVG."""

from collections.abc import Mapping, Sequence
from typing import Protocol

WIDTH, LEFT, RIGHT = 900, 60, 150
PANEL, GAP, TOP = 130, 45, 40
COLOURS = ("#2563eb", "#d97706", "#64748b", "#94a3b8")
BIN_SECONDS = 3.0
MOST_PRESSURE = 3.0


class Observed(Protocol):
    """The cluster at one moment."""

    @property
    def time(self) -> float: ...
    @property
    def prefill(self) -> int: ...
    @property
    def decode(self) -> int: ...
    @property
    def prefill_pressure(self) -> float | None: ...
    @property
    def decode_pressure(self) -> float | None: ...


class _Panel:
    """One diagram over the time of the run."""

    def __init__(self, number: int, title: str, seconds: float, most: float) -> None:
        self._top = TOP + number * (PANEL + GAP)
        self._seconds = seconds
        self._most = most
        self.parts = [
            f'<text x="{LEFT}" y="{self._top - 8}" font-weight="bold">{title}</text>',
            f'<rect x="{LEFT}" y="{self._top}" width="{WIDTH - LEFT - RIGHT}" height="{PANEL}" fill="none" '
            'stroke="#cbd5e1"/>',
        ]
        for value in (0.0, most / 2, most):
            self.parts.append(f'<text x="{LEFT - 6}" y="{self.y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')

    def x(self, time: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * time / self._seconds

    def y(self, value: float) -> float:
        return self._top + PANEL * (1 - min(value, self._most) / self._most)

    def line(self, points: Sequence[tuple[float, float]], colour: str, label: str, place: int) -> None:
        path = " ".join(f"{self.x(time):.1f},{self.y(value):.1f}" for time, value in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = self._top + 14 + 18 * place
        self.parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y}" fill="{colour}">{label}</text>')

    def level(self, value: float, label: str) -> None:
        y = self.y(value)
        self.parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dc2626" stroke-dasharray="4"/>'
        )
        self.parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{y + 4:.1f}" fill="#dc2626">{label}</text>')

    def flips(self, times: Sequence[float]) -> None:
        for time in times:
            x = self.x(time)
            self.parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{self._top}" y2="{self._top + PANEL}" stroke="#94a3b8" '
                'stroke-dasharray="2"/>'
            )
            self.parts.append(f'<text x="{x + 3:.1f}" y="{self._top + PANEL + 14}">flip at {time:g} s</text>')


def picture(seen: Sequence[Observed], goods: Mapping[str, Sequence[float]], seconds: Sequence[float]) -> str:
    """
    Args:
        seen: the cluster while the policy decided.
        goods: by run, when each request arrived that met both targets; the policy's run first.
        seconds: of each phase.
    """
    total = sum(seconds)
    flips = [sum(seconds[:number]) for number in range(1, len(seconds))]
    split = _Panel(0, "workers that are ready", total, max(each.prefill + each.decode for each in seen))
    split.line([(each.time, each.prefill) for each in seen], COLOURS[0], "prefill", 0)
    split.line([(each.time, each.decode) for each in seen], COLOURS[1], "decode", 1)
    pressure = _Panel(1, "predicted latency / target", total, MOST_PRESSURE)
    for place, (name, values) in enumerate(
        (
            ("prefill", [(each.time, each.prefill_pressure) for each in seen]),
            ("decode", [(each.time, each.decode_pressure) for each in seen]),
        )
    ):
        known = [(time, value) for time, value in values if value is not None]
        pressure.line(known, COLOURS[place], name, place)
    pressure.level(1.0, "target missed")
    binned = {name: _binned(times, total) for name, times in goods.items()}
    most = max(value for points in binned.values() for _, value in points)
    goodput = _Panel(2, "requests a second that met both targets, by arrival", total, round(most + 1))
    for place, (name, points) in enumerate(binned.items()):
        label = name if name == "policy" else f"static {name}"
        goodput.line(points, COLOURS[place % len(COLOURS)], label, place)
    for panel in (split, pressure, goodput):
        panel.flips(flips)
    height = TOP + 3 * (PANEL + GAP)
    body = "\n".join((*split.parts, *pressure.parts, *goodput.parts))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="#475569">\n<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def _binned(times: Sequence[float], total: float) -> list[tuple[float, float]]:
    bins = [0] * max(1, round(total / BIN_SECONDS))
    for time in times:
        bins[min(int(time / BIN_SECONDS), len(bins) - 1)] += 1
    return [((number + 0.5) * BIN_SECONDS, count / BIN_SECONDS) for number, count in enumerate(bins)]

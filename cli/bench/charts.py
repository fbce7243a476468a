"""Pictures as inline SVG. Colours are the page's CSS variables, so one picture serves light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

WIDTH, HEIGHT = 520, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 40
COLOURS = 6
"""CSS variables --c0 to --c5."""
MOST_POINTS = 400
MOST_BARS = 200


@dataclass(frozen=True, slots=True)
class Series:
    """A line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    steps: bool = False
    """Whether a value holds until the next point."""
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """Times of one request in the timeline chart, in seconds: due, sent, first message, last message."""

    due: float
    sent: float
    first: float
    last: float
    ok: bool
    title: str


class Axis:
    """Values on a line of pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, *, log: bool = False) -> None:
        self._log = log and low > 0
        if high <= low:
            high = low * 2 if low > 0 else low + 1.0
        self._low, self._high = (math.log10(low), math.log10(high)) if self._log else (low, high)
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Pixel at which a value is drawn."""
        value = math.log10(max(value, 1e-12)) if self._log else value
        return self._start + (self._end - self._start) * (value - self._low) / (self._high - self._low)

    def ticks(self) -> list[float]:
        """Round values from end to end."""
        if self._log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            steps = (1, 2, 5) if self._high - self._low < 3 else (1,)
            found = [step * 10.0**power for power in powers for step in steps]
            return [each for each in found if self._low - 1e-9 <= math.log10(each) <= self._high + 1e-9]
        raw = (self._high - self._low) / 5
        scale = 10 ** math.floor(math.log10(raw))
        step = next(each * scale for each in (1, 2, 5, 10) if each * scale >= raw)
        count = math.floor(self._high / step + 1e-9) - math.ceil(self._low / step - 1e-9) + 1
        return [(math.ceil(self._low / step - 1e-9) + at) * step for at in range(count)]


def lines(title: str, series: Sequence[Series], x_name: str, y_name: str, *, log_x: bool = False) -> str:
    """Lines over one another, with a legend if there are several."""
    series = [each for each in series if len(each.x)]
    if not series:
        return ""
    xs = [x for each in series for x in each.x]
    low = min((x for x in xs if x > 0), default=1e-3) if log_x else min(0.0, *xs)
    x_axis = Axis(low, max(xs), LEFT, WIDTH - RIGHT, log=log_x)
    y_axis = Axis(0.0, max(max(each.y) for each in series) or 1.0, HEIGHT - BOTTOM, TOP)
    body = [_frame(x_axis, y_axis, x_name, y_name)]
    for at, each in enumerate(series):
        points = _thin(list(zip(each.x, each.y, strict=True)))
        path = _steps(points, x_axis, y_axis) if each.steps else _line(points, x_axis, y_axis)
        colour = f"var(--c{at % COLOURS})"
        body.append(f'<path class="line" style="stroke:{colour}" d="{path}"><title>{escape(each.name)}</title></path>')
        if each.dots:
            body += [
                f'<circle r="3.5" style="fill:{colour}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}">'
                f"<title>{escape(each.name)}: {_number(x)}, {_number(y)}</title></circle>"
                for x, y in points
            ]
    return _figure(title, "".join(body), [each.name for each in series] if len(series) > 1 else [])


def cdf(title: str, named: Sequence[tuple[str, Sequence[float]]], unit: str) -> str:
    """The share of values up to x, for each of several sets of values."""
    series = [
        Series(name, [float(x) for x in np.sort(each)], [100.0 * (at + 1) / len(each) for at in range(len(each))], True)
        for name, each in named
        if len(each)
    ]
    return lines(title, series, unit, "% of values", log_x=True)


def histogram(title: str, values: Sequence[float], unit: str) -> str:
    """A chart of how often values come, with lines at the 50th and 99th percentile. Its range ends at the 99.5th."""
    if not values:
        return ""
    array = np.asarray(values)
    most = float(np.percentile(array, 99.5))
    low, high = float(array.min()), max(most, float(array.min()) + 1e-9)
    counts, edges = np.histogram(array[array <= high], bins=min(40, max(8, int(len(array) ** 0.5))), range=(low, high))
    x_axis = Axis(low, high, LEFT, WIDTH - RIGHT)
    y_axis = Axis(0.0, 1.15 * float(max(counts.max(), 1)), HEIGHT - BOTTOM, TOP)  # the marks' names are above the bars
    body = [_frame(x_axis, y_axis, unit, "count")]
    for count, left, right in zip(counts, edges, edges[1:], strict=False):
        x, y = x_axis.at(float(left)), y_axis.at(float(count))
        width = max(0.5, x_axis.at(float(right)) - x - 1)
        body.append(
            f'<rect class="bin" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{HEIGHT - BOTTOM - y:.1f}">'
            f"<title>{_number(float(left))} to {_number(float(right))} {escape(unit)}: {count}</title></rect>"
        )
    for percentile in (50, 99):
        value = float(np.percentile(array, percentile))
        if value <= high:
            x = x_axis.at(value)
            anchor, aside = ("start", x + 3) if x < WIDTH * 0.75 else ("end", x - 3)
            body.append(
                f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
                f'<text class="mark" text-anchor="{anchor}" x="{aside:.1f}" y="{TOP + 9}">'
                f"p{percentile} {_number(value)}</text>"
            )
    return _figure(title, "".join(body), [])


def timeline(title: str, bars: Sequence[Bar]) -> str:
    """Each request as a bar from its arrival to its end, the first ones at the top."""
    if not bars:
        return ""
    shown = sorted(bars, key=lambda bar: bar.due)[:MOST_BARS]
    row = max(2.0, min(12.0, 360 / len(shown)))
    bottom = TOP + row * len(shown)
    x_axis = Axis(0.0, max(bar.last for bar in shown), LEFT, 2 * WIDTH - RIGHT)
    parts = []
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom:.1f}"/>'
            f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{bottom + 14:.1f}">{_number(tick)}</text>'
        )
    for at, bar in enumerate(shown):
        y = TOP + at * row
        spans = ("late", bar.due, bar.sent), ("wait", bar.sent, bar.first), ("flow", bar.first, bar.last)
        rects = [
            f'<rect class="{kind if bar.ok else "bad"}" x="{x_axis.at(start):.1f}" y="{y:.1f}" '
            f'width="{max(0.0, x_axis.at(end) - x_axis.at(start)):.1f}" height="{max(1.0, row - 1):.1f}"/>'
            for kind, start, end in spans
            if end > start
        ]
        parts.append(f"<g><title>{escape(bar.title)}</title>{''.join(rects)}</g>")
    height = bottom + BOTTOM
    parts.append(f'<text class="name" text-anchor="middle" x="{WIDTH}" y="{height - 6:.1f}">seconds</text>')
    keys = "".join(
        f'<span class="key"><i class="{kind}"></i>{text}</span>'
        for kind, text in (("late", "due, not yet sent"), ("wait", "to the first token"), ("flow", "tokens"))
    )
    note = f" (the first {MOST_BARS} of {len(bars)})" if len(bars) > MOST_BARS else ""
    return (
        f'<figure class="wide"><figcaption>{escape(title + note)}</figcaption><svg viewBox="0 0 {2 * WIDTH} '
        f'{height:.0f}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
        f'<div class="keys">{keys}</div></figure>'
    )


def _figure(title: str, body: str, names: Sequence[str]) -> str:
    keys = "".join(
        f'<span class="key"><i style="background:var(--c{at % COLOURS})"></i>{escape(name)}</span>'
        for at, name in enumerate(names)
    )
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{body}</svg><div class="keys">{keys}</div></figure>'
    )


def _frame(x_axis: Axis, y_axis: Axis, x_name: str, y_name: str) -> str:
    """Grid, ticks and the names of the axes."""
    parts = []
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" text-anchor="end" x="{LEFT - 6}" y="{y + 4:.1f}">{_number(tick)}</text>'
        )
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}">{_number(tick)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="name" text-anchor="middle" x="{middle}" y="{HEIGHT - 6}">{escape(x_name)}</text>')
    across = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text class="name" text-anchor="middle" transform="translate(12 {across}) rotate(-90)">'
        f"{escape(y_name)}</text>"
    )
    return "".join(parts)


def _line(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    return "M" + "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)


def _steps(points: Sequence[tuple[float, float]], x_axis: Axis, y_axis: Axis) -> str:
    path = f"M{x_axis.at(points[0][0]):.1f} {y_axis.at(points[0][1]):.1f}"
    return path + "".join(f"H{x_axis.at(x):.1f}V{y_axis.at(y):.1f}" for x, y in points[1:])


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of the points, the first and the last included."""
    if len(points) <= MOST_POINTS:
        return points
    return [points[round(at * (len(points) - 1) / (MOST_POINTS - 1))] for at in range(MOST_POINTS)]


def _number(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"

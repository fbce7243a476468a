"""The picture of what `quantization.py` has measured: quality over speed, a point for each format, as SVG.

python benchmarks/quantization_picture.py benchmarks/results/quantization-2-cores.json docs/images/quantization.svg
"""

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PANEL, TOP, LEFT, GAP, BOTTOM = 250, 60, 70, 40, 50
TITLES = {"decode_1": "decode, batch 1", "decode_32": "decode, batch 32", "prefill_512": "prefill, 512 tokens"}
COLOURS = {"none": "#64748b", "int8": "#2563eb", "int4": "#d97706", "fp8": "#9333ea", "w8a8": "#059669"}
DECADES = (-5, -2)
"""Powers of ten between which divergences are drawn; smaller ones, and none at all, are at the lower edge."""


class _Panel:
    """The diagram of one cell."""

    def __init__(self, number: int, title: str, most: float) -> None:
        self._left = LEFT + number * (PANEL + GAP)
        self._most = most
        bottom = TOP + PANEL
        self.parts = [
            f'<text x="{self._left}" y="{TOP - 8}" font-weight="bold">{title}</text>',
            f'<rect x="{self._left}" y="{TOP}" width="{PANEL}" height="{PANEL}" fill="none" stroke="#cbd5e1"/>',
        ]
        for step in range(int(most / 0.5) + 1):
            x = self._x(step * 0.5)
            self.parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{step * 0.5:g}x</text>')
        x = self._x(1.0)
        self.parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}" stroke="#94a3b8" stroke-dasharray="3"/>'
        )

    def point(self, name: str, speed: Mapping[str, float], divergence: float) -> None:
        """
        Args:
            speed: median and range, as multiples of bfloat16's.
            divergence: nats a token.
        """
        colour, y = COLOURS[name], height(divergence)
        x, low, high = (self._x(speed[key]) for key in ("median", "min", "max"))
        self.parts += [
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="{colour}" stroke-width="2"/>',
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"/>',
            f'<text x="{x:.1f}" y="{y - 10:.1f}" fill="{colour}" text-anchor="middle">{name}</text>',
        ]

    def _x(self, times: float) -> float:
        return self._left + PANEL * times / self._most


def height(divergence: float) -> float:
    """The place of a divergence, from the upper edge of the picture."""
    least, most = DECADES
    power = math.log10(divergence) if divergence > 0 else least
    return TOP + PANEL * (most - min(max(power, least), most)) / (most - least)


def picture(result: Mapping[str, Any]) -> str:
    """
    Args:
        result: of `quantization.py`, with speed and quality.
    """
    cells, losses = result["speed"], result["quality"]
    most = max(each["of_bfloat16"]["max"] for cell in cells.values() for each in cell.values())
    least, top = DECADES
    parts = [
        f'<text x="{LEFT}" y="20">Further right is faster (multiples of bfloat16, with their range), '
        "further down is closer to bfloat16.</text>",
        f'<text x="{LEFT}" y="{TOP + PANEL + 38}">tokens a second, as multiples of bfloat16 in the same run; '
        "vertical: divergence of the next token's distribution, nats</text>",
    ]
    for power in range(least, top + 1):
        label = "0" if power == least else f"{10.0**power:g}"
        parts.append(f'<text x="{LEFT - 8}" y="{height(10.0**power) + 4:.1f}" text-anchor="end">{label}</text>')
    for number, (cell, formats) in enumerate(cells.items()):
        panel = _Panel(number, TITLES.get(cell, cell), math.ceil(most * 2) / 2)
        for name, found in formats.items():
            if name in losses:
                panel.point(name, found["of_bfloat16"], losses[name]["divergence"])
        parts += panel.parts
    width, total = LEFT + len(cells) * (PANEL + GAP), TOP + PANEL + BOTTOM
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" font-family="sans-serif" '
        f'font-size="12" fill="#475569">\n<rect width="{width}" height="{total}" fill="#ffffff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what quantization.py has written")
    parser.add_argument("out", type=Path, help="SVG file")
    args = parser.parse_args()
    args.out.write_text(picture(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()

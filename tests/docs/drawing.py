"""Boxes, arrows and text as an SVG that can be read on light and on dark pages.

A drawing brings its own background, so it can be read also where a page is dark and the system is not. Widths of text
are estimated, and text that would leave its box is an error.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

_STYLE = """<style>
text { font-family: sans-serif; font-size: 13px; fill: #1f2328 }
.small { font-size: 11px } .soft { fill: #57606a } .strong { font-weight: bold }
.card { fill: #ffffff } .box { fill: #f6f8fa; stroke: #8c959f } .part { fill: #ffffff; stroke: #8c959f }
.mark { fill: #ddf4ff; stroke: #1f6feb }
.line { fill: none; stroke: #57606a; stroke-width: 1.5 } .head { fill: #57606a }
.dashed { stroke-dasharray: 5 4 } .ours { fill: #1f6feb } .other { fill: #9aa4ae }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .soft { fill: #9da7b3 } .card { fill: #0d1117 } .box { fill: #161b22; stroke: #6e7681 }
.part { fill: #0d1117; stroke: #6e7681 } .mark { fill: #12304f; stroke: #58a6ff }
.line { stroke: #9da7b3 } .head { fill: #9da7b3 }
.ours { fill: #58a6ff } .other { fill: #6e7681 }
}
</style>"""
_LINE = 17  # from one line of text to the next


class Drawing:
    """Args:
    width, height: of the whole.
    title: what it shows, for readers who do not see it.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._width, self._height = width, height
        self._lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img">',
            f"<title>{html.escape(title)}</title>",
            _STYLE,
            f'<rect class="card" width="{width}" height="{height}" rx="6"/>',
        ]

    def box(self, x: int, y: int, width: int, height: int, kind: str = "box") -> None:
        is_inside = min(x, y) >= 0 and x + width <= self._width and y + height <= self._height
        assert is_inside, f"a box of {width} x {height} at {x}, {y} leaves the drawing"
        self._lines.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._lines.append(f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        wide = estimate_width(text, kind)
        left = x - wide * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        assert left >= 0 and left + wide <= self._width, f"{text!r} leaves the drawing"
        shape = f' class="{kind}"' if kind else ""
        shape += f' text-anchor="{anchor}"' if anchor != "start" else ""
        self._lines.append(f'<text{shape} x="{x:g}" y="{y:g}">{html.escape(text)}</text>')

    def labelled(self, x: int, y: int, width: int, lines: Sequence[str], kind: str = "part", text: str = "") -> int:
        """A box with lines of text in its middle; its lower edge."""
        height = _LINE * len(lines) + 11
        self.box(x, y, width, height, kind)
        for number, line in enumerate(lines):
            assert estimate_width(line, text) <= width - 8, f"{line!r} leaves its box"
            self.text(x + width / 2, y + _LINE * (number + 1), line, text, "middle")
        return y + height

    def arrow(self, start: tuple[int, int], end: tuple[int, int], *, both: bool = False, dashed: bool = False) -> None:
        """A straight line that ends in a head; horizontal or vertical."""
        assert start[0] == end[0] or start[1] == end[1], "only along one axis"
        kind = "line dashed" if dashed else "line"
        self._lines.append(f'<path class="{kind}" d="M{start[0]} {start[1]}L{end[0]} {end[1]}"/>')
        for tip, tail in ((end, start), (start, end))[: 2 if both else 1]:
            dx, dy = ((tip[0] > tail[0]) - (tip[0] < tail[0])) * 8, ((tip[1] > tail[1]) - (tip[1] < tail[1])) * 8
            back = (tip[0] - dx, tip[1] - dy)
            corners = [tip, (back[0] + dy // 2, back[1] + dx // 2), (back[0] - dy // 2, back[1] - dx // 2)]
            self._lines.append(f'<path class="head" d="M{"L".join(f"{x} {y}" for x, y in corners)}Z"/>')

    def svg(self) -> str:
        return "\n".join([*self._lines, "</svg>", ""])


def estimate_width(text: str, kind: str = "") -> float:
    """At least the width of a text in pixels, in usual fonts."""
    classes = kind.split()
    return (5.6 if "small" in classes else 7.2 if "strong" in classes else 6.7) * len(text)

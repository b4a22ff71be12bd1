"""Draw the documentation's diagrams: `python -m tools.diagrams` writes them to docs/images.

Plain SVG with a background of its own, so that it reads in a light and in a dark page.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
FONT = "font-family='system-ui, sans-serif'"
INK, PALE, LINE, BACK = "#1c2733", "#5b6b7c", "#8698aa", "#ffffff"
FILLS = {
    "client": "#eef1f4",
    "router": "#dceafc",
    "tokenizer": "#e3f4e4",
    "compute": "#fdebd2",
    "detokenizer": "#f0e4f7",
}


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle with a title and smaller lines below it, in pixels."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: tuple[str, ...] = ()

    @property
    def middle(self) -> float:
        """Its horizontal middle."""
        return self.x + self.width / 2

    def svg(self) -> str:
        parts = [
            f"<rect x='{self.x:g}' y='{self.y:g}' width='{self.width:g}' height='{self.height:g}' "
            f"rx='8' fill='{FILLS[self.title]}' stroke='{LINE}'/>",
            text(self.middle, self.y + 24, self.title, size=16, weight=600),
        ]
        for number, line in enumerate(self.lines):
            parts.append(text(self.middle, self.y + 46 + 17 * number, line, size=12, fill=PALE))
        return "\n".join(parts)


def text(x: float, y: float, words: str, size: int = 13, fill: str = INK, weight: int = 400) -> str:
    """A line of text, centred at x."""
    return (
        f"<text x='{x:g}' y='{y:g}' {FONT} font-size='{size}' font-weight='{weight}' "
        f"fill='{fill}' text-anchor='middle'>{escape(words)}</text>"
    )


def arrow(*points: tuple[float, float], dashed: bool = False) -> str:
    """A line through points with a head at the last one."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    dash = " stroke-dasharray='5 4'" if dashed else ""
    return (
        f"<polyline points='{path}' fill='none' stroke='{PALE if dashed else INK}' "
        f"stroke-width='1.5'{dash} marker-end='url(#head)'/>"
    )


def drawing(width: int, height: int, title: str, *parts: str) -> str:
    """A whole picture."""
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
            f"role='img' aria-label='{escape(title)}'>",
            "<defs><marker id='head' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='8' "
            "markerHeight='8' orient='auto'>"
            f"<path d='M0 0 8 4 0 8z' fill='{INK}'/></marker></defs>",
            f"<rect width='{width}' height='{height}' fill='{BACK}'/>",
            *parts,
            "</svg>\n",
        )
    )


def architecture() -> str:
    """The four services and the messages between them."""
    router_lines = ("HTTP, SSE", "admission", "placement", "requests in flight")
    compute_lines = ("scheduler", "paged KV cache", "model, sampling", "one step ahead")
    boxes = (
        Box(20, 115, 110, 90, "client", ("any SDK,", "curl, a browser")),
        Box(230, 90, 170, 140, "router", router_lines),
        Box(560, 20, 190, 105, "tokenizer", ("chat templates", "prompts to ids", "grammars")),
        Box(870, 90, 190, 140, "compute", compute_lines),
        Box(560, 215, 190, 105, "detokenizer", ("ids to text", "stop strings", "tool calls")),
    )
    notes = (
        "Each service is a process, and there can be any number of each. ZeroMQ carries",
        "MessagePack between them: one message per engine step, whatever the batch size.",
    )
    return drawing(
        1080,
        400,
        "The ring: client, router, tokenizer, compute, detokenizer",
        *(box.svg() for box in boxes),
        arrow((130, 145), (230, 145)),
        text(180, 136, "HTTP"),
        arrow((230, 185), (130, 185)),
        text(180, 202, "SSE"),
        arrow((400, 110), (480, 72), (560, 72)),
        text(478, 56, "Tokenize"),
        arrow((750, 72), (830, 72), (870, 110)),
        text(820, 56, "Generate"),
        arrow((870, 210), (830, 267), (750, 267)),
        text(830, 292, "TokensGenerated"),
        arrow((560, 267), (480, 267), (400, 210)),
        text(480, 292, "TextGenerated"),
        arrow((400, 160), (870, 160), dashed=True),
        text(655, 152, "Abort (heartbeats run back)", size=12, fill=PALE),
        *(text(540, 355 + 20 * n, note, fill=PALE) for n, note in enumerate(notes)),
    )


LANES = ("router", "tokenizer", "compute", "detokenizer")
LANE_TOP, LANE_HEIGHT, LANE_LEFT, STEP_WIDTH = 20, 62, 130, 118


def request() -> str:
    """Which service works on what at which time, for one streamed request."""
    parts = []
    for number, name in enumerate(LANES):
        y = LANE_TOP + LANE_HEIGHT * number
        parts.append(text(62, y + 26, name, size=14, weight=600))
        parts.append(
            f"<line x1='{LANE_LEFT}' y1='{y + 46}' x2='1060' y2='{y + 46}' stroke='{LINE}'/>"
        )
    parts.append(work("router", LANE_LEFT, 92, "check, place"))
    parts.append(work("tokenizer", LANE_LEFT + 98, 112, "template, encode"))
    first = LANE_LEFT + 216
    for number, words in enumerate(
        ("prefill: token 1", "token 2", "token 3", "token 4", "token 5")
    ):
        x = first + STEP_WIDTH * number
        parts.append(work("compute", x, STEP_WIDTH - 3, words))
        if number:
            parts.append(work("detokenizer", x + 6, 54, f"text {number}"))
            parts.append(work("router", x + 64, 48, f"SSE {number}"))
    note = "The GPU computes token n+1 while the text of token n is made and sent."
    parts.append(text(540, 296, note, fill=PALE))
    return drawing(1080, 315, "One streamed request: the stages overlap", *parts)


def work(name: str, x: float, width: float, words: str) -> str:
    """A piece of work in a service's lane."""
    y = LANE_TOP + LANE_HEIGHT * LANES.index(name) + 6
    return "\n".join(
        (
            f"<rect x='{x:g}' y='{y}' width='{width:g}' height='34' rx='4' "
            f"fill='{FILLS[name]}' stroke='{LINE}'/>",
            text(x + width / 2, y + 22, words, size=12),
        )
    )


DIAGRAMS = {"architecture.svg": architecture, "request.svg": request}


def main() -> int:
    """Write every diagram."""
    for name, draw in DIAGRAMS.items():
        (IMAGES / name).write_text(draw())
        print(IMAGES / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

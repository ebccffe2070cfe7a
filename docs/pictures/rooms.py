"""Draws `rooms.svg`: the rooms of jaxcomp, what each imports, and the walk of a gradient.

python docs/pictures/rooms.py
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[2]
# Room: column and row; a room imports only from rows below its own.
PLACES = {
    "measure": (2, 0),
    "sharded": (1, 0),
    "steps": (0, 1),
    "islands": (2, 1),
    "methods": (1, 2),
    "exchange": (1, 3),
    "replicas": (0, 4),
    "compressors": (2, 4),
}
WALK = ("steps", "methods", "exchange", "compressors")
WIDTH, HEIGHT, GAP_X, GAP_Y = 190, 62, 70, 48


def sentence(room: str) -> str:
    """The first sentence of a room's docstring, up to a comma or the period."""
    text = ast.get_docstring(ast.parse((ROOT / "jaxcomp" / room / "__init__.py").read_text()))
    return text.partition(". ")[0].partition(",")[0]


def corner(room: str) -> tuple[int, int]:
    column, row = PLACES[room]
    return 20 + column * (WIDTH + GAP_X), 20 + row * (HEIGHT + GAP_Y)


def lines_of(text: str, width: int = 30) -> list[str]:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def draw() -> str:
    parts = []
    for above, below in zip(WALK, WALK[1:], strict=False):
        (x0, y0), (x1, y1) = corner(above), corner(below)
        start, end = (x0 + WIDTH / 2, y0 + HEIGHT), (x1 + WIDTH / 2, y1 - 6)
        parts.append(
            f'<path d="M {start[0]} {start[1]} C {start[0]} {start[1] + 36}, {end[0]} '
            f'{end[1] - 36}, {end[0]} {end[1]}" class="walk" marker-end="url(#head)"/>'
        )
    for room in PLACES:
        x, y = corner(room)
        kind = "room on" if room in WALK else "room"
        parts.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" class="{kind}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 21}" class="name">{room}/</text>')
        for number, line in enumerate(lines_of(sentence(room))[:2]):
            parts.append(f'<text x="{x + 12}" y="{y + 38 + 15 * number}">{line}</text>')
    width, height = 3 * WIDTH + 2 * GAP_X + 40, 5 * HEIGHT + 4 * GAP_Y + 40
    body = "\n".join(parts)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">
<style>
text {{ font: 12px sans-serif; fill: #444 }}
.name {{ font: bold 15px monospace; fill: #123 }}
.room {{ fill: #f4f6f8; stroke: #9ab; rx: 6 }}
.on {{ fill: #e3f0fb; stroke: #27c; stroke-width: 2 }}
.walk {{ fill: none; stroke: #27c; stroke-width: 2.5 }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6"
orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#27c"/></marker></defs>
<rect width="{width}" height="{height}" fill="white"/>
{body}
</svg>
"""


if __name__ == "__main__":
    (ROOT / "docs" / "pictures" / "rooms.svg").write_text(draw())

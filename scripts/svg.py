"""Small SVG files by hand: text stays text, and the colours follow the reader's light or dark mode.

A picture lies on a card with its own background, so it stays readable on a page with another theme.
"""

from pathlib import Path

STYLE = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; fill: var(--ink) }
.title { font-size: 15px; font-weight: 600 } .small { font-size: 11.5px; fill: var(--soft) } .soft { fill: var(--soft) }
.middle { text-anchor: middle } .end { text-anchor: end } .bold { font-weight: 600 } .plain { font-weight: 400 }
.halo { paint-order: stroke; stroke-width: 4px; stroke-linejoin: round }
.card { fill: var(--card); stroke: var(--grid) } .grid { stroke: var(--grid); fill: none }
.ink { stroke: var(--ink); fill: none }
.line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
"""
LIGHT = {"card": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "grid": "#d8dee4"}
DARK = {"card": "#161b22", "ink": "#e6edf3", "soft": "#9aa4ae", "grid": "#30363d"}


class Picture:
    """Collects elements and writes them into one file.

    `light` and `dark` name further colours: each becomes a CSS variable, to be used as `var(--name)`.
    """

    def __init__(self, width: int, height: int, title: str, light: dict[str, str], dark: dict[str, str]) -> None:
        self.width, self.height = width, height
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}">',
            "<style>",
            f":root {{ {_variables(LIGHT | light)} }}",
            f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK | dark)} }} }}{STYLE}</style>",
            f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        ]

    def add(self, element: str) -> None:
        self.parts.append(element)

    def text(self, x: float, y: float, words: str, kind: str = "", colour: str = "") -> None:
        style = f' style="fill:var(--{colour})"' if colour else ""
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{style}>{words}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid", more: str = "") -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}" {more}/>')

    def path(self, points: list[tuple[float, float]], colour: str) -> None:
        places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.add(f'<polyline points="{places}" class="line" stroke="var(--{colour})"/>')

    def save(self, path: Path) -> None:
        path.write_text(str(self))

    def __str__(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def _variables(colours: dict[str, str]) -> str:
    return "; ".join(f"--{name}: {value}" for name, value in colours.items())

"""Draw what the example job found, layer by position, as an SVG.

python examples/llama_70b.py --shipped --output patched.safetensors
python docs/figures/patching.py patched.safetensors docs/figures/patching.svg
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path

from safetensors import safe_open

CELL, LEFT, TOP = 36, 132, 74
FROM, TO = (255, 255, 255), (30, 64, 175)


def draw(values: list[list[float]], words: list[str], devices: list[str]) -> str:
    """The picture.

    Args:
        values: from 0 to 1, by layer and position.
        words: of each position.
        devices: of each layer.
    """
    width, height = LEFT + CELL * len(words) + 20, TOP + CELL * len(values) + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="DejaVu Sans, Helvetica, Arial, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(16, 28, "How much of the answer comes back", size=17, weight="bold"),
        _text(16, 50, "the residual stream of the clean prompt, patched in before one layer at one"
              " position; 1 is all of it"),
    ]  # fmt: skip
    first = 0
    for device, layers in groupby(devices):
        n = len(list(layers))
        top = TOP + first * CELL
        here = device + (" (home)" if first == 0 else "")
        parts.append(_text(16, top + n * CELL / 2 + 4, here))
        if first:
            parts.append(
                f'<path d="M16 {top}H{LEFT + CELL * len(words)}" stroke="#475569" '
                'stroke-dasharray="5 4" fill="none"/>'
            )
        first += n
    for layer, row in enumerate(values):
        y = TOP + layer * CELL
        parts.append(_text(LEFT - 24, y + CELL / 2 + 4, f"L{layer}"))
        for position, value in enumerate(row):
            x, share = LEFT + position * CELL, min(max(value, 0.0), 1.0)
            colour = "".join(f"{round(a + (b - a) * share):02x}" for a, b in zip(FROM, TO))
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{CELL - 2}" height="{CELL - 2}" '
                f'fill="#{colour}" stroke="#e2e8f0"/>'
            )
            if value > 0.1:
                ink = "white" if share > 0.5 else "black"
                parts.append(
                    _text(x + CELL / 2, y + CELL / 2 + 4, f"{value:.1f}", ink, anchor="middle")
                )
    bottom = TOP + CELL * len(values) + 10
    for position, word in enumerate(words):
        x = LEFT + position * CELL + CELL / 2 + 4
        parts.append(
            f'<text transform="translate({x} {bottom}) rotate(-90)" text-anchor="end">'
            f"{word.strip().replace('<', '&lt;')}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _text(
    x: float, y: float, text: str, fill: str = "black", anchor: str = "start", **font: object
) -> str:
    styles = "".join(f' font-{name}="{value}"' for name, value in font.items())
    return f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}"{styles}>{text}</text>'


def main() -> None:
    """Draw the results of one job."""
    parser = argparse.ArgumentParser(description="Draw what the example job found.")
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    chosen = parser.parse_args()
    with safe_open(chosen.results, framework="pt") as results:
        about = results.metadata()
        values = results.get_tensor("recovered").tolist()
    chosen.picture.write_text(draw(values, json.loads(about["words"]), json.loads(about["on"])))


if __name__ == "__main__":
    main()

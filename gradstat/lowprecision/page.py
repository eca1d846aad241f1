"""The page of a study: a heat map of layers by operands, in plain HTML, without scripts and requests."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from pathlib import Path

from gradstat._core.files import replacing
from gradstat._core.text import expect
from gradstat.lowprecision.verdicts import LIMIT, Row, summary_of

_STYLE = """:root { color-scheme: light dark; font: 14px/1.5 system-ui, sans-serif; } body { margin: 24px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } th { font-weight: 500; text-align: left; }
td { padding: 2px 8px; text-align: right; color: #111; } th.keep { color: #c81e2c; font-weight: 600; }"""


def write_page(
    formats: Sequence[str], table: Sequence[Row], text: str, path: str | os.PathLike[str], title: str
) -> Path:
    """Writes the page; the other arguments and the errors are those of `LowPrecision.write_page`."""
    expect("title", title, str, "text")
    layers = dict[str, dict[tuple[str, str, str], Row]]()
    for row in table:
        layers.setdefault(row["layer"], {})[row["format"], row["product"], row["operand"]] = row
    places = dict.fromkeys(place for cells in layers.values() for place in cells)
    body = ""
    for name, cells in layers.items():
        mark = ' class="keep"' if any(row["keep"] for row in cells.values()) else ""
        body += f"<tr><th{mark}>{html.escape(name)}{''.join(_cell(cells.get(place)) for place in places)}\n"
    heads = "".join(f"<th>{format}<br>{product}:<br>{operand}" for format, product, operand in places)
    page = f"""<!doctype html><html lang="en"><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1>
<p>{"<br>".join(map(html.escape, summary_of(formats, table)))}</p>
<p>Signal to quantization noise of operands in dB, the worst layer first. Layers to keep in bfloat16 are red.</p>
<table><thead><tr><th>{heads}</thead><tbody>{body}</tbody></table><pre>{html.escape(text)}</pre></html>"""
    with replacing(path) as file:
        file.write(page.encode("utf-8", "replace"))
    return Path(path)


def _cell(row: Row | None) -> str:
    """From red, at the noise that is the limit of a product, to blue at 40 dB."""
    if row is None:
        return "<td>"
    hue = 220 * min(1.0, max(0.0, row["sqnr"] + 20 * math.log10(LIMIT)) / 35)
    text = f"{row['flushed']:.1%} flushed, {row['saturated']:.1%} saturated; the product's noise is {row['noise']:.2g}"
    return f'<td style="background:hsl({hue:.0f} 60% 75%)" title="{text} of its norm">{row["sqnr"]:.1f}'

"""`write_page`: a recording as one interactive HTML page that needs no network and runs nothing but its own scripts."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
from pathlib import Path

from gradstat._core.files import replacing
from gradstat._core.text import expect
from gradstat.monitor.page_data import packed, page_data
from gradstat.recording.recording import Recording

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("data.js", "charts.js", "heat.js", "lists.js", "replay.js")


class ViewerMissingError(ImportError):
    """plotly, which draws the page, is not installed."""


def write_page(recording: Recording, path: str | os.PathLike[str], title: str | None = None) -> Path:
    """Writes one self-contained page that shows the diagnosis of ``recording``, and every step.

    Args:
        recording: What to show.
        path: The ``.html`` file; missing folders are made, an existing file is replaced atomically.
        title: Name of the run.

    Returns:
        ``path``.

    Raises:
        ViewerMissingError: plotly is not installed.
        OSError: The page cannot be written.
    """
    expect("recording", recording, Recording, "a Recording")
    expect("title", title, str | None, "text or None")
    title, plotly = html.escape(title or "Flight recording"), _plotly()
    code = "\n".join((_FOLDER / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    code = f'(() => {{\n"use strict";\n{code}\n}})();'
    # The content security policy allows these two scripts only, and no requests, so that a name that got past the
    # escaping would still be harmless. The second one unpacks the first, which is most of the page.
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii") for script in (plotly, code))
    allowed = " ".join(f"'sha256-{sha256}'" for sha256 in hashes)
    # "<" is the only character with which the JSON could end its script element.
    data = json.dumps(page_data(recording), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "POLICY": f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:",
        "TITLE": title,
        "STYLE": (_FOLDER / "page.css").read_text(encoding="utf-8"),
        "DATA": data,
        "PLOTLY": packed(plotly.encode()),
        "CODE": code,
    }
    template = (_FOLDER / "page.html").read_text(encoding="utf-8")
    page = re.sub("@([A-Z]+)@", lambda mark: parts[mark[1]], template)
    with replacing(path) as file:
        # Names may contain lone surrogates, which UTF-8 cannot encode.
        file.write(page.encode("utf-8", "replace"))
    return Path(path)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ViewerMissingError(
            'the page is drawn by plotly, which is not installed: pip install "gradstat[view]"', name="plotly"
        ) from error
    return str(get_plotlyjs())

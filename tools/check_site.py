"""Holds the built site to what it promises: `python tools/check_site.py build/site`, which is what `make docs` does.

Nothing on it is fetched from elsewhere, every public name of gradstat is in the reference, and the search finds it.
"""

import re
import sys
from pathlib import Path

from public_names import public_names

# What a browser fetches by itself; links that one may click on may lead anywhere.
FETCHED = (
    re.compile(
        r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""
    ),
    re.compile(r"""<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""),
    re.compile(r"""@import\s+(?:url\()?["']?\s*((?:https?:)?//[^"')\s]+)"""),
    re.compile(r"""url\(\s*["']?\s*((?:https?:)?//[^"')\s]+)"""),
)


def fetched_from_elsewhere(site: Path) -> list[str]:
    """The addresses that pages and style sheets would fetch from a network, with the file."""
    found = []
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            found += [f"{path.relative_to(site)}: {match}" for pattern in FETCHED for match in pattern.findall(text)]
    return found


def documented(site: Path) -> set[str]:
    """The names in the reference, from the inventory that Sphinx writes for others to link to."""
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    return {name for kind, items in inventory.data.items() if kind.startswith("py:") for name in items}


def main(folder: str) -> int:
    site = Path(folder)
    problems = [f"fetched from elsewhere: {address}" for address in fetched_from_elsewhere(site)]
    in_reference = documented(site)
    for names in public_names().values():
        if not in_reference.intersection(names):
            problems.append(f"not in the reference: {' or '.join(sorted(names))}; add it to a page in docs/api/")
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    words = ("clip_grad_norm_", "detect_anom", "semant")  # as stems, which is how it keeps them
    problems += [f"the search does not find {word!r}" for word in words if word not in index]
    print("\n".join(problems) or f"{len(in_reference)} names in the reference, nothing fetched from elsewhere")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

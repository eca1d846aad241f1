"""Checks the built documentation: `python tools/check_site.py build/site`, which `make docs` runs.

No page may load anything from another site. In a browser
without network every page has to fit a phone's screen, load all its images and log nothing to the console, and searches
have to find the expected pages. Without chromium and its driver this is skipped, unless GRADSTAT_REQUIRE_BROWSER is 1.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from browser import offline_chromium

# Resources that a browser fetches by itself; links to click on may lead anywhere.
FETCHED = (
    re.compile(
        r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""
    ),
    re.compile(r"""<link\b(?![^>]*\brel=["']?canonical)[^>]*\bhref\s*=\s*["']?\s*((?:https?:)?//[^"'\s>]+)"""),
    re.compile(r"""(?:@import\s+|url\()["']?\s*((?:https?:)?//[^"')\s]+)"""),
)
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
# Search terms, and a page that has to be among the results.
SEARCHES = {
    "clip_grad_norm_": "api/clips.html",
    "returned nan values in its 0th output": "faq.html",
    "GradScaler": "stepping.html",
    "find_culprit": "replay.html",
}
_BROKEN = "return [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"


def in_files(site: Path) -> Iterator[str]:
    """Problems with the pages and the style sheets."""
    for path in sorted(site.rglob("*")):
        if path.suffix in (".html", ".css"):
            text = path.read_text(encoding="utf-8")
            for address in (found for pattern in FETCHED for found in pattern.findall(text)):
                yield f"loads from another site: {path.relative_to(site)}: {address}"


def in_browser(site: Path, browser: Any) -> Iterator[str]:
    """Problems with the pages as a browser shows them."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    for page in sorted(site.rglob("*.html")):
        if "_modules" not in page.parts:
            name = page.relative_to(site)
            browser.get(page.as_uri())
            width = browser.execute_script("return document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                yield f"{name} is {width} pixels wide on a phone of {PHONE['width']}"
            yield from (f"{name}: image not loaded: {source}" for source in browser.execute_script(_BROKEN))
    yield from (entry["message"] for entry in browser.get_log("browser"))
    # The log is not checked after searches: the summaries below results need a server, so they fail for files.
    for words, wanted in SEARCHES.items():
        browser.get(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
        wait = WebDriverWait(browser, 20)
        wait.until(lambda b: "Search finished" in b.find_element(By.ID, "search-results").text)
        links = browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
        found = [link.get_attribute("href") or "" for link in links]
        if not any(wanted in address for address in found):
            yield f"a search for {words!r} does not find {wanted}, but {found}"


def main(folder: str) -> int:
    site = Path(folder).resolve()
    problems = list(in_files(site))
    started = offline_chromium()
    if started is None:
        print("there is no chromium with chromedriver on the path; pages and searches were not checked")
    else:
        with started as browser:
            problems += in_browser(site, browser)
    print("\n".join(problems) or "all checks passed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

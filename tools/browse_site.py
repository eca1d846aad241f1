"""Looks at the built site in a browser, without a network: `python tools/browse_site.py build/site`, for `make docs`.

Every page fits a phone, loads all that it names, and says nothing to the console; a search from a file finds what it
should. Where there is no chromium with its driver nothing is looked at, unless GRADSTAT_REQUIRE_BROWSER is 1.
"""

import sys
from pathlib import Path

from browser import offline_chromium

PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
# What people may search for, and a page that has to be among the results.
SEARCHES = {
    "clip_grad_norm_": "api/clips.html",
    "returned nan values in its 0th output": "faq.html",
    "GradScaler": "amp.html",
    "find_culprit": "replay.html",
}
_BROKEN = "return [...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"


def main(folder: str) -> int:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    started = offline_chromium()
    if started is None:
        print("there is no chromium with chromedriver on the path; nothing was looked at")
        return 0
    site = Path(folder).resolve()
    problems = []
    with started as browser:
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        pages = [page for page in sorted(site.rglob("*.html")) if "_modules" not in page.parts]
        for page in pages:
            name = page.relative_to(site)
            browser.get(page.as_uri())
            width = browser.execute_script("return document.documentElement.scrollWidth")
            if width > PHONE["width"]:
                problems.append(f"{name} is {width} pixels wide on a phone of {PHONE['width']}")
            problems += [f"{name}: no picture {source}" for source in browser.execute_script(_BROKEN)]
        problems += [entry["message"] for entry in browser.get_log("browser")]
        # Of a search from a file nothing is said about the log: the lines of text below results need a server.
        for words, wanted in SEARCHES.items():
            browser.get(f"{(site / 'search.html').as_uri()}?q={words.replace(' ', '+')}")
            wait = WebDriverWait(browser, 20)
            wait.until(lambda b: "Search finished" in b.find_element(By.ID, "search-results").text)
            found = [
                link.get_attribute("href") for link in browser.find_elements(By.CSS_SELECTOR, "#search-results li a")
            ]
            if not any(wanted in (address or "") for address in found):
                problems.append(f"a search for {words!r} does not find {wanted}, but {found}")
    print("\n".join(problems) or f"{len(pages)} pages and {len(SEARCHES)} searches looked at in a browser")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A headless chromium without network access, for `tools/check_site.py` and tests of pages."""

import os
import shutil
from typing import Any


def offline_chromium() -> Any | None:
    """A selenium driver that logs console messages and requests; None if chromium or its driver is not installed.

    Raises:
        FileNotFoundError: One of them is not installed, and GRADSTAT_REQUIRE_BROWSER is 1.
    """
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        if os.environ.get("GRADSTAT_REQUIRE_BROWSER") == "1":
            raise FileNotFoundError("there is no chromium with chromedriver on the path")
        return None
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,1200"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    started = webdriver.Chrome(options=options, service=Service(driver))
    started.execute_cdp_cmd("Network.enable", {})
    conditions = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    started.execute_cdp_cmd("Network.emulateNetworkConditions", conditions)
    return started

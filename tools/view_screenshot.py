"""Trains the demo's GPT with one fault and a monitor, writes the page and takes a screenshot of it for the documents.

    python tools/view_screenshot.py [--output docs/view.png] [--page FOLDER]

Needs chromium and chromedriver on the path.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
from browser import offline_chromium

from gradstat.demo import corpus
from gradstat.demo.model import GPT, SMALL
from gradstat.demo.train import train
from gradstat.monitor import write_page
from gradstat.recording import save

ROOT = Path(__file__).resolve().parent.parent
STEPS, FAULT, LAYER = 80, 64, 2
WIDTH, HEIGHT = 1400, 1470


def take_screenshot(page: Path, picture: Path) -> None:
    browser = offline_chromium()
    if browser is None:
        raise FileNotFoundError("there is no chromium with chromedriver on the path")
    with browser:
        metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.execute_cdp_cmd("Emulation.setScrollbarsHidden", {"hidden": True})
        browser.get(page.as_uri())
        while not browser.execute_script("return document.body.dataset.ready"):
            time.sleep(0.1)
        time.sleep(1)
        picture.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(picture))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "view.png")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="keep the recording and the page there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.page or Path(temporary)).resolve()
        torch.manual_seed(0)
        data = corpus.read(corpus.standard_library())
        recording, _ = train(GPT(SMALL), data, STEPS, FAULT, LAYER, seed=0, device="cpu")
        saved = save(recording, folder / "run.gradstat")
        page = write_page(recording, folder / "run.html", "The demo's GPT, one activation overwritten")
        take_screenshot(page, options.output)
        print(f"{saved}: {saved.stat().st_size:,} bytes; {page}: {page.stat().st_size:,} bytes")
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

"""Trains the demo's GPT with one fault under a monitor, writes the page and photographs it for the documents.

    python benchmarks/view_picture.py [--output docs/view.png] [--page FOLDER]

Needs chromium and chromedriver on the path. Not timed, and no part of the suite.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

import gradstat
from gradstat.demo import corpus as text
from gradstat.demo.model import GPT, SMALL
from gradstat.demo.train import corrupt
from gradstat.monitor import Recording
from gradstat.monitor.recording import save, write_page

ROOT = Path(__file__).resolve().parent.parent
STEPS, FAULT, LAYER = 80, 64, 2
WIDTH, HEIGHT = 1400, 1470


def record(steps: int = STEPS, fault: int = FAULT) -> Recording:
    """A short run on the CPU, in one step of which an activation is overwritten with Inf behind the forward pass."""
    torch.manual_seed(0)
    model = GPT(SMALL)
    corpus = text.read(text.standard_library())
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    watch = {"parameters": 10, "optimizer": 10, "activations": 10}
    with gradstat.Monitor(model, optimizer, on_anomaly="record", watch=watch) as monitor:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 30)
            handle = corrupt(model.blocks[LAYER].mlp.down) if step == fault else None
            optimizer.zero_grad()
            loss = model.loss(text.batch(corpus, SMALL.batch, SMALL.context + 1, generator, "cpu"))
            loss.backward()
            if handle is not None:
                handle.remove()
            monitor.step(loss)
            gradstat.guarded_step(optimizer, max_norm=1.0)
    return monitor.recording()


def photograph(page: Path, picture: Path) -> None:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    for argument in ("--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        metrics = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(page.as_uri())
        while not browser.execute_script("return document.body.dataset.ready"):
            time.sleep(0.1)
        time.sleep(1)
        picture.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(picture))
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "view.png")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="keep the recording and the page there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.page or Path(temporary)).resolve()
        recording = record()
        saved = save(recording, folder / "run.gradstat")
        page = write_page(recording, folder / "run.html", "The demo's GPT, one activation overwritten")
        photograph(page, options.output)
        print(f"{saved}: {saved.stat().st_size:,} bytes; {page}: {page.stat().st_size:,} bytes")
    print(f"{options.output}: {options.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

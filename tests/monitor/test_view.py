"""The page of a recording: its file, tested without a browser, and its behaviour in a browser without network."""

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.recordings import HOSTILE, recording, spoil
from helpers.training_faults import FAULTS, Fault, inject

from gradstat.monitor import Diagnosis, Finding, Recording, page_data, view, write_page
from gradstat.recording import COLUMNS

CULPRIT = "blocks.0.mlp.down.weight"  # of `recording(names=HOSTILE)`
# Faults by what is found first.
ONE_EACH: dict[str, Fault] = dict([*{fault.rule: fault for fault in FAULTS if fault.ranks == 1}.items()][:10:3])


def test_the_page_is_one_file_that_asks_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "page.html"
    write_page(recording(names=HOSTILE), path, "</title><script>")
    own = path.read_text()
    assert len(own) < 2_500_000
    assert "default-src 'none'" in own
    markup = own.replace("\\u003c", "<").split("<script type")[0]
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!data:)\w+:""", markup)
    assert own.count("</script>") == own.count("<script") == 3  # the data, plotly, the page's own
    assert "&lt;/title&gt;&lt;script&gt;" in own
    assert not [mark for mark in ("@DATA@", "@CODE@", "@STYLE@", "@RUN@") if mark in own]
    made = recording(names=("@CODE@", "@DATA@"))  # not replaced in names
    assert '"@CODE@","@DATA@"' in write_page(made, path, "@STYLE@").read_text()


def test_rounding_keeps_four_digits_and_everything_special() -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    rounded = page_data._rounded(values)
    np.testing.assert_array_equal(np.isnan(values), np.isnan(rounded))
    normal = np.isfinite(values) & (np.abs(values) > 1e-37)
    np.testing.assert_allclose(rounded[normal], values[normal], rtol=1e-4)
    limits = np.array([np.inf, -np.inf, 0, np.finfo(np.float32).max, -np.finfo(np.float32).max], np.float32)
    np.testing.assert_array_equal(page_data._rounded(limits), limits)


@pytest.mark.parametrize("bad", [[7, 1500], list(range(100, 2000))])
def test_too_long_a_run_is_thinned_but_keeps_what_matters(bad: list[int]) -> None:
    made = recording(2000, 4, incident=None)
    made.findings = (Finding("rule", "warning", 777, "loss", {}),)
    for i in bad:
        spoil(made.tables["gradient"], i, 2, nan=1)
    data = page_data.page_data(made, cells=2000)
    steps = data["steps"]
    assert data["leftOut"] == 2000 - len(steps) >= 1500
    assert {0, bad[0], 1999} <= set(steps)
    if len(bad) < 10:
        assert {*bad, 777, *range(1990, 2000)} <= set(steps)
    assert steps[data["findings"][0]["at"]] >= 777


class Page:
    """A page in the browser, inspected by JavaScript."""

    def __init__(self, browser: Any, path: Path) -> None:
        self.browser, self.run = browser, browser.execute_script
        for kind in ("browser", "performance"):
            browser.get_log(kind)  # drops the log of the previous page
        browser.get(path.as_uri())
        self.run("window.$ = (s) => document.querySelector(s); window.$$ = (s) => document.querySelectorAll(s)")
        self.wait("document.body.dataset.ready === 'yes'")
        assert "file" in self.fetched()

    def __call__(self, expression: str, *arguments: object) -> Any:
        return self.run(f"return {expression}", *arguments)

    def wait(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self(condition):
            assert time.monotonic() < end, f"{condition} did not come true: {self.browser.get_log('browser')}"
            time.sleep(0.02)

    def choose(self, id: str, value: str) -> None:
        script = "const s = document.getElementById(arguments[0]);"
        script += "s.value = [...s.options].find((o) => o.textContent === arguments[1]).value;"
        self.run(script + "s.dispatchEvent(new Event('change'))", id, value)

    def scrub(self, value: int) -> None:
        self.run("const s = $('#step'); s.value = arguments[0]; s.dispatchEvent(new Event('input'))", value)

    def click(self, selector: str) -> None:
        self.run("$(arguments[0]).click()", selector)

    def press(self, key: str) -> None:
        self.run("document.activeElement.blur()")
        self.actions().send_keys(key).perform()

    def actions(self) -> Any:
        from selenium.webdriver import ActionChains

        return ActionChains(self.browser)

    @property
    def step(self) -> str:
        return self.text("now")

    def rows(self) -> Any:
        return self("[...$$('#worst tbody tr')].map((r) => [...r.cells].map((c) => c.textContent))")

    def text(self, id: str) -> str:
        return str(self("document.getElementById(arguments[0]).textContent", id))

    def fetched(self) -> set[str]:
        """The URL schemes requested since the last call; fails if one needs a network."""
        log = [json.loads(entry["message"])["message"] for entry in self.browser.get_log("performance")]
        sent = [entry["params"]["request"]["url"] for entry in log if entry["method"] == "Network.requestWillBeSent"]
        schemes = {url.split(":")[0] for url in sent}
        assert schemes <= {"file", "data", "blob"}
        return schemes

    def assert_clean(self) -> None:
        """Checks that nothing was logged, nothing was fetched and no name was executed."""
        assert self("typeof window.harmed") == "undefined"
        assert self.browser.get_log("browser") == []
        self.fetched()
        entries = self("performance.getEntriesByType('resource').map((e) => e.name)")
        assert [name for name in entries if not name.startswith(("data:", "blob:"))] == []


@pytest.fixture
def show(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of a recording, which must be clean before the next one is opened and at the end of a test."""
    shown: list[Page] = []

    def show(made: Recording) -> Page:
        _ = [page.assert_clean() for page in shown[-1:]]
        shown.append(Page(browser, write_page(made, tmp_path / "page.html")))
        return shown[-1]

    yield show
    shown[-1].assert_clean()


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Page:
    made = recording(names=HOSTILE)
    made.scalars["</script><b>x"] = made.scalars["loss"]
    gradient = made.tables["gradient"]
    gradient.names = (*gradient.names[:20], "<b>&amp;</b>", *gradient.names[21:])  # short enough for a whole label
    made.meta |= {"title": HOSTILE[1], "culprit": HOSTILE[1]}
    evidence = {HOSTILE[0]: HOSTILE[1]}
    words = Finding("<i>rule", "info", 12, HOSTILE[1], evidence, HOSTILE, HOSTILE, HOSTILE[0], "gradient")
    made.findings = (*made.findings, words)
    path = tmp_path_factory.mktemp("page") / "hostile.html"
    return Page(browser, write_page(made, path, HOSTILE[0]))


@pytest.fixture
def page(opened: Page) -> Iterator[Page]:
    """The page at the incident, opened once; only the table's sort order persists between tests."""
    opened.choose("kind", "gradient")
    opened.choose("column", "L2 norm, finite part")
    opened.click("#close")
    opened.click("#incident")
    yield opened
    opened.assert_clean()


Z = "$('#heat').data[0].z"
NONFINITE = "$('#heat').data.find((t) => t.name === 'nonfinite').z"


def test_it_opens_at_the_incident_with_the_headline_and_lines_mark_what_was_bad_and_found(page: Page) -> None:
    assert page.text("headline").endswith(f" in step 30: The gradient of {CULPRIT} has 7 NaN and 2 Inf.")
    assert page.step == "step 30 of 39"
    assert page("[$$('.finding').length, $$('#marks i').length, $('.finding').dataset.severity]") == [3, 3, "error"]
    assert "\N{MINUS SIGN}Inf" in page("$('.finding dl').textContent")
    assert page.rows()[0][:3] == [CULPRIT, "7", "2"]
    loss = "$('[data-series=loss] .plot').data"
    assert page(f"[{loss}[1].x, {loss}[1].text, {loss}[2].text, {loss}[0].y[30]]") == [
        *([30], ["step 30: NaN"], ["The loss tripled."], None)
    ]
    noted = "$('[data-series=loss_nonfinite] .plot').data"  # a series of bad steps only says nothing about the others
    assert page(f"[{noted}[1].x, {noted}[0].y.filter((y) => y !== null)]") == [[], [1]]
    assert page.text("constant") == ("The same in every step: loss scale 65,536 · gradients missing 0.")


def test_the_heat_map_is_drawn_and_follows_the_choices(page: Page) -> None:
    assert page("$$('#heat .heatmaplayer image').length") >= 2
    assert page(f"[{Z}.length, {Z}[0].length]") == [24, 40]
    value = recording(names=HOSTILE).tables["gradient"].values
    assert page(f"{Z}[5][7]") == pytest.approx(np.log10(value[7, 5, 0]), abs=1e-4)
    bad = page(f"{NONFINITE}.flatMap((row, i) => [...row].flatMap((x, j) => (x === 1 ? [[i, j]] : [])))")
    assert bad == [[12, 30]]
    assert page("$('#heat').data.find((t) => t.name === 'pointers').y") == [12]
    absent = "$('#heat').data.find((t) => t.name === 'absent').z"
    assert page(f"[{absent}[1].every((x) => x === 1), {absent}[2].some((x) => x === 1)]") == [True, False]
    page.choose("column", "largest |x|")
    largest = np.abs(value[7, 5, 3:5]).max()
    assert page(f"{Z}[5][7]") == pytest.approx(np.log10(largest), abs=1e-4)
    for column in page("[...$('#column').options].map((o) => o.textContent)"):
        page.choose("column", column)
        assert page(f"{Z}[5].every(Number.isFinite)"), column
    assert page(f"{Z}[12][30]") == pytest.approx(np.log10(3))
    page.choose("kind", "parameter")
    assert page(f"{Z}[0].length") == 8
    assert page.text("measured") == "parameter"
    page.scrub(33)
    assert page.text("measured") == "parameter, last measured in step 30"


def test_the_scrubber_moves_a_line_with_its_step_and_everything_else(page: Page) -> None:
    left, width = page("[$('#heat')._fullLayout._size.l, $('#heat')._fullLayout._size.w]")
    for step in (0, 20, 39):
        page.scrub(step)
        assert page.step == f"step {step} of 39"
        assert page("$('#heat-cursor').dataset.label") == f"step {step}"
        assert page.text("worst-title") == f"Tensors in step {step}, most unusual first"
        assert float(page("parseFloat($('#heat-cursor').style.left)")) == pytest.approx(
            left + width * (step + 0.5) / 40, abs=1
        )
    bars = "$('#profile').data[0].x"
    before = page(bars)
    page.scrub(3)
    assert page(bars) != before
    assert page("$('[data-series=loss] .value').textContent") != "NaN"


def test_keys_and_buttons_move_the_step_and_play_replays_the_run_up_to_the_incident(page: Page) -> None:
    from selenium.webdriver import Keys

    for focused, key, step in (
        ("", Keys.ARROW_RIGHT, 31),
        ("", Keys.ARROW_LEFT, 30),
        ("step", Keys.HOME, 0),
        ("", "i", 30),
        ("incident", Keys.ARROW_RIGHT, 31),  # buttons do not handle this key
        ("step", Keys.END, 39),
        ("step", Keys.ARROW_LEFT, 38),
    ):
        if focused:
            page.browser.find_element("id", focused).send_keys(key)
        else:
            page.press(key)
        assert page.step == f"step {step} of 39"
    page.click("#incident")
    assert page.step == "step 30 of 39"
    page.click("#play")
    assert page.text("play") == "Pause"
    page.wait("Number($('#step').value) > 1 && Number($('#step').value) < 30")
    page.press(" ")
    assert page.text("play") == "Play"
    page.scrub(27)
    page.click("#play")
    page.wait("$('#play').textContent === 'Play'")
    assert page.step == "step 30 of 39"


def test_a_name_or_a_row_of_the_map_shows_every_field_of_its_tensor(page: Page) -> None:
    assert page("$('#detail').hidden")
    page.click("#worst tbody button")
    assert not page("$('#detail').hidden")
    assert page.text("detail-title") == CULPRIT
    assert page("[$$('#fields .chart').length, $$('#fields .js-plotly-plot').length]") == [9, 9]
    assert page("$('#fields [data-series=l2_norm] .plot').data[1].x") == [30]
    page.choose("kind", "parameter")
    assert page.text("detail-title") == CULPRIT
    assert page.text("detail-size").startswith("parameter, ")
    assert page("$('#fields [data-series=l2_norm] .plot').data[0].x") == [*range(0, 40, 5)]
    page.scrub(12)
    assert page("$$('#fields .cursor')[0].style.left") != ""
    page.click("#close")
    assert page("$('#detail').hidden")
    page.choose("kind", "gradient")
    layer = page.browser.find_element("css selector", "#heat .nsewdrag")
    page.run("arguments[0].scrollIntoView({block: 'center'})", layer)
    at = int(-0.3 * layer.rect["width"]), int(((12 + 0.5) / 24 - 0.5) * layer.rect["height"])
    page.actions().move_to_element_with_offset(layer, *at).perform()
    page.wait("!$('#tip').hidden")
    assert page.text("tip").startswith(CULPRIT + "step ")
    page.actions().click().perform()
    page.wait("!$('#detail').hidden")
    assert page.text("detail-title") == CULPRIT
    assert page.step == "step 7 of 39"


def test_hostile_names_are_text_wherever_they_are_shown(page: Page) -> None:
    page.click("#all-rows")
    assert {HOSTILE[0], HOSTILE[2], HOSTILE[3], HOSTILE[4]} <= {row[0] for row in page.rows()}
    for name in (HOSTILE[0], HOSTILE[2]):
        page.run("[...$$('#worst tbody button')].find((b) => b.textContent === arguments[0]).click()", name)
        assert page.text("detail-title") == name
    labels = page("[...$$('#heat .ytick text')].map((t) => t.textContent)")
    assert labels[0].startswith("</script>")
    assert "<b>&amp;</b>" in labels
    assert page("$$('main img, main a, #heat a').length") == 0
    assert page.text("run") == HOSTILE[0]
    assert page("$('#summary pre').textContent") == HOSTILE[1]


def test_printing_opens_the_findings_and_hides_the_buttons(page: Page) -> None:
    page.browser.print_page()
    assert page("[...$$('.finding')].every((f) => f.open && !f.hidden)")
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert page("['#play', '.finding .where', '#all-rows', '#worst button'].map((s) => $(s).checkVisibility())") == [
        *(False, False, False),
        True,
    ]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_the_table_sorts(page: Page) -> None:
    page.click("#all-rows")
    for descends in (True, False):
        page.click("#worst th[data-key=l2_norm] button")
        norms = [float(row[4].replace(",", "").replace("\N{MINUS SIGN}", "-")) for row in page.rows()]
        assert norms == sorted(norms, reverse=descends)
        assert len(norms) == 23  # of 24, one never had a gradient
        assert [page("$('th[aria-sort]').dataset.key"), page.text("worst-title")] == ["l2_norm", "Tensors in step 30"]
    page.click("#worst th[data-key=name] button")
    assert [row[0] for row in page.rows()][-1] == recording(names=HOSTILE).tables["gradient"].names[-1]


def test_dark_and_small_screens(page: Page) -> None:
    light = page("getComputedStyle(document.body).backgroundColor")
    feature = {"name": "prefers-color-scheme", "value": "dark"}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    metrics = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.wait(f"getComputedStyle(document.body).backgroundColor !== '{light}'")
        page.wait("$('#heat')._fullLayout.width < 400")
        assert page("document.documentElement.scrollWidth") <= 400
        # At the new size, the line is in the middle of the current step.
        plot = "$('#heat')"
        middle = f"{plot}._fullLayout.xaxis._offset + {plot}._fullLayout.xaxis.d2p(30)"
        page.wait(f"Math.abs(parseFloat($('#heat-cursor').style.left) - ({middle})) < 1")
        page.wait(f"{plot}._fullLayout.margin.l < 140")
        assert "b.1.a.qkv.weight" in page("[...$$('#heat .ytick text')].map((t) => t.textContent)")
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_first_screen_shows_the_finding_the_run_and_the_tensors(show: Any) -> None:
    page = show(recording())
    metrics = {"width": 1280, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        for rule in (None, *ONE_EACH):
            page = show(inject(ONE_EACH[rule])[1]) if rule else page
            assert page("$('h1').offsetHeight") <= 2 * 1.3 * 19 + 1, page.text("headline")
        made = recording(n=53)
        page = show(made)
        bottom = "getBoundingClientRect().bottom"
        shown = page(f"[$('.finding .body').{bottom}, $('#series').{bottom}, $('#heat .ytick').{bottom}]")
        assert shown == sorted(shown)
        assert shown[-1] < 700
        # Not every row has room for its label; the one with NaN has it.
        labels = page("[...$$('#heat .ytick text')].map((t) => t.textContent)")
        assert [name in labels for name in made.tables["gradient"].names[25:28]] == [False, True, False]
        assert page("document.documentElement.scrollWidth") <= 1280
        widths = page(
            "[...$$('#series .chart')].map((c) => [c.clientWidth, c.querySelector('.plot')._fullLayout.width])"
        )
        assert all(abs(box - drawn) <= 1 for box, drawn in widths), widths
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_keyboard_reaches_everything_and_charts_are_in_words(show: Any) -> None:
    from selenium.webdriver import Keys

    page = show(recording())
    culprit = page.rows()[0][0]
    page.run("document.body.tabIndex = -1; document.body.focus()")
    reached = []
    for _ in range(60):
        page.actions().send_keys(Keys.TAB).perform()
        reached.append(page("((e) => e.id || e.textContent || e.className)(document.activeElement)"))
        assert page("getComputedStyle(document.activeElement).outlineStyle") != "none", reached[-1]
        if page("document.activeElement.closest('#about') !== null"):
            break
    controls = ["play", "incident", "step", "kind", "column"]
    places = ["Go to step 30", f"Show gradient {culprit}", *controls, "Mean", culprit]
    assert [name for name in reached if name in places] == places
    assert page("$$('[role=img]').length") >= 6
    name = "(e) => e.ariaLabel || document.getElementById(e.getAttribute('aria-labelledby'))?.textContent"
    names = page(f"[...$$('[role=img], [role=region], input, table, main section:not([hidden])')].map({name})")
    assert all(names), names
    said = page("$('[data-series=norm] .plot').ariaLabel")
    assert re.fullmatch(
        r"gradient norm: smallest \S+ in step \d+, largest \S+ in step \d+, last \S+ in step 39; "
        "NaN or Inf in step 30",
        said,
    )
    page.run("[...$$('#worst tbody button')][2].focus()")
    opener = page("document.activeElement.textContent")
    page.actions().send_keys(Keys.ENTER).perform()
    assert page("document.activeElement.id") == "detail-title"
    page.run("$('#close').focus()")
    page.actions().send_keys(Keys.ENTER).perform()
    assert page("document.activeElement.textContent") == opener


def test_texts_have_the_contrast_of_wcag_aa() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return sum(weight * x for weight, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    schemes = re.findall(r":root \{(.*?)\}", (Path(view.__file__).parent / "page" / "page.css").read_text(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colors = dict(re.findall(r"--(\w+): (#\w{6})", scheme))
        for text in ("ink", "muted", "accent", "error", "warning", "info", "ok"):
            for behind in ("ground", "surface"):
                low, high = sorted(luminance(colors[name]) for name in (text, behind))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind)


def test_a_run_without_findings_says_what_was_checked_and_what_stood_out(show: Any) -> None:
    made = recording(incident=None)
    made.meta |= {"rules": ["loss-spike", "unrelated-outputs"], "culprit": "", "optimizer": None}
    norms = made.tables["gradient"].column("l2_norm")
    norms[:] = 1
    norms[17, 5] = 53.9
    made.scalars["norm"][:] = 2
    made.scalars["norm"][21] = 7
    page = show(made)
    facts = page("[...$$('#checked > div')].map((row) => [...row.children].map((part) => part.textContent.trim()))")
    assert [fact for fact in facts if fact[0] != "Largest loss"] == [
        ["Rules", "2 ran, no error and no warning"],
        ["NaN or Inf", "in no tensor"],
        ["Largest gradient norm", "7 step 21"],
        [
            "Gradient furthest above its median norm",
            f"53.9 \N{MULTIPLICATION SIGN} {made.tables['gradient'].names[5]} in step 17",
        ],
        ["Tensors measured", "gradient: 24 in 40 steps \N{MIDDLE DOT} parameter: 24 in 8 steps"],
    ]
    page.run("[...$$('#checked button')].at(-1).click()")
    assert [page.step, page.text("detail-title")] == ["step 17 of 39", made.tables["gradient"].names[5]]
    assert not {"culprit", "optimizer"} & set(page("[...$$('#meta dt')].map((term) => term.textContent)"))
    assert show(recording())("$('#checked').childElementCount") == 0


def test_long_runs_are_pooled_and_lose_no_bad_step(show: Any) -> None:
    made = recording(2500, 5, incident=None)
    for i in (7, 1201, 2499):
        spoil(made.tables["gradient"], i, 3, inf=1)
    made.tables["gradient"].values[1200, 0, COLUMNS.index("l2_norm")] = 1e12
    page = show(made)
    nonfinite = page(f"[...{NONFINITE}[3]].flatMap((x, i) => (x === 1 ? [i] : []))")
    assert nonfinite == [7 // 3, 1201 // 3, 2499 // 3]
    assert page(f"{Z}[0][400]") == pytest.approx(12, abs=1e-3)
    assert "step 7: NaN or Inf in the gradient of" in page.text("summary")


def test_recordings_with_nothing_in_them_are_shown(show: Any) -> None:
    page = show(Recording(np.zeros(0, np.int64), {}, {}))
    assert page.text("headline") == "nothing is known about the model, since no step was seen"
    one = recording(1, 1, incident=None)
    page = show(one)
    assert page.text("headline") == "nothing wrong in 1 step of GPT"
    assert page("$('#incident').hidden")
    one.tables.clear()
    assert show(one)("$$('#series .chart, #constant').length") >= 1


def test_play_goes_on_to_the_end_if_the_incident_is_the_first_step(show: Any) -> None:
    made = recording(incident=0)
    made.scalars["refused"] = np.arange(40.0) % 3
    page = show(made)
    assert page.step == "step 0 of 39"
    page.click("#play")
    page.wait("Number($('#step').value) > 1")
    page.press(" ")
    assert "decision of the guard" in page.text("series")


@pytest.mark.parametrize("rule", ONE_EACH)
def test_the_page_says_what_the_diagnosis_says_in_its_order(rule: str, show: Any) -> None:
    diagnosis, made = inject(ONE_EACH[rule])
    page = show(made)
    assert page.text("headline") == diagnosis.headline()
    assert page("[...$$('.finding .rule')].map((r) => r.textContent)") == [found.rule for found in diagnosis.findings]
    assert page("$('.finding ol').textContent") == "".join(diagnosis.findings[0].causes)
    assert page.step.startswith(f"step {diagnosis.incidents[0].first} of ")


def test_the_headline_is_what_a_replay_found_or_not_green_if_the_loss_never_moved(show: Any) -> None:
    made = recording()
    made.meta["culprit"] = "replay of step 30: Inf was made\n  at model.py:7\n      x.log()\n  went in: self"
    assert show(made).text("headline") == "replay of step 30: Inf was made at model.py:7: x.log()"
    made = recording(incident=None)
    assert (Diagnosis.of(made).notes, show(made)("$('#headline').dataset.level")) == ((), "ok")
    made.scalars["loss"] = np.full(40, 2.303)
    page = show(made)
    (note,) = Diagnosis.of(made).notes
    assert "the loss does not fall: its mean is 2.303 in the first 10 steps and 2.303 in the last" in note
    assert page("[$('#headline').dataset.level, $('#summary').textContent, $('#incident').hidden]") == ["", note, True]


def test_the_largest_against_its_median_is_first(show: Any) -> None:
    made = recording(incident=None)
    norms = made.tables["gradient"].column("l2_norm")
    norms[:] = 1
    norms[-1, [3, 5, 7]] = 0.007, 53.9, 2
    assert [row[3] for row in show(made).rows()][:2] == ["53.9", "2"]

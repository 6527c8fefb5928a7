"""The report in a real browser: no console errors, all plots drawn, and working controls.

Needs chromium on PATH (apt-get install chromium) and the package playwright; skipped without them.
"""

import re
import shutil

import pytest

from slime_tis.main import main
from tests.report.dumps import make_run

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium on PATH; apt-get install chromium"
)


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="the package playwright is not installed"
    )
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("browser") / "run")
    assert main(["report", str(run)]) == 0
    return run / "report.html"


@pytest.fixture(params=["light", "dark"])
def page(browser, report, request):
    opened = browser.new_page(viewport={"width": 1240, "height": 900}, color_scheme=request.param)
    troubles = []
    opened.on(
        "console",
        lambda said: troubles.append(said.text) if said.type in ("error", "warning") else None,
    )
    opened.on("pageerror", lambda error: troubles.append(str(error)))
    opened.on(
        "request", lambda made: troubles.append(made.url) if made.url.startswith("http") else None
    )
    opened.goto(report.as_uri())
    opened.wait_for_selector("html[data-drawn][data-samples]", state="attached")
    yield opened
    assert troubles == []
    opened.close()


def test_every_plot_is_drawn(page):
    canvases = page.locator(".canvas")
    assert canvases.count() == 12
    for index in range(canvases.count()):
        drawn = canvases.nth(index).locator(".trace, .points path")
        assert drawn.count() > 0, canvases.nth(index).get_attribute("id")
    assert page.locator("#plot-density image").count() == 1


def test_visible_plots_are_drawn_before_the_page_has_loaded(browser, report):
    opened = browser.new_page(viewport={"width": 1240, "height": 500})
    opened.add_init_script(
        "addEventListener('load', (event) => event.stopImmediatePropagation(), true)"
    )
    opened.goto(report.as_uri())
    opened.wait_for_selector("html[data-samples]", state="attached")
    pareto = opened.locator("#plot-pareto .main-svg")
    assert pareto.count() == 0 and opened.locator("html[data-drawn]").count() == 0
    opened.locator("#plot-pareto").scroll_into_view_if_needed()
    pareto.first.wait_for(state="attached")
    opened.close()


def test_the_density_shows_the_number_of_tokens_of_a_cell(page):
    page.locator("#plot-density").scroll_into_view_if_needed()
    box = page.locator("#plot-density .nsewdrag").bounding_box()
    x, y = page.evaluate("""() => {
      const plot = document.getElementById("plot-density"), { x, y, z } = plot.data[0];
      const row = z.findIndex((values) => values.some((value) => value !== null));
      const column = z[row].findIndex((value) => value !== null);
      return [plot._fullLayout.xaxis.d2p(x[column]), plot._fullLayout.yaxis.d2p(y[row])];
    }""")
    page.mouse.move(box["x"] + x - 1, box["y"] + y)
    page.mouse.move(box["x"] + x, box["y"] + y)
    hover = page.locator("#plot-density .hovertext")
    hover.wait_for()
    assert re.search(r"rollout.*training.*\d tokens", hover.text_content(), re.S)


def test_tokens_are_colored_by_the_selected_value(page):
    def colors():
        return page.eval_on_selector_all(
            "#sample .tokens span", "all => all.map(one => one.style.background)"
        )

    by_ratio = colors()
    assert len({color for color in by_ratio if color}) > 3
    page.select_option("#color", "weight")
    by_weight = colors()
    page.select_option("#color", "mask")
    by_mask = colors()
    assert by_ratio != by_weight != by_mask and len(by_ratio) == len(by_mask) == 24
    assert page.locator("#legend").inner_text().strip().startswith("trained on")


def test_masked_tokens_are_shown_as_masked(page):
    page.fill("#search", "question 5")
    page.locator("#list li").first.click()
    masked = page.locator("#sample .tokens span.masked")
    assert masked.count() == 4 and masked.first.evaluate("one => one.style.background") == ""
    masked.first.hover()
    assert "not trained on" in page.locator("#details").inner_text()


def test_details_of_a_token(page):
    page.locator("#sample .tokens span").nth(12).hover()
    details = page.locator("#details").inner_text()
    logged = ("position 12", "log π train", "log π rollout", "Δ")
    for name in (*logged, "weight", "advantage", "entropy", "weight version", "experts"):
        assert name in details


def test_search(page):
    page.fill("#search", "answer 7")
    assert page.locator("#list li").count() == 1
    assert "sample 7" in page.locator("#sample .about").inner_text()
    page.fill("#search", "step 1")
    assert page.locator("#list li").count() == 8
    assert "step 1" in page.locator("#sample .about").inner_text()
    page.fill("#search", "nowhere to be found")
    assert page.locator("#list").inner_text() == "no matching samples"
    assert page.locator("#sample article").count() == 0


def test_arrow_keys_choose_samples_and_tokens(page):
    page.locator("#list").press("ArrowDown")
    assert page.locator("#list li").nth(1).get_attribute("aria-current") == "true"
    page.locator("#sample").press("ArrowRight")
    page.locator("#sample").press("ArrowRight")
    assert "position 1" in page.locator("#details").inner_text()
    page.locator("#what-if-table th", has_text="kept").press("Enter")
    assert page.locator("#what-if-table th[aria-sort=descending]").inner_text().startswith("kept")


def test_plots_are_no_tab_stops(page):
    page.locator("nav a").last.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.modebar')") is None
    page.locator("#plot-density").hover()
    assert page.locator("#plot-density .modebar-btn").first.is_visible()


def test_segments_have_headings(page):
    page.fill("#search", "question 5")
    model, tool, after = page.locator("#sample .turn").all_inner_texts()
    assert model.startswith("turn 0, model, weights 0, 5 tokens, mean abs(Δ) 0.0")
    assert tool == "turn 0, tool or environment, not trained on, 4 tokens" and after.startswith(
        "turn 1, model"
    )
    page.fill("#search", "question 17")
    weights = [text.split(", ")[2:4] for text in page.locator("#sample .turn").all_inner_texts()]
    assert weights == [["weights 1", "9 tokens"], ["weights 2", "15 tokens"]]
    page.fill("#search", "question 6")
    assert page.locator("#sample .turn").count() == 0


def test_nothing_leaves_the_page(browser, report):
    page = browser.new_page()  # a blocked form is an error in the console
    page.goto(report.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached")
    titles = page.eval_on_selector_all(".modebar-btn", "all => all.map(one => one.dataset.title)")
    assert titles and not [title for title in titles if "Share" in title]
    blocked = """() => new Promise((resolve) => {
      addEventListener("securitypolicyviolation", (event) => resolve(event.effectiveDirective));
      const form = document.createElement("form");
      form.action = "https://example.org";
      form.target = "_blank";
      document.body.append(form);
      form.submit();
    })"""
    assert page.evaluate(blocked) == "form-action"
    page.close()


def test_the_page_fits_a_phone(browser, report):
    opened = browser.new_page(viewport={"width": 390, "height": 800})
    opened.goto(report.as_uri())
    opened.wait_for_selector("html[data-drawn][data-samples]", state="attached")
    assert opened.evaluate("document.documentElement.scrollWidth") <= 390
    assert opened.locator("#verdict > p").is_visible()
    opened.close()


def test_a_group_side_by_side(page):
    page.click("#side")
    assert page.locator("#sample article").count() == 4
    assert page.locator("#sample article .about").first.inner_text().count("reward") == 1


def test_hostile_text_is_text(page):
    page.fill("#search", "window.hacked")
    items = page.locator("#list li")
    assert items.count() == 2
    for place in range(2):
        items.nth(place).click()
        shown = page.locator("#sample article").inner_text()
        assert "</script><script>window.hacked=1</script><img src=x" in shown
        assert "‹U+202E›evil␀␇" in shown
    assert page.evaluate("window.hacked") is None
    assert page.locator("#sample img, #list img").count() == 0


def test_the_table_of_corrections_sorts_and_gives_flags(page):
    rows = page.locator("#what-if-table tbody tr")
    assert rows.count() > 30
    page.locator("#what-if-table th", has_text="kept").click()
    kept = [
        float(text)
        for text in page.locator("#what-if-table tbody tr td:nth-child(2)").all_inner_texts()
    ]
    assert kept == sorted(kept, reverse=True)
    page.locator("#what-if-table td", has_text="decoupled_token_is").first.click()
    assert (
        page.locator("#flags code").inner_text() == "--rollout-correction-preset decoupled_token_is"
    )
    page.click("#flags button")
    page.locator("#flags button", has_text=re.compile("^(copied|selected)$")).wait_for()

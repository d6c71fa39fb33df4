"""The HTML report in a real browser, without a network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evil_names import EVIL, make_evil_analysis
from hand_made import MIB, make_analysis, memory_graphs
from hypothesis import given, settings

import fxmem
from fxmem.graph import Category, MemoryGraph
from fxmem.report.formats import RenderOptions, render_as
from fxmem.report.html import write_html
from fxmem.units import format_bytes

PLOT = {"left": 74, "right": 14, "top": 44, "bottom": 46}
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    # Where CI runs, a report that nobody looked at is a failure.
    give_up = pytest.fail if os.environ.get("CI") else pytest.skip
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        give_up("playwright is not installed: pip install 'fxmem[dev]'")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        give_up("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*FLAGS])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report as a file, offline; nothing may go wrong in it and nothing leave it."""
    wrong: list[str] = []
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    path = tmp_path / "report.html"

    def open_page(*report: Any) -> Any:
        path.write_text(write_html(*report), encoding="utf-8")
        page = context.new_page()
        page.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message) or dialog.dismiss())
        page.on("request", lambda r: r.url == path.as_uri() or wrong.append(r.url))
        page.goto(path.as_uri())
        return page

    yield open_page
    context.close()
    assert wrong == []


def locate(page: Any, step: int, nbytes: int, steps: int = 8, peak: int = 30 * MIB) -> Any:
    """Where an operation and a height of the stack are on the screen."""
    page.evaluate("scrollTo(0, 0)")
    box = page.locator("#chart").bounding_box()
    width = box["width"] - PLOT["left"] - PLOT["right"]
    height = box["height"] - PLOT["top"] - PLOT["bottom"]
    x = box["x"] + PLOT["left"] + width * (step + 0.5) / steps
    return x, box["y"] + PLOT["top"] + height * (1 - nbytes / (peak * 1.04))


def read_rows(page: Any, selector: str) -> list[list[str]]:
    rows = page.locator(f"{selector} tbody tr").all()
    return [row.locator("th, td").all_inner_texts() for row in rows]


def read_life(page: Any) -> dict[str, str]:
    names = page.locator("#life dt").all_inner_texts()
    return dict(zip(names, page.locator("#life dd").all_inner_texts(), strict=True))


def is_at_peak(page: Any) -> bool:
    """Tells whether the tree of modules shows the operation at the peak."""
    return "relu \u25c6 peak" in [row[0].strip() for row in read_rows(page, "#tree")]


def test_the_mouse_is_enough(open_page: Open) -> None:
    page = open_page(make_analysis())
    check_the_peak(page)
    check_pointing(page)
    check_storages(page)


def check_the_peak(page: Any) -> None:
    assert page.locator("h1").inner_text() == "Peak 30.00 MiB in backward of block.relu, net.py:12"
    assert page.locator("#moment-title").inner_text() == (
        "Peak, operation 6 of 8: backward of block.relu (net.py:12), aten.threshold_backward: "
        "30.00 MiB"
    )
    legend = {row[0]: row[1] for row in read_rows(page, ".legend")}
    assert legend == {
        "PARAMETER": "8.00 MiB",
        "BUFFER": "1.00 MiB",
        "OPTIMIZER_STATE": "2.00 MiB",
        "INPUT": "2.00 MiB",
        "GRADIENT": "4.00 MiB",
        "ACTIVATION": "4.00 MiB",
        "OUTPUT": "1.00 MiB",
        "TEMPORARY": "4.00 MiB",
        "WORKSPACE": "4.00 MiB",
    }
    page.locator("#steps summary").click()
    page.locator("#steps tbody tr").first.wait_for()
    rows = read_rows(page, "#steps")
    assert [row[3] for row in rows] == [f"{n}.00 MiB" for n in (13, 17, 21, 18, 18, 30, 29, 19)]
    assert rows[5][:3] == ["6 (peak)", "backward", "block.relu"]
    assert is_at_peak(page)
    page.get_by_role("button", name="Close all").click()
    assert not is_at_peak(page)
    page.get_by_role("button", name="block, level 2").click()
    assert is_at_peak(page)
    # Without colours, and without their brightness: where a pattern has its lines.
    shapes = page.evaluate(
        """() => [...document.querySelectorAll('.legend canvas')].map((canvas) => {
          const { data } = canvas.getContext('2d').getImageData(0, 0, 16, 16);
          const sums = Array.from({ length: 256 }, (_, i) => data[4*i] + data[4*i+1] + data[4*i+2]);
          const middle = (Math.min(...sums) + Math.max(...sums)) / 2;
          return sums.map((sum) => (sum > middle ? 1 : 0)).join('');
        })"""
    )
    assert len(set(shapes)) == len(shapes) == len(Category) - 2  # no COMMUNICATION, no KV_CACHE


def check_pointing(page: Any) -> None:
    page.mouse.move(*locate(page, 3, 15 * MIB))  # 13 MiB lie below the activation of 4
    tip = page.locator(".tip").inner_text().split("\n")
    assert tip == [
        "18.00 MiB alive",
        "Operation 4 of 8: forward of fc2 (net.py:13)",
        "Here: block.relu, ACTIVATION, 4.00 MiB",
    ]
    largest = page.locator("#largest li").all_inner_texts()
    assert "4.00 MiB ACTIVATION block.relu" in largest
    assert not any("TEMPORARY" in line for line in largest)
    page.mouse.move(5, 5)
    assert page.locator(".tip").is_hidden()
    assert page.locator("#moment-title").inner_text().startswith("Peak, operation 6")
    page.mouse.click(*locate(page, 3, 15 * MIB))
    assert page.locator("#life h3").inner_text() == "block.relu"
    assert read_life(page) == {
        "size": "4.00 MiB (4,194,304 bytes)",
        "category": "ACTIVATION",
        "tensor": "8x1024 float32",
        "born": "Operation 3 of 8: forward of block.relu (net.py:12), aten.relu",
        "last used": "Peak, operation 6 of 8: backward of block.relu (net.py:12), "
        "aten.threshold_backward",
        "freed": "after operation 7 of 8: backward of fc1 (net.py:11), aten.mm",
        "saved by": "block.relu, fc2",
        "source": "/home/me/nets/net.py:12",
    }
    page.locator("#largest button").first.click()
    assert page.locator("#life h3").inner_text() != "block.relu"


def check_storages(page: Any) -> None:
    def read_column(index: int) -> list[str]:
        return [row[index] for row in read_rows(page, "#live")]

    alive = [storage for storage in make_analysis().peak.live if storage.nbytes]
    assert len(read_column(0)) == len(alive) + 1  # and the workspace
    sizes = sorted([4 * MIB, *(storage.nbytes for storage in alive)])
    assert read_column(0) == [format_bytes(n) for n in reversed(sizes)]
    head = page.locator("#live th").first
    assert head.get_attribute("aria-sort") == "descending"
    head.get_by_role("button").click()
    assert read_column(0) == [format_bytes(n) for n in sizes]
    assert head.get_attribute("aria-sort") == "ascending"
    page.locator("#live th button").nth(2).click()
    assert read_column(2) == sorted(read_column(2), key=str.lower)
    button = page.locator("#live").get_by_role("button", name="block.relu", exact=True).first
    button.click()
    assert "saved by\nblock.relu, fc2" in page.locator("#live .detail").inner_text()
    assert button.get_attribute("aria-expanded") == "true"
    button.click()
    assert page.locator("#live .detail").count() == 0
    page.locator("#filter").fill("WEIGHT grad")
    assert read_column(2) == ["fc2.weight.grad"]
    assert page.locator("#found").inner_text() == f"1 of {len(alive) + 1}, 4.00 MiB"
    page.locator("#filter").fill("")
    page.locator("#category").select_option("WORKSPACE")
    assert read_column(2) == ["workspace of aten.threshold_backward"]


def test_the_keyboard_is_enough(open_page: Open) -> None:
    page = open_page(make_analysis())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(6):
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "chart"
    chart = page.locator("#chart")
    for key, operation in [
        *[("ArrowLeft", 5), ("ArrowRight", 6), ("Home", 1), ("ArrowLeft", 1), ("End", 8)],
        *[("PageUp", 8), ("PageDown", 7), ("p", 6)],
    ]:
        page.keyboard.press(key)
        assert chart.get_attribute("aria-valuenow") == str(operation), key
    assert chart.get_attribute("aria-valuetext") == (
        "Peak, operation 6 of 8: backward of block.relu (net.py:12), 30.00 MiB"
    )
    page.keyboard.press("Enter")
    assert read_life(page)["size"].startswith("4.00 MiB")
    page.keyboard.press("+")
    page.keyboard.press("End")
    assert chart.get_attribute("aria-valuenow") == "8"
    page.locator("#tree .fold").last.focus()
    before = page.locator("#tree tbody tr").count()
    page.keyboard.press("Enter")
    assert page.locator("#tree tbody tr").count() != before
    assert page.evaluate("document.activeElement.className") == "fold"


def test_the_graph_goes_to_the_peak(open_page: Open) -> None:
    analysis = make_analysis()
    page = open_page(analysis, None, (), render_as(analysis, "svg", RenderOptions()))
    page.set_viewport_size({"width": 400, "height": 400})
    page.get_by_role("button", name="To the peak").last.click()
    box = page.locator(".picture text", has_text="PEAK: 30.00 MiB").bounding_box()
    assert 0 < box["y"] < 400 and box["x"] < 400


def test_evil_names_are_shown_and_do_nothing(open_page: Open) -> None:
    page = open_page(make_evil_analysis())
    page.mouse.click(*locate(page, 3, 15 * MIB))
    page.locator("#steps summary").click()
    page.locator("#steps tbody tr").first.wait_for()
    page.get_by_role("button", name="Open all").click()
    assert page.locator("img, iframe, body svg").count() == 0
    assert page.locator("script").count() == 2
    assert page.locator("#life h3").inner_text().startswith(tuple(EVIL))
    shown = page.locator("body").inner_text()
    for name in EVIL:
        assert name in shown


CONTRAST = """() => {
  const light = (color) => {
    const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => {
      const share = part / 255;
      return share <= 0.03928 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const behind = (element) => {
    const color = getComputedStyle(element).backgroundColor;
    return color !== 'rgba(0, 0, 0, 0)' ? color : behind(element.parentElement);
  };
  return [...document.querySelectorAll('body *')]
    .filter((element) => !element.closest('svg, script'))
    .filter(({ childNodes }) => [...childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
    .map((element) => {
      const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
    }).filter(([contrast]) => contrast < 4.5);
}"""
"""Contrast of text and background, as the Web Content Accessibility Guidelines measure it (AA)."""


def test_a_plan_lies_over_the_step_and_every_text_stands_out(open_page: Open) -> None:
    analysis = fxmem.analyze("examples/unet.py:UNet", ("1x3x64x64",))
    front = fxmem.pareto(analysis, time_limit_s=1)
    plan = next(each for each in reversed(front) if each.segments)
    page = open_page(analysis, plan, front)
    readout, overlay = page.locator("#overlay-moment"), page.locator("#overlay")
    assert readout.inner_text().endswith(f"{format_bytes(plan.peak_bytes)} with the plan")
    overlay.focus()
    for _ in range(int(overlay.get_attribute("aria-valuemax"))):
        if ", recomputed: " in readout.inner_text():
            break
        page.keyboard.press("ArrowRight")
    assert ", recomputed: " in readout.inner_text()
    page.keyboard.press("Home")
    first = format_bytes(analysis.timeline.profile()[0])
    assert readout.inner_text().endswith(f": {first} before, {first} with the plan")
    assert page.locator("#curve circle").count() == len(read_rows(page, "#trade")) == len(front)
    page.locator("#live td button").first.click()
    for scheme in "light", "dark":
        page.emulate_media(color_scheme=scheme)
        colors = [page.evaluate("getComputedStyle(document.body).backgroundColor")]
        assert page.evaluate(CONTRAST) == []
        page.locator("#theme").click()
        colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        shades = [sum(map(int, color[4:-1].split(","))) for color in colors]
        assert (shades[0] < shades[1]) == (scheme == "dark")
        assert page.evaluate(CONTRAST) == []
        page.reload()
    page.set_viewport_size({"width": 360, "height": 700})
    page.locator("#steps summary").click()
    page.locator("#steps tbody tr").first.wait_for()
    page.locator("#live button").last.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360  # no scrolling sideways


@pytest.fixture(scope="module")
def any_page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


@settings(max_examples=5)
@given(memory_graphs())
def test_any_step_makes_a_page(any_page: Any, graph: MemoryGraph) -> None:
    analysis, page, wrong = make_analysis(graph), any_page, list[str]()
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content(write_html(analysis))
    for key, step in (("p", analysis.peak.step), ("Home", 0), ("End", -1)):
        page.locator("#chart").press(key)
        text = page.locator("#chart").get_attribute("aria-valuetext")
        assert text.endswith(f", {format_bytes(analysis.timeline.profile()[step])}")
    page.locator("#chart").click()
    assert wrong == []

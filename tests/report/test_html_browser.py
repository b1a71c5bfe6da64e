"""Pages in a real browser: at the width of a desktop and of a telephone, light and dark."""

import json
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from nereus_jax.report.page.command import make_page
from tests.report.html_runs import live_run, simulated_runs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZES = ((1280, 800), (390, 844))
PROBE = """
<script>
const errors = [];
addEventListener('error', e => errors.push(String(e.message)));
addEventListener('load', () => {
  const all = (what, of = document) => [...of.querySelectorAll(what)];
  const box = e => e.getBoundingClientRect();
  const width = () => document.documentElement.scrollWidth;
  const found = {width: innerWidth, closed: width(), resources: performance.getEntriesByType(
    'resource').length, background: getComputedStyle(document.body).backgroundColor};
  const first = document.querySelector('details:not([open])');
  const before = box(first).height;
  first.querySelector('summary').click();
  found.opens = first.open && box(first).height > before + 20;
  all('details').forEach(d => d.open = true);
  found.open = width();
  const plots = all('svg.plot');
  found.plots = plots.length;
  found.empty = plots.filter(s => !(box(s).width > 100 && box(s).height > 50)).length;
  const words = e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  const seen = e => box(e).width > 0 && !['title', 'desc', 'style', 'script'].includes(e.localName);
  found.small = all('body *').filter(e => words(e) && seen(e)
    && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 80));
  found.outside = []; found.overlapping = []; found.labels = 0;
  for (const plot of plots) {
    const texts = all('text', plot).filter(seen);
    found.labels += texts.length;
    for (const [i, a] of texts.entries()) {
      const p = box(a);
      if (p.left < 0 || p.right > innerWidth) found.outside.push(a.textContent);
      for (const b of texts.slice(i + 1)) {
        const q = box(b);
        if (p.left < q.right && q.left < p.right && p.top + 2 < q.bottom && q.top + 2 < p.bottom)
          found.overlapping.push(a.textContent + ' | ' + b.textContent);
      }
    }
  }
  found.scrolling = all('.scroll').filter(e => e.scrollWidth > e.clientWidth).length;
  found.errors = errors;
  parent.postMessage(JSON.stringify(found), '*');
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    """The path of a browser; where there is none the tests are skipped, but fail in CI."""
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    missing = f"no browser is there (looked for {', '.join(NAMES)}): apt-get install chromium"
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


class _Body(HTMLParser):
    found = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "body":
            self.found = dict(attrs).get("data-found") or ""


def visit(
    browser: str, text: str, folder: Path, size: tuple[int, int], *, dark: bool = False
) -> dict[str, Any]:
    """Shows a page in a frame of a size (a window has a least width), and asks it how it looks.

    Returns:
      What `PROBE` found, and the lines of the console.
    """
    probed = folder / "page.html"
    probed.write_text(text.replace("</head>", f"{PROBE}</head>"))
    (folder / "frame.html").write_text(
        "<!doctype html><body><script>onmessage = e => document.body.dataset.found = e.data"
        f'</script><iframe src="page.html" width="{size[0]}" height="{size[1]}"></iframe>'
    )
    done = subprocess.run(
        [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--enable-logging=stderr", "--virtual-time-budget=10000", "--window-size=1400,1000"),
            f"--user-data-dir={folder / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            "--dump-dom",
            (folder / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    body = _Body()
    body.feed(done.stdout)
    assert body.found, f"the page did not answer: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return {**json.loads(body.found), "console": console}


def check(found: dict[str, Any], width: int) -> None:
    assert found["width"] == width
    assert found["closed"] <= width and found["open"] <= width, "the page scrolls sideways"
    assert found["plots"] >= 8 and found["empty"] == 0
    assert found["opens"]
    assert found["labels"] > 50 and not found["outside"] and not found["overlapping"]
    assert not found["small"]
    assert not found["errors"] and not found["console"] and found["resources"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("make", [live_run, simulated_runs])
def test_a_page_is_legible(browser: str, tmp_path: Path, make: Any, size: tuple[int, int]) -> None:
    found = visit(browser, make_page(make(tmp_path / "run")), tmp_path, size)
    check(found, size[0])
    assert found["background"] == "rgb(255, 255, 255)"
    if size[0] < 500:
        assert found["scrolling"] >= 3, "wide tables scroll in their own boxes"


@pytest.mark.slow
def test_a_dark_page_is_dark(browser: str, tmp_path: Path) -> None:
    found = visit(browser, make_page(live_run(tmp_path / "run")), tmp_path, SIZES[0], dark=True)
    check(found, SIZES[0][0])
    assert found["background"] == "rgb(15, 19, 23)"


@pytest.mark.slow
def test_the_probe_sees_what_is_wrong(browser: str, tmp_path: Path) -> None:
    text = make_page(live_run(tmp_path / "run")).replace(
        "<main>",
        '<main><div style="width:3000px">wide</div><p style="font-size:9px">small</p>'
        '<svg class="plot"><text x="0" y="9">a</text><text x="2" y="9">b</text></svg>'
        "<script>console.error('told'); null.gone</script>",
    )
    found = visit(browser, text, tmp_path, SIZES[1])
    assert found["closed"] > 3000
    assert found["overlapping"] == ["a | b"]
    assert len(found["small"]) == 1 and found["errors"]
    assert any("told" in line for line in found["console"])

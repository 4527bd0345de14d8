"""Pages in a headless browser: their texts that overlap or are cut, and screenshots."""

import html
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
MISSING = "no browser looks at the pages: apt-get install chromium"
SECONDS = 120
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip

# A text is cut where a box that hides what overflows is smaller, or the page is; what
# can be scrolled to is not. Two texts overlap where their lines share some pixels.
SCRIPT = """<script>
const faults = [], boxes = [], shown = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode, inside = node.parentElement, said = node.data.trim();
  if (!said || inside.closest("style, script, title")) continue;
  if (inside.closest("details:not([open])") && !inside.closest("summary")) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  for (const box of range.getClientRects()) {
    if (box.width < 1 || box.height < 1) continue;
    let left = box.left, right = box.right, scrolls = false;
    for (let up = inside; up && up !== document.body; up = up.parentElement) {
      const style = getComputedStyle(up), edge = up.getBoundingClientRect();
      const svg = up.tagName === "svg";
      if (style.overflowX === "auto" && !svg) {
        scrolls = true;
        left = Math.max(left, edge.left);
        right = Math.min(right, edge.right);
      } else if ((style.overflowX === "hidden" || svg) && (
        box.left < edge.left - 1 || box.right > edge.right + 1 ||
        box.top < edge.top - 2 || box.bottom > edge.bottom + 2)) {
        faults.push(`cut: ${said}`);
      }
    }
    if (!scrolls && (box.left < -1 || box.right > innerWidth + 1))
      faults.push(`beyond the page: ${said}`);
    if (right - left < 1) continue;
    shown.push(said);
    boxes.push({node, said, left, right, top: box.top, bottom: box.bottom});
  }
}
for (const [i, a] of boxes.entries())
  for (const b of boxes.slice(0, i))
    if (a.node !== b.node &&
        Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1.5 &&
        Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
      faults.push(`overlap: ${a.said} and ${b.said}`);
parent.found[frameElement.name] = {faults, shown, width: innerWidth};
</script></body>"""
COLLECT = """<script>
var found = {};
onload = () => document.body.textContent = `BEGIN${JSON.stringify(found)}END`;
</script>"""


def looked_at(pages, height=2000):
    """What is seen of each (page, width in pixels): its faults, and its texts.

    Each is in a frame, as windows have a least width of their own.
    """
    frames = [
        f'<iframe name="{i}" style="width:{width}px;height:{height}px;border:0"'
        f' srcdoc="{html.escape(page.replace("</body>", SCRIPT))}"></iframe>'
        for i, (page, width) in enumerate(pages)
    ]
    dumped = _run(f"<html><body>{COLLECT}{''.join(frames)}</body></html>", "--dump-dom")
    (found,) = re.findall("BEGIN(.*)END", dumped, re.S)
    found = json.loads(html.unescape(found))
    assert [found[str(i)]["width"] for i, _ in enumerate(pages)] == [
        w for _, w in pages
    ]
    return [
        (found[str(i)]["faults"], found[str(i)]["shown"]) for i, _ in enumerate(pages)
    ]


def screenshot(page, path, width, height=1600):
    """Writes what a page looks like as a PNG."""
    _run(page, f"--screenshot={path}", f"--window-size={width},{height}")


def _run(page, *options):
    """What the browser prints; none of its processes is left, whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "page.html")
        source.write_text(page, encoding="utf-8")
        process = subprocess.Popen(
            [
                BROWSER,
                *OPTIONS,
                f"--user-data-dir={folder}/user",
                *options,
                source.as_uri(),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        try:
            return process.communicate(timeout=SECONDS)[0]
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

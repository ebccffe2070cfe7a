"""Checks the built pages: links, markup that has become text, and how a browser shows a page.

    python docs/check_site.py docs/_build/html

Links within the site are followed to their file and anchor. Headless Chromium, if it is there,
lays each page out at 390 and at 1,280 pixels, in light and dark: nothing may be wider than its
page, no script may fail, and the calculator must show its rows.
"""

import html
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse

WIDTHS = (390, 1280)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

# Opens each page in a frame of each width, and writes what is wrong as the text of the body.
HARNESS = """<!doctype html><body><script>
const found = [], pages = %s, widths = %s;
async function look(page, width, mode) {
  const frame = document.createElement("iframe");
  frame.style.cssText = `width: ${width}px; height: 844px; border: 0`;
  document.body.append(frame);
  frame.src = page;
  await new Promise((loaded) => (frame.onload = loaded));
  const inside = frame.contentDocument, root = inside.documentElement;
  root.dataset.mode = root.dataset.theme = mode;
  const wide = () => root.scrollWidth > width;
  if (wide()) await new Promise((done) => setTimeout(done, 500));  // a drawer that still moves
  const say = (text) => found.push(`${page} at ${width} pixels, ${mode}: ${text}`);
  if (wide()) {
    const first = [...inside.querySelectorAll("article *")].findLast(
      (e) => e.getBoundingClientRect().right > width && !e.closest("table, pre, svg"));
    say(`${root.scrollWidth} pixels wide: ${first ? first.outerHTML.slice(0, 120) : "no article"}`);
  }
  const form = inside.getElementById("calculator");
  if (form && inside.querySelectorAll("#prediction tr").length < 5) say("no prediction");
  const image = [...inside.images].find((i) => i.complete && !i.naturalWidth && i.offsetParent);
  if (image) say(`an image that is not shown: ${image.src}`);
  frame.remove();
}
window.onload = async () => {
  for (const page of pages)
    for (const width of widths)
      for (const mode of ["light", "dark"])
        await look(page, width, mode).catch((error) => found.push(`${page}: ${error}`));
  document.body.innerText = "LOOKED" + JSON.stringify(found) + "END";
};
</script></body>"""


class Page(html.parser.HTMLParser):
    """The anchors of a page, and what it links to."""

    def __init__(self, text: str):
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        self.anchors |= {named[key] for key in ("id", "name") if named.get(key)}
        self.links |= {named[key] for key in ("href", "src") if named.get(key)}


def written(folder: pathlib.Path) -> list[pathlib.Path]:
    """The pages of a site, without the templates of its theme."""
    return [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]


def broken_links(folder: pathlib.Path) -> list[str]:
    """Links of a site's pages to files or anchors that it does not have."""
    pages = {path: Page(path.read_text()) for path in written(folder)}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            aim = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            known = pages[aim].anchors if aim in pages else None
            if not aim.exists() or (anchor and known is not None and anchor not in known):
                found.append(f"{path.relative_to(folder)} links to {link}, which is not there")
    return found


def lost_markup(folder: pathlib.Path) -> list[str]:
    """Markup that a page shows as text: lines of a card or a list that were joined to one."""
    found = []
    for path in written(folder):
        article = re.search("<article.*?</article>", path.read_text(), re.DOTALL)
        text = re.sub(
            "<pre.*?</pre>|<code.*?</code>", "...", article[0] if article else "", flags=re.DOTALL
        )
        text = html.unescape(re.sub("<[^>]*>", "", text))
        for match in re.finditer(
            r":::|```|:link(-type)?: |^\| .* \|$|^\w+ : |\]\(", text, re.MULTILINE
        ):
            around = " ".join(text[match.start() : match.start() + 60].split())
            found.append(f"{path.relative_to(folder)} shows markup as text: {around}")
    return found


def misshown(folder: pathlib.Path, browser: str) -> list[str]:
    """What a browser shows badly, a line each."""
    pages = [str(path.relative_to(folder)) for path in written(folder)]
    harness = folder / "check_site.html"
    harness.write_text(HARNESS % (json.dumps(pages), json.dumps(WIDTHS)))
    try:
        with tempfile.TemporaryDirectory() as profile:
            options = (
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--allow-file-access-from-files",
            )
            done = subprocess.run(
                [browser, *options, f"--user-data-dir={profile}", "--virtual-time-budget=3600000",
                 "--dump-dom", harness.as_uri()],
                capture_output=True, text=True, timeout=600, check=True,
            )  # fmt: skip
    finally:
        harness.unlink()
    looked = re.search("LOOKED(.*)END", done.stdout)
    if looked is None:
        return [f"{browser} did not finish: {done.stdout[-300:]} {done.stderr[-300:]}"]
    return json.loads(html.unescape(looked[1]))


def main() -> None:
    """Prints what is wrong, and ends with 1 if anything is."""
    folder = pathlib.Path(sys.argv[1]).resolve()
    found = broken_links(folder) + lost_markup(folder)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print("no Chromium on this machine: only links and markup are checked")
    else:
        found += misshown(folder, browser)
    print("\n".join(found), end="\n" if found else "")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()

"""Check a built site: every link leads to a file and an anchor in it, and nothing is fetched from other hosts.

python tools/check_site.py build/site
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src")}


class Reader(HTMLParser):
    """The anchors of a page, and what it links to: (whether a browser fetches it, address)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[bool, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            if name in ("href", "src") and value:
                self.links.append(((tag, name) in FETCHED, value))


def problems(site: Path) -> list[str]:
    # (404.html is for web servers: its addresses begin at their root.)
    pages = {path: Reader(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for page, reader in pages.items():
        for fetched, address in reader.links:
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                if fetched and parts.scheme != "data":
                    found.append(f"{page.relative_to(site)} fetches {address}")
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file():
                found.append(f"{page.relative_to(site)} links to {address}, which is not there")
            elif target in pages and parts.fragment and unquote(parts.fragment) not in anchors | {"__skip", "__top"}:
                found.append(f"{page.relative_to(site)} links to {address}, which has no such anchor")
    if not pages:
        found.append(f"{site} has no pages")
    return sorted(set(found))


if __name__ == "__main__":
    bad = problems(Path(sys.argv[1]).resolve())
    print(*bad, sep="\n")
    sys.exit(f"{len(bad)} problems" if bad else 0)

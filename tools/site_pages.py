"""A hook of MkDocs: the site also has pages from outside docs/, and files of the repository that pages link to.

Links are those that GitHub follows, relative to the file that has them; a link to nothing ends the build.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SOURCES = {page: source for source, page in OUTSIDE.items()}
HOME = "---\nhide: [navigation]\n---\n"  # its only entry would be the page itself
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")
FENCE = re.compile(r"^```(python|json) \w+$", re.MULTILINE)  # `python runnable`: for the tests, not for highlighting


def on_files(files: Files, config: Any) -> Files:
    for source, page in OUTSIDE.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=HOME + text if page == "index.md" else text))
    texts = {file.src_uri: file.content_string for file in files if file.is_documentation_page()}
    for uri, text in texts.items():
        for _, target, _ in LINK.findall(text):
            path = repository_path(uri, target)
            if in_site(path) == f"files/{path}" and files.get_file_from_path(in_site(path)) is None:
                files.append(File.generated(config, in_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    uri = page.file.src_uri

    def link(match: re.Match[str]) -> str:
        target = in_site(repository_path(uri, match[2]))
        return match[1] + posixpath.relpath(target, posixpath.dirname(uri) or ".") + match[3]

    return FENCE.sub(r"```\1", LINK.sub(link, markdown))


def repository_path(uri: str, target: str) -> str:
    """What a link of a page means, as a path in the repository."""
    folder = posixpath.dirname(SOURCES.get(uri, f"docs/{uri}"))
    path = posixpath.normpath(posixpath.join(folder, target))
    if not (ROOT / path).is_file():
        raise PluginError(f"{SOURCES.get(uri, uri)} links to {target}, which is not a file of the repository")
    return path


def in_site(path: str) -> str:
    """Where a file of the repository lies in the site."""
    return OUTSIDE.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}")

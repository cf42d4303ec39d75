"""Text of documentation pages: HTML to plain text, and the documented names of a Sphinx page.

Regular expressions instead of a parser: the pages are machine-made by a few generators (Sphinx,
DocBook, mdBook), there are hundreds of megabytes of them, and a page that is read badly costs a
line of training text. Preformatted blocks keep their line breaks, all other text is reflowed.
Typographic characters become ASCII, so that the small vocabulary is not spent on them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import NamedTuple

_STARTS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r'<div class="body" role="main">',
        r"<main\b[^>]*>",
        r'<div role="main"[^>]*>',
        r"<article\b[^>]*>",
        r'<div class="(?:body|bodywrapper)"[^>]*>',
        r'<div id="apicontent">',
        r"<body\b[^>]*>",
    )
)
_END = re.compile(
    r'<div class="(?:sphinxsidebar|footer|related)"|</main>|<footer\b|</body>',
    re.IGNORECASE,
)
_DROP = re.compile(
    r"<(script|style|nav|svg|head|button)\b.*?</\1>|<!--.*?-->|<a class=\"headerlink\".*?</a>",
    re.IGNORECASE | re.DOTALL,
)
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre>", re.IGNORECASE | re.DOTALL)
_ITEM = re.compile(r"<li\b[^>]*>", re.IGNORECASE)
_BLOCK = re.compile(
    r"</?(p|div|ul|ol|li|dl|dt|dd|h[1-6]|table|tr|section|blockquote|br|hr|figure|aside)\b[^>]*>",
    re.IGNORECASE,
)
_CELL = re.compile(r"</t[dh]>", re.IGNORECASE)
_TAG = re.compile(r"<[^>]*>")
_SPACE = re.compile(r"\s+")
_BLANK_LINES = re.compile(r"\n\s*\n+")
_PLAIN = str.maketrans(
    {
        "\u00b6": "", "\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-",
        "\u2014": "-", "\u2026": "...", "\u00a0": " ", "\u2192": "->", "\u00bb": ">>",
        "\u2212": "-", "\u200b": "", "\u2022": "-", "\uf0c1": "", "\t": "    ",
    }
)  # fmt: skip
_NAME = re.compile(
    r'<dt class="sig sig-object (?:py|c)[^"]*" id="([^"]+)">(.*?)</dt>\s*<dd>(.*?)</dd>', re.DOTALL
)
_PARAGRAPH = re.compile(r"<p>(.*?)</p>", re.DOTALL)


class Documented(NamedTuple):
    """A name of an interface with its signature and the first paragraphs about it."""

    name: str
    signature: str
    paragraphs: tuple[str, ...]


def plain(fragment: str) -> str:
    """One line of text from a fragment of HTML without block structure."""
    text = html.unescape(_TAG.sub("", fragment)).translate(_PLAIN)
    return _SPACE.sub(" ", text).strip()


def main_part(page: str) -> str:
    """The HTML of the page's own content, without navigation."""
    begin = next((found for start in _STARTS if (found := start.search(page))), None)
    rest = page[begin.end() :] if begin else page
    end = _END.search(rest)
    return _DROP.sub("", rest[: end.start()] if end else rest)


def page_text(page: str) -> str:
    """Plain text of an HTML page: reflowed paragraphs, code blocks as they stand."""
    parts: list[str] = []
    for index, part in enumerate(_PRE.split(main_part(page))):
        if index % 2:
            code = html.unescape(_TAG.sub("", part)).translate(_PLAIN)
            parts.append("\n" + code.strip("\n") + "\n")
        else:
            parts.append(_flow(part))
    lines = (line.rstrip() for line in "".join(parts).replace("[source]", "").splitlines())
    return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()


def _flow(part: str) -> str:
    """Reflow HTML outside preformatted blocks: one line a block element, list items marked."""
    part = _SPACE.sub(" ", part)
    part = _ITEM.sub("\n- ", part)
    part = _BLOCK.sub("\n", _CELL.sub("  ", part))
    text = html.unescape(_TAG.sub("", part)).translate(_PLAIN)
    lines = [line.strip() for line in text.split("\n")]
    joined = "\n".join(line for line in lines if line)
    return "\n" + joined.replace("\n- \n", "\n- ").replace("-\n", "- ") + "\n"


def documented_names(page: str) -> Iterator[Documented]:
    """Each documented name of a Sphinx page that has at least one paragraph of text."""
    for found in _NAME.finditer(page):
        paragraphs = tuple(
            text
            for text in (plain(raw) for raw in _PARAGRAPH.findall(found[3]))
            if len(text) > 20 and not text.startswith(("New in", "Changed in", "Deprecated"))
        )
        if paragraphs:
            yield Documented(found[1], plain(found[2]), paragraphs)

"""The page loads nothing from elsewhere, and the browser runs only its own script and style."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from fastformer.serving import page
from fastformer.serving.page import policy

TEXT = Path(page.__file__).with_name("index.html").read_text(encoding="utf-8")


class Elements(HTMLParser):
    """Collects all elements with their attributes, and the text of scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.all and self.all[-1][0] in ("script", "style"):
            self.raw.setdefault(self.all[-1][0], data)


@pytest.fixture(scope="module")
def elements() -> Elements:
    found = Elements()
    found.feed(TEXT)
    return found


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_policy_allows_only_the_pages_own_script_and_style(elements: Elements) -> None:
    app = FastAPI()
    app.include_router(page.router(None, None))
    answer = TestClient(app).get("/")
    assert answer.text == TEXT and answer.headers["content-type"].startswith("text/html")
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    assert rules["script-src"] == digest(elements.raw["script"]) and rules["style-src"] == digest(elements.raw["style"])
    assert "unsafe" not in answer.headers["content-security-policy"]


def test_another_script_would_have_another_hash() -> None:
    assert policy(TEXT.replace('"use strict"', '"use strict" ')) != policy(TEXT)


def test_the_page_loads_nothing_from_another_host(elements: Elements) -> None:
    for tag, attributes in elements.all:
        for name in ("src", "href", "action", "srcset"):
            value = attributes.get(name) or ""
            assert value.startswith(("#", "data:")) or not value, (tag, value)
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes), (tag, attributes)
    without_icon = re.sub(r'href="data:[^"]*"', "", TEXT)
    assert "//" not in re.sub(r"^\s*// .*$|\s// .*$", "", without_icon, flags=re.MULTILINE)
    assert "@import" not in TEXT and "url(" not in TEXT


def test_texts_never_become_markup(elements: Elements) -> None:
    script = elements.raw["script"]
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in script, way


def test_every_field_has_a_label_and_news_is_announced(elements: Elements) -> None:
    labels = {attributes.get("for") for tag, attributes in elements.all if tag == "label"}
    fields = [attributes for tag, attributes in elements.all if tag in ("input", "select", "textarea")]
    assert len(fields) >= 8
    in_label = {"attention"}  # its label is around it
    assert all(attributes["id"] in labels | in_label for attributes in fields)
    roles = {attributes.get("role") for _, attributes in elements.all}
    assert {"alert", "status", "log"} <= roles
    assert ("html", {"lang": "en"}) in elements.all
    assert not [attributes for _, attributes in elements.all if (attributes.get("tabindex") or "0") not in ("0", "-1")]


def colors(scheme: str) -> dict[str, str]:
    block = TEXT.split("prefers-color-scheme: dark", 1)[scheme == "dark"]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block.split("* { box-sizing")[0]))


def contrast(one: str, other: str) -> float:
    """Returns the contrast ratio of WCAG 2.1."""

    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_its_colors_can_be_read(scheme: str) -> None:
    # WCAG 2.1 asks 4.5 of text and 3 of the edges of what can be used.
    found = colors(scheme)
    grounds = ("page", "surface", "sunken")
    assert all(contrast(found[ink], found[ground]) >= 4.5 for ink in ("ink", "quiet") for ground in grounds)
    assert contrast(found["accent-ink"], found["accent"]) >= 4.5 and contrast(found["ink"], found["soft"]) >= 4.5
    assert contrast(found["bad"], found["bad-soft"]) >= 4.5
    assert contrast(found["edge"], found["surface"]) >= 3 and contrast(found["accent"], found["surface"]) >= 3

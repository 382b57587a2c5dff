"""Tests LibreTranslate's routes: JSON and forms, texts and lists, HTML, alternatives, detection of languages."""

from __future__ import annotations

import gc
import random
import time
from types import SimpleNamespace
from typing import Any

import pytest

from fastformer.generation import Translator
from fastformer.languages import Languages
from fastformer.serving import Limits, open_service
from fastformer.serving.codes import Codes
from fastformer.serving.html_text import HtmlPage
from tests.covering import each
from tests.serving.asking import events, serving

TEXT = "One two. Three!\n\n Four. "
PAIR = {"source_lang": "en", "target_lang": "de"}
ASK = {"source": "en", "target": "de"}


@pytest.fixture(scope="module")
def translator(translator_folder) -> Translator:
    return Translator.from_pretrained(translator_folder)


async def test_json_and_forms_give_the_librarys_texts(translator_folder, translator) -> None:
    right = translator.translate(TEXT, split=True)
    async with serving(open_service(translator_folder, **PAIR)) as client:
        assert (await client.post("/translate", json={"q": TEXT, **ASK})).json() == {"translatedText": right}
        form = {"q": TEXT.replace("\n", "\r\n"), **ASK, "api_key": "any"}
        assert (await client.post("/translate", data=form)).json() == {"translatedText": right}
        assert (await client.post("/translate", files={"x": b""}, data=form)).json() == {"translatedText": right}
        found = (await client.post("/translate", json={"q": [TEXT, "one"], **ASK})).json()
        assert found == {"translatedText": translator.translate([TEXT, "one"], split=True)}


async def test_alternatives_are_the_next_best(translator_folder, translator) -> None:
    best = translator.translate("one", num_beams=3, num_return_sequences=3)
    async with serving(open_service(translator_folder, **PAIR)) as client:
        found = (await client.post("/translate", json={"q": "one", "alternatives": 2, **ASK})).json()
        assert [found["translatedText"], *found["alternatives"]] == list(dict.fromkeys(best))
        found = (await client.post("/translate", data={"q": "one", "alternatives": "2", **ASK})).json()
        assert [found["translatedText"], *found["alternatives"]] == list(dict.fromkeys(best))
        found = (await client.post("/translate", json={"q": ["one", "two"], "alternatives": 1, **ASK})).json()
        assert len(found["translatedText"]) == len(found["alternatives"]) == 2
    best = translator.translate("one", num_beams=5, num_return_sequences=2)
    async with serving(open_service(translator_folder, options={"num_beams": 5}, **PAIR)) as client:
        found = (await client.post("/translate", json={"q": "one", "alternatives": 1.0, **ASK})).json()
        assert [found["translatedText"], *found["alternatives"]] == list(dict.fromkeys(best))


async def test_html_keeps_its_tags(translator_folder, translator) -> None:
    one, two = translator.translate(["one & all", "two."], split=True)
    async with serving(open_service(translator_folder, **PAIR)) as client:
        html = '<p id="a">one &amp; all<br/> <script>x<y</script><b translate="no">two.</b><!-- two. --><i>two.</i></p>'
        found = (await client.post("/translate", json={"q": html, "format": "html", **ASK})).json()["translatedText"]
        escape = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
        said = ["".join(escape.get(letter, letter) for letter in text) for text in (one, two)]
        assert found == html.replace("one &amp; all", said[0]).replace("<i>two.", f"<i>{said[1]}")


async def test_languages_and_the_language_of_a_text(translator_folder) -> None:
    german = "Das ist ein Satz, und er ist lang genug."
    async with serving(open_service(translator_folder, **PAIR)) as client:
        found = (await client.get("/languages")).json()
        assert [(*one.values(),) for one in found] == [("en", "en", ["de"]), ("de", "de", [])]
        best, *_ = (await client.post("/detect", data={"q": german})).json()
        assert best["language"] == "de" and 50 < best["confidence"] <= 100
        several = (await client.post("/detect", json={"q": "no"})).json()
        shares = [100 * one.confidence for one in client.app.state.service.codes.detect("no")]
        assert [one["confidence"] for one in several] == [round(share, 1) for share in shares] != [*map(round, shares)]
        shares = [one["confidence"] for one in several]
        assert len(several) > 1 and shares == sorted(shares, reverse=True) and min(shares) >= 1 and sum(shares) <= 100.5
        for stream in (False, True):
            answer = await client.post("/v1/translate", json={"text": german, "source_lang": "auto", "stream": stream})
            assert (events(answer.text)[-1] if stream else answer.json())["detected_lang"] == "de"
        found = (await client.post("/translate", json={"q": german[:40], "source": "auto", "target": "de"})).json()
        assert found["detectedLanguage"]["language"] == "de"
        page = {"q": f"<p title='This is English'>{german[:20]}<br>{german[20:]}</p>", "format": "html"}
        found = (await client.post("/translate", json={**page, "source": "auto", "target": "de"})).json()
        assert found["detectedLanguage"]["language"] == "de"
        texts = [german[:40], "This is one sentence in English."]
        found = (await client.post("/translate", json={"q": texts, "source": "auto", "target": "de"})).json()
        assert [one["language"] for one in found["detectedLanguage"]] == ["de", "en"]
        settings = (await client.get("/frontend/settings")).json()
        assert settings["language"]["target"]["code"] == "de" and settings["keyRequired"] is False
        assert settings["charLimit"] == Limits().max_text_chars
        assert settings["language"]["source"] == {"code": "en", "name": "en"} and settings["frontendTimeout"] == 500
        assert (settings["suggestions"], settings["filesTranslation"], settings["supportedFilesFormat"]) == (
            False, False, [],
        )  # fmt: skip


@pytest.mark.parametrize("as_form", [False, True], ids=["json", "form"])
async def test_errors_have_libretranslates_format(translator_folder, as_form) -> None:
    wrong = [
        {},
        ASK,
        {"q": "", **ASK},
        {"q": "a", "source": "fr", "target": "de"},
        {"q": "a", "source": "en", "target": "tlh"},
        {"q": "a", **ASK, "format": "pdf"},
        {"q": "a", **ASK, "alternatives": 10_000},
        {"q": "a", **ASK, "alternatives": "-1" if as_form else -1},
        {"q": "a" * 100, **ASK},
    ]
    async with serving(open_service(translator_folder, limits=Limits(max_text_chars=200), **PAIR)) as client:
        for body in wrong:
            answer = await client.post("/translate", **{"data" if as_form else "json": body})
            assert answer.status_code == 400, body
            assert set(answer.json()) == {"error"} and isinstance(answer.json()["error"], str)
        answer = await client.post("/translate", **{"data" if as_form else "json": {"q": "a" * 300, **ASK}})
        assert answer.status_code == 413
        for text, status in (("", 400), ("a" * 300, 413)):
            answer = await client.post("/detect", **{"data" if as_form else "json": {"q": text}})
            assert answer.status_code == status and answer.json().keys() == {"error"}
        page = {"q": "<![a[", "format": "html", **ASK}
        assert (await client.post("/translate", **{"data" if as_form else "json": page})).status_code == 400
        for raw in (b"{", b"[1]", b'"a"', b"\xff", b"[" * 100_000, b""):
            headers = {"Content-Type": "application/json"}
            if as_form:
                headers = {"Content-Type": "multipart/form-data; boundary=x"}
            answer = await client.post("/translate", content=raw, headers=headers)
            assert answer.status_code == 400 and isinstance(answer.json()["error"], str), raw
        assert (await client.get("/translate")).json().keys() == {"error"}


def test_a_language_is_no_target_of_itself() -> None:
    known = Languages({"deu_Latn": 5, "eng_Latn": 6, "fra_Latn": 7}, "front")
    stub: Any = SimpleNamespace(languages=known, source_lang=None, target_lang="deu_Latn")
    codes = Codes(stub)
    targets = {one["code"]: one["targets"] for one in codes.entries()}
    assert targets == {"de": ["en", "fr"], "en": ["de", "fr"], "fr": ["de", "en"]}
    assert codes.defaults() == ("auto", "de") and codes.source("de") == codes.source("deu_Latn") == "deu_Latn"
    assert (
        codes.target("fr") == codes.target("fra_Latn") == "fra_Latn" and codes.target("") is codes.target(None) is None
    )
    names = {"source": codes.source, "target": codes.target}
    for name, find in names.items():
        with pytest.raises(ValueError, match=name):
            find("it")
    assert codes.detect("Questa è una frase in italiano, e non è corta.")[0].code in targets
    stub.languages = Languages({"deu_Latn": 5, "eng_Latn": 6}, "asked")
    assert Codes(stub).source("de") is None and Codes(stub).target("de") == "deu_Latn"


async def test_the_codes_of_a_pair_may_be_in_any_case(translator_folder) -> None:
    async with serving(open_service(translator_folder, source_lang="en", target_lang="de-AT")) as client:
        for source, target, status in (("EN", "De-at", 200), (" en ", "de-AT", 200), ("en", "en", 400)):
            answer = await client.post("/translate", json={"q": "a", "source": source, "target": target})
            assert answer.status_code == status, answer.text
            answer = await client.post(
                "/v1/translate", json={"text": "a", "source_lang": source, "target_lang": target}
            )
            assert answer.status_code == status, answer.text


PIECES = [
    "<b>", "</b>", "<i translate=no>", "</i>", "<br>", "<br/>", "<pre>", "</pre>", "a", "é", "&amp;", "&#65;", "&", "#",
    "\n", "\r", " ", "<", ">", "<!--", "-->", '"', "=", "</", "/>", "<a ", "<!d", ";",
]  # fmt: skip


@each(
    "page, texts",
    [
        ("<p>one &lt; two<b class='x notranslate'>no</b> three</p>", ["one < two", "three"]),
        ("a<code>b<i>c</i></code>d<script>e<f</script>", ["a", "d"]),
        ("x\n<b>\n</b>&#65;&#x42;&unknown;\r\ny&nbsp;", ["x", "AB&unknown; y\xa0"]),
        ("</b>a</b><i>b&nbsp;</i>&nbsp;", ["a", "b\xa0"]),
        ("<!-- a --><?b?><!DOCTYPE c>", []),
        # White space is a space
        ("<p>\n\t\tWenn eine Zeile\n\n\t\tkein Verb\fhat,&#10;ist\n</p>", ["Wenn eine Zeile kein Verb hat, ist"]),
        # translate, of which the innermost counts
        ("<p translate=NO>a<b translate=yes>b</b><i translate>c</i><u translate=x>d</u></p>e", ["b", "c", "e"]),
        ("<code translate='yes'>a</code><b translate=no translate=yes>b</b><script translate=yes>c</script>", ["a"]),
        ("<b class=notranslatex>a</b><b class=notranslate translate=yes>b</b>", ["a", "b"]),
        # Ends that are implied, or come too early or late; html5lib reads the same
        ("<p translate=no>a<br>b<p>c</p>d</p>e", ["c", "d", "e"]),
        ("<p translate=no>a<b>b</b><ul><li>c", ["c"]),
        ("<h1 translate=no>a</h1>b<h2 translate=no>c</h3>d", ["b", "d"]),
        ("<ul><li translate=no>a</li>b</ul>", ["b"]),
        ("<ul><li translate=no>a<li>b<ul><li translate=no>c</ul>d</ul>e", ["b", "d", "e"]),
        ("<dl><dt translate=no>a<dd>b<dt>c</dl>", ["b", "c"]),
        ("<table><tr><td translate=no>a<td>b<tr><td>c<tbody><td>d</table>e", ["b", "c", "d", "e"]),
        ("<select><option translate=no>a<option>b</select>c", ["b", "c"]),
        ("<p><i translate=no>a</p>b</i>c", ["c"]),
        ("<b><i translate=no>a</b>b</i>c", ["c"]),
        ("<table><td><b translate=no>a</td>b</table>", ["b"]),
        ("<span translate=no><div>a</span>b</div>c</span>d", ["d"]),
        ("<div translate=no><table><td></div>a</table>b</div>c", ["c"]),
        ("<i translate='no'/>a</i>b<svg><g translate='no'/><text>c</text></svg>", ["b", "c"]),
    ],
)
def test_prose_is_found(page, texts) -> None:
    found = HtmlPage(page)
    assert found.texts == texts
    if "unknown" not in page:  # an ampersand that stands for itself is escaped
        assert HtmlPage(found.filled(texts)).texts == texts
    with_others = found.filled(["<&"] * len(texts))
    assert HtmlPage(with_others).texts == ["<&"] * len(texts)


def test_white_space_around_a_text_stays_in_the_page() -> None:
    page = "<p>\n  one\n  two <b>\n three\n</b>\t</p>"
    assert HtmlPage(page).filled(["1", "2"]) == "<p>\n  1 <b>\n 2\n</b>\t</p>"
    assert HtmlPage("<i>a</i>").filled(['it\'s "b" & c']) == '<i>it\'s "b" &amp; c</i>'  # quotes mean nothing here


def test_everything_but_the_texts_is_unchanged() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        page = "".join(draw.choices(PIECES, k=draw.randrange(1, 14)))
        found = HtmlPage(page)
        between = found.filled([f"{number}@" for number in range(len(found.texts))])
        place = 0  # what stands between the texts is in the page, in order
        for number, kept in enumerate(between.replace("@", "\0").split("\0")):
            kept = kept.removesuffix(str(number)) if number < len(found.texts) else kept
            place = page.index(kept, place) + len(kept)


def test_the_time_for_a_page_depends_only_on_its_length() -> None:
    def seconds(count: int) -> float:
        began = time.process_time()
        pages = ("<b>x", "<", "&", "<div>", "<p><i translate=no>x</p>", "<table><td><b>", "<li><ul>")
        for page in (
            *(text * count for text in pages),
            "<b>" * count + "</i>" * count,
            "<p>" + "<b>" * count + "</p>" * count,
        ):
            HtmlPage(page)
        return time.process_time() - began

    gc.disable()  # a full collection reads all objects of the process, whatever the page
    try:
        assert seconds(4000) < 3 * 16 * max(seconds(250), 0.001)  # were it quadratic, 256 times as much
    finally:
        gc.enable()

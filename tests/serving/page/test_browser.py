"""Tests the page in Chromium, on real servers. With FASTFORMER_SCREENSHOTS=FOLDER it saves screenshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastformer.encoding import CrossEncoder
from fastformer.generation import Translator
from fastformer.serving import Limits
from tests.audio import speech
from tests.audio.test_reading import wav
from tests.serving import models
from tests.serving.servers import Running, running, until

pytestmark = pytest.mark.slow  # proves what a person sees and can stop; a browser takes seconds to start

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
SENTENCE = "The dog reads a book."
KEY = "a-key-of-a-test"
# Notes what the result says, each time that it changes.
WATCH = """(id) => {
  window.seen = [];
  new MutationObserver(() => window.seen.push(document.getElementById(id).textContent))
    .observe(document.getElementById(id), {childList: true, subtree: true, characterData: true});
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="not installed: pip install playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


class Visit:
    """A page with its console messages and requests."""

    def __init__(self, browser: Any, url: str, **settings: Any) -> None:
        self.context = browser.new_context(**settings)
        self.page = self.context.new_page()
        self.url = url
        self.errors: list[str] = []
        self.hosts: set[str] = set()
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda asked: self.hosts.add(asked.url.split("/")[2]) if "//" in asked.url else None)
        self.page.goto(url)

    def expect(self, selector: str) -> Any:
        from playwright.sync_api import expect

        return expect(self.page.locator(selector))

    def end(self) -> None:
        """Checks the conditions that hold for every visit."""
        self.context.close()
        assert not self.errors
        assert self.hosts == {self.url.split("/")[2]}

    def picture(self, name: str) -> None:
        if folder := os.environ.get("FASTFORMER_SCREENSHOTS"):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.fixture(scope="module")
def patient_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a translator whose output never ends, so that it can be stopped."""
    folder = tmp_path_factory.mktemp("models") / "patient-translator"
    sizes = {"d_model": 64, "d_ff": 128, "num_encoder_layers": 2, "num_decoder_layers": 24, "max_len": 4000}
    return models.translator(folder, ends=False, **sizes)


@pytest.fixture(scope="module")
def translating(patient_folder: Path) -> Iterator[Running]:
    with running(patient_folder, Limits(max_new_tokens=3900)) as server:
        yield server


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Makes a language model whose answers never end by themselves."""
    place = tmp_path_factory.mktemp("models") / "small-chat"
    folder = models.generator(place, num_layers=32, max_len=4000, ends=False)
    with running(folder, Limits(max_new_tokens=3500)) as server:
        yield server


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "name"), [(1200, "wide"), (390, "phone")])
def test_a_translation_comes_piece_by_piece_with_its_attention(
    scheme: str, width: int, name: str, browser: Any, translating: Running, patient_folder: Path
) -> None:
    visit = Visit(browser, translating.url, color_scheme=scheme, viewport={"width": width, "height": 844})
    page = visit.page
    visit.expect("#translate").to_be_visible()
    assert page.evaluate("document.activeElement.id") == "text"  # one can write at once
    page.keyboard.type(SENTENCE)
    page.check("#attention")
    page.evaluate(WATCH, "result")
    page.press("#text", "Control+Enter")
    visit.expect("#status").to_contain_text("Done", timeout=60_000)
    translator = Translator.from_pretrained(patient_folder)
    said = translator.translate(SENTENCE)
    assert page.locator("#result").text_content() == said
    seen = [text for text in dict.fromkeys(page.evaluate("window.seen")) if text]
    assert len([text for text in seen if text != said]) >= 2 and all(said.startswith(text) for text in seen)
    visit.expect("#map").to_be_visible()
    source, target, looked = translator.attention(SENTENCE)
    rows, columns = len(target), len(source)
    assert page.locator("#weights tbody tr").count() == rows and page.locator("#weights td").count() == rows * columns
    shown = [float(text) for text in page.locator("#weights tbody tr").first.locator("td").all_text_contents()]
    assert shown == pytest.approx(looked[-1].mean(0)[0].tolist(), abs=0.006)  # of the last layer, with two decimals
    assert page.locator("#weights thead th").count() == columns + 1  # each cell has a header for its row and its column
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # only the table itself scrolls
    visit.picture(f"translate-{scheme}-{name}")
    visit.end()


def test_stop_ends_the_request_on_the_server(browser: Any, translating: Running) -> None:
    visit = Visit(browser, translating.url)
    visit.page.fill("#text", "a dog " * 500)
    visit.page.click("#go")
    visit.expect("#result").not_to_be_empty()
    assert translating.service.session.stats().running >= 1
    visit.page.focus("#stop")
    visit.page.keyboard.press("Enter")
    until(lambda: translating.service.session.stats().running == 0, 2.0)
    visit.expect("#status").to_contain_text("Stopped")
    visit.expect("#stop").to_be_disabled()
    assert visit.page.evaluate("document.activeElement.id") == "go"  # the focus isn't lost with the button
    visit.end()


def test_an_error_is_shown_as_it_is(browser: Any, translating: Running) -> None:
    visit = Visit(browser, translating.url)
    most = translating.service.limits.max_text_chars
    visit.page.fill("#text", "x" * (most + 1))
    visit.expect("#count").to_have_class("small over")
    visit.page.click("#go")
    visit.expect("#problem").to_contain_text(f"{most:,}")
    visit.expect("#go").to_be_enabled()
    visit.picture("error")
    assert [error for error in visit.errors if "413" in error]  # the browser's own line for such an answer
    visit.errors.clear()
    visit.end()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_a_chat_of_several_turns(scheme: str, width: int, browser: Any, chatting: Running) -> None:
    visit = Visit(browser, chatting.url, color_scheme=scheme, viewport={"width": width, "height": 844})
    page = visit.page
    asked: list[dict[str, Any]] = []
    page.on("request", lambda request: asked.append(request.post_data_json) if request.method == "POST" else None)
    page.click("#more summary")
    page.fill("#system", "be brief")
    page.fill("#most", "24")
    page.fill("#temperature", "0")
    for number, text in enumerate(("the dog reads a book", "<b>two</b> birds"), 1):
        page.fill("#say", text)
        page.press("#say", "Enter")
        visit.expect("#turns li.assistant").to_have_count(number)
        visit.expect("#status").to_contain_text("Done", timeout=60_000)
        page.locator("#status").evaluate("(status) => { status.textContent = '' }")
    assert [turn["role"] for turn in asked[-1]["messages"]] == ["system", "user", "assistant", "user"]
    said = asked[-1]["messages"][2]["content"]
    assert said and page.locator("#turns li.assistant span:last-child").first.text_content() == said
    visit.expect("#turns li.user span:last-child").to_contain_text(["the dog reads a book", "<b>two</b> birds"])
    assert page.locator("#turns b").count() == 0
    visit.picture(f"chat-{scheme}")
    page.click("#anew")
    visit.expect("#turns li").to_have_count(1)
    visit.end()


def test_a_chat_is_stopped(browser: Any, chatting: Running) -> None:
    visit = Visit(browser, chatting.url)
    visit.page.click("#more summary")
    visit.page.fill("#most", "3500")
    visit.page.fill("#temperature", "0")
    visit.page.fill("#say", "two birds")
    visit.page.click("#send", no_wait_after=True)
    visit.expect("#turns li.assistant span:last-child").not_to_be_empty()
    visit.page.keyboard.press("Escape")
    until(lambda: chatting.service.session.stats().running == 0, 2.0)
    visit.expect("#status").to_contain_text("Stopped")
    visit.end()


def test_a_model_without_a_chat_template_continues_texts(browser: Any, tmp_path: Path) -> None:
    with running(models.generator(tmp_path / "small-writer", template=None)) as server:
        visit = Visit(browser, server.url)
        visit.expect("#title").to_have_text("Continue a text")
        visit.page.fill("#say", "the dog reads")
        visit.page.press("#say", "Enter")
        visit.expect("#status").to_contain_text("Done")
        visit.expect("#turns li.assistant span:last-child").not_to_be_empty()
        visit.end()


def test_texts_are_compared(browser: Any, tmp_path: Path) -> None:
    texts = ["the dog reads a book", "two birds", "men walk in the park"]
    with running(models.encoder(tmp_path / "small-encoder")) as server:
        visit = Visit(browser, server.url)
        visit.page.fill("#query", texts[1])
        visit.page.fill("#texts", "\n".join(texts))
        visit.page.click("#run")
        visit.expect("#status").to_contain_text("Done")
        ranked = visit.page.locator("#ranks span:first-child").all_text_contents()
        assert ranked[0] == texts[1] and sorted(ranked) == sorted(texts)
        shown = [float(text) for text in visit.page.locator("#ranks span.small").all_text_contents()]
        assert shown[0] == 1.0 and shown == sorted(shown, reverse=True)
        visit.end()


def test_texts_are_ranked_by_a_cross_encoder(browser: Any, tmp_path: Path) -> None:
    texts = ["the dog reads a book", "two birds", "men walk in the park"]
    folder = models.classifier(tmp_path / "small-ranker", num_labels=1)
    with running(folder) as server:
        visit = Visit(browser, server.url)
        visit.page.fill("#query", texts[1])
        visit.page.fill("#texts", "\n".join(texts))
        visit.page.click("#run")
        visit.expect("#status").to_contain_text("Done")
        ranked = visit.page.locator("#ranks span:first-child").all_text_contents()
        best = [texts[each["corpus_id"]] for each in CrossEncoder.from_pretrained(folder).rank(texts[1], texts)]
        assert ranked == best
        visit.end()


def test_a_file_is_transcribed(browser: Any, tmp_path: Path) -> None:
    with running(speech.folder(tmp_path / "whisper")) as server:
        visit = Visit(browser, server.url)
        (tmp_path / "a.wav").write_bytes(wav(speech.sound(5, 2)))
        visit.page.set_input_files("#audio", str(tmp_path / "a.wav"))
        visit.page.click("#hear")
        visit.expect("#status").to_contain_text("Done")
        assert visit.page.text_content("#heard").strip()
        visit.end()


def test_a_server_with_keys_asks_for_one(browser: Any, translator_folder: Path) -> None:
    with running(translator_folder, keys=(KEY,), page_public=True) as server:
        visit = Visit(browser, server.url)
        visit.expect("#keybox").to_be_visible()
        visit.picture("key")
        visit.page.fill("#key", "another")
        visit.page.press("#key", "Enter")
        visit.expect("#problem").to_be_visible()
        visit.page.fill("#key", KEY)
        visit.page.press("#key", "Enter")
        visit.expect("#translate").to_be_visible()
        visit.expect("#problem").to_be_hidden()
        visit.page.fill("#text", "two birds")
        visit.page.click("#go")
        visit.expect("#status").to_contain_text("Done")
        assert visit.page.evaluate("localStorage.length") == 0 and KEY not in visit.page.url
        assert all("401" in error for error in visit.errors)
        visit.errors.clear()
        visit.end()

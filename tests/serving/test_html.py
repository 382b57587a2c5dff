"""The rules by which tags end elements, each in a page whose texts tell whether they ended."""

from __future__ import annotations

import pytest

from fastformer.serving.html_text import HtmlPage


def words(text: str) -> list[str]:
    return text.split()


NO = " translate=no>"
SECTIONS = ("tbody", "thead", "tfoot")
IN_TABLES = (*SECTIONS, "caption", "colgroup")
HEADINGS = [f"h{level}" for level in range(1, 7)]
FORMATTING = words("a b big code em font i nobr s small strike strong tt u")
# A page, and the texts that are translated.
ROWS: list[tuple[str, str]] = [
    # A start tag ends elements that are open within a barrier
    *((f"<{first}{NO}a<{second}>b", "b") for first in ("dd", "dt") for second in ("dd", "dt")),
    *((f"<ul><li{NO}a<{inner}><li>b", "b") for inner in ("address", "div", "p", "dd", "dt")),
    *((f"<{name}{NO}<li>a<{name}>b", "b") for name in ("dd", "dt")),
    *((f"<li{NO}a<{barrier}><li>b", "") for barrier in ("section", "ul", "button", "td", "center")),
    (f"<button{NO}a<button>b", "b"), (f"<button{NO}a<object><button>b", ""),
    *((f"<table><tr><{first}{NO}a<{second}>b", "b") for first in ("td", "th") for second in ("td", "th")),
    (f"<table><td{NO}a<tr>b", "b"), *((f"<table><td{NO}a<{name}>b", "b") for name in IN_TABLES),
    (f"<table><tr{NO}<td>a<tr><td>b", "b"), (f"<table><td{NO}a<table><td>b", ""),
    *((f"<table><caption{NO}a<{name}>b", "b") for name in IN_TABLES),
    *((f"<table><tr><td{NO}a<{name}>b", "b") for name in IN_TABLES),
    *((f"<table><tr{NO}<td>a<{name}>b", "b") for name in IN_TABLES),
    *((f"<table><{section}{NO}<tr><td>a<{name}>b", "b") for section in SECTIONS for name in IN_TABLES),
    # ... or the innermost ones
    (f"<select><option{NO}a<optgroup>b", "b"), (f"<select><optgroup{NO}a<optgroup>b", "b"),
    (f"<select><optgroup{NO}<option>a<optgroup>b", "b"), (f"<select><optgroup{NO}<option>a<option>b", ""),
    *((f"<ruby><{first}{NO}a<{second}>b", "b") for first in ("rb", "rt", "rp") for second in ("rt", "rp")),
    (f"<rt{NO}<span>a<rt>b", ""), (f"<div{NO}<option>a</option>b", ""), ("<option>a", "a"),
    *((f"<{first}{NO}a<{second}>b", "b") for first in HEADINGS for second in ("h1", "h6")),
    # ... or a paragraph
    *((f"<p{NO}a<{name}>b", "b") for name in words("address blockquote div dl form h3 hr li ol p table ul")),
    (f"<p{NO}a<button><p>b</p></button>c", ""), (f"<p{NO}<button><span>a</span><p>b</p></button>c</p>d", "d"),
    *((f"<p{NO}a<{name}>b", "") for name in ("span", "b", "ins", "label")),
    # Links and nobr end those of their kind; other formatting is nested
    *((f"<{name}{NO}a<{name}>b", "b") for name in ("a", "nobr")),
    *((f"<{name}{NO}a<{name}>b</{name}>c</{name}>d", "d") for name in FORMATTING if name not in ("a", "nobr")),
    # An end tag ends the innermost of its elements, and nothing beyond a barrier
    (f"<h1{NO}a<div><h2>b</h2>c", ""), (f"<div{NO}</section>a</div>b", "b"), (f"<div{NO}</p>a</div>b", "b"),
    *((f"<li{NO}a<{name}></li>b</{name}>c", "") for name in ("ul", "ol")),
    (f"<div><span{NO}<div></span>a</div>b</span>c", "c"), (f"<table{NO}<td></div>a</td></table>b", "b"),
    *((f"<{name}{NO}a<span>b</{name}>c", "c") for name in words("section article center address button div")),
    *((f"<table><{name}{NO}a<object></{name}>b", "b") for name in (*SECTIONS, "td", "th", "tr", "caption")),
    (f"<table{NO}<td><object>a</table>b", "b"),
    # Formatting stays open when an element around it ends, except a marker
    *((f"<div><{name}{NO}a</div>b</{name}>c", "c") for name in FORMATTING),
    *((f"<{name}><b{NO}a</{name}>b", "b") for name in words("applet marquee object template")),
    *((f"<table><{name}><b{NO}a</{name}>b", "b") for name in ("caption", "td", "th")),
    (f"<b{NO}a<object></b>b</object>c</b>d", "d"), (f"<object><b{NO}a<object></b>b</object>c</b>d", "d"),
    (f"<b>a<object><b{NO}b</b>c</object>d", "a|c|d"), (f"<b{NO}a<object>b</object>c</b>d", "d"),
    (f"<b>a<object><i{NO}b</object>c", "a|c"), ("<object><b>a</b></object>b", "a|b"), ("<object>a</object>b", "a|b"),
    (f"<b{NO}a<object><b>b</object></b>c", "c"),
    # Elements without an end
    *((f"<{name}{NO}a", "a")
      for name in words("area base br col embed hr img input link meta param source track wbr")),
    *((f"<{name}{NO[:-1]} />a", "a") for name in ("svg", "math")), (f"<div{NO[:-1]} />a", ""),
    (f"<svg><g{NO[:-1]} />a</svg>", "a"), (f"<math><mi{NO[:-1]} />a</math>", "a"),
    *((f"<{name} />a", "a") for name in ("script", "style")),  # empty, as their writers mean
    # Texts that nobody translates
    *((f"<{name}>a</{name}>b", "b") for name in words("code kbd pre samp textarea iframe noembed script style xmp")),
    *((f"<{name} translate=yes>a</{name}>b", "a|b") for name in words("code kbd pre samp")),
    # Entities without a semicolon, and at the end
    ("a &lt b", "a < b"), ("a &#60 b", "a < b"), ("a&lt;b", "a<b"), ("a&#60;b", "a<b"), ("a &am", "a &am"),
]  # fmt: skip


@pytest.mark.parametrize("page, texts", ROWS)
def test_elements_end_where_browsers_end_them(page: str, texts: str) -> None:
    assert HtmlPage(page).texts == list(filter(None, texts.split("|")))


def test_a_broken_declaration_is_an_error_of_the_request() -> None:
    with pytest.raises(ValueError, match="broken declaration"):
        HtmlPage("<![x[a]]>b")


def test_the_plain_text_has_no_markup() -> None:
    assert HtmlPage("<p>a</p><p>b <i>c</i></p>").plain() == "a b c"

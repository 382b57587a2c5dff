"""Chat templates render as in transformers, within limits on access, time and memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
import transformers

from fastformer import ChatTemplate
from tests.covering import each
from tests.generation.chat_templates import CASES, CHATML, LLAMA_3, MISTRAL, TURNS

jinja2 = pytest.importorskip("jinja2", reason="the jinja2 library is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


def rendered_by_transformers(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **NAMES
    )
    options = {"add_generation_prompt": True, **options}
    found: str = tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    return found


@pytest.mark.parametrize("name", CASES)
def test_templates_render_as_in_transformers(name) -> None:
    source, cases = CASES[name]
    template = ChatTemplate(source, NAMES)
    for messages, options in cases:
        expected = rendered_by_transformers(source, messages, **options)
        assert template.render(messages, **options) == expected
        assert len(expected) > 20
    assert template.render(iter(messages), **options) == expected  # and again


def test_the_time_is_known() -> None:
    assert ChatTemplate("{{ strftime_now('%Y-%m') }}").render([]) == time.strftime("%Y-%m")


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 + 2 + 3.5 }}", "{{ ([1] + [2, 'x'] + messages) | length }}", "{{ 'a' + ('b' + 'c') + ('d' ~ 1) }}",
        "{{ 'a&' + ('<b>' | safe) + '<c>' }}", "{{ ('<b>' | safe) + messages[0].content + '&' }}",
        "{{ [1, 2] | sum + 3 + messages | length }}",
    ],
)  # fmt: skip
def test_sums_are_those_of_jinja(source) -> None:
    messages = [{"role": "user", "content": "<d>"}]
    assert ChatTemplate(source).render(messages) == jinja2.Template(source).render(messages=messages)


def test_the_refusal_of_a_template_is_reported() -> None:
    for source, messages, named in (
        (MISTRAL, [TURNS[0], TURNS[0]], "must alternate"),
        (LLAMA_3, [{"role": "assistant", "content": "", "tool_calls": []}], "one call at a time"),
    ):
        with pytest.raises(ValueError, match=named):
            ChatTemplate(source, NAMES).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ range(1000000000) | list }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** 10 * 'a' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.zfill(width=1000000000) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '{:{}}'.format(1, 999999999) }}",
        "{{ '{:{w}}'.format_map({'w': 999999999}) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ 'a' | indent(999999999) }}",
        "{{ ('a' * 3000000) | replace('a', 'b' * 3000000) }}",
        "{{ ('a' * 3000000).replace('', 'b' * 3000000) }}",
        "{{ ('a' * 3000000) | join('b' * 3000000) }}",
        "{{ ('b' * 3000000).join('a' * 3000000) }}",
        *(
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}" + step + "{% endfor %}"
            for step in (
                "{% set ns.x = ns.x ~ ns.x %}",
                "{% set ns.x = ns.x + ns.x %}",
                "{% set ns.x = ns.x.replace('a', 'aaa') %}",
                "{% set ns.x = [ns.x, ns.x] | join %}",
                "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
                "{% set ns.x = [ns.x, ns.x] | string %}",
            )
        ),
        "{{ ('a' * 100000).translate('a'.maketrans({'a': 'b' * 100000})) | length }}",
        "{{ range(100000) | list | tojson(indent=99999) | length }}",
        "{{ range(100000) | list | tojson(separators=('b' * 99999, ':')) | length }}",
        "{% for i in range(99999) if i < 0 %}{% endfor %}",
        "{{ ((range(99999) | list) * 9) | unique | first }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% for i in range(4000) %}{{ 'abcdefghijklmnopqrstuvwxyz' * 9999 }}{% endfor %}",
    ],
)
def test_an_endless_template_is_stopped(source, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.chat_sandbox.MAX_ROUNDS", 5000)
    began = time.process_time()
    with pytest.raises(ValueError, match="stopped|fails"):
        ChatTemplate(source).render([])
    assert time.process_time() - began < 5


@pytest.mark.parametrize("step", ["[ns.x, ns.x]", "[ns.x] * 2", "{'a': ns.x, 'b': ns.x}", "dict(a=ns.x, b=ns.x)"])
def test_values_inside_of_values_count_towards_a_length(step, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.chat_sandbox.MAX_ITEMS", 5_000)
    source = "{% set ns = namespace(x='ab') %}{% for i in range(18) %}{% set ns.x = " + step + " %}{% endfor %}"
    with pytest.raises(ValueError, match="stopped"):
        ChatTemplate(source + "{{ ns.x | tojson | length }}").render([])


def test_the_clock_stops_a_slow_template(monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.chat_sandbox.MAX_SECONDS", 0.05)
    with pytest.raises(ValueError, match="longer than"):
        ChatTemplate("{% for i in range(90000) %}{% set x = 'x' * 3999999 %}{% endfor %}").render([])


_MANY = "{% set x = range(100000) | list %}{% set t = 'ab ' * 60000 %}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ x | reject('in', x | reverse | list) | list | length }}",
        "{{ x | select('in', x | reverse | list) | list | length }}",
        "{{ x | batch(1) | sum(start=[]) | length }}",
        "{% set y = x | reverse | list %}" + "{% set z = y | sort %}" * 40,
        "{% set z = t | replace('a', 'c') %}" * 60,
        "{% set z = t.count('ba') %}" * 400,
        "{% set z = t.split() %}" * 40,
        "{% set z = -1 in x %}" * 100,
        "{% set z = t[::-1] %}" * 400,
        "{% set d = dict(x | batch(2)) %}" + "{% set z = d.keys() - d.keys() %}" * 40,
        "{% set y %}" + "{{ x }}" * 70 + "{% endset %}",
        "{% set t = t * 9 %}{{ t.rfind('x' + t[9:]) }}",
        "{% set t = t * 9 %}{{ t.strip('c' * 900000 + 'ab ') }}",
        "{{ ('a'.encode() * 10 ** 10) | length }}",
    ],
    ids=lambda source: source[:60],
)
def test_work_outside_of_loops_is_stopped(source, monkeypatch) -> None:
    monkeypatch.setattr("fastformer.generation.chat_sandbox.MAX_SECONDS", 0.02)
    template = ChatTemplate(_MANY + source)
    began = time.process_time()
    with pytest.raises(ValueError, match="stopped"):
        template.render([])
    assert time.process_time() - began < 2  # a few operations after the limit, each of which is short


@each(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages[0]['__class__'] }}{{ messages.__len__() }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{0.__class__.__mro__}' | format(messages) }}{{ messages.__init__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self.__init__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace(__class__=1) }}",
        "{% import 'os' as os %}",
        "{% from 'os' import path %}",
        "{% include '/etc/passwd' %}",
        "{% extends 'x' %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].missing.more }}",
        "{{ open('/etc/passwd') }}",
        "{{ tick() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_sees_only_its_arguments(source) -> None:
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "x"}]


def test_invalid_templates_are_named() -> None:
    for source in (
        "{% if x %}",
        "{{ x | nonsense }}",
        "{% nonsense %}",
        "{{ lipsum | urlize }}",
        None,
        "x" * 2_000_000,
    ):
        with pytest.raises(ValueError, match="the template of m"):
            ChatTemplate(source, name="the template of m")


def test_invalid_messages_are_named() -> None:
    template = ChatTemplate(CHATML)

    class Text(str):
        def strip(self, *args: Any) -> str:  # what a template would call
            raise AssertionError

    assert "hello" in template.render([{"role": "user", "content": Text("hello")}])
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    for messages in (["hello"], [3], [{"role": "user", "content": object()}], [{"role": "user", "content": deep}]):
        with pytest.raises(ValueError, match="messages"):
            template.render(messages)
    with pytest.raises(ValueError, match="fails"):
        template.render([{"role": "user"}])


def test_a_tokenizer_without_a_template_is_named() -> None:
    class Plain:
        chat = NAMES

    with pytest.raises(ValueError, match="chat_template"):
        ChatTemplate.of(Plain())

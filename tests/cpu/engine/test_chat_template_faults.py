"""What a caller can do wrong with templates and messages: named errors, never ours."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from octavo.engine.chat_template import ChatTemplate, normalise_messages
from octavo.errors import ConfigError, InvalidRequestError
from tests.cpu.engine.helpers import byte_tokenizer

USER = {"role": "user", "content": "Hi"}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
DEEP_JSON = "[" * 100_000


def deep(levels: int = 100_000) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def ring() -> dict:
    value: dict = {}
    value["a"] = value["b"] = value
    return value


def wide() -> list:
    """Twenty levels of ten references each: 10^20 values, if copied."""
    value: list = []
    for _ in range(20):
        value = [value] * 10
    return value


class Rude:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def refused(field: str, call, *args, **kwargs) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        call(*args, **kwargs)
    assert caught.value.field.startswith(field)
    assert len(caught.value.field) < 5000
    return caught.value.message


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "continue_final_message"]
)
def test_template_kwargs_cannot_replace_what_render_sets(name):
    template = ChatTemplate("{{ messages[0].content }}{{ x }}{{ bos_token }}", {"bos_token": "B"})
    assert name in refused(
        "chat_template_kwargs", template.render, [USER], template_kwargs={name: 1, "x": 2}
    )
    assert template.render([USER], template_kwargs={"x": 2, "self": 1}) == "Hi2B"
    assert template.render([USER], template_kwargs={}) == "HiB"


@pytest.mark.parametrize(
    "kwargs", [{1: 2}, {None: 1}, [("a", 1)], "abc", 5, {"f": print}, {"x": deep()}, ring()]
)
def test_template_kwargs_are_an_object_of_json_values(kwargs):
    template = ChatTemplate(PLAIN)
    refused("chat_template_kwargs", template.render, [USER], template_kwargs=kwargs)


BAD_SOURCES = [
    "{% if %}",
    "{{ x | no_such_filter }}",
    "{{ 10**5000 }}",
    "{{ 2 ** (10 ** 10) }}",
    "{{ 'a' * 10**12 }}",
    "{{ [1] * 10**12 }}",
    "{{ " + "(" * 100_000 + " }}",
    "{{ " + "-" * 50_000 + "1 }}",
    "{{ '\ud800' }}",
    "{{ a." + "b." * 50_000 + "c }}",
]


@pytest.mark.parametrize("source", BAD_SOURCES, ids=range(len(BAD_SOURCES)))
def test_bad_jinja_is_the_one_who_gave_its_error(source):
    """ConfigError at engine start, InvalidRequestError for one request; some fail when rendered."""
    start = ChatTemplate(PLAIN)
    with pytest.raises((ConfigError, InvalidRequestError), match=r"chat_template|messages"):
        ChatTemplate.load(source, None).render([USER])
    with pytest.raises(InvalidRequestError) as caught:
        start.with_source(source).render([USER])
    assert caught.value.field in ("chat_template", "messages")


def test_bad_syntax_names_the_line():
    with pytest.raises(ConfigError, match="chat_template: line 2"):
        ChatTemplate.load("{{ 1 }}\n{% if %}", None)
    message = refused("chat_template", ChatTemplate(PLAIN).with_source, "{{ 1 }}\n{% if %}")
    assert message.startswith("line 2")


@pytest.mark.parametrize("source", [5, ["{{ 1 }}"], {"default": "{{ 1 }}"}, b"{{ 1 }}"])
def test_a_template_of_the_wrong_kind(source):
    refused("chat_template", ChatTemplate(PLAIN).with_source, source)
    for make in (ChatTemplate, lambda given: ChatTemplate.load(given, byte_tokenizer())):
        with pytest.raises(ConfigError, match="chat_template: must be text"):
            make(source)


def test_a_request_cannot_name_a_path(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(PLAIN)
    for source in (str(path), "", "hello", "a}b{c"):
        refused("chat_template", ChatTemplate(PLAIN).with_source, source)


@pytest.mark.parametrize("name", ["x" * 300, "a\0b", "/no/such", "\ud800", "a{b", "{folder}"])
def test_a_path_at_start_that_cannot_be_read(name, tmp_path):
    name = name.replace("{folder}", str(tmp_path))
    (tmp_path / "binary").write_bytes(b"\xff")
    for path in (name, str(tmp_path / "binary")):
        with pytest.raises(ConfigError, match="chat_template: "):
            ChatTemplate.load(path, None)


@pytest.mark.parametrize(
    "messages",
    [{"role": "user"}, {0: USER}, 3, None, "hi", b"hi", {USER["role"]}, (m for m in [USER])],
    ids=lambda value: type(value).__name__,
)
def test_messages_that_are_no_list(messages):
    refused("messages", ChatTemplate(PLAIN).render, messages)


@pytest.mark.parametrize(
    "value",
    [deep(), ring(), wide(), {1: 2}, {10**5000: 1}, Rude(), {"a": Rude()}, print],
    ids=range(8),
)
def test_values_that_no_template_can_be_given(value):
    """In extra fields, contents, tools and tool arguments."""
    template = ChatTemplate("{{ tools }}" + PLAIN)
    call = {"function": {"name": "f", "arguments": value}}
    refused("messages[0]", normalise_messages, [{**USER, "extra": value}])
    refused("messages[0]", normalise_messages, [{**USER, "content": value}])
    refused("messages[0]", normalise_messages, [{**USER, "role": value}])
    refused("messages[0]", normalise_messages, [value])
    refused("messages[0]", normalise_messages, [{**USER, "tool_calls": [call]}])
    refused("tools", template.render, [USER], tools=[{"a": value}])
    refused("tools", template.render, [USER], tools=Rude())


@pytest.mark.parametrize(
    "arguments",
    [DEEP_JSON, '{"a":' * 200 + "1" + "}" * 200, '{"a": 1' + "0" * 5000 + "}", 0, [], "3"],
    ids=range(6),
)
def test_tool_arguments_that_cannot_be_used(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    refused("messages[0].tool_calls[0].function.arguments", normalise_messages, [message])


@pytest.mark.parametrize("tools", [5, "x", {}, {"a": 1}, [1], 0])
def test_tools_must_be_a_list_of_objects(tools):
    refused("tools", ChatTemplate("{{ tools }}").render, [USER], tools=tools)
    assert ChatTemplate("{{ tools }}").render([USER], tools=[]) == "None"


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message"])
def test_switches_are_true_or_false(name):
    refused(name, ChatTemplate(PLAIN).render, [USER], **{name: "yes"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception(messages) }}",
        "{{ raise_exception(x) }}",
        "{{ messages[0].n }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ strftime_now(messages) }}",
        "{{ messages[0].content * messages[0].n }}",
    ],
)
def test_whatever_happens_inside_a_template_is_the_requests_error(source):
    message = {**USER, "n": 10**5000}
    refused("messages", ChatTemplate(source).render, [message])


LONG = "{% set x = 'ab' * 8000000 %}"
TREE = "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
GROW = "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x OP %}{% endfor %}"
TOO_MUCH = [
    "{{ '%500000000d' % 1 }}",
    "{{ '%.500000000f' % 1.0 }}",
    "{{ '%*d' % (500000000, 1) }}",
    "{{ '%(a)500000000d' % {'a': 1} }}",
    "{{ '%500000000d' | format(1) }}",
    "{{ '%5000000000d'.encode() % 1 }}",
    "{{ '{:>500000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=500000000) }}",
    "{{ '{a:>500000000}'.format_map({'a': 1}) }}",
    "{{ ('{a}' * 100)['format'](a='x' * 1000000) }}",
    *(f"{{{{ 'x'.{name}(500000000) }}}}" for name in ("center", "ljust", "rjust", "zfill")),
    "{{ 'x' | center(500000000) }}",
    "{{ 'x' | center(width=500000000) }}",
    "{{ '\t'.expandtabs(500000000) }}",
    "{{ 'x' | indent(500000000, true) }}",
    "{{ (1).to_bytes(500000000, 'big') }}",
    "{{ [1] | tojson(indent=500000000) }}",
    "{{ [1] | batch(500000000, 1) | list }}",
    "{{ [1] | slice(500000000) | list }}",
    "{{ [[1] * 1000000] * 1000 | sum(start=[]) }}",
    "{{ 1 | round(500000000, 'ceil') }}",
    GROW.replace("OP", "~ n.x"),
    GROW.replace("OP", "+ n.x"),
    GROW.replace("'ab'", "[1]").replace("OP", "+ n.x"),
    LONG + "{{ x | replace('a', x) }}",
    LONG + "{{ x.replace('a', x) }}",
    LONG + "{{ ('a' * 100).translate({97: x}) }}",
    LONG + "{{ [x, x] | join }}",
    LONG + "{{ ''.join([x, x] | map('upper')) }}",
    LONG + "{{ x }}{{ x }}",
    LONG + "{% macro f() %}{{ x }}{{ x }}{% endmacro %}{{ f() | length }}",
    LONG + "{% set y %}{{ x }}{{ x }}{% endset %}",
    LONG + "{{ ([x] * 100000) | string }}",
    LONG + "{{ (x | replace('b', 'a')) | int(base=16) }}",
    TREE + "{{ n.x }}",
    TREE + "{{ n }}",
    TREE + "{{ n.x ~ 1 }}",
    TREE + "{{ n.x | upper }}",
    TREE + "{{ n.x | tojson }}",
    TREE + "{{ '%s' % [n.x] }}",
    "{{ strftime_now('%c' * 100000) }}",
    "{{ lipsum(n=1000000) }}",
]


@pytest.mark.parametrize("source", TOO_MUCH, ids=range(len(TOO_MUCH)))
def test_a_template_cannot_fill_the_memory(source):
    """Refused before anything large is made. (The limit of memory makes sure of it.)"""
    template = ChatTemplate(PLAIN).with_source(source)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (400 << 20), hard))
    try:
        message = refused("messages", template.render, [USER])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "MemoryError" not in message


def test_what_the_bounds_leave_alone():
    """The same operations in the sizes that prompts have."""
    for source, text in {
        "{{ '%s and %d of 100%%' % ('b', 3) }}": "b and 3 of 100%",
        "{{ '%(a)s' % {'a': 1} }}{{ '%05d' | format(7) }}": "100007",
        """{{ '{{"a": {}}}'.format(5) }}{{ '{:>3}{a}'.format(1, a=2) }}""": '{"a": 5}  12',
        "{{ 'x'.center(5) }}{{ 'x' | center(3) }}{{ '7'.zfill(3) }}": "  x   x 007",
        "{{ 'a\nb' | indent(2) }}{{ 'a' | indent(width=1, first=true) }}": "a\n  b a",
        "{{ [1, 'b'] | join(', ') }}{{ '-'.join('ab') }}": "1, ba-b",
        "{{ messages | map(attribute='role') | join('-') }}": "user",
        "{{ messages | join(',', attribute='content') }}": "Hi",
        "{{ 1 ~ none ~ missing ~ [1] ~ 'x' }}": "1None[1]x",
        "{{ [1] + [2] }}{{ 1 + 2 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 'a' + 'b' }}": "[1, 2]333ab",
        "{{ '12' | int + 1 }}{{ '1.5' | float }}{{ 2.6 | round }}": "131.53.0",
        "{{ [1, 2] | sum }}{{ ' aB ' | trim | upper }}{{ 3 | string }}": "3AB3",
        "{{ {'a': [1, 'ž']} | tojson(indent=1) }}": '{\n "a": [\n  1,\n  "ž"\n ]\n}',
        "{{ 'aXa' | replace('X', 'b') }}{{ 'aa'.replace('a', 'c', 1) }}": "abaca",
    }.items():
        assert ChatTemplate(source).render([USER]) == text

"""What a caller can do wrong with templates and messages: named errors, never ours."""

from __future__ import annotations

import pytest

from octavo.config.engine import EngineArgs
from octavo.engine.chat_template import ChatTemplate, normalise_messages
from octavo.errors import ConfigError, InvalidRequestError

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
    with pytest.raises(ConfigError, match=r"chat_template=.* must be text"):
        EngineArgs("model", chat_template=source)


def test_a_request_cannot_name_a_path(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text(PLAIN)
    for source in (str(path), "", "hello", "a}b{c"):
        refused("chat_template", ChatTemplate(PLAIN).with_source, source)


@pytest.mark.parametrize(
    "name", ["x" * 300, "a\0b", "/no/such", "\ud800", "a{b", "{folder}", "/dev/zero"]
)
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
        "{{ 'a'.ljust(2 ** 63) }}",
        "{{ 'a' * 2 ** 62 }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% import 'os' as os %}",
        "{% include '/etc/passwd' %}",
        "{{ strftime_now(messages) }}",
        "{{ messages[0].content * messages[0].n }}",
    ],
)
def test_whatever_happens_inside_a_template_is_the_requests_error(source):
    message = {**USER, "n": 10**5000}
    refused("messages", ChatTemplate(source).render, [message])


ESCAPES = [
    "''.__class__",
    "''['__class__']",
    "'' | attr('__class__')",
    "'' | attr('__cl' ~ 'ass__')",
    "''.join.__self__",
    "dict.mro",
    "dict | attr('mro')",
    "messages | map(attribute='__class__') | first",
    "messages | map('attr', '__class__') | first",
    "messages | sum('__class__')",
    "'{0.__class__.__mro__}'.format(1)",
    "'{a.__init__.__globals__}'.format_map({'a': cycler})",
    "('{0.__class__.__mro__}' | attr('format'))(1)",
    "('{0.__class__.__mro__}' | safe).format(1)",
    "raise_exception.__globals__",
    "strftime_now | attr('__globals__')",
    "lipsum.__globals__['os'].popen('id')",
    "cycler.__init__",
    "joiner.__init__.__builtins__",
    "namespace(a=1)._Namespace__attrs",
    "self._TemplateReference__context",
    "f._func",
    "f.__call__",
    "(messages | map('upper')).gi_frame",
    "messages.append(1)",
    "messages[0].update(a=1)",
    "(messages[0] | attr('pop'))('content')",
]


@pytest.mark.parametrize("expression", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(expression):
    """It gets something undefined, and is refused for any use of that."""
    source = f"{{% macro f() %}}{{% endmacro %}}{{{{ ({expression}).x }}}}"
    assert "is unsafe" in refused("messages", ChatTemplate(source).render, [USER])

"""Prompts equal transformers' apply_chat_template; messages are checked by index."""

from __future__ import annotations

import json

import pytest

from octavo.engine.chat_template import ChatTemplate, normalise_messages
from octavo.errors import ConfigError, InvalidRequestError
from tests.cpu.engine.helpers import byte_tokenizer

USER = {"role": "user", "content": "Hi <b> & 'you' 한"}
ASSISTANT = {"role": "assistant", "content": "Sure: "}
SYSTEM = {"role": "system", "content": "Be brief."}
TOOL_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "add", "arguments": {"a": 1, "b": "ž"}},
        }
    ],
}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "3"}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if loop.index0 > 8 %}{% break %}{% endif %}\n"
    "<|{{ message.role }}|>{{ message['content'] }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WITH_TOOLS = (
    "{%- if tools %}TOOLS:{% for tool in tools %}{{ tool | tojson }};{% endfor %}{% endif %}\n"
    "{%- for m in messages %}"
    "[{{ m.role }}]{% if m.content %}{{ m.content | trim }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson(indent=1) }}</call>"
    "{% endfor %}{% generation %}{{ loop.index }}{% endgeneration %}"
    "{%- endfor %}{{ '/think' if enable_thinking else '' }}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [SYSTEM, USER, ASSISTANT, USER],
    [USER, TOOL_CALL, TOOL],
]


@pytest.mark.parametrize("source", [None, CHATML, WITH_TOOLS], ids=["smollm2", "chatml", "tools"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["u", "su", "suau", "uct"])
@pytest.mark.parametrize("generate", [True, False])
def test_equals_transformers(smollm2, reference_tokenizer, source, messages, generate):
    tools = TOOLS if source == WITH_TOOLS else None
    expected = reference_tokenizer.apply_chat_template(
        messages,
        chat_template=source,
        tools=tools,
        add_generation_prompt=generate,
        tokenize=False,
        enable_thinking=True,
    )
    template = ChatTemplate.load(source, smollm2)
    found = template.render(
        messages, generate, tools=tools, template_kwargs={"enable_thinking": True}
    )
    assert found == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}{{ messages | tojson(indent='  ') }}{{ [1] | tojson(true, 2) }}",
        "{{ {'b': '<ž>', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
        "{{ '{:>{w}}'.format('a', w=5) }}{{ '{a!r:^5}'.format_map({'a': 1}) }}{{ '%*d' % (5, 7) }}",
        "{{ [[1], [2, 3]] | sum(start=[]) }}{{ [[1], [2]] | sum('0', 5) }}",
        "{{ messages | pprint }}{{ {'id': 'a', 'n': none, 'b': '<'} | xmlattr }}",
        "{{ 'see www.example.org <b>' | urlize }}{{ '<b>' | e }}{{ '<p>a</p>' | striptags }}",
        "{{ 'a b c' | wordwrap(2) }}{{ 'x\n\ny' | indent('> ', true, true) }}{{ 'x' | center(5) }}|",
        "{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2, 3] | slice(2) | map('list') | list }}",
        "{{ messages | groupby('role') | map(attribute='grouper') | join('-') }}{{ 2 ** 100 }}",
        "{{ dict(a=1) }}{{ dict.fromkeys('ab', 1) }}{% set n = namespace(x=1) %}{{ n.x }}{{ n }}",
        "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 3 %}{% break %}{% endif %}"
        "{{ i ~ loop.cycle('a', 'b') }}{% endfor %}",
        "{% set x = 1 %}{% generation %}{% set x = x + 1 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% macro f(a, b=2) %}{{ a }}{{ caller(b) }}{{ varargs }}{% endmacro %}"
        "{% call(c) f(1, 2, 3) %}<{{ c }}>{% endcall %}",
        "  {% if true -%}\n  a\n  {%- endif %}\n  {# note #}\nb{% raw %}{{ x }}{% endraw %}\n",
        "{{ x }}{{ x is defined }}{{ 1 ~ none ~ x ~ [1] }}{{ 2.5 | round }}{{ '12' | int(base=16) }}",
        "{% filter upper %}{{ 'a\tb'.expandtabs(4) }}{% endfilter %}{{ 'ab'.translate({97: 'x'}) }}",
    ],
    ids=range(16),
)
def test_every_feature_of_a_template_equals_transformers(reference_tokenizer, source):
    messages = [USER, ASSISTANT, {**USER, "extra": {"é": [None, True, 1.5, -0.0, "'"]}}]
    expected = reference_tokenizer.apply_chat_template(
        messages, chat_template=source, tokenize=False
    )
    assert ChatTemplate(source).render(messages, False) == expected


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_found_under_the_names_that_templates_read(name):
    source = "{{ messages[0].reasoning_content }}-{{ messages[0].thinking }}"
    message = {**ASSISTANT, "reasoning": "last", name: "so"}
    assert ChatTemplate(source).render([message]) == "so-so"
    assert ChatTemplate(source).render([USER]) == "-"


@pytest.mark.parametrize("source", [None, WITH_TOOLS], ids=["smollm2", "trimming"])
@pytest.mark.parametrize("text", ["Sure", "Sure:  ", "\n", "a\n\nb "])
def test_continuing_the_last_message_equals_transformers(
    smollm2, reference_tokenizer, source, text
):
    messages = [USER, {"role": "assistant", "content": text}]
    expected = reference_tokenizer.apply_chat_template(
        messages, chat_template=source, continue_final_message=True, tokenize=False
    )
    template = ChatTemplate.load(source, smollm2)
    assert template.render(messages, False, continue_final_message=True) == expected


def test_special_tokens_and_dates_are_at_hand():
    template = ChatTemplate("{{ bos_token }}{{ strftime_now('%Y') | length }}", {"bos_token": "B"})
    assert template.render([USER]) == "B4"
    assert template.with_source("{{ bos_token }}!").render([USER]) == "B!"


@pytest.mark.parametrize(
    ("messages", "text"),
    [([SYSTEM, USER], "System role not supported"), ([USER, USER], "Roles must alternate")],
)
def test_what_the_template_refuses_is_the_callers_error(messages, text):
    """V10: a template that raises on a role, or on two user turns in a row."""
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(STRICT).render(messages)
    assert (caught.value.field, caught.value.message) == ("messages", text)


def test_no_template_is_a_clear_error():
    """V10: no template at all."""
    for template in (ChatTemplate.load(None, byte_tokenizer()), ChatTemplate.load(None, None)):
        with pytest.raises(InvalidRequestError, match="no chat template") as caught:
            template.render([USER])
        assert caught.value.field == "chat_template"


def test_a_template_that_breaks_fails_only_this_request():
    """V10: errors of the template's own code are not ours."""
    for source in ("{{ messages[9].content.x }}", "{{ 'a' + 1 }}", "{{ messages.pop() }}"):
        with pytest.raises(InvalidRequestError) as caught:
            ChatTemplate(source).render([USER])
        assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": ["a", {"type": "text", "text": ""}]}, "a\n"),
        ({"content": []}, ""),
    ],
)
def test_content_becomes_text(message, text):
    """V12: null, missing, empty, list of text parts; never the word None."""
    tool_calls = TOOL_CALL["tool_calls"]
    messages = [USER, {"role": "assistant", "tool_calls": tool_calls, **message}]
    assert normalise_messages(messages)[1]["content"] == text
    assert "None" not in ChatTemplate(CHATML).render(messages)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("hi", "messages[1]"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": ["user"], "content": "x"}, "messages[1].role"),
        ({"role": "user", "content": 3}, "messages[1].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[1].content"),
        ({"role": "user", "content": [3]}, "messages[1].content[0]"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]},
            "messages[1].content[1].type",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": object()}, "messages[1].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
    ],
)
def test_bad_messages_are_named(message, field):
    """V12 and its kind: image parts, wrong shapes, unknown roles."""
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML).render([USER, message])
    assert caught.value.field == field


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, None, 3])
def test_messages_must_be_a_list(messages):
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(CHATML).render(messages)
    assert caught.value.field == "messages"


def test_arguments_of_tool_calls_are_parsed():
    """The API sends them as JSON text; templates print them with tojson."""
    call = {"name": "add", "arguments": json.dumps({"a": 1, "b": "ž"})}
    message = {"role": "assistant", "tool_calls": [{"function": call}]}
    assert '{"a": 1, "b": "ž"}' in ChatTemplate(
        "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
    ).render([message])
    assert isinstance(call["arguments"], str), "the caller's message was changed"


def test_options_are_checked():
    template = ChatTemplate(CHATML)
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        template.render([USER, ASSISTANT], True, continue_final_message=True)
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate("x").render([USER, ASSISTANT], False, continue_final_message=True)
    assert caught.value.field == "continue_final_message"
    with pytest.raises(InvalidRequestError) as caught:
        ChatTemplate(WITH_TOOLS).render([USER], tools="add")
    assert caught.value.field == "tools"
    with pytest.raises(InvalidRequestError, match="no place for tools"):
        template.render([USER], tools=TOOLS)
    with pytest.raises(InvalidRequestError) as caught:
        template.render([USER], template_kwargs={"tools ": 1, "bos_token": "\ud800"})
    assert caught.value.field == "messages"


def test_template_from_a_path(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}!")
    assert ChatTemplate.load(str(path), None).render([USER]) == USER["content"] + "!"
    with pytest.raises(ConfigError, match=r"looked for .*absent\.jinja"):
        ChatTemplate.load(str(tmp_path / "absent.jinja"), None)
    with pytest.raises(ConfigError, match="chat_template: line 1"):
        ChatTemplate.load("{% if %}", None)

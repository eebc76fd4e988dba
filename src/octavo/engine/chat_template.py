"""Conversations to prompt text with the model's Jinja template.

Owns what a valid message is and how its content becomes text. Renders what transformers'
apply_chat_template renders; what the template refuses is the caller's error.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequestError, expect, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
_JINJA = re.compile(r"\{[{%#]")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one field under three names
_MAX_DEPTH, _MAX_VALUES = 64, 2**17  # of what a caller hands to a template


class ChatTemplate:
    """A compiled chat template, or the lack of one, which is an error only when it is used."""

    def __init__(
        self, source: str | None, special_tokens_map: Mapping[str, str] | None = None
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens_map or {})
        self._template: jinja2.Template | None = None
        self._takes_tools = False
        if source is not None:
            environment = _sandbox()
            try:
                self._template = environment.from_string(source)
                variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
                self._takes_tools = "tools" in variables
            except jinja2.TemplateSyntaxError as exc:
                raise ConfigError(f"chat_template: line {exc.lineno}: {exc.message}") from exc
            except Exception as exc:
                # Compiling runs constant expressions and Python's own compiler on foreign text.
                raise ConfigError(f"chat_template: cannot be compiled: {_reason(exc)}") from exc

    @classmethod
    def load(cls, source_or_path: str | None, tokenizer: Tokenizer | None) -> ChatTemplate:
        """From Jinja source, a path to it, or (None) the tokenizer's own template."""
        source = source_or_path
        if source is None:
            source = None if tokenizer is None else tokenizer.chat_template
        elif not _JINJA.search(source):  # no template is without; a path hardly has them
            try:
                if (path := Path(source)).exists() and not path.is_file():
                    raise OSError("no regular file")  # a device may have no end
                source = path.read_text("utf-8")
            except FileNotFoundError as exc:
                looked = shown(str(Path(source).absolute()))
                raise ConfigError(f"chat_template: looked for {looked}: no such file") from exc
            except (OSError, ValueError) as exc:
                raise ConfigError(f"chat_template: {shown(source)}: unreadable ({exc})") from exc
        return cls(source, tokenizer.special_tokens_map if tokenizer is not None else None)

    def with_source(self, source: str) -> ChatTemplate:
        """The same special tokens with the template that one request gives.

        Raises InvalidRequestError for what is no Jinja template. Paths are not read: a request may
        come from afar.
        """
        if not _JINJA.search(expect("chat_template", source, str, "text")):
            text = f"{shown(source)} holds no Jinja; a path is not read for a request"
            raise InvalidRequestError("chat_template", text)
        try:
            return ChatTemplate(source, self._special_tokens)
        except ConfigError as exc:
            text = str(exc).removeprefix("chat_template: ")
            raise InvalidRequestError("chat_template", text) from exc

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation. It already holds BOS where the template writes it.

        continue_final_message leaves the last message open, for the model to go on with it.
        template_kwargs are further variables of the template (chat_template_kwargs).
        """
        if self._template is None:
            text = "this model has no chat template; give one, or use a text prompt"
            raise InvalidRequestError("chat_template", text)
        expect("add_generation_prompt", add_generation_prompt, bool, "true or false")
        expect("continue_final_message", continue_final_message, bool, "true or false")
        extra = _checked_kwargs(template_kwargs)
        chat = normalise_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                text = "cannot be used with add_generation_prompt"
                raise InvalidRequestError("continue_final_message", text)
            final = chat[-1]["content"]
            chat[-1]["content"] = final + _CONTINUE_TAG
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **extra,
            "messages": chat,
            "tools": self._checked_tools(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        return _cut_at_tag(text, final) if continue_final_message else text

    def _checked_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> Any:
        given = () if tools is None else expect("tools", tools, Sequence, "a list of objects")
        for tool in given:
            expect("tools", tool, Mapping, "a list of objects")
        if not given:
            return None
        if not self._takes_tools:
            raise InvalidRequestError("tools", "the chat template has no place for tools")
        return _plain("tools", list(given))

    def _run(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        try:
            text = self._template.render(variables)
            text.encode("utf-8")
            return text
        except UnicodeEncodeError as exc:
            raise InvalidRequestError("messages", f"not valid Unicode: {exc.reason}") from None
        except jinja2.TemplateError as exc:
            raise InvalidRequestError("messages", _reason(exc)) from exc
        except Exception as exc:
            # A template is foreign code: whatever it does with these messages, only they fail.
            reason = f"the chat template failed: {type(exc).__name__}: {_reason(exc)}"
            raise InvalidRequestError("messages", reason) from exc


def _sandbox() -> ImmutableSandboxedEnvironment:
    """jinja2's sandbox with what transformers adds to it.

    Promised: a template runs no Python code of its own and reaches into no object. Not promised: that
    it ends, or that what it makes fits into memory. It comes from the checkpoint, the operator or the
    Python caller, by the choice of whoever runs this process; so the HTTP server must refuse templates
    in requests unless its operator says otherwise.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it leaves < > & ' as they are: a prompt is no HTML."""
    options: dict[str, Any] = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body; what it sets is gone after it, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _checked_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    field = "chat_template_kwargs"
    given = {} if kwargs is None else expect(field, kwargs, Mapping, "an object")
    plain: dict[str, Any] = _plain(field, given)
    for name in sorted(plain.keys() & _RESERVED):
        raise InvalidRequestError(field, f"{name} is not a template variable")
    return plain


def _reason(exc: Exception) -> str:
    """An exception's text; some cannot say it (a number of more digits than Python prints)."""
    try:
        return str(exc) or type(exc).__name__
    except Exception:
        return type(exc).__name__


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked plain copies: content is text (parts joined by newlines), tool arguments are dicts.

    As in transformers, a template finds reasoning as reasoning_content and as thinking.
    Raises InvalidRequestError naming the message by index.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages", "must be a non-empty list of messages")
    chat = []
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        copy = _plain(field, expect(field, message, Mapping, "an object"))
        plain = {key: value for key, value in copy.items() if value is not None}
        if (role := plain.get("role")) not in ROLES:
            text = f"{shown(role)} is not one of {', '.join(ROLES)}"
            raise InvalidRequestError(f"{field}.role", text)
        plain["content"] = _content_text(f"{field}.content", plain.get("content"))
        if "tool_calls" in plain:
            plain["tool_calls"] = _tool_calls(f"{field}.tool_calls", plain["tool_calls"])
        if given := [plain[name] for name in _REASONING if name in plain]:
            plain = {"thinking": given[0], **plain, "reasoning_content": given[0]}
        chat.append(plain)
    return chat


def _content_text(field: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(expect(field, content, list, "text or a list of text parts")):
        where = f"{field}[{i}]"
        if not isinstance(part, str):
            kind = expect(where, part, dict, "a text part").get("type")
            if kind != "text":
                text = f"{shown(kind)} parts are not supported, only text"
                raise InvalidRequestError(f"{where}.type", text)
            part = expect(f"{where}.text", part.get("text"), str, "text")
        texts.append(part)
    return "\n".join(texts)


def _tool_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Templates print arguments with tojson, the API sends them as JSON text: parse them."""
    checked: list[Any] = expect(field, calls, list, "a list")
    for i, call in enumerate(checked):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{field}[{i}].function", "must be an object with a name")
        where = f"{field}[{i}].function.arguments"
        arguments = function.get("arguments")
        if arguments in (None, ""):
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as exc:
                raise InvalidRequestError(where, f"is not JSON: {exc}") from None
            arguments = _plain(where, arguments)
        function["arguments"] = expect(where, arguments, dict, "an object")
    return checked


def _plain(field: str, value: Any) -> Any:
    """A copy out of JSON types only, so that a template is handed nothing it could call.

    Of bounded depth and size: a structure may hold itself, or one part many times.
    """
    number = itertools.count(1)

    def copy(field: str, value: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise InvalidRequestError(field, f"is nested deeper than {_MAX_DEPTH} levels")
        if next(number) > _MAX_VALUES:
            raise InvalidRequestError(field, f"has more than {_MAX_VALUES} values around it")
        if value is None or type(value) in (str, int, float, bool):
            return value
        if isinstance(value, Mapping):
            if bad := [key for key in value if not isinstance(key, str)]:
                raise InvalidRequestError(field, f"the key {shown(bad[0])} is not text")
            return {
                str.__str__(key): copy(f"{field}.{key[:64]}", item, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [copy(f"{field}[{i}]", item, depth + 1) for i, item in enumerate(value)]
        if isinstance(value, str):
            return str.__str__(value)  # an enum
        raise InvalidRequestError(field, f"{type(value).__name__} is not a JSON value")

    return copy(field, value, 0)


def _cut_at_tag(text: str, final: str) -> str:
    """Everything before the tag that was put behind the final message."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        reason = "the chat template does not show the final message as it is"
        raise InvalidRequestError("continue_final_message", reason)
    # A template that trims messages has trimmed the tag: then trim what came before it, too.
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()

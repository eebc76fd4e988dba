"""Conversations to prompt text with the model's Jinja template, in a sandbox.

Owns what a valid message is and how its content becomes text. Renders what transformers'
apply_chat_template renders; what the template refuses is the caller's error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequestError

ROLES = ("system", "developer", "user", "assistant", "tool")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}


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
            environment = _environment()
            try:
                self._template = environment.from_string(source)
                variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
                self._takes_tools = "tools" in variables
            except jinja2.TemplateSyntaxError as exc:
                raise ConfigError(f"chat_template: line {exc.lineno}: {exc.message}") from exc

    @classmethod
    def load(cls, source_or_path: str | None, tokenizer: Tokenizer | None) -> ChatTemplate:
        """From Jinja source, a path to it, or (None) the tokenizer's own template."""
        source = source_or_path
        if source is None:
            source = tokenizer.chat_template if tokenizer is not None else None
        elif "{" not in source:  # no template is without braces; a path hardly has them
            path = Path(source)
            if not path.is_file():
                raise ConfigError(f"chat_template: looked for {path.absolute()}: no such file")
            source = path.read_text("utf-8")
        return cls(source, tokenizer.special_tokens_map if tokenizer is not None else None)

    def with_source(self, source: str) -> ChatTemplate:
        """The same special tokens with another template."""
        return ChatTemplate(source, self._special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text of a conversation. It already holds BOS where the template writes it.

        continue_final_message leaves the last message open, for the model to go on with it.
        kwargs are further variables of the template (chat_template_kwargs).
        """
        if self._template is None:
            raise InvalidRequestError(
                "chat_template", "this model has no chat template; give one, or use a text prompt"
            )
        for name in kwargs.keys() & _RESERVED:
            raise InvalidRequestError("chat_template_kwargs", f"{name} is not a template variable")
        chat = normalise_messages(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message", "cannot be used with add_generation_prompt"
                )
            final = chat[-1]["content"]
            chat[-1]["content"] = final + _CONTINUE_TAG
        variables: dict[str, Any] = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": chat,
            "tools": self._checked_tools(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        return _cut_at_tag(text, final) if continue_final_message else text

    def _checked_tools(self, tools: Sequence[Mapping[str, Any]]) -> Any:
        if not self._takes_tools:
            raise InvalidRequestError("tools", "the chat template has no place for tools")
        if not isinstance(tools, Sequence) or not all(isinstance(t, Mapping) for t in tools):
            raise InvalidRequestError("tools", f"must be a list of objects, not {tools!r}")
        return _plain("tools", list(tools))

    def _run(self, variables: dict[str, Any]) -> str:
        assert self._template is not None
        try:
            text = self._template.render(variables)
            text.encode("utf-8")
            return text
        except UnicodeEncodeError as exc:
            raise InvalidRequestError("messages", f"not valid Unicode: {exc.reason}") from None
        except jinja2.TemplateError as exc:
            raise InvalidRequestError("messages", exc.message or "refused by the template") from exc
        except Exception as exc:
            # A template is foreign code: whatever it does with these messages, only they fail.
            raise InvalidRequestError(
                "messages", f"the chat template failed: {type(exc).__name__}: {exc}"
            ) from exc


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked plain copies: content is text (parts joined by newlines), tool arguments are dicts.

    Raises InvalidRequestError naming the message by index.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages", "must be a non-empty list of messages")
    chat = []
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(field, f"must be an object, not {message!r}")
        plain = {key: value for key, value in _plain(field, message).items() if value is not None}
        if plain.get("role") not in ROLES:
            raise InvalidRequestError(
                f"{field}.role", f"{plain.get('role')!r} is not one of {', '.join(ROLES)}"
            )
        plain["content"] = _content_text(f"{field}.content", plain.get("content"))
        if "tool_calls" in plain:
            plain["tool_calls"] = _tool_calls(f"{field}.tool_calls", plain["tool_calls"])
        chat.append(plain)
    return chat


def _content_text(field: str, content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(field, f"must be text or a list of text parts, not {content!r}")
    texts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, dict):
            raise InvalidRequestError(f"{field}[{i}]", f"must be a text part, not {part!r}")
        if part.get("type") != "text":
            raise InvalidRequestError(
                f"{field}[{i}].type", f"{part.get('type')!r} parts are not supported, only text"
            )
        if not isinstance(text := part.get("text"), str):
            raise InvalidRequestError(f"{field}[{i}].text", f"must be text, not {text!r}")
        texts.append(text)
    return "\n".join(texts)


def _tool_calls(field: str, calls: Any) -> list[dict[str, Any]]:
    """Templates print arguments with tojson, the API sends them as JSON text: parse them."""
    if not isinstance(calls, list):
        raise InvalidRequestError(field, f"must be a list, not {calls!r}")
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{field}[{i}].function", "must be an object with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as exc:
                raise InvalidRequestError(
                    f"{field}[{i}].function.arguments", f"is not JSON: {exc}"
                ) from None
        if not isinstance(arguments, dict):
            raise InvalidRequestError(f"{field}[{i}].function.arguments", "must be an object")
        function["arguments"] = arguments
    return calls


def _plain(field: str, value: Any) -> Any:
    """A copy out of JSON types only, so that a template is handed nothing it could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{field}.{key}", item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(f"{field}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, str):
        return str.__str__(value)  # an enum
    raise InvalidRequestError(field, f"{type(value).__name__} is not a JSON value")


def _cut_at_tag(text: str, final: str) -> str:
    """Everything before the tag that was put behind the final message."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise InvalidRequestError(
            "continue_final_message", "the chat template does not show the final message as it is"
        )
    if text.startswith(_CONTINUE_TAG, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims messages, so trim what came before the tag


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Like transformers': no HTML escapes, unlike Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)

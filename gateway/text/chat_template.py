"""Chat templates: untrusted Jinja programs from model folders, run in a sandbox.

The environment offers templates the same as `transformers` (options, filters, functions, the `generation` tag), so that
a conversation becomes the same prompt. This module does not know tokens.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from moonserve.protocol.errors import ConfigError, InvalidRequest


class ChatTemplate:
    """A compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None) -> None:
        """`with_tools`: template of conversations with tools, if it is a different one. Raises ConfigError."""
        self.source = with_tools or source
        try:
            self._template = _environment().from_string(source)
            self._with_tools = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Returns the prompt's text. `tools`: functions that the model may call. Raises InvalidRequest if the template
        refuses the conversation."""
        context = {**self._special_tokens, **(variables or {})}
        context |= {"tools": tools, "documents": None}
        # Like transformers: templates expect an absent key rather than None.
        plain = [{name: value for name, value in message.items() if value is not None} for message in messages]
        try:
            template = self._with_tools if tools else self._template
            context |= {"messages": plain, "add_generation_prompt": add_generation_prompt}
            try:
                text = template.render(context)
            except jinja2.UndefinedError:  # it may want a text beside tool calls too
                texts = [{"content": "", **message} if "tool_calls" in message else message for message in plain]
                text = template.render({**context, "messages": texts})
            text.encode()  # fails on half a surrogate pair, which JSON can spell and no tokenizer accepts
            return text
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # The template is the model author's program and the conversation the client's input.
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        except (OverflowError, MemoryError, RecursionError, ArithmeticError) as error:
            raise InvalidRequest("the chat template could not render the messages", param="messages") from error


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Dict:
    """`dict(…)` for templates, which cannot reach a class's attributes through it."""

    def __call__(self, *args: Any, **entries: Any) -> dict[Any, Any]:
        return dict(*args, **entries)

    def fromkeys(self, keys: Sequence[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """`namespace(…)` for templates. Refuses underscore names, which would reach into the interpreter."""

    def __init__(*args: Any, **entries: Any) -> None:
        # No parameter is named `self`, so that a template may write namespace(self=…), as with jinja's own.
        attributes = dict(*args[1:], **entries)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serializes a value to JSON. Unlike jinja's own filter it does not escape HTML characters."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)

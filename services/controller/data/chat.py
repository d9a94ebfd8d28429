"""Chat templates: a conversation as text, and where in it the assistant speaks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = Sequence[Mapping[str, Any]]
Span = tuple[int, int]
BEGIN, END = "\ufdd0", "\ufdd1"
"""Stand around what a template marks as generated; Unicode keeps both from ever being characters of a text."""


class BadChat(ValueError):
    """The template cannot say these messages, or where the assistant speaks in them."""


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}`, as transformers has it: what the model is to say."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


class ChatTemplate:
    """A model's template in a sandbox. It is not told the date: what is rendered depends on the messages alone."""

    def __init__(self, text: str, **words: str) -> None:
        """`words`: what templates ask for by name, such as bos_token. BadChat if it is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        self.words = words
        try:
            self.template = environment.from_string(text)
        except jinja2.TemplateError as error:
            raise BadChat(f"the chat template cannot be read: {error}") from error
        self.marks = "endgeneration" in text

    def prompt(self, messages: Messages) -> str:
        """Up to where the assistant begins to speak. BadChat if the template refuses the messages."""
        return _plain(self._render(messages, True))

    def conversation(self, messages: Messages) -> tuple[str, list[Span]]:
        """The whole text, and the characters of each assistant turn in order, with what ends the turn.

        By the template's own generation marks; without any, by what rendering up to and with each turn adds. BadChat if the
        template renders a turn otherwise in a longer conversation (some leave out earlier reasoning).
        """
        if re.search(f"[{BEGIN}{END}]", json.dumps(messages, ensure_ascii=False, default=str)):
            raise BadChat("the messages hold U+FDD0 or U+FDD1, which are no characters")
        marked = self._render(messages, False)
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not self.marks:
            return marked, [self._turn(messages, i, marked) for i in turns]
        spans, text, begun = [], "", 0
        for piece in re.split(f"([{BEGIN}{END}])", marked):
            if piece == BEGIN:
                begun = len(text)
            elif piece == END:
                spans.append((begun, len(text)))
            else:
                text += piece
        if len(spans) != len(turns):
            raise BadChat(f"the chat template marks {len(spans)} turns as generated, the assistant has {len(turns)}")
        return text, spans

    def last_turn(self, messages: Messages) -> tuple[str, list[Span]]:
        """As conversation(), of the last message alone."""
        if self.marks:
            text, spans = self.conversation(messages)
            return text, spans[-1:]
        text = self._render(messages, False)
        return text, [self._turn(messages, len(messages) - 1, text)]

    def _turn(self, messages: Messages, place: int, whole: str) -> Span:
        before, after = self._render(messages[:place], True), self._render(messages[: place + 1], False)
        if not after.startswith(before) or not whole.startswith(after):
            why = "the chat template renders it otherwise in a longer conversation"
            raise BadChat(f"message {place + 1}: {why}; mark what is generated in the template, or set data.learn to last")
        return len(before), len(after)

    def _render(self, messages: Messages, begin: bool) -> str:
        try:
            return str(self.template.render(messages=messages, add_generation_prompt=begin, **self.words))
        except Exception as error:  # templates compute, and may fail as any program does
            raise BadChat(f"the chat template refused the messages: {error}") from error


def _plain(marked: str) -> str:
    return marked.replace(BEGIN, "").replace(END, "")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)

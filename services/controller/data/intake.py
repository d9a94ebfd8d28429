"""From a record to token ids: rendered and tokenized once, here. Nothing later re-tokenizes text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.controller.data.record import Record
from shared.config.problems import bad
from shared.config.sections import Data


class BadPrompt(ValueError):
    """This record cannot be a prompt; the message says why."""


class TooLong(BadPrompt):
    """More tokens than fit."""


@dataclass(frozen=True)
class Prompt:
    text: str
    """As rendered, for display."""
    tokens: list[int]


class Intake:
    """One model's tokenizer and chat template. Knows the context length and the stop tokens."""

    def __init__(self, files: Path, data: Data, max_new_tokens: int) -> None:
        """BadInput if the recipe asks for a chat template that the model does not have, or leaves no room for a prompt."""
        self.data, self.files = data, files
        self.tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.config = json.loads((files / "config.json").read_text())
        text_config = self.config.get("text_config", self.config)
        self.context: int | None = text_config.get("max_position_embeddings")
        room = None if self.context is None else self.context - max_new_tokens
        if room is not None and room < 1:
            legal = f"less than the model's context of {self.context} tokens"
            raise bad("rollout.sampling.max_new_tokens", max_new_tokens, "leaves no room for a prompt", legal)
        limits = [n for n in (room, data.max_prompt_tokens) if n is not None]
        self.limit = min(limits) if limits else None
        if data.chat and self.template is None:
            raise bad("data.chat", True, "the model folder has no chat template", "false")

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        path = self.files / "tokenizer_config.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    @cached_property
    def template(self) -> Any:
        path = self.files / "chat_template.jinja"
        text = path.read_text() if path.exists() else self.tokenizer_config.get("chat_template")
        if not isinstance(text, str):
            return None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda v, indent=None: json.dumps(v, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _raise
        return environment.from_string(text)

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """End-of-sequence ids of generation_config.json, config.json and the tokenizer's eos token."""
        found: dict[int, None] = {}
        path = self.files / "generation_config.json"
        generation = json.loads(path.read_text()) if path.exists() else {}
        for value in (generation.get("eos_token_id"), self.config.get("eos_token_id")):
            for token in value if isinstance(value, list) else [value]:
                if isinstance(token, int):
                    found[token] = None
        if (token := self.tokenizer.token_to_id(self._named("eos_token") or "")) is not None:
            found[token] = None
        return tuple(found)

    def _named(self, name: str) -> str | None:
        value = self.tokenizer_config.get(name)
        return value.get("content") if isinstance(value, dict) else value

    def prompt(self, record: Record) -> Prompt:
        """BadPrompt if it is empty or longer than the context leaves."""
        text = self.render(record)
        try:
            tokens = list(self.tokenizer.encode(text, add_special_tokens=not self.data.chat).ids)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadPrompt(f"the prompt is no valid Unicode text: {error}") from error
        if not tokens:
            raise BadPrompt("the prompt is empty: it must have at least 1 token")
        if self.limit is not None and len(tokens) > self.limit:
            if self.data.on_long in ("refuse", "drop"):
                raise TooLong(f"the prompt has {len(tokens)} tokens: at most {self.limit} fit")
            tokens = tokens[-self.limit :] if self.data.on_long == "truncate_left" else tokens[: self.limit]
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
        return Prompt(text, tokens)

    def render(self, record: Record) -> str:
        if not self.data.chat:
            if not isinstance(record.prompt, str):
                raise BadPrompt("the prompt is a list of messages: set data.chat to true")
            return record.prompt
        messages = [{"role": "user", "content": record.prompt}] if isinstance(record.prompt, str) else record.prompt
        if self.data.system is not None:
            messages = [{"role": "system", "content": self.data.system}, *messages]
        try:
            return str(
                self.template.render(
                    messages=messages,
                    add_generation_prompt=True,
                    bos_token=self._named("bos_token") or "",
                    eos_token=self._named("eos_token") or "",
                )
            )
        except TemplateError as error:
            raise BadPrompt(f"the chat template refused the messages: {error}") from error

    def pair(self, record: Record) -> tuple[Prompt, list[int]]:
        """The prompt, the target's tokens and one end-of-sequence token. BadPrompt without a target, or if both do not fit."""
        if record.target is None:
            raise BadPrompt("the record has no target text: set data.source.params.target")
        prompt = self.prompt(record)
        target = [*self.tokenizer.encode(record.target, add_special_tokens=False).ids, *self.stop_tokens[:1]]
        if self.context is not None and len(prompt.tokens) + len(target) > self.context:
            size = f"{len(prompt.tokens)} + {len(target)} tokens"
            raise BadPrompt(f"prompt and target have {size}: the model's context is {self.context}")
        return prompt, target

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


def _raise(message: str) -> None:
    raise TemplateError(message)

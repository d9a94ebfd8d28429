"""From a record to token ids: rendered and tokenized once, here. Nothing later re-tokenizes text."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer

from services.controller.data.chat import BadChat, ChatTemplate
from services.controller.data.encoder import Encoder
from services.controller.data.record import Record
from shared.config.problems import BadInput, bad
from shared.config.sections import Data, SftData


class BadPrompt(ValueError):
    """This record cannot be a prompt; the message says why."""


class TooLong(BadPrompt):
    """More tokens than fit."""


@dataclass(frozen=True)
class Prompt:
    text: str
    """As rendered, for display."""
    tokens: list[int]
    reference: str = ""
    """Path of the picture that it is about."""


@dataclass(frozen=True)
class Example:
    """What is imitated (sft)."""

    prompt: Prompt
    target: list[int]
    """Tokens after the prompt."""
    mask: list[bool]
    """False: the token is somebody else's turn, or framing."""
    picture: str = ""
    """Its path, in place of tokens."""

    def __len__(self) -> int:
        return len(self.prompt.tokens) + len(self.target)


class MediaIntake:
    """Prompts of a model that makes pictures: texts, which its own encoders take in; there are no tokens here."""

    def __init__(self, files: Path, data: Data, allowed: Callable[[str, str], Path], pictured: bool, encoder: Encoder) -> None:
        """BadInput for what only a language model can do. `allowed`: a path below the configured roots, resolved. `pictured`:
        prompts are a text and a reference each. `encoder`: what reads the texts.
        """
        self.files, self.data, self.allowed, self.pictured, self.encoder = files, data, allowed, pictured, encoder
        self.limit: int | None = None
        for name, value, off in (("chat", data.chat, False), ("system", data.system, None)):
            if value != off:
                raise bad(f"data.{name}", value, "pictures are made from plain texts", str(off).lower())
        if data.on_long == "truncate_left":
            raise bad("data.on_long", data.on_long, "a text encoder cuts the end of a text", "refuse, drop or truncate_right")

    def prompt(self, record: Record) -> Prompt:
        """BadPrompt if it is no text, or an empty one; TooLong if its end would be cut off and that is not allowed."""
        if not isinstance(record.prompt, str) or record.conversation:
            raise BadPrompt("the prompt is a list of messages: pictures are made from plain texts")
        if not record.prompt.strip():
            raise BadPrompt("the prompt is empty")
        if self.data.on_long != "truncate_right" and (count := self.encoder.count(record.prompt)) > self.encoder.limit:
            raise TooLong(f"the prompt has {count} tokens: the text encoder reads {self.encoder.limit}")
        if not self.pictured and record.reference is not None:
            raise BadPrompt("the record has a reference, and this family makes pictures of texts alone")
        return Prompt(record.prompt, [], self._file(record.reference, "reference") if self.pictured else "")

    def example(self, record: Record) -> Example:
        """A prompt and the picture to imitate. BadPrompt if there is none, or its path leads elsewhere."""
        return Example(self.prompt(record), [], [], self._file(record.picture, "picture"))

    def _file(self, path: str | None, field: str) -> str:
        """Resolved. BadPrompt if there is none, it lies elsewhere, or is no file."""
        if path is None:
            raise BadPrompt(f"the record has no {field}: set data.source.params.{field}")
        try:
            found = self.allowed(path, field)
        except BadInput as error:
            raise BadPrompt(str(error)) from error
        if not found.is_file():
            raise BadPrompt(f"{field} {path!r}: no such file")
        try:
            with Image.open(found) as picture:
                picture.verify()
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise BadPrompt(f"{field} {path!r} is no picture that can be read: {error}") from error
        return str(found)


def check_taught(recipe: Any, record: Record) -> None:
    """BadPrompt for a record whose domain has no teacher, where prompts have one for each."""
    teachers = recipe.algorithm.params.get("teachers")
    if teachers and record.metadata.get("domain") not in teachers:
        raise BadPrompt(f"its domain is {record.metadata.get('domain')!r}: there are teachers of {', '.join(teachers)}")


class Intake:
    """One model's tokenizer and chat template. Knows the context length and the stop tokens."""

    def __init__(self, files: Path, data: Data, max_new_tokens: int) -> None:
        """BadInput if the recipe asks for a chat template that the model does not have, or leaves no room for a prompt."""
        self.data, self.files = data, files
        try:
            self.tokenizer = Tokenizer.from_file(str(files / "tokenizer.json"))
        except Exception as error:  # the library raises nothing more exact
            raise bad("model.path", str(files), f"its tokenizer cannot be read: {error}", "a model folder") from error
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
    def template(self) -> ChatTemplate | None:
        path = self.files / "chat_template.jinja"
        text = path.read_text() if path.exists() else self.tokenizer_config.get("chat_template")
        if not isinstance(text, str):
            return None
        words = {name: self._named(name) or "" for name in ("bos_token", "eos_token")}
        try:
            return ChatTemplate(text, **words)
        except BadChat as error:
            raise bad("data.chat", True, str(error), "false, or a model with another template") from error

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
        """BadPrompt if it is empty or longer than the context leaves, or the record holds answers too."""
        if record.conversation:
            raise BadPrompt("the record is a whole conversation, which sft imitates: name the prompt's field instead")
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
        assert self.template is not None
        try:
            return self.template.prompt(self._messages(record))
        except BadChat as error:
            raise BadPrompt(str(error)) from error

    def _messages(self, record: Record) -> list[dict[str, Any]]:
        messages = [{"role": "user", "content": record.prompt}] if isinstance(record.prompt, str) else record.prompt
        if self.data.system is not None:
            messages = [{"role": "system", "content": self.data.system}, *messages]
        return messages

    def example(self, record: Record) -> Example:
        """A prompt and its target with one end-of-sequence token, or a conversation. BadPrompt if there is nothing to imitate;
        TooLong if it does not fit and is not to be cut.
        """
        if record.conversation:
            return self._fitting(self._conversation(record))
        if record.target is None:
            raise BadPrompt("the record has no target text: set data.source.params.target or .messages")
        target = [*self.tokenizer.encode(record.target, add_special_tokens=False).ids, *self.stop_tokens[:1]]
        return self._fitting(Example(self.prompt(record), target, [True] * len(target)))

    def _conversation(self, record: Record) -> Example:
        """One text, tokenized at once: a token counts if it begins in what the assistant is to say. That is each turn (or the
        last) without those of weight 0, up to and with the token that ends it; a turn of a template that ends turns without
        such a token gets one where the conversation ends.
        """
        if self.template is None or not self.data.chat:
            raise BadPrompt("the record is a conversation: set data.chat to true")
        messages = self._messages(record)
        said = [message for message in messages if message.get("role") == "assistant"]
        last = isinstance(self.data, SftData) and self.data.learn == "last"
        if not said or (last and messages[-1] is not said[-1]):
            raise BadPrompt("the conversation has no turn of the assistant" + (" at its end" if last else ""))
        try:
            text, turns = self.template.last_turn(messages) if last else self.template.conversation(messages)
        except BadChat as error:
            raise BadPrompt(str(error)) from error
        weights = [message.get("weight", 1) for message in said][-len(turns) :]
        if any(weight not in (0, 1) for weight in weights):
            raise BadPrompt(f"weights {weights} of the assistant's messages: each must be 0 or 1")
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        tokens, starts = list(encoding.ids), [start for start, _ in encoding.offsets]
        mask = [False] * len(tokens)
        for (low, high), weight in zip(turns, weights, strict=True):
            places = [i for i, start in enumerate(starts) if low <= start < high]
            ends = [i for i in places if tokens[i] in self.stop_tokens]
            if not ends and high == len(text) and self.stop_tokens:
                end = len(tokens)
                while places and not text[starts[places[-1]] :].strip():
                    end = places.pop()  # what the template puts between turns
                tokens[end:], mask[end:] = [self.stop_tokens[0]], [False]
                places.append(end)
            for i in places if not ends else [i for i in places if i <= ends[-1]]:
                mask[i] = weight == 1
        if True not in mask:
            raise BadPrompt("no turn of the assistant counts: all have weight 0, or are empty")
        first, end = mask.index(True), len(mask) - mask[::-1].index(True)
        if not first:
            raise BadPrompt("nothing stands before the first turn of the assistant")
        before = text[: starts[first]] if first < len(starts) else text
        return Example(Prompt(before, tokens[:first]), tokens[first:end], mask[first:end])

    def _fitting(self, example: Example) -> Example:
        own = self.data.max_tokens if isinstance(self.data, SftData) else None
        limits = [n for n in (self.context, own) if n is not None]
        excess = len(example) - min(limits) if limits else 0
        if excess <= 0:
            return example
        size = f"{len(example.prompt.tokens)} + {len(example.target)} tokens"
        too_long = TooLong(f"prompt and target have {size}: at most {min(limits)} fit")
        if self.data.on_long == "truncate_left" and excess < len(example.prompt.tokens):
            tokens = example.prompt.tokens[excess:]
            text = str(self.tokenizer.decode(tokens, skip_special_tokens=False))
            return Example(Prompt(text, tokens), example.target, example.mask)
        if self.data.on_long == "truncate_right" and True in example.mask[:-excess]:
            return Example(example.prompt, example.target[:-excess], example.mask[:-excess])
        raise too_long

    def decode(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

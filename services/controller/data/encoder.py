"""How many tokens of a prompt a pipeline's text encoder reads, counted by its own tokenizer: torch-free."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, models, pre_tokenizers


class Encoder(NamedTuple):
    limit: int
    """Tokens; what comes behind them is cut off."""
    tokenizer: Tokenizer | None
    """None: the folder's tokenizer is of a kind that cannot be read here."""

    def count(self, text: str) -> int:
        """With the tokens that the tokenizer itself adds; 0 where it cannot be read."""
        return 0 if self.tokenizer is None else len(self.tokenizer.encode(text).ids)


def encoder_of(files: Path, known: Sequence[tuple[str, int]]) -> Encoder:
    """Of the first of these folders of a pipeline that is there. `known`: (folder, tokens), at least one."""
    folder, limit = next(((files / name, n) for name, n in known if (files / name).is_dir()), (files, known[-1][1]))
    return Encoder(limit, _tokenizer(folder))


def _tokenizer(folder: Path) -> Tokenizer | None:
    """From `tokenizer.json`, or the byte-level BPE of `vocab.json` and `merges.txt`."""
    try:
        if (folder / "tokenizer.json").exists():
            found = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            if "</w>" in (folder / "merges.txt").read_text():
                return None  # CLIP's, which cleans texts by rules of its own
            vocabulary = json.loads((folder / "vocab.json").read_text())
            lines = (folder / "merges.txt").read_text().splitlines()
            merges = [(a, b) for a, _, b in (line.partition(" ") for line in lines if not line.startswith("#version")) if b]
            found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
            found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    except Exception:  # the library raises nothing more exact
        return None
    found.no_padding()
    found.no_truncation()
    return found

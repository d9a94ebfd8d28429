"""Small pictures and videos of what was trained on and evaluated, as files in the job's folder: for people, while bodies go."""

from __future__ import annotations

import logging
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

import xxhash

from shared.media import ENDINGS, preview
from shared.types.part import Media, Part

log = logging.getLogger(__name__)


class Previews:
    """Of one job: `steps/STEP/…` and `evals/SUITE:TAG/…`, each file with the ending of its media type."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, kind: str, of: int | str, name: int | str, media: Media) -> bool:
        """Whether there is one now. Nothing waits for it, and nothing fails for it."""
        place = self._place(kind, of, name)
        temporary = place.with_name(f".{uuid4().hex}")
        try:
            mime, data = preview(media)
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.rename(place.with_name(f"{place.name}{ENDINGS[mime]}"))
        except (OSError, ValueError) as error:
            log.info("no preview of %s: %s", name, error)
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def find(self, kind: str, of: int | str, name: int | str) -> tuple[str, bytes] | None:
        """(media type, file)."""
        place = self._place(kind, of, name)
        for mime, ending in ENDINGS.items():
            with suppress(FileNotFoundError):  # also where it goes meanwhile
                return mime, place.with_name(f"{place.name}{ending}").read_bytes()
        return None

    def forget(self, below: int, at_least: int) -> None:
        """Samples of steps that are too old, or that an older history had trained."""
        for folder in (self.folder / "steps").glob("*"):
            if folder.name.isdigit() and not below <= int(folder.name) < at_least:
                shutil.rmtree(folder, ignore_errors=True)

    def _place(self, kind: str, of: int | str, name: int | str) -> Path:
        """Without its ending. Names may be long, and cannot lead elsewhere."""
        return self.folder / kind / quote(str(of), safe="") / xxhash.xxh3_128_hexdigest(str(name).encode())


def media_of(part: Part) -> dict[str, Media]:
    """Sample id → its picture or video, of a Part that has them."""
    return {name: one for name, one in zip(part.sample_ids, part.media, strict=True) if one is not None}

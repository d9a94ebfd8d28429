"""Small pictures and videos of what was trained on and evaluated, as files in the job's folder: for people, while bodies go."""

from __future__ import annotations

import logging
import mimetypes
import shutil
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from shared.media import preview
from shared.types.part import Media, Part

log = logging.getLogger(__name__)


class Previews:
    """Of one job: `steps/STEP/SAMPLE` and `evals/SUITE:TAG/INDEX`, each with the ending of its media type."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, kind: str, of: int | str, name: int | str, media: Media) -> bool:
        """Whether there is one now. Nothing waits for it, and nothing fails for it."""
        place = self._place(kind, of, name)
        try:
            mime, data = preview(media)
            place.parent.mkdir(parents=True, exist_ok=True)
            temporary = place.with_name(f".{uuid4().hex}")
            temporary.write_bytes(data)
            temporary.rename(place.with_name(f"{place.name}{mimetypes.guess_extension(mime)}"))
        except (OSError, ValueError) as error:
            log.info("no preview of %s: %s", name, error)
            return False
        return True

    def find(self, kind: str, of: int | str, name: int | str) -> tuple[str, bytes] | None:
        """(media type, file)."""
        place = self._place(kind, of, name)
        for path in place.parent.glob(f"{_escaped(place.name)}.*"):
            return mimetypes.guess_type(path.name)[0] or "application/octet-stream", path.read_bytes()
        return None

    def forget(self, below: int, at_least: int) -> None:
        """Samples of steps that are too old, or that an older history had trained."""
        for folder in (self.folder / "steps").glob("*"):
            if folder.name.isdigit() and not below <= int(folder.name) < at_least:
                shutil.rmtree(folder, ignore_errors=True)

    def _place(self, kind: str, of: int | str, name: int | str) -> Path:
        """Without its ending; names cannot lead elsewhere."""
        return self.folder / kind / quote(str(of), safe="") / quote(str(name), safe="").replace(".", "%2E")


def media_of(part: Part) -> dict[str, Media]:
    """Sample id → its picture or video, of a Part that has them."""
    column = part.primitives.get("image") or part.primitives.get("video") or ()
    return {name: one for name, one in zip(part.sample_ids, column, strict=False) if isinstance(one, Media)}


def _escaped(name: str) -> str:
    """For glob."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

"""Whether two services keep their files in the same place: identities that the folders themselves hold.

Containers may call one folder by different names, or different folders by one name: a random word in the folder tells.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from uuid import uuid4

from shared.config.settings import Settings

MARK = ".unimesh-storage"


def storage_id(settings: Settings) -> str:
    """Of the state folder, the body store's and that of weights; made where there is none yet."""
    scheme, _, path = settings.bodies.partition(":")
    bodies = _identity(Path(path)) if scheme in ("dir", "shm") else settings.bodies
    elsewhere = settings.store is None or "://" in settings.store
    weights = settings.store or "" if elsewhere else _identity(Path(str(settings.store)))
    return f"{_identity(settings.state)} {bodies} {weights}".rstrip()


def _identity(folder: Path) -> str:
    mark = folder / MARK
    if not mark.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fresh = folder / f"{MARK}-{uuid4().hex}"
        fresh.write_text(uuid4().hex)
        try:
            os.link(fresh, mark)
        except FileExistsError:
            pass  # another service was first
        except OSError:  # a file system without links
            with contextlib.suppress(FileExistsError), mark.open("x") as file:
                file.write(fresh.read_text())
        fresh.unlink()
    return mark.read_text()

"""Whether two services keep their files in the same place: identities that the folders themselves hold.

Containers may call one folder by different names, or different folders by one name: a random word in the folder tells.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from uuid import uuid4

MARK = ".unimesh-storage"


def storage_id(state: Path, bodies: str) -> str:
    """Of the state folder and the body store's; made where there is none yet."""
    scheme, _, path = bodies.partition(":")
    return f"{_identity(state)} {_identity(Path(path)) if scheme in ('dir', 'shm') else bodies}"


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

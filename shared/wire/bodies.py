"""The body store: where the bytes of a slice live while only its head travels.

Names are unique to an attempt and lie on a shelf (the batch number at issue). A shelf is swept as a whole once no open
group and no retained log entry is older; nothing is counted, so a body of a killed attempt goes with its shelf.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote
from uuid import uuid4

import fsspec
import xxhash

from shared.files import sync
from shared.wire.codec import Buffer
from shared.wire.envelope import BodyRef
from shared.wire.errors import BodyLost, WireError
from shared.wire.keys import JobKeys

REDIS_LIMIT = 64 * 1024
"""Bytes up to which a body is kept as a field of the shelf's hash in Redis (transport measurements: the crossover)."""


class Bodies(Protocol):
    """A backend for bodies too large for Redis."""

    def put(self, shelf: int, name: str, parts: Sequence[Buffer]) -> BodyRef: ...

    def get(self, ref: BodyRef) -> Buffer: ...

    def glance(self, ref: BodyRef) -> Buffer:
        """As get, for people: unchecked, so that of a mapped file only what is looked at is read."""
        ...

    def sweep(self, below: int) -> int:
        """Removes shelves with a number below; returns how many."""
        ...

    def remove(self) -> None:
        """Everything of the job."""
        ...


class DirectoryBodies:
    """A local or shared directory, or shared memory: one file a body, written, renamed, and read through mmap."""

    def __init__(self, root: Path, durable: bool = True) -> None:
        """`durable` fsyncs before the name appears: what the train log will name must survive a power loss."""
        self.root, self.durable = root, durable

    def put(self, shelf: int, name: str, parts: Sequence[Buffer]) -> BodyRef:
        folder = self.root / str(shelf)
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / quote(name, safe="")
        temporary = target.with_name(f".{uuid4().hex}")
        digest = xxhash.xxh3_64()
        size = 0
        try:
            with temporary.open("wb", buffering=0) as file:
                for part in parts:
                    _write_all(file.fileno(), part)
                    digest.update(part)
                    size += len(part)
                if self.durable:
                    os.fsync(file.fileno())
        except OSError as error:
            temporary.unlink(missing_ok=True)
            need = sum(map(len, parts))
            raise OSError(error.errno, f"{error.strerror}: a body of {need} bytes does not fit below {self.root}") from error
        temporary.rename(target)
        if self.durable:
            sync(folder)
        return BodyRef(uri=f"dir:{shelf}/{target.name}", nbytes=size, xxh3=digest.hexdigest())

    def get(self, ref: BodyRef) -> Buffer:
        return _verified(ref, self.glance(ref))

    def glance(self, ref: BodyRef) -> Buffer:
        path = self.root / _checked(ref.uri, "dir")
        try:
            with path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (FileNotFoundError, ValueError) as error:
            raise BodyLost(f"body {ref.uri} is gone") from error

    def sweep(self, below: int) -> int:
        old = [p for p in self.root.iterdir() if p.name.isdigit() and int(p.name) < below] if self.root.exists() else []
        for folder in old:
            shutil.rmtree(folder, ignore_errors=True)
        return len(old)

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class FsspecBodies:
    """Shared storage through fsspec (object stores, network file systems)."""

    def __init__(self, url: str) -> None:
        self.files, self.root = fsspec.core.url_to_fs(url)

    def put(self, shelf: int, name: str, parts: Sequence[Buffer]) -> BodyRef:
        safe = quote(name, safe="")
        data = b"".join(parts)
        self.files.makedirs(f"{self.root}/{shelf}", exist_ok=True)
        self.files.pipe_file(f"{self.root}/{shelf}/{safe}", data)
        return BodyRef(uri=f"fs:{shelf}/{safe}", nbytes=len(data), xxh3=xxhash.xxh3_64_hexdigest(data))

    def get(self, ref: BodyRef) -> Buffer:
        try:
            data: bytes = self.files.cat_file(f"{self.root}/{_checked(ref.uri, 'fs')}")
        except FileNotFoundError as error:
            raise BodyLost(f"body {ref.uri} is gone") from error
        return _verified(ref, data)

    def glance(self, ref: BodyRef) -> Buffer:
        return self.get(ref)

    def sweep(self, below: int) -> int:
        if not self.files.exists(self.root):
            return 0
        names = [str(p).rstrip("/").rpartition("/")[2] for p in self.files.ls(self.root, detail=False)]
        old = [n for n in names if n.isdigit() and int(n) < below]
        for name in old:
            self.files.rm(f"{self.root}/{name}", recursive=True)
        return len(old)

    def remove(self) -> None:
        if self.files.exists(self.root):
            self.files.rm(self.root, recursive=True)


class BodyStore:
    """What services use: small bodies ride in the commit as a field of the shelf's hash, larger ones go to the backend."""

    def __init__(self, client: Any, keys: JobKeys, backend: Bodies, redis_limit: int = REDIS_LIMIT) -> None:
        self.client, self.keys, self.backend, self.redis_limit = client, keys, backend, redis_limit

    def place(self, shelf: int, name: str, parts: Sequence[Buffer]) -> tuple[BodyRef, bytes | None]:
        """The reference, and the bytes that the commit has to write (None: they are in the backend already)."""
        size = sum(map(len, parts))
        if size <= self.redis_limit:
            return BodyRef(uri=f"redis:{shelf}/{name}", nbytes=size), b"".join(parts)
        return self.backend.put(shelf, name, parts), None

    def enclose(self, shelf: int, name: str, parts: Sequence[Buffer]) -> tuple[BodyRef | None, bytes | None]:
        """For a message that may carry its body itself: the bytes if they are few, else a reference to what is written now."""
        if sum(map(len, parts)) <= REDIS_LIMIT:
            return None, b"".join(parts)
        return self.backend.put(shelf, name, parts), None

    @staticmethod
    def in_redis(ref: BodyRef) -> bool:
        """Whether only who talks to Redis can load it."""
        return ref.uri.startswith("redis:")

    def load(self, ref: BodyRef) -> Buffer:
        return self.load_many([ref])[0]

    def glance(self, ref: BodyRef) -> Buffer:
        """For people: as load, but a large file is mapped unchecked, and only what is looked at is read."""
        return self.load(ref) if self.in_redis(ref) else self.backend.glance(ref)

    def load_many(self, refs: Sequence[BodyRef]) -> list[Buffer]:
        """In order; one round trip for all that are in Redis. BodyLost names the first that is gone."""
        wanted = [(i, *_shelf_and_name(r.uri)) for i, r in enumerate(refs) if self.in_redis(r)]
        out: dict[int, Buffer] = {}
        if wanted:
            with self.client.pipeline(transaction=False) as pipe:
                for _, shelf, name in wanted:
                    pipe.hget(self.keys.shelf(shelf), name)
                for (index, _, _), data in zip(wanted, pipe.execute(), strict=True):
                    if data is None:
                        raise BodyLost(f"body {refs[index].uri} is gone")
                    out[index] = data
        for index, ref in enumerate(refs):
            if index not in out:
                out[index] = self.backend.get(ref)
        return [out[i] for i in range(len(refs))]


def open_bodies(url: str, job: str) -> Bodies:
    """The backend of a job: `dir:/path` (durable), `shm:/path` (not durable), or any fsspec URL."""
    scheme, _, path = url.partition(":")
    if scheme in ("dir", "shm"):
        return DirectoryBodies(Path(path) / job, durable=scheme == "dir")
    return FsspecBodies(f"{url.rstrip('/')}/{job}")


def _shelf_and_name(uri: str) -> tuple[int, str]:
    shelf, _, name = uri.removeprefix("redis:").partition("/")
    if not shelf.isdigit() or not name:
        raise WireError(f"body uri {uri!r}")
    return int(shelf), name


def _checked(uri: str, scheme: str) -> str:
    """`shelf/name` of a reference that came over the wire: it can name nothing outside the store."""
    kind, _, rest = uri.partition(":")
    shelf, _, name = rest.partition("/")
    if kind != scheme or not shelf.isdigit() or not name or "/" in name or name.startswith("."):
        raise WireError(f"body uri {uri!r}: must be {scheme}:shelf/name")
    return f"{shelf}/{name}"


def _verified(ref: BodyRef, data: Buffer) -> Buffer:
    if len(data) != ref.nbytes or (ref.xxh3 is not None and xxhash.xxh3_64_hexdigest(data) != ref.xxh3):
        raise BodyLost(f"body {ref.uri} is damaged: {len(data)} bytes, expected {ref.nbytes} with checksum {ref.xxh3}")
    return data


def _write_all(descriptor: int, data: Buffer) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]

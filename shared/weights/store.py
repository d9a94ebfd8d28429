"""The weights store: `{track}/{incarnation}/v{n}/` with safetensors shards, a manifest, and the complete marker written last.

A complete version is never rewritten. Nothing is fsynced: readers verify checksums, and what a power loss damaged is dropped
and published again from the checkpoint. Readers hold leases; garbage collection keeps the newest K and whatever is leased.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from shared.files import checksum, fetched, link_or_copy, local, remove
from shared.wire.codec import Buffer

COMPLETE = "COMPLETE"
MANIFEST = "manifest.json"
PIPELINE = "pipeline.txt"
LEASE_S = 120.0
RANKS_S = 1800.0
"""Longest time that rank 0 waits for another rank's share of a version."""


class Shard(msgspec.Struct, frozen=True):
    file: str
    nbytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    track: str
    incarnation: int
    version: int
    kind: str = "full"
    """full | lora | delta."""
    base: str = ""
    """lora and delta: what it applies to."""
    source: str = "live"
    """live | ema."""
    shards: tuple[Shard, ...] = ()


class WeightsDamaged(RuntimeError):
    """A complete version whose bytes are not what its manifest says."""


class WeightStore:
    """One track of one job."""

    def __init__(self, root: Path, track: str) -> None:
        self.track, self.folder = track, root / track

    @property
    def files(self) -> Path:
        """Config and tokenizer of the model, written once; versions hold weights only."""
        return self.folder / "model"

    def note_pipeline(self, folder: Path) -> None:
        """Where the parts of a pipeline lie that are not trained: they are too large to be copied for each job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / PIPELINE).write_text(str(folder))

    @property
    def pipeline(self) -> str | None:
        """What was noted; None: it is a language model's store."""
        place = self.folder / PIPELINE
        return place.read_text() if place.exists() else None

    def path(self, incarnation: int, version: int) -> Path:
        return self.folder / str(incarnation) / f"v{version}"

    def versions(self, incarnation: int) -> list[int]:
        """Complete versions, ascending."""
        folder = self.folder / str(incarnation)
        names = [p.parent.name for p in folder.glob(f"v*/{COMPLETE}")]
        return sorted(int(name[1:]) for name in names if name[1:].isdigit())

    def has(self, incarnation: int, version: int) -> bool:
        return (self.path(incarnation, version) / COMPLETE).exists()

    def drop_damaged(self, incarnation: int) -> list[int]:
        """Takes the marker off versions whose bytes did not survive a power loss; a trainer does it at its start."""
        bad = []
        for version in self.versions(incarnation):
            try:
                self.open(incarnation, version)
            except (WeightsDamaged, OSError, msgspec.DecodeError):
                (self.path(incarnation, version) / COMPLETE).unlink(missing_ok=True)
                bad.append(version)
        return bad

    def newest(self, incarnation: int) -> int | None:
        found = self.versions(incarnation)
        return found[-1] if found else None

    def latest(self) -> Path | None:
        """Folder of the newest complete version of the newest incarnation."""
        numbers = sorted((int(p.name) for p in self.folder.glob("*") if p.name.isdigit()), reverse=True)
        for incarnation in numbers:
            if (version := self.newest(incarnation)) is not None:
                return self.path(incarnation, version)
        return None

    def publish(
        self,
        incarnation: int,
        version: int,
        files: Iterable[tuple[str, Sequence[Buffer]]],
        kind: str = "full",
        source: str = "live",
        base: str = "",
        ranks: int = 1,
        say: Callable[[str], None] = lambda text: None,
    ) -> int | None:
        """Writes a version: names of its files, and their bytes in pieces. Returns bytes; 0 if it was complete before.

        With several `ranks` the others contribute() theirs; None if one of them has left this version out for a newer one.
        Waits for: the other ranks' files, which may wait for a full disk (`say` is told). TimeoutError after RANKS_S.
        """
        target = self.path(incarnation, version)
        if (target / COMPLETE).exists():
            return 0
        # an object store has no rename: there each attempt has a folder of its own in the version's, which the manifest names
        temporary = target.with_name(f".{uuid4().hex}") if local(target) else target / uuid4().hex[:8]
        temporary.mkdir(parents=True, exist_ok=True)
        complete = False
        try:
            shards = tuple(_written(temporary / name, data) for name, data in files)
            for rank in range(1, ranks):
                theirs = self._contributed(incarnation, version, rank, say)
                if theirs is None:
                    return None
                shards += theirs
            manifest = Manifest(
                track=self.track,
                incarnation=incarnation,
                version=version,
                kind=kind,
                base=base,
                source=source,
                shards=shards,
            )
            for path in self._parts(incarnation, version).glob("*.safetensors"):
                link_or_copy(path, temporary / path.name)  # what fails below is done again
            if (target / COMPLETE).exists():  # another trainer's, meanwhile
                return 0
            if local(target):
                (temporary / MANIFEST).write_text(_text(manifest))
                remove(target)  # an attempt that died before its marker
                temporary.rename(target)
            else:
                (target / MANIFEST).write_text(_text(_inside(manifest, temporary.name)))
            (target / COMPLETE).write_bytes(b"")
            complete = True
        finally:
            if local(target) or not complete:
                remove(temporary)
        if ranks > 1:
            self.drop_parts(incarnation, version)
        return sum(s.nbytes for s in shards)

    def contribute(self, incarnation: int, version: int, rank: int, files: Iterable[tuple[str, Sequence[Buffer]]]) -> None:
        """Another rank's share of a version that rank 0 publishes."""
        if self.has(incarnation, version):
            return
        folder = self._parts(incarnation, version)
        folder.mkdir(parents=True, exist_ok=True)
        shards = [_written(folder / name, data) for name, data in files]
        word = folder / (f".rank-{rank}" if local(folder) else f"rank-{rank}.json")
        word.write_bytes(msgspec.json.encode(shards))
        if local(folder):
            word.rename(folder / f"rank-{rank}.json")

    def waiting(self, incarnation: int, version: int, rank: int, text: str) -> None:
        """The rank's disk is full: rank 0 tells people, and waits as long."""
        with suppress(OSError):
            (self._parts(incarnation, version) / f"rank-{rank}.waiting").write_text(text)

    def _parts(self, incarnation: int, version: int) -> Path:
        return self.folder / str(incarnation) / f"parts-{version}"

    def _contributed(self, incarnation: int, version: int, rank: int, say: Callable[[str], None]) -> tuple[Shard, ...] | None:
        """What the rank has written of the version, once it has; None if it has gone on to a newer one."""
        full, told = self._parts(incarnation, version) / f"rank-{rank}.waiting", False
        word = self._parts(incarnation, version) / f"rank-{rank}.json"
        until = time.monotonic() + RANKS_S
        while not word.exists():
            newer = (int(p.parent.name.partition("-")[2]) for p in word.parents[1].glob(f"parts-*/{word.name}"))
            behind = any(number > version for number in newer) or (self.newest(incarnation) or 0) > version
            if behind and not word.exists():
                return None
            if full.exists():
                until = time.monotonic() + RANKS_S
                if not told:
                    say(f"rank {rank}: {full.read_text() or 'no space left'}")
                    told = True
            if time.monotonic() > until:
                raise TimeoutError(f"rank {rank} has not written its share of version {version} for {RANKS_S:.0f} s")
            time.sleep(0.002 if local(word) else 0.2)
        return msgspec.json.decode(word.read_bytes(), type=tuple[Shard, ...])

    def drop_parts(self, incarnation: int, version: int | None = None) -> None:
        """Shares of this version and older ones; of all versions, before the ranks begin."""
        for folder in (self.folder / str(incarnation)).glob("parts-*"):
            if version is None or int(folder.name.partition("-")[2]) <= version:
                remove(folder)

    def digest(self, incarnation: int, version: int) -> str:
        """The same for versions with the same bytes. FileNotFoundError if it is not complete (any more)."""
        return "".join(shard.xxh3 for shard in _manifest(self.path(incarnation, version)).shards)

    def open(self, incarnation: int, version: int, verify: bool = True) -> list[Path]:
        """Shards of a complete version, checksums verified. FileNotFoundError if it is not there (yet)."""
        return open_version(self.path(incarnation, version), verify)

    def read(self, incarnation: int, version: int) -> list[tuple[str, Buffer]]:
        """Names and bytes of a complete version's files, verified: private mappings, so that nothing is read twice or copied;
        of an object store copies in memory.

        FileNotFoundError if it is not there (yet), WeightsDamaged if its bytes are wrong. They outlive the version itself.
        """
        return read_version(self.path(incarnation, version))

    @contextmanager
    def leased(self, incarnation: int, version: int, holder: str) -> Iterator[None]:
        """Keeps the version from being collected while it is read, however long. Each reader's lease is its own, also of one
        holder."""
        own, done = f"{holder}.{uuid4().hex[:8]}", threading.Event()

        def renew() -> None:
            while not done.wait(LEASE_S / 4):
                with suppress(Exception):  # libraries of stores have errors of their own; the next round tries again
                    self.hold(incarnation, version, own)

        self.hold(incarnation, version, own)
        thread = threading.Thread(target=renew, name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            self.release(incarnation, version, own)

    def hold(self, incarnation: int, version: int, holder: str) -> None:
        """Takes or renews a lease of LEASE_S seconds."""
        lease = self._lease(incarnation, version, holder)
        lease.parent.mkdir(parents=True, exist_ok=True)
        lease.write_text(str(time.time()))

    def release(self, incarnation: int, version: int, holder: str) -> None:
        self._lease(incarnation, version, holder).unlink(missing_ok=True)

    def _lease(self, incarnation: int, version: int, holder: str) -> Path:
        return self.folder / str(incarnation) / "leases" / f"v{version}.{holder}"

    def collect(self, incarnation: int, keep: int, pinned: frozenset[int] = frozenset()) -> list[int]:
        """Removes complete versions that are neither among the newest `keep`, nor pinned, nor leased."""
        leases = (self.folder / str(incarnation) / "leases").glob("v*.*")
        young = time.time() - LEASE_S
        held = {int(p.name[1:].partition(".")[0]) for p in leases if _taken(p) > young}
        old = [v for v in self.versions(incarnation)[:-keep] if v not in held and v not in pinned]
        for version in old:
            (self.path(incarnation, version) / COMPLETE).unlink(missing_ok=True)
            remove(self.path(incarnation, version))
        return old


def read_version(folder: Path) -> list[tuple[str, Buffer]]:
    """As WeightStore.read, of the version in `folder`."""
    out: list[tuple[str, Buffer]] = []
    for shard in _manifest(folder).shards:
        data = _read(folder / shard.file)
        if Shard(shard.file, len(data), xxhash.xxh3_64_hexdigest(data)) != shard:
            raise WeightsDamaged(f"{folder / shard.file} does not match its manifest")
        out.append((shard.file.rpartition("/")[2], data))
    return out


def open_version(folder: Path, verify: bool = True) -> list[Path]:
    """Shards of the version in `folder`. FileNotFoundError if it is not complete, WeightsDamaged if its bytes are wrong."""
    manifest = _manifest(folder)
    for shard in manifest.shards:
        if verify and Shard(shard.file, (folder / shard.file).stat().st_size, checksum(folder / shard.file)) != shard:
            raise WeightsDamaged(f"{folder / shard.file} does not match its manifest")
    return [folder / shard.file for shard in manifest.shards]


def here(folder: Path, below: Path, kept_s: float) -> Path:
    """A complete version as a folder of this host: itself, or a copy below `below`, where copies older than `kept_s` go.

    FileNotFoundError if it is not complete.
    """
    manifest = _manifest(folder)
    names = {shard.file: shard.file.rpartition("/")[2] for shard in manifest.shards}
    flat = [msgspec.structs.replace(shard, file=names[shard.file]) for shard in manifest.shards]
    own = {MANIFEST: _text(msgspec.structs.replace(manifest, shards=tuple(flat))), COMPLETE: ""}
    return fetched(folder, below, kept_s, names, own)


def _inside(manifest: Manifest, attempt: str) -> Manifest:
    """Its files stand in the folder of an attempt."""
    shards = (msgspec.structs.replace(shard, file=f"{attempt}/{shard.file}") for shard in manifest.shards)
    return msgspec.structs.replace(manifest, shards=tuple(shards))


def _text(manifest: Manifest) -> str:
    return json.dumps(msgspec.to_builtins(manifest), indent=1)


def _manifest(folder: Path) -> Manifest:
    if not (folder / COMPLETE).exists():
        raise FileNotFoundError(f"no complete version in {folder}")
    return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)


def _written(path: Path, pieces: Sequence[Buffer]) -> Shard:
    digest, size = xxhash.xxh3_64(), 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            digest.update(piece)
            size += len(piece)
    return Shard(path.name, size, digest.hexdigest())


def _read(path: Path) -> Buffer:
    if not local(path):
        return bytearray(path.read_bytes())
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)) if size else b""


def _taken(lease: Path) -> float:
    """When it was taken or renewed, by its holder's clock; one that is being written is as good as now."""
    try:
        return float(lease.read_text() or time.time())
    except FileNotFoundError:
        return 0.0

"""Text for the wikipedia task: where it lies, and how enwik8 gets there. Needs no torch."""

import gzip
import hashlib
import http.client
import lzma
import os
import urllib.request
import zipfile
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import IO

from pondertime.config import ConfigError

EXCERPT = Path(__file__).parent / "tasks" / "excerpt.txt"
HOW_TO_GET_IT = "fetch it with `pondertime data enwik8`, or give a local copy with `pondertime data enwik8 --from FILE`"
ARCHIVES = {b"PK\x03\x04": "zip", b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz"}
BLOCK = 1 << 20
# What the readers raise; RuntimeError and its NotImplementedError: a password, an unknown method.
DAMAGED = (zipfile.BadZipFile, gzip.BadGzipFile, lzma.LZMAError, zlib.error, EOFError, RuntimeError)


@dataclass(frozen=True)
class Dataset:
    """A file, its public home and what it must be."""

    name: str
    url: str
    size: int
    sha1: str


ENWIK8 = Dataset(
    name="enwik8",
    url="http://mattmahoney.net/dc/enwik8.zip",
    size=100_000_000,
    sha1="57b8363b814821dc9d47aa4d41f58733519076b2",
)


def home() -> Path:
    """The folder of the data: $PONDERTIME_DATA, or ``data`` in the current one."""
    return Path(os.environ.get("PONDERTIME_DATA") or "data")


def find(name: str | Path) -> Path:
    """The file of ``"enwik8"``, of ``"excerpt"``, or of any other path."""
    if name == "excerpt":
        return EXCERPT
    if name == ENWIK8.name:
        path = home() / ENWIK8.name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: enwik8 is not there; {HOW_TO_GET_IT}")
        if path.stat().st_size != ENWIK8.size:
            raise FileNotFoundError(f"{path}: not enwik8, which has {ENWIK8.size:,} bytes; {HOW_TO_GET_IT}")
        return path
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected enwik8, excerpt or the path of a text")
    if kind := archive_kind(path):
        raise ConfigError(f"{path}: a {kind} archive; unpack it first")
    return path


def prepare(source: Path | None = None, target_dir: Path | None = None, dataset: Dataset = ENWIK8) -> Path:
    """Put a checked copy of enwik8 into a folder and return its path.

    ``source``: a local copy, plain or packed with gzip, xz or zip; None downloads it.
    ``target_dir``: by default :func:`home`. What is there and right stays.
    """
    target_dir = home() if target_dir is None else Path(target_dir)
    target = target_dir / dataset.name
    if target.is_file() and is_right(target, dataset):
        return target
    target_dir.mkdir(parents=True, exist_ok=True)
    if source is not None:
        return unpack(Path(source), target, dataset)
    with beside(target, "download") as archive:
        download(dataset, archive)
        return unpack(archive, target, dataset)


def is_right(path: Path, dataset: Dataset = ENWIK8) -> bool:
    """Whether a file has the size and the sha1 of the dataset."""
    if path.stat().st_size != dataset.size:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha1").hexdigest() == dataset.sha1


def unpack(source: Path, target: Path, dataset: Dataset) -> Path:
    """Copy the dataset out of a plain or packed file; nothing is left where it is not what it must be."""
    with beside(target, "part") as part:
        try:
            with contents(source, dataset.name) as stream, part.open("wb") as file:
                size, sha1 = copy(stream, file, dataset.size + 1)
        except DAMAGED as error:
            raise ConfigError(f"{source}: a damaged archive ({error})") from error
        if size != dataset.size:
            found = f"more than {dataset.size:,}" if size > dataset.size else f"{size:,}"
            raise ConfigError(f"{source}: expected {dataset.size:,} bytes of {dataset.name}, got {found}")
        if sha1 != dataset.sha1:
            raise ConfigError(f"{source}: expected {dataset.name} with sha1 {dataset.sha1}, got {sha1}")
        part.replace(target)
    return target


def copy(stream: IO[bytes] | BufferedIOBase, file: BufferedIOBase, limit: int) -> tuple[int, str]:
    """Copy at most ``limit`` bytes; returns how many there were and their sha1."""
    sha1 = hashlib.sha1(usedforsecurity=False)
    size = 0
    while block := stream.read(min(BLOCK, limit - size)):
        file.write(block)
        sha1.update(block)
        size += len(block)
    return size, sha1.hexdigest()


def archive_kind(path: Path) -> str | None:
    """How a file is packed, by its first bytes, or None."""
    with path.open("rb") as file:
        start = file.read(6)
    return next((kind for magic, kind in ARCHIVES.items() if start.startswith(magic)), None)


@contextmanager
def contents(path: Path, member: str) -> Generator[IO[bytes] | BufferedIOBase]:
    """The unpacked bytes of a file; of a zip those of one member, read by name, so that no path in it is used."""
    kind = archive_kind(path)
    if kind == "zip":
        with zipfile.ZipFile(path) as archive:
            if member not in archive.namelist():
                raise ConfigError(f"{path}: expected {member} in the archive, got {', '.join(archive.namelist()[:5])}")
            with archive.open(member) as stream:
                yield stream
    else:
        opener = {"gzip": gzip.open, "xz": lzma.open}.get(kind or "", open)
        with opener(path, "rb") as stream:
            yield stream


@contextmanager
def beside(target: Path, suffix: str) -> Generator[Path]:
    """A name for a file beside another one, of this process alone, removed at the end."""
    path = target.with_name(f".{target.name}.{os.getpid()}.{suffix}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def download(dataset: Dataset, path: Path) -> None:
    """Fetch the dataset's archive, with a progress bar."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    try:
        with urllib.request.urlopen(dataset.url, timeout=60) as response, path.open("wb") as file:
            expected = int(response.headers.get("Content-Length") or 0)
            size = 0
            with Progress(*columns) as progress:
                bar = progress.add_task(dataset.url, total=expected or None)
                # An archive is smaller than what it holds: a longer answer is something else.
                while size <= dataset.size and (block := response.read(BLOCK)):
                    file.write(block)
                    size += len(block)
                    progress.update(bar, completed=size)
    except (OSError, http.client.HTTPException) as error:
        local = "`pondertime data enwik8 --from FILE` takes a local copy"
        raise OSError(f"could not download {dataset.url}: {error}; {local}") from error
    if expected and size != expected:
        raise OSError(f"the download of {dataset.url} ended after {size:,} of {expected:,} bytes; try again")

import gzip
import hashlib
import io
import lzma
import pickle
import zipfile
from pathlib import Path

import pytest

from pondertime import data
from pondertime.data import Dataset
from pondertime.tasks import Wikipedia
from test_tasks import assert_uniform, seeded

TEXT = b"".join(b"%d, " % i for i in range(1000))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    """A small stand-in for enwik8 whose public home is a file."""
    archive = tmp_path / "home.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("enwik8", TEXT)
    return Dataset("enwik8", archive.as_uri(), len(TEXT), hashlib.sha1(TEXT).hexdigest())


def pack(path: Path, kind: str, text: bytes = TEXT, member: str = "enwik8") -> Path:
    if kind == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            file.writestr(member, text)
    else:
        path.write_bytes({"gz": gzip.compress, "xz": lzma.compress, "plain": lambda text: text}[kind](text))
    return path


def assert_nothing_but(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("kind", ["plain", "gz", "xz", "zip"])
def test_a_local_copy_is_prepared(tmp_path: Path, dataset: Dataset, kind: str):
    target = data.prepare(pack(tmp_path / "copy", kind), tmp_path / "data", dataset)
    assert target == tmp_path / "data" / "enwik8" and target.read_bytes() == TEXT
    assert_nothing_but(tmp_path / "data", "enwik8")


def test_it_is_downloaded_once(tmp_path: Path, dataset: Dataset):
    target = data.prepare(None, tmp_path / "data", dataset)
    assert target.read_bytes() == TEXT
    assert_nothing_but(tmp_path / "data", "enwik8")
    written = target.stat().st_mtime_ns
    (tmp_path / "home.zip").unlink()
    assert data.prepare(None, tmp_path / "data", dataset).stat().st_mtime_ns == written
    target.write_bytes(TEXT[::-1])
    with pytest.raises(OSError, match=r"could not download file:.*--from FILE` takes a local copy"):
        data.prepare(None, tmp_path / "data", dataset)


def test_a_download_that_breaks_off(tmp_path: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch):
    class Response(io.BytesIO):
        headers = {"Content-Length": "2000"}  # noqa: RUF012

    monkeypatch.setattr("urllib.request.urlopen", lambda url, timeout: Response(b"x" * 1500))
    with pytest.raises(OSError, match=r"ended after 1,500 of 2,000 bytes; try again"):
        data.prepare(None, tmp_path / "data", dataset)
    assert_nothing_but(tmp_path / "data")


@pytest.mark.parametrize("kind", ["plain", "gz", "xz", "zip"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[:-1], r"expected 4,890 bytes of enwik8, got 4,889"),
        (TEXT + b"x" * 10_000_000, r"expected 4,890 bytes of enwik8, got more than 4,890"),
        (TEXT[::-1], r"expected enwik8 with sha1 \w{40}, got \w{40}"),
        (b"", r"expected 4,890 bytes of enwik8, got 0"),
    ],
    ids=["short", "long", "other", "empty"],
)
def test_another_text_is_refused(tmp_path: Path, dataset: Dataset, kind: str, text: bytes, message: str):
    with pytest.raises(ValueError, match=message):
        data.prepare(pack(tmp_path / "copy", kind, text), tmp_path / "data", dataset)
    assert_nothing_but(tmp_path / "data")


@pytest.mark.parametrize("kind", ["gz", "xz", "zip"])
def test_a_damaged_archive_is_refused(tmp_path: Path, dataset: Dataset, kind: str):
    packed = pack(tmp_path / "copy", kind).read_bytes()
    middle = len(packed) // 2
    broken = [
        packed[:middle],
        packed[:middle] + bytes(b ^ 255 for b in packed[middle : middle + 40]) + packed[middle + 40 :],
    ]
    for content in broken:
        (tmp_path / "copy").write_bytes(content)
        with pytest.raises(ValueError, match=r"copy: a damaged archive"):
            data.prepare(tmp_path / "copy", tmp_path / "data", dataset)
    assert_nothing_but(tmp_path / "data")


@pytest.mark.parametrize("member", ["../enwik8", "/tmp/enwik8", "folder/enwik8", "other"])
def test_no_path_in_an_archive_is_used(tmp_path: Path, dataset: Dataset, member: str):
    source = pack(tmp_path / "copy.zip", "zip", member=member)
    with pytest.raises(ValueError, match=rf"expected enwik8 in the archive, got {member}"):
        data.prepare(source, tmp_path / "data", dataset)
    assert_nothing_but(tmp_path / "data")
    assert_nothing_but(tmp_path, "data", "copy.zip", "home.zip")


def test_what_was_there_survives_a_bad_copy(tmp_path: Path, dataset: Dataset):
    old = tmp_path / "enwik8"
    old.write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"got 3"):
        data.prepare(pack(tmp_path / "copy", "plain", b"bad"), tmp_path, dataset)
    assert old.read_bytes() == b"mine"
    with pytest.raises(FileNotFoundError):
        data.prepare(tmp_path / "missing", tmp_path, dataset)


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PONDERTIME_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    missing = r"data/enwik8: enwik8 is not there; .*`pondertime data enwik8`.*--from FILE"
    with pytest.raises(FileNotFoundError, match=missing):
        data.find("enwik8")
    with pytest.raises(FileNotFoundError, match=missing):
        Wikipedia().sample(1, seeded())
    with pytest.raises(FileNotFoundError, match=r"no such file; expected enwik8, excerpt or the path of a text"):
        data.find(tmp_path / "missing")
    with pytest.raises(FileNotFoundError, match=r"no such file"):
        data.find(tmp_path)
    with pytest.raises(ValueError, match=r"copy: a xz archive; unpack it first"):
        data.find(pack(tmp_path / "copy", "xz"))

    monkeypatch.setenv("PONDERTIME_DATA", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "enwik8").write_bytes(TEXT)
    with pytest.raises(FileNotFoundError, match=r"elsewhere/enwik8: not enwik8, which has 100,000,000 bytes"):
        data.find("enwik8")
    with (tmp_path / "elsewhere" / "enwik8").open("wb") as file:
        file.truncate(100_000_000)
    assert data.find("enwik8") == tmp_path / "elsewhere" / "enwik8"


def test_the_excerpt_is_whole_pages_and_used_by_name():
    text = data.find("excerpt").read_bytes()
    assert hashlib.sha1(text).hexdigest() == "3d11ba5c827d6c3df960582c954524830d01a32e"
    assert text.startswith(b"  <page>\n") and text.endswith(b"  </page>\n")
    assert data.EXCERPT.with_name("excerpt.LICENSE.md").is_file()
    task = Wikipedia(data="excerpt")
    assert task.sample(4, seeded()).input.shape == (500, 4)
    assert task.render(task.sample(1, seeded()), 0).encode() in text


def test_the_last_twentieth_is_held_out(tmp_path: Path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)))
    task = pickle.loads(pickle.dumps(Wikipedia(data=path, length=4)))
    seen = task.sample(20_000, seeded())
    assert set(seen.input.unique().tolist()) | set(seen.target.unique().tolist()) == set(range(190))
    assert_uniform(seen.input[0] // 31, 0, 5)
    held_out = task.sample(500, seeded(), split="held-out")
    assert set(held_out.input.unique().tolist()) | set(held_out.target.unique().tolist()) == set(range(190, 200))
    with pytest.raises(ValueError, match=r"split: expected train or held-out, got 'test'"):
        task.sample(1, seeded(), split="test")


@pytest.mark.parametrize("size", [0, 1, 100])
def test_a_text_that_is_too_short(tmp_path: Path, size: int):
    path = tmp_path / "text"
    path.write_bytes(b"x" * size)
    with pytest.raises(ValueError, match=r"data: expected more than 100 bytes to train in .*text, got"):
        Wikipedia(data=path, length=100).sample(1, seeded())

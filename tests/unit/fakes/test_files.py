"""Files that stand for those on the disk, under the same paths."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fxmem.fakes.files import FakeFiles


def test_a_folder_takes_its_files_along(tmp_path: Path) -> None:
    """As transformers' ``Trainer`` renames a checkpoint's folder once all is written."""
    files = FakeFiles()
    (tmp_path / "new").mkdir()
    with files.watch():
        files.write(tmp_path / "new" / "model.pt", b"kept")
        (tmp_path / "new").rename(tmp_path / "done")
        assert (tmp_path / "done" / "model.pt").read_bytes() == b"kept"
        assert not (tmp_path / "new" / "model.pt").exists()
    assert not (tmp_path / "done" / "model.pt").exists()


def test_what_is_on_the_disk_stays(tmp_path: Path) -> None:
    files, own, other = FakeFiles(), tmp_path / "own.pt", tmp_path / "other.pt"
    own.write_bytes(b"own")
    with files.watch():
        files.write(own, b"kept")
        shutil.copy2(own, other)
        assert own.read_bytes() == other.read_bytes() == b"kept"
        os.unlink(own)
        assert own.read_bytes() == b"own"
        files.write(tmp_path / "new.pt", b"kept")
        os.replace(tmp_path / "new.pt", own)
        assert own.read_bytes() == b"kept"
    assert own.read_bytes() == b"own" and not other.exists()


def test_what_code_writes_itself_is_what_it_reads(tmp_path: Path) -> None:
    files, path = FakeFiles(), tmp_path / "saved.pt"
    with files.watch():
        files.write(path, b"kept")
        path.write_bytes(b"written")
        assert path.read_bytes() == b"written"
    assert path.read_bytes() == b"written"

"""Fetch published files and check them by md5, so that a damaged file is an error now and not a strange accuracy later.

If a file was compressed again, the md5 of its decompressed content decides.
"""

import bz2
import gzip
import hashlib
import sys
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path

from fastff.atomic import replacing
from fastff.progress import make_bar

from .catalogue import File

_CHUNK = 1 << 18
_TIMEOUT = 30.0  # seconds without an answer
_UNPACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.decompress, ".bz2": bz2.decompress}


def checked(folder: Path, file: File, urls: tuple[str, ...]) -> bytes:
    """The bytes of the published file, decompressed unless it is an archive. `ValueError` if it is another file."""
    path = folder / file.name
    data = path.read_bytes()
    if reason := wrong(data, file):
        raise ValueError(
            f"{path} is damaged, incomplete or another file: {reason}. "
            f"Delete it and run again to download it, or replace it with the file from {urls[0]}"
        )
    return _UNPACK[path.suffix](data) if file.contents else data


def wrong(data: bytes, file: File) -> str:
    """How these bytes differ from the published file; "" if they do not, or if the reader checks what is in them."""
    if not file.md5:
        return ""
    found = hashlib.md5(data, usedforsecurity=False).hexdigest()
    if found == file.md5:
        return ""
    if file.contents:
        try:
            inside = _UNPACK[Path(file.name).suffix](data)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            return f"its {len(data)} bytes have md5 {found}, expected {file.md5}, and do not decompress ({error})"
        if hashlib.md5(inside, usedforsecurity=False).hexdigest() == file.contents:
            return ""
    return f"its {len(data)} bytes have md5 {found}, expected {file.md5}"


def download(folder: Path, file: File, urls: tuple[str, ...], show: bool) -> list[str]:
    """Download a file from the first location that has it. Returns [] on success, else the reason for each location.

    The file is written as a whole after the check, so that several processes can download it at once.
    """
    target = folder / file.name
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for url in (base + file.name for base in urls):
        try:
            data = _fetch(url, show)
            reason = wrong(data, file)
            if not reason:
                with replacing(target, binary=True) as out:
                    out.write(data)
                return []
        except (OSError, HTTPException) as error:
            reason = str(error) or type(error).__name__
        reasons.append(f"{url}: {reason}")
    return reasons


def _fetch(url: str, show: bool) -> bytes:
    found = bytearray()
    with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
        total = int(answer.headers.get("Content-Length", 0)) or None
        with _bar(url, total, show) as advance:
            while chunk := answer.read(_CHUNK):
                found += chunk
                advance(len(chunk))
    if total and len(found) < total:
        raise ConnectionError(f"the connection ended after {len(found)} of {total} bytes")
    return bytes(found)


@contextmanager
def _bar(url: str, total: int | None, show: bool) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr; a single line without a terminal or without rich."""
    try:
        from rich.progress import DownloadColumn, TimeRemainingColumn

        bar = make_bar(DownloadColumn(), TimeRemainingColumn(), show=show)
    except ImportError:
        bar = None
    if bar is None or bar.disable:
        if show:
            print(f"downloading {url}", file=sys.stderr, flush=True)
        yield lambda count: None
        return
    with bar:
        task = bar.add_task(url.rsplit("/", 1)[-1], total=total)
        yield lambda count: bar.advance(task, count)

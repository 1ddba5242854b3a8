"""Where to download a source distribution, according to the user's own pip configuration.

pip itself does not download: for a source distribution it would build metadata, which runs the package's code. pip is
only asked for its configuration (`pip config list`, and its help text for the default index). The places that it names
(simple indexes, by http or file, and `find-links`) are read here for names and checksums. Nothing is ever run.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urljoin, urlsplit

from trailmark.errors import DataError
from trailmark.plain_files import read_plain

SUFFIXES = (".tar.gz", ".zip", ".tgz", ".tar.bz2", ".tar.xz")
MOST_PAGE = 64 << 20
WEB = ("http", "https")


@dataclass(frozen=True)
class Place:
    """A file on an index. `sha256` is the index's checksum, "" if it gives none."""

    url: str
    file: str
    sha256: str = ""


@dataclass(frozen=True)
class Pip:
    indexes: tuple[str, ...]
    links: tuple[str, ...]
    cert: str = ""
    proxy: str = ""
    timeout: float = 60.0

    def client(self) -> Any:
        import ssl

        import httpx

        try:
            verify = ssl.create_default_context(cafile=self.cert) if self.cert else True
            return httpx.Client(verify=verify, proxy=self.proxy or None, timeout=self.timeout, follow_redirects=True)
        except (OSError, ValueError) as e:
            raise DataError(f"pip's settings 'cert' and 'proxy' cannot be used ({e}).") from None


def pip_says() -> Pip:
    """The user's pip configuration: the environment overrides the sections `download` and `global` of the files."""
    found: dict[str, str] = {}
    for line in _pip("config", "list").splitlines():
        key, equals, value = line.partition("=")
        if equals:
            found[key.strip()] = str(ast.literal_eval(value.strip()))

    def ask(name: str) -> str:
        return next((found[k] for k in (f":env:.{name}", f"download.{name}", f"global.{name}") if k in found), "")

    indexes: list[str] = []
    if ask("no-index").lower() not in ("1", "true", "yes", "on"):
        indexes = [ask("index-url") or _default_index(), *ask("extra-index-url").split()]
    timeout = ask("default-timeout") or ask("timeout")
    return Pip(tuple(indexes), tuple(ask("find-links").split()), ask("cert"), ask("proxy"), float(timeout or 60))


def _pip(*words: str) -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--disable-pip-version-check", *words],
            capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "2000", "PIP_NO_COLOR": "1"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise DataError(f"pip cannot be asked where packages come from ({e}).") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise DataError(f"pip cannot be asked where packages come from ({why}).")
    return done.stdout


def _default_index() -> str:
    """The index that pip uses if none is configured, as its help says."""
    found = re.search(r"--index-url.*?\(default\s+(\S+?)\)", _pip("download", "--help"), re.DOTALL)
    if not found:
        raise DataError("pip does not say which index it uses: set one with `pip config set global.index-url URL`.")
    return found.group(1)


def find(pip: Pip, client: Any, name: str, version: str, file: str = "") -> tuple[list[Place], list[str]]:
    """All places of the source distribution, in pip's order, and why some places could not be asked."""
    wanted, places, problems = plain_name(name), [], []
    pages = [*pip.links, *(f"{u.rstrip('/')}/{wanted}/" for u in pip.indexes)]
    for url in pages:
        try:
            links = list(_links(client, url))
        except (OSError, ValueError) as e:
            problems.append(f"{_shown(url)}: {e}")
            continue
        places += [p for p in links if (p.file == file if file else _is_sdist(p.file, wanted, version))]
    return places, problems


def plain_name(name: str) -> str:
    """A project's name as indexes spell it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _is_sdist(file: str, name: str, version: str) -> bool:
    suffix = next((s for s in SUFFIXES if file.endswith(s)), None)
    stem, dash, found = file.removesuffix(suffix or "").rpartition("-")
    return suffix is not None and bool(dash) and plain_name(stem) == name and found == version


def _shown(url: str) -> str:
    """An address without user name and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def local_path(url: str) -> Path | None:
    parts = urlsplit(url)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in WEB else Path(url).expanduser()


def _links(client: Any, url: str) -> Iterable[Place]:
    here = local_path(url)
    if here is None:
        return _of_page(*_page(client, url))
    if here.is_dir() and (here / "index.html").is_file():
        here = here / "index.html"
    if here.is_dir():
        return [Place(p.as_uri(), p.name) for p in sorted(here.absolute().iterdir()) if p.is_file()]
    if not here.is_file():
        return []
    return _of_page(str(read_plain(here), "utf-8", "replace"), here.absolute().as_uri())


def _page(client: Any, url: str) -> tuple[str, str]:
    import httpx

    try:
        with client.stream("GET", url, headers={"Accept": "text/html"}) as answer:
            if answer.status_code == 404:
                return "", url
            answer.raise_for_status()
            data = b""
            for part in answer.iter_bytes():
                data += part
                if len(data) > MOST_PAGE:
                    raise ValueError("its page is too long")
            return data.decode("utf-8", "replace"), str(answer.url)
    except httpx.HTTPStatusError as e:
        raise ValueError(f"answers {e.response.status_code}") from None
    except (httpx.HTTPError, httpx.InvalidURL) as e:
        raise ValueError(str(e) or type(e).__name__) from None


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.base = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") or ""
        if tag == "a" and target:
            self.found.append(target)
        elif tag == "base" and target:
            self.base = target


def _of_page(page: str, url: str) -> list[Place]:
    anchors = _Anchors()
    anchors.feed(page)
    made = []
    for link in anchors.found:
        whole = urlsplit(urljoin(urljoin(url, anchors.base), link))
        if whole.scheme in WEB or (whole.scheme == "file" and urlsplit(url).scheme == "file"):
            said = re.fullmatch(r"sha256=([0-9a-f]{64})", whole.fragment)
            file = unquote(whole.path).rpartition("/")[2]
            made.append(Place(whole._replace(fragment="").geturl(), file, said.group(1) if said else ""))
    return made

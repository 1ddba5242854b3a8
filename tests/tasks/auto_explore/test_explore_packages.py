"""Source distributions: found by pip's configuration, checked, and unpacked without running code or
following links."""

import hashlib
import io
import json
import os
import tarfile
import zipfile

import pytest

from trailmark.errors import DataError, TaskError
from trailmark.tasks import get_task
from trailmark.tasks.auto_explore import pip_index
from trailmark.tasks.auto_explore.packages import (
    Sdist,
    fetch_sdist,
    find_repository,
    parse_package,
    read_trees,
    repository,
)
from trailmark.tasks.auto_explore.pip_index import Pip, find, pip_says
from trailmark.tasks.auto_explore.unpack import unpack

FILES = {"demo-1.0/demo/core.py": b"x = 1\n", "demo-1.0/README.md": b"Demo\n",
         "demo-1.0/setup.py": b"open('ran', 'w')\nraise SystemExit('the code was run')\n"}  # fmt: skip


def tar(path, files=FILES, links=()):
    with tarfile.open(path, "w:gz") as t:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o777
            t.addfile(info, io.BytesIO(data))
        for name, kind, target in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            t.addfile(info)
    return path


@pytest.fixture
def index(tmp_path):
    """A simple index in a folder, as pip reads it, and its only file."""
    files = tmp_path / "index" / "files"
    files.mkdir(parents=True)
    archive = tar(files / "demo-1.0.tar.gz")
    sha = hashlib.sha256(archive.read_bytes()).hexdigest()
    page = tmp_path / "index" / "simple" / "demo" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(
        f'<a href="../../files/demo-1.0.tar.gz#sha256={sha}">demo-1.0.tar.gz</a><a '
        'href="../../files/demo-1.0.whl">w</a>'
    )
    return Pip(((tmp_path / "index" / "simple").as_uri(),), ()), sha


def test_fetched_checked_and_unpacked(index, tmp_path):
    pip, sha = index
    package = Sdist("Demo", "1.0", sha)
    folder = repository(package, tmp_path / "cache", pip)
    assert folder == tmp_path / "cache" / "repos" / f"Demo-1.0-{sha[:16]}"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == [
        "README.md",
        "demo/core.py",
        "setup.py",
    ]
    assert not os.access(folder / "setup.py", os.X_OK) and not os.path.exists("ran")
    assert sorted(p.name for p in (tmp_path / "cache" / "sdists").iterdir()) == ["demo-1.0.tar.gz"]


def test_a_filled_cache_asks_nobody(index, tmp_path, monkeypatch):
    pip, sha = index
    made = repository(Sdist("demo", "1.0", sha), tmp_path / "cache", pip)
    monkeypatch.setattr("trailmark.tasks.auto_explore.packages.pip_says", lambda: pytest.fail("pip was asked"))
    assert repository(Sdist("demo", "1.0", sha), tmp_path / "cache") == made
    assert repository(Sdist("demo", "1.0"), tmp_path / "cache") == made
    assert fetch_sdist(Sdist("demo", "1.0", sha, "demo-1.0.tar.gz"), tmp_path / "cache").name == "demo-1.0.tar.gz"


def test_find_links_and_archives_put_there_by_hand(tmp_path):
    (tmp_path / "links").mkdir()
    tar(tmp_path / "links" / "demo-1.0.tar.gz")
    pip = Pip((), (str(tmp_path / "links"),))
    assert (repository(Sdist("demo", "1.0"), tmp_path / "a", pip) / "README.md").read_text() == "Demo\n"
    (tmp_path / "b" / "sdists").mkdir(parents=True)
    tar(tmp_path / "b" / "sdists" / "demo-1.0.tar.gz")
    assert (repository(Sdist("demo", "1.0"), tmp_path / "b", Pip((), ())) / "README.md").is_file()


def test_an_index_over_http(index, tmp_path):
    import httpx

    _, sha = index
    data = (tmp_path / "index" / "files" / "demo-1.0.tar.gz").read_bytes()

    def answer(request):
        pages = {
            "/simple/demo/": httpx.Response(302, headers={"location": "/moved/demo/"}),
            "/moved/demo/": httpx.Response(
                200, text=f'<base href="/files/"><a href="demo-1.0.tar.gz#sha256={sha}">x</a>'
            ),
            "/files/demo-1.0.tar.gz": httpx.Response(200, content=data),
        }
        return pages.get(request.url.path, httpx.Response(404))

    class Web(Pip):
        def client(self):
            return httpx.Client(transport=httpx.MockTransport(answer), follow_redirects=True)

    web = Web(("http://index.invalid/none", "http://index.invalid/simple"), ())
    assert fetch_sdist(Sdist("demo", "1.0", sha), tmp_path / "cache", web).read_bytes() == data


def test_a_server_that_fails_is_named_without_its_password(tmp_path):
    import httpx

    class Web(Pip):
        def client(self):
            return httpx.Client(transport=httpx.MockTransport(lambda r: httpx.Response(500)))

    with pytest.raises(DataError, match="is not available .*index.invalid/simple/demo/: answers 500") as e:
        fetch_sdist(Sdist("demo", "1.0"), tmp_path, Web(("http://me:secret@index.invalid/simple",), ()))
    assert "secret" not in str(e.value)


@pytest.mark.parametrize("says_so", [True, False])
def test_another_checksum_is_an_error_and_nothing_is_kept(index, tmp_path, says_so):
    pip, sha = index
    if not says_so:
        page = tmp_path / "index" / "simple" / "demo" / "index.html"
        page.write_text(page.read_text().replace(f"#sha256={sha}", ""))
    with pytest.raises(DataError, match=f"does not have the right checksum: .*{sha}.*Nothing was kept"):
        repository(Sdist("demo", "1.0", "0" * 64), tmp_path / "cache", pip)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def test_a_spoilt_cache_is_filled_again(index, tmp_path):
    pip, sha = index
    place = tmp_path / "cache" / "sdists" / "demo-1.0.tar.gz"
    place.parent.mkdir(parents=True)
    place.write_bytes(b"spoilt")
    assert fetch_sdist(Sdist("demo", "1.0", sha, "demo-1.0.tar.gz"), tmp_path / "cache", pip) == place
    assert hashlib.sha256(place.read_bytes()).hexdigest() == sha


def test_what_no_index_has(index, tmp_path):
    pip, _ = index
    with pytest.raises(DataError, match="demo 2.0 is not available .no index of pip's configuration has it"):
        repository(Sdist("demo", "2.0"), tmp_path / "cache", pip)


def test_names_are_compared_as_indexes_spell_them():
    assert pip_index.plain_name("My_Pack.Age--x") == "my-pack-age-x"
    assert pip_index._is_sdist("My_Pack-1.0.tar.gz", "my-pack", "1.0")
    assert not pip_index._is_sdist("my_pack-1.0-py3-none-any.whl", "my-pack", "1.0")
    assert not pip_index._is_sdist("my_pack-1.0.1.tar.gz", "my-pack", "1.0")


def test_a_page_cannot_point_to_local_files():
    page = '<a href="file:///etc/passwd">demo-1.0.tar.gz</a><a href="ftp://x/demo-1.0.tar.gz">x</a>'
    assert pip_index._of_page(page, "https://index.invalid/simple/demo/") == []


def test_pips_own_configuration(monkeypatch, tmp_path):
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = http://a.invalid/simple\n[download]\nindex-url = http://b.invalid/simple\n"
    )
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_CERT", "PIP_DEFAULT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "http://c.invalid/simple  http://d.invalid/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", "/some/where")
    said = pip_says()
    assert said.indexes == ("http://b.invalid/simple", "http://c.invalid/simple", "http://d.invalid/simple")
    assert said.links == ("/some/where",)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert pip_says().indexes == ()


@pytest.mark.parametrize("settings", [{"cert": "none.pem"}, {"proxy": "nonsense://x"}])
def test_settings_of_pips_that_cannot_be_used(tmp_path, settings):
    with pytest.raises(DataError, match="pip's settings 'cert' and 'proxy' cannot be used"):
        fetch_sdist(Sdist("demo", "1.0"), tmp_path, Pip((), (), **settings))


def test_pips_default_index_comes_from_its_help(monkeypatch):
    monkeypatch.setattr(pip_index, "_pip", lambda *words: "" if words[0] == "config" else
                        "-i, --index-url <url>  Base URL (default\n  https://index.invalid/simple). This "
                        "should")  # fmt: skip
    assert pip_says().indexes == ("https://index.invalid/simple",)
    monkeypatch.setattr(pip_index, "_pip", lambda *words: "")
    with pytest.raises(DataError, match="pip does not say which index"):
        pip_says()


def test_the_real_pip_names_a_default():
    assert pip_index._default_index().startswith("https://")


@pytest.mark.parametrize("name", ["/etc/x.py", "demo-1.0/../../x.py", "..", "demo-1.0/a\\..\\x.py", "C:/x.py"])
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_archives_that_lead_out_are_refused(tmp_path, name, kind):
    if kind == "tar":
        tar(tmp_path / "a", {**FILES, name: b"bad"})
    else:
        with zipfile.ZipFile(tmp_path / "a", "w") as z:
            for n, data in {**FILES, name: b"bad"}.items():
                info = zipfile.ZipInfo("x")
                info.filename = n
                z.writestr(info, data)
    with pytest.raises(DataError, match="leads out of its folder; it is not unpacked"):
        unpack(tmp_path / "a", tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_links_and_devices_are_left_out(tmp_path):
    links = [("demo-1.0/link.py", tarfile.SYMTYPE, "/etc/passwd"), ("demo-1.0/hard.py", tarfile.LNKTYPE, "/etc/passwd"),
             ("demo-1.0/up", tarfile.SYMTYPE, ".."), ("demo-1.0/pipe.py", tarfile.FIFOTYPE, ""),
             ("demo-1.0/null.py", tarfile.CHRTYPE, "")]  # fmt: skip
    made = unpack(tar(tmp_path / "a.tar.gz", links=links), tmp_path / "out")
    assert sorted(p.name for p in made.iterdir()) == ["README.md", "demo", "setup.py"]


def test_a_file_under_a_link_stays_inside(tmp_path):
    """The link is not made, so what the archive wanted to write through it lands in a plain folder."""
    outside = tmp_path / "outside"
    outside.mkdir()
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as t:
        link = tarfile.TarInfo("demo-1.0/way")
        link.type, link.linkname = tarfile.SYMTYPE, str(outside)
        t.addfile(link)
        inner = tarfile.TarInfo("demo-1.0/way/x.py")
        inner.size = 3
        t.addfile(inner, io.BytesIO(b"bad"))
    unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert not list(outside.iterdir()) and (tmp_path / "out" / "way" / "x.py").read_bytes() == b"bad"


def test_zip_archives(tmp_path):
    with zipfile.ZipFile(tmp_path / "demo.zip", "w") as z:
        for name, data in FILES.items():
            z.writestr(name, data)
        link = zipfile.ZipInfo("demo-1.0/link.py")
        link.external_attr = 0o120777 << 16
        z.writestr(link, "/etc/passwd")
    made = unpack(tmp_path / "demo.zip", tmp_path / "out")
    assert sorted(p.name for p in made.iterdir()) == ["README.md", "demo", "setup.py"]


def test_archives_too_large_or_broken(tmp_path):
    archive = tar(tmp_path / "a.tar.gz")
    for options in ({"most_files": 2}, {"most_bytes": 10}):
        with pytest.raises(DataError, match="holds more than"):
            unpack(archive, tmp_path / "out", **options)
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:60])
    (tmp_path / "no.tar.gz").write_bytes(b"no archive")
    for name in ("cut.tar.gz", "no.tar.gz", "none.tar.gz"):
        with pytest.raises(DataError, match=f"{name}: cannot be unpacked"):
            unpack(tmp_path / name, tmp_path / "out")
    with pytest.raises(DataError, match="cannot be unpacked"):
        unpack(tar(tmp_path / "twice.tar.gz", {"d/a.py": b"", "d/a.py/b.py": b""}), tmp_path / "out")
    assert not (tmp_path / "out").exists() and not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_a_folder_called_dot_is_the_folder_itself(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as t:
        top = tarfile.TarInfo(".")
        top.type = tarfile.DIRTYPE
        t.addfile(top)
        file = tarfile.TarInfo("./demo-1.0/x.py")
        file.size = 3
        t.addfile(file, io.BytesIO(b"x=1"))
    made = unpack(tmp_path / "a.tar.gz", tmp_path / "out")
    assert [(p.name, p.read_bytes()) for p in made.iterdir()] == [("x.py", b"x=1")]


def test_what_is_too_large_is_refused_from_its_headers(tmp_path):
    """Nothing behind the header that is one too many is read: here there is nothing behind it at all."""
    big = tarfile.TarInfo("demo-1.0/big.py")
    big.size = 1 << 40
    (tmp_path / "big.tar").write_bytes(big.tobuf())
    links = [(f"demo-1.0/{i}.py", tarfile.SYMTYPE, "x") for i in range(4)]
    tar(tmp_path / "links.tar", {}, links=links)
    for name, options in (("big.tar", {}), ("links.tar", {"most_files": 3})):
        with pytest.raises(DataError, match="holds more than"):
            unpack(tmp_path / name, tmp_path / "out", **options)
    with pytest.raises(DataError, match="more than 64 deep"):
        unpack(tar(tmp_path / "deep.tar", {"d/" * 65 + "x.py": b""}), tmp_path / "out")
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


def test_what_is_no_package():
    assert parse_package("click==8.1.7") == Sdist("click", "8.1.7")
    assert parse_package("click==8.1.7#sha256=" + "a" * 64).sha256 == "a" * 64
    for words in ("click", "click==", "==1", "../x==1", "click==../1", "click==1#sha256=zz"):
        with pytest.raises(DataError):
            parse_package(words)


def test_tasks_over_packages(index, tmp_path, monkeypatch):
    """A task folder with file_trees.json fetches what it needs through pip's configuration."""
    pip, sha = index
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "tasks_train.jsonl").write_text(
        json.dumps({"repo": "demo", "version": "1.0", "query": "x?", "target": "demo/core.py"}) + "\n"
    )
    tree = {"demo": {"version": "1.0", "sdist": "demo-1.0.tar.gz", "sha256": sha, "license": "MIT", "files": {}}}
    (folder / "file_trees.json").write_text(json.dumps(tree))
    monkeypatch.setattr("trailmark.tasks.auto_explore.packages.pip_says", lambda: pip)
    source = get_task("auto-explore", tasks=str(folder / "tasks_train.jsonl"), cache=str(tmp_path / "cache"))
    world = source.make()
    world.reset(source.tasks("all")[0])
    assert world.step("id demo/core.py").outcome.success
    with pytest.raises(TaskError, match="needs demo 2.0, but file_trees.json has 1.0"):
        find_repository("demo", "2.0", None, read_trees(folder / "file_trees.json"))
    (folder / "file_trees.json").write_text('{"demo": {"version": "1.0"}}')
    with pytest.raises(DataError, match="key 'sdist': package 'demo' needs it"):
        read_trees(folder / "file_trees.json")


def test_find_asks_links_before_indexes(index, tmp_path):
    pip, _ = index
    (tmp_path / "ours").mkdir()
    tar(tmp_path / "ours" / "demo-1.0.tar.gz")
    places, problems = find(Pip(pip.indexes, (str(tmp_path / "ours"),)), None, "demo", "1.0")
    assert ["/ours/" in p.url for p in places] == [True, False] and problems == []

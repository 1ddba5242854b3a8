"""Ways out of the repository, tried and refused."""

import os
import random

import pytest

from trailmark.tasks import get_task

SECRET = "the secret outside"


@pytest.fixture
def guarded(repo, tmp_path, monkeypatch):
    """A world in a repository beside a secret, and a watch on every file that is opened and every process started."""
    outside = tmp_path / "outside.py"
    outside.write_text(SECRET)
    (tmp_path / "repository.py").write_text(SECRET)  # its path begins like the repository's
    (repo / "out.py").symlink_to(outside)
    (repo / "way").symlink_to(tmp_path)
    (repo / "loop.py").symlink_to(repo / "loop.py")
    os.link(outside, repo / "hard.py")
    (repo / "$(touch pwned).py").write_text("innocent\n")
    (repo / "a; touch pwned;.py").write_text("innocent\n")
    os.mkfifo(repo / "pipe.py")
    source = get_task("auto-explore", repo=str(repo), target="setup.py", horizon=10**6)
    world = source.make()
    world.reset(source.tasks("all")[0])
    opened = []
    real = os.open

    def watched(path, flags, *args, **kwargs):
        opened.append((os.fspath(path), flags, kwargs.get("dir_fd")))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("a shell"))
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *_, **__: pytest.fail("a process"))
    return world, opened


REFUSED = [
    "cat ../outside.py", "cat src/../../outside.py", "cd ..", "cd ../..", "ls ..", "ls ../", "cat ./../outside.py",
    "cat ../repository.py",
    "cat /etc/passwd", "cd /", "ls /", "cat //etc/passwd", "cat ~/x.py", "cat ~root/x.py", "id ../outside.py",
    "head ../outside.py",
    "tail -n 3 /etc/passwd", "cat out.py", "cat way/outside.py", "cd way", "ls way", "id out.py", "cat loop.py",
    "cat pipe.py", "id pipe.py", "cat hard.py", "head hard.py",
    "cat setup.py ../outside.py", "cat setup.py /etc/passwd", "cat setup.py README.md",
    "cat setup.py; cat ../outside.py",
    "cat setup.py;cat ../outside.py", "cat setup.py | cat", "cat setup.py && ls", "cat $(echo ../outside.py)",
    "cat `echo setup.py`", "cat $HOME/x.py",
    "cat *.py", "cat {setup,x}.py", "cat < setup.py", "ls > x", "cat setup.py\ncat ../outside.py", "cat\nsetup.py",
    "cat setup.py\0", "cat \0",
    "cat setup.py\x1b[2J", "cat /dev/zero", "cat /dev/stdin", "cat /proc/self/environ", "cat ..\\outside.py",
    "cat C:\\x.py", "cat C:/x.py", "cat \\\\host\\x.py",
    "head -n 99999999999999999999 setup.py", "head -c 5 setup.py", "cat -- setup.py", "cat .hidden/secret.py",
    "cat .env.py", "cat " + "../" * 900 + "etc/passwd",
    "cat " + "a/" * 1500 + "x.py", "cat \u202esetup.py", "cat " + "s" * 3000, "id", "cat '' ",
]  # fmt: skip


@pytest.mark.parametrize("command", REFUSED)
def test_refused(guarded, command):
    world, opened = guarded
    step = world.step(command)
    assert world.result.splitlines()[-1].startswith("Error"), world.result
    assert not step.over and world.cwd == "" and not world.catted and opened == []


@pytest.mark.parametrize(
    "command",
    [
        "python -c 1",
        "pip install x",
        "echo x",
        "rm -rf .",
        "exit",
        "sudo cat x",
        "sh -c ls",
        "CAT setup.py",
        "cat" * 2000,
    ],
)
def test_not_a_command(guarded, command):
    world, opened = guarded
    world.step(command)
    assert world.result.startswith("Warning") and len(world.result) < 200 and opened == []


def test_names_like_commands_are_only_names(guarded, repo):
    world, _ = guarded
    for name in ("$(touch pwned).py", "a; touch pwned;.py"):
        command = f'cat "{name}"'
        assert command in world.commands
        world.step(command)
        assert world.result.endswith("innocent\n")
    assert not (repo / "pwned").exists() and not os.path.exists("pwned")


def test_10000_fuzzed_commands(guarded, repo, tmp_path, digest):
    """None raises, none shows what is outside, none opens anything but single names under the root, nothing is
    changed."""
    world, opened = guarded
    draw, before = random.Random(0), digest(repo)
    verbs = ["cd", "ls", "cat", "head", "tail", "id", "rm", "", "cat -n 3", "head -n", "tail -2"]
    parts = ["..", ".", "/", "//", "src", "deep", "inner.py", "setup.py", "my file.py", "out.py", "way", "loop.py",
             "pipe.py", "hard.py", "outside.py", "~", "*", "$(ls)", ";",
             "|", "&&", "'", '"', "\\", "\n", "\0", "\x1b", "\ud800", "\u202e", " ", "-", "é", "repository.py", "etc",
             "passwd", str(tmp_path), str(repo), "%2e%2e", "1."]  # fmt: skip
    task = world.source.tasks("all")[0]
    for _ in range(10_000):
        if draw.random() < 0.5:
            words = [
                draw.choice(verbs),
                *("/".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(draw.randint(0, 2))),
            ]
            reply = " ".join(words)
        else:
            reply = "".join(draw.choices([*parts, *verbs, "cat ", " "], k=draw.randint(0, 8)))
        step = world.step(reply)
        assert SECRET not in step.observation.text and "root:" not in step.observation.text
        if step.over or world.steps >= 15:
            world.reset(task)
    names = {p for p, _, _ in opened}
    assert names - {str(repo)} <= {
        "src",
        "deep",
        "docs",
        *(p.name for p in repo.rglob("*.*") if p.is_file() and not p.is_symlink()),
    }
    assert all(fd is not None or p == str(repo) for p, _, fd in opened)
    assert all(flags & os.O_NOFOLLOW and not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) for _, flags, _ in opened)
    assert opened and digest(repo) == before

"""`run` and `Popen` of `subprocess` for the Python processes of tests. A process is forked from one that has made the
imports, so that its start takes no seconds.

What the imports read of the environment (`HF_ENDPOINT`, `PYTHONPATH`) is that of the process that forks. A test of such
a variable, or of what is imported, starts a process with `subprocess`.
"""

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import threading
import types
from multiprocessing import reduction
from pathlib import Path

LIBRARIES = ["torch", "transformers", "peft", "matplotlib.pyplot", "uvicorn", "fastapi"]
MODELS = [f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "qwen2")]
OURS = ["trailmark.commands.app", "trailmark.methods.policy_gradient", "trailmark.serve.app", "trailmark.evaluate.run"]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([*LIBRARIES, *MODELS, *OURS])

HERE = str(Path(__file__).parent)
PATH = [p for p in sys.path if p not in ("", os.getcwd()) and not p.startswith(HERE)]  # of a new interpreter


class _Descriptor:
    """A file descriptor that the new process gets."""

    def __init__(self, number):
        self.number = number

    def __reduce__(self):
        return _received, (reduction.DupFd(self.number),)


def _received(sent):
    return sent.detach()


class Popen:
    """As in `subprocess`, for `[sys.executable, "-m" or "-c" or a file, …]`."""

    def __init__(self, command, *, stdout=None, stderr=None, text=False, cwd=None, env=None):
        self.args, opened = command, []
        assert command[0] == sys.executable

        def end(wanted, own):
            """The end that the process writes to, and the one that is read here."""
            if wanted == subprocess.PIPE:
                here, there = os.pipe()
                opened.append(there)
                return there, open(here, "r" if text else "rb")
            return own if wanted is None else wanted if isinstance(wanted, int) else wanted.fileno(), None

        out, self.stdout = end(stdout, 1)
        err, self.stderr = (out, None) if stderr == subprocess.STDOUT else end(stderr, 2)
        words, env = [str(w) for w in command[1:]], dict(os.environ if env is None else env)
        ends = _Descriptor(out), _Descriptor(err)
        self._process = SERVER.Process(target=_become, args=(words, *ends, str(cwd or os.getcwd()), env))
        self._process.start()
        self.pid = self._process.pid
        for there in opened:
            os.close(there)

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def communicate(self, timeout=None):
        said = {}
        pipes = [p for p in (self.stdout, self.stderr) if p is not None and not p.closed]
        readers = [threading.Thread(target=lambda p=p: said.update({p: p.read()})) for p in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader, pipe in zip(readers, pipes):
            reader.join()
            pipe.close()
        return said.get(self.stdout), said.get(self.stderr)


def run(command, *, capture_output=False, text=False, check=False, timeout=None, cwd=None, env=None, **ends):
    if capture_output:
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = Popen(command, text=text, cwd=cwd, env=env, **ends)
    try:
        out, err = process.communicate(timeout)
    except BaseException:
        process.kill()
        raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _become(words, out, err, cwd, env):
    """In the new process: what an interpreter does with its command line."""
    for sent, number in ((out, 1), (err, 2)):
        os.dup2(sent, number)
        os.close(sent)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", 1, errors="backslashreplace")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    how, *rest = words
    sys.path[:] = [{"-c": "", "-m": cwd}.get(how, str(Path(how).resolve().parent)), *PATH]
    try:
        if how == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif how == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = types.ModuleType("__main__")
            exec(rest[0], main.__dict__)
        else:
            sys.argv = words
            runpy.run_path(how, run_name="__main__")
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()

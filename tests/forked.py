"""Runs programs in forks of a process that has imported Keras.

The import takes a new process 4 s. Forks have one order of sets, that of the
process before them. So processes that have to agree with each other are started
as new ones, by `started.py`.
"""

import atexit
import multiprocessing
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import threading
import types

_processes = multiprocessing.get_context("forkserver")


class Started:
    """A program that runs, as `subprocess.Popen` has it.

    Args:
        *command: A script, or `-c` and a program, or `-m` and a module, and
            its arguments.
        env: All environment variables, if they are not those of this process.
        cwd: Where it runs.
    """

    def __init__(self, *command, env=None, cwd=None):
        self.args = [str(word) for word in command]
        self._folder = tempfile.TemporaryDirectory()
        folder = pathlib.Path(self._folder.name)
        self._printed = [folder / name for name in ("out", "err")]
        environ = dict(os.environ if env is None else env)
        given = self.args, environ, cwd or os.getcwd(), self._printed
        _processes.set_forkserver_preload(["keras"])
        self._process = _processes.Process(target=_begin, args=given)
        self._process.start()
        self.kill = self._process.kill
        self.wait = self._process.join

    @property
    def returncode(self):
        return self._process.exitcode

    def communicate(self, timeout=None):
        """Waits for the end, and returns what was printed, and as errors."""
        self.wait(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return tuple(each.read_text() for each in self._printed)


def run(*command, timeout=600, **options):
    """Does what `subprocess.run([sys.executable, *command])` does.

    Args:
        *command: That of `Started`.
        timeout: How many seconds it may take.
        **options: Those of `Started`.

    Returns:
        A `subprocess.CompletedProcess`, with what was printed as text.
    """
    started = Started(*command, **options)
    try:
        printed = started.communicate(timeout)
    finally:
        started.kill()
        started.wait()
    return subprocess.CompletedProcess(
        started.args, started.returncode, *printed
    )


def _begin(command, environ, folder, printed):
    for descriptor, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    path = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = ["", *filter(None, path)]
    try:
        _run(*command)
    finally:  # as Python ends; a fork ends at once
        threading._shutdown()
        atexit._run_exitfuncs()


def _run(first, *arguments):
    if first == "-c":
        program, *arguments = arguments
        sys.argv = [first, *arguments]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), vars(main))
    elif first == "-m":
        sys.argv = [*arguments]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [first, *arguments]
        script = os.path.abspath(first)
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")

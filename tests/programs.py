"""Programs that run like ``python program.py``, without the seconds of importing torch.

A server imports torch and ficco once. A program is a fork of it, which runs the text as its own
``__main__`` and then ends as any interpreter does: with its exit handlers, its threads joined and
its modules torn down. So tests of the end of a process and of its leftovers are cheap.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: Code of the server; a fork leaves the loop and continues below it, at the top of ``__main__``.
#: Lines of JSON: ``[argv, environment, stdout, stderr]`` forks, a process id queries its exit code.
SERVER = """
import gc, json, os, sys
import torch, torch.distributed, ficco

gc.freeze()

for line in sys.stdin:
    request = json.loads(line)
    if isinstance(request, int):
        process, status = os.waitpid(request, os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if process else None), flush=True)
        continue
    process = os.fork()
    if not process:
        break
    print(process, flush=True)
else:
    os._exit(0)
for number, path in enumerate((os.devnull, *request[2:])):
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.dup2(file, number)
    os.close(file)
sys.argv = request[0]
os.environ.update(request[1])
with open(sys.argv[0]) as file:
    text = file.read()
del line, process, number, path, file
exec(compile(text, sys.argv[0], "exec"))
"""


class Ended(NamedTuple):
    """Exit code and output of a program; the code of a signal is negative."""

    code: int
    out: str
    err: str


class Program:
    """A running program, with its output in files of ``folder``."""

    def __init__(
        self, folder: Path, name: str, text: str, args: Sequence[str], env: Mapping[str, str]
    ) -> None:
        self.out, self.err = folder / f"{name}.out", folder / f"{name}.err"
        path = folder / f"{name}.py"
        path.write_text(text)
        argv = [str(path), *args]
        self.process = int(_answer([argv, dict(env), str(self.out), str(self.err)]))
        self.code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while the program runs."""
        if self.code is None:
            self.code = json.loads(_answer(self.process))
        return self.code

    def end(self, deadline: float) -> Ended:
        """Wait for the end; ``TimeoutError`` at the deadline, on the monotonic clock."""
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running:\n{self.out.read_text()}{self.err.read_text()}")
            time.sleep(0.01)
        return Ended(code, self.out.read_text(), self.err.read_text())

    def kill(self) -> None:
        """Kill the program unless it has ended."""
        if self.poll() is None:
            os.kill(self.process, signal.SIGKILL)
            self.end(time.monotonic() + 10)


_servers: list[subprocess.Popen[str]] = []


def _server() -> subprocess.Popen[str]:
    if not _servers:
        root = str(Path(__file__).parents[1])
        _servers.append(
            subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-c", SERVER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "PYTHONPATH": root, "GLOO_SOCKET_IFNAME": "lo"},
            )
        )
        atexit.register(close)
    return _servers[0]


def _answer(request: object) -> str:
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the server of programs ended with {server.wait(10)}"
    return line


def close() -> None:
    """End the server."""
    while _servers:
        server = _servers.pop()
        server.communicate(timeout=10)

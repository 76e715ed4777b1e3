"""Start Python with torch, TRL and vLLM loaded: `python -I -S warm_python.py SOCKET ...` runs what `python ...` would.

A fork server: each start is a fork of one process that has imported them (`serve`), which saves eight seconds of
imports. The script, `-m MODULE` or `-c CODE` finds its words, environment, folder and streams as usual; signals and
the exit status are passed on. What differs: /proc shows the command line and the environment of the server, and
libraries have read the server's environment where they read it at import. A test of those starts `sys.executable`,
which what runs here does too, unless PYTHONEXECUTABLE names another.
"""

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading

PRELOADED = (
    *("polar_trl.grpo.arguments", "polar_trl.grpo.trainer"),
    # what a training imports later
    *("deepspeed", "matplotlib.pyplot"),
    *("transformers.models.llama.modeling_llama", "vllm.model_executor.models.llama", "vllm.v1.worker.cpu_worker"),
)

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(path: str, words: list[str]) -> None:
    """Have the words run by the server at a socket, and end as they did."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        ignored = [number for number in _PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
        request = {"words": words, "env": dict(os.environ), "cwd": os.getcwd(), "ignored": ignored}
        text = json.dumps(request).encode()
        signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until they can be passed on
        socket.send_fds(server, [len(text).to_bytes(4)], [0, 1, 2])
        server.sendall(text)
        for number in set(_PASSED_ON) - set(ignored):
            signal.signal(number, lambda number, _: server.send(bytes([number])))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        answer = server.recv(4)
    if not answer:
        sys.exit("warm_python.py: the server has ended")
    status = int.from_bytes(answer, signed=True)
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path: str) -> list[str]:
    """Answer requests until standard input ends; returns, in a fork of this process, the words that it is to run."""
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that answer
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        while sys.stdin not in select.select([sys.stdin, listening], [], [])[0]:
            client = listening.accept()[0]
            if os.fork() == 0:
                listening.close()
                return _answer(client)
            client.close()
    sys.exit()


def _answer(client: socket.socket) -> list[str]:
    """Run a request in a fork, the only one that returns; pass its client's signals and its own end on."""
    length, files, _, _ = socket.recv_fds(client, 4, 3)
    with client.makefile("rb") as stream:
        request = json.loads(stream.read(int.from_bytes(length)))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child == 0:
        client.close()
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        os.chdir(request["cwd"])
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        own = _list_python_path()
        os.environ.clear()
        os.environ.update(request["env"])
        tempfile.tempdir = None  # what was TMPDIR is known already
        sys.executable = os.environ.get("PYTHONEXECUTABLE", sys.executable)
        sys.path[1:] = [*_list_python_path(), *(folder for folder in sys.path[1:] if folder not in own)]
        return list(request["words"])
    for file in (0, 1, 2, *files):
        os.close(file)
    ended = os.pidfd_open(child)
    while ended not in (ready := select.select([client, ended], [], [])[0]):
        number = client.recv(1) if client in ready else b""
        os.kill(child, number[0] if number else signal.SIGKILL)  # without a client: it was killed
        if not number:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(status.to_bytes(4, signed=True))
    os._exit(0)


def _list_python_path() -> list[str]:
    return [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


if __name__ == "__main__":
    if sys.argv[1] != "--serve":
        main(sys.argv[1], sys.argv[2:])
    import runpy
    import types
    from importlib import import_module

    for name in PRELOADED:
        import_module(name)
    words = serve(sys.argv[2])
    try:
        words = words[1:] if words[0] == "-u" else words
        if words[0] == "-m":
            sys.path[0] = os.getcwd()
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.path[0] = ""
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = module = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), module.__dict__)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except KeyboardInterrupt:  # an atexit function of some library may make Python forget that
        sys.excepthook(*sys.exc_info())
        threading._shutdown()
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

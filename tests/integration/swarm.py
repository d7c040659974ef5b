"""Hubs, workers and llama.cpp's programs as real processes, for tests and the demo.

A Swarm owns a folder of its own (LINKCPP_HOME) and every process it starts. close() ends them all and removes the
folder; should Python itself be killed, the kernel ends them. Each process logs to a file, and every wait has a
deadline. Python's standard library is all it needs.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from pathlib import Path

SLOWNESS = int(os.environ.get("LINKCPP_TEST_SLOWNESS", 1))  # of a build with sanitizers: every wait is so much longer
POLL_S = 0.02
START_S = 60  # until a worker holds its slices or a server answers, on a busy machine of two cores
RUN_S = 120  # for one run of a program of llama.cpp

# Of llama.cpp's programs. With a sanitizer one: ggml's threads wait for each other by spinning, and where more programs
# than processors compute, that took most of the time.
N_THREADS = 2 if SLOWNESS == 1 else 1
# Compared runs must add in one order: the same threads, no re-packing of weights.
SAME_ARITHMETIC = ["--no-repack", "-t", str(N_THREADS)]

# llama.cpp's programs exit without waiting for the thread that prints (common_log_main() in its common/log.cpp says
# so): on a busy machine the end of what they say is lost. By program, what tells that nothing is.
SAID_ALL = {
    "llama-completion": "graphs reused",
    "llama-perplexity": "Final estimate",
    "llama-imatrix": "Final estimate",
    "llama-cli": r"\[ Prompt:",
    "llama-embedding": r"\]\]",  # of its array of arrays
    "llama-batched-bench": r"\|\n\n",  # behind its table
}
N_TRIES = 6

SANITIZERS = ("ASAN_OPTIONS", "UBSAN_OPTIONS", "TSAN_OPTIONS")
REPORT = "sanitizer"  # a file for each process that has something to report

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


def bin_dir():
    """The folder of linkcpp's programs."""
    return Path(os.environ["LINKCPP_BIN"])


def llama_dir():
    """The folder of llama.cpp's programs."""
    return Path(os.environ["LINKCPP_LLAMA_BIN"])


def _die_with_parent():
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def wait_for(condition, timeout, what, pause=POLL_S):
    """The first true value of condition(); TimeoutError with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout * SLOWNESS
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {timeout} s")
        time.sleep(pause)


def resident(pid):
    """Bytes of a process's memory that are there; 0 when it is not."""
    for line in Path("/proc", str(pid), "status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def said_all(program, process):
    """False when a program of llama.cpp that did its work lost the end of what it said."""
    said = process.out().decode(errors="replace") + process.err()
    return process.poll() != 0 or re.search(SAID_ALL.get(program, ""), said) is not None


def until_said_all(program, timeout, start):
    """Runs start() to its end, again when the end of what it said was lost."""
    for _ in range(N_TRIES):
        process = start()
        process.wait(timeout)
        if said_all(program, process):
            break
    return process


class Process:
    """One process, its standard output and error in files."""

    def __init__(self, name, arguments, environment, folder):
        self.name = name
        self.out_path = folder / f"{name}.out"
        self.err_path = folder / f"{name}.err"
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            # A group of its own: Ctrl-C reaches us alone, and we end it in order.
            self.popen = subprocess.Popen([str(a) for a in arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                                          env=environment, start_new_session=True, preexec_fn=_die_with_parent)

    @property
    def pid(self):
        return self.popen.pid

    def poll(self):
        """The exit status (negative: the signal), or None while it runs."""
        return self.popen.poll()

    def out(self):
        return self.out_path.read_bytes()

    def err(self):
        return self.err_path.read_text(errors="replace")

    def wait(self, timeout=RUN_S):
        """Its exit status; TimeoutError if it runs longer."""
        try:
            return self.popen.wait(timeout * SLOWNESS)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.name} still runs after {timeout} s; it said:\n{self.err()[-3000:]}") from None

    def kill(self):
        """kill -9, and waits for its end."""
        self.popen.kill()
        self.popen.wait()

    def stop(self):
        """Ends it and its children: politely, then not."""
        if self.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(6 * SLOWNESS)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()


class Swarm:
    """At most one hub, workers, and the programs run on them."""

    def __init__(self):
        # Short: Unix sockets lie in it, and their paths have at most 107 characters.
        self.home = Path(tempfile.mkdtemp(prefix="lcpp", dir="/tmp"))
        ours = ("LINKCPP_", "LLAMA_ARG_", "GGML_BACKEND_PATH")
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        self.environment["LINKCPP_HOME"] = str(self.home)
        if os.environ.get("LINKCPP_SANITIZE"):
            self.environment["LLAMA_ARG_THREADS"] = str(N_THREADS)
            for name in SANITIZERS:
                given = self.environment.get(name)
                self.environment[name] = f"{given + ':' if given else ''}log_path={self.home}/{REPORT}"
        self.processes = []
        self.hub = None
        self.line = None
        self.reports = ""  # of sanitizers, once closed

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        if self.reports:
            raise RuntimeError(f"sanitizer:\n{self.reports}")

    def close(self):
        """Ends every process, removes the folder; returns the logs."""
        for process in reversed(self.processes):
            process.stop()
        self.reports = "".join(path.read_text(errors="replace") for path in sorted(self.home.glob(f"{REPORT}.*")))
        logs = "".join(f"--- {p.name}, exit status {p.poll()}\n{p.err()[-6000:]}\n" for p in self.processes
                       if p.err_path.exists())
        self.processes = []
        shutil.rmtree(self.home, ignore_errors=True)
        return logs

    # ---- processes

    def start(self, name, arguments, **variables):
        """Starts a process; `variables` are added to its environment, those that are None taken out."""
        used = {p.out_path.stem for p in self.processes}
        unique = next(n for n in [name, *(f"{name}-{i}" for i in range(2, 1000))] if n not in used)
        environment = {**self.environment, **{k: str(v) for k, v in variables.items() if v is not None}}
        for variable, value in variables.items():
            if value is None:
                environment.pop(variable, None)
        process = Process(unique, arguments, environment, self.home)
        self.processes.append(process)
        return process

    def linkcpp(self, *arguments, name=None, timeout=RUN_S, **variables):
        """Runs `linkcpp ARGUMENTS` to its end."""
        process = self.start(name or f"linkcpp-{arguments[0]}", [bin_dir() / "linkcpp", *arguments], **variables)
        process.wait(timeout)
        return process

    def serve(self, model, *arguments, workers=0, hub_only=True, **variables):
        """Starts `linkcpp serve` on free ports, unless --port comes first; waits until its workers hold all."""
        command = [bin_dir() / "linkcpp", "serve", "-m", model]
        command += [] if "--port" in arguments[:1] else ["--port", "0"]
        command += ["--local-workers", workers] if workers else []
        command += ["--hub-only"] if hub_only else []
        self.hub = self.start("hub", [*command, *arguments], **variables)
        self.line = wait_for(self._find_line, START_S, "the hub's join line")
        if workers:
            self.wait_covered()
        return self.hub

    def _find_line(self):
        if self.hub.poll() is not None:
            raise RuntimeError(f"linkcpp serve ended with status {self.hub.poll()}:\n{self.hub.err()}")
        match = re.search(r"linkcpp join '(linkcpp://[^']+)'", self.hub.out().decode())
        return match and match.group(1)

    def join(self, name, *arguments, line=None, **variables):
        """Starts a worker of one thread."""
        return self.start(name, [bin_dir() / "linkcpp", "join", "--name", name, "--threads", 1, *arguments],
                          LINKCPP_HUB=line or self.line, **variables)

    def exec_arguments(self, program, *arguments, options=()):
        return [bin_dir() / "linkcpp", "exec", *options, "--", program, *arguments]

    def exec(self, program, *arguments, options=("--no-local-experts",), timeout=RUN_S, **variables):
        """Runs a program of llama.cpp on the swarm to its end."""
        return until_said_all(program, timeout,
                              lambda: self.start_exec(program, *arguments, options=options, **variables))

    def start_exec(self, program, *arguments, options=("--no-local-experts",), **variables):
        return self.start(f"exec-{Path(program).name}", self.exec_arguments(program, *arguments, options=options),
                          **variables)

    def alone(self, program, *arguments, timeout=RUN_S, **variables):
        """Runs a program of llama.cpp in one process, without the plugin."""
        return until_said_all(program, timeout, lambda: self.start_alone(program, *arguments, **variables))

    def start_alone(self, program, *arguments, **variables):
        return self.start(f"alone-{Path(program).name}", [llama_dir() / program, *arguments], **variables)

    def running(self):
        """Command lines of all processes that descend from this swarm's, by pid: whoever has its folder for a home."""
        found = {}
        home = f"LINKCPP_HOME={self.home}\0".encode()
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path("/proc", pid, "environ").read_bytes()
                if home in environment + b"\0":
                    found[int(pid)] = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended
                pass
        return found

    def line_for(self, whom):
        """A join line that lets in "programs", or "all"; the one that the hub prints lets in workers."""
        made = self.linkcpp("token", "new", f"test-{len(self.processes)}", "--for", whom, "--json")
        if made.poll() != 0:
            raise RuntimeError(made.err())
        return json.loads(made.out())["line"]

    def hub_address(self):
        """Host and port of the hub's control links."""
        host, port = re.search("//([^:/]+):([0-9]+)/", self.line).groups()
        return host, int(port)

    def https_address(self):
        host, port = self.hub_address()
        https = re.search("https=([0-9]+)", self.line)
        return host, int(https.group(1)) if https else port + 1

    def https(self):
        """A connection to the hub's HTTPS side, TLS and all; whose key it is is not looked at."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context.wrap_socket(socket.create_connection(self.https_address(), timeout=10 * SLOWNESS))

    # ---- what the hub says

    def status(self):
        """`linkcpp status --json`, or None when the hub did not answer."""
        result = subprocess.run([bin_dir() / "linkcpp", "status", "--json"], env=self.environment, capture_output=True,
                                timeout=20 * SLOWNESS)
        return json.loads(result.stdout) if result.returncode == 0 else None

    def wait_status(self, condition, what, timeout=START_S):
        """Polls the status until condition(status); returns that status."""
        def check():
            status = self.status()
            return status if status and condition(status) else None
        # With a sanitizer a status takes most of a second of a core that the swarm needs.
        return wait_for(check, timeout, what, POLL_S if SLOWNESS == 1 else 0.5)

    def wait_program(self, condition, what):
        """Polls the status until the program on the swarm is there and condition(its part); returns that part."""
        return self.wait_status(lambda s: s["coordinators"] and condition(s["coordinators"][0]), what)["coordinators"][0]

    def wait_covered(self, timeout=START_S):
        """Until every slice has as many live holders as were asked for."""
        def covered(status):
            wanted = status["model"]["slices"] * status["coverage"]["replicas"]
            return (status["coverage"]["missing_slices"] == 0
                    and sum(w["slices"] for w in status["workers"] if w["state"] == "ready") >= wanted)
        return self.wait_status(covered, "workers that hold every slice", timeout)

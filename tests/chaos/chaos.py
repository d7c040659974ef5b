#!/usr/bin/env python3
"""Decodes without a pause while processes are killed and stopped and wires are cut, and counts what that costs.

Usage: chaos.py [--minutes N] [--seed S] [--only KIND,…] [--json FILE]

Four workers hold two copies of every slice; a llama-server with its experts on the swarm, and no copy of its own, answers one
request after the other. One fault at a time, drawn from a seed, hits them while a request is under way; the next comes when
all copies are there again. Every text must be that of the undisturbed run, token by token; no request may fail but those
whose own llama-server was killed; no process may end but those that were ended; memory must stay flat.

Needs LINKCPP_BIN, LINKCPP_LLAMA_BIN and LINKCPP_TEST_MODELS, as the integration tests do.
"""

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integration"))

import models  # noqa: E402  pylint: disable=wrong-import-position
from case import SERVER_ARGUMENTS  # noqa: E402
from proxy import Wire  # noqa: E402
from server import RequestFailed, Server, free_port  # noqa: E402
from swarm import Swarm, resident, wait_for  # noqa: E402

KIND = "Q8_0"
WORKERS = ("one", "two", "three", "four")
PROMPTS = ("And the LORD said unto Moses,", "In the beginning", "Blessed are they", "Now it came to pass")
N_TOKENS = 120
RECOVER_S = 60  # within which all copies must be there again
FLAT = 1.15, 24 << 20  # memory may grow by this factor and these bytes


class Client(threading.Thread):
    """Asks without a pause, and compares each text with the undisturbed run's."""

    def __init__(self, chaos):
        super().__init__(daemon=True)
        self.chaos = chaos
        self.expected = {}
        self.request = None
        self.stop = self.paused = False
        self.n_completed = self.n_failed_with_server = 0
        self.failures = []  # what must not be
        self.arrivals = []

    def undisturbed(self):
        for prompt in PROMPTS:
            self.expected[prompt] = self.chaos.server.complete(prompt, N_TOKENS, on_token=self.arrived)

    def arrived(self):
        self.arrivals.append(time.monotonic())

    def run(self):
        number = 0
        while not self.stop:
            if self.paused:
                time.sleep(0.02)
                continue
            prompt = PROMPTS[number % len(PROMPTS)]
            number += 1
            generation = self.chaos.server_generation
            try:
                text = self.chaos.server.complete(prompt, N_TOKENS, on_token=self.arrived)
            except (RequestFailed, OSError, ValueError) as error:
                if self.chaos.server_generation != generation or self.chaos.server_down:
                    self.n_failed_with_server += 1
                    wait_for(lambda: not self.chaos.server_down or self.stop, RECOVER_S, "llama-server")
                else:
                    self.failures.append(f"{prompt!r}: {error}")
                continue
            if text == self.expected[prompt]:
                self.n_completed += 1
            elif self.chaos.server_generation != generation or self.chaos.server_down:
                self.n_failed_with_server += 1  # the stream ended with its server
            else:
                self.failures.append(f"{prompt!r}: other text: {text!r}")

    def usual_gap(self):
        """Between two tokens, in the middle of the whole run: most have nothing to do with any fault."""
        return statistics.median(b - a for a, b in zip(self.arrivals, self.arrivals[1:]))

    def largest_gap_since(self, begin):
        """Between two tokens that both came after the last one before `begin`."""
        times = [t for t in self.arrivals if t >= begin - 1]
        before = [t for t in times if t <= begin][-1:]
        after = before + [t for t in times if t > begin]
        return max((b - a for a, b in zip(after, after[1:])), default=0)


class Chaos:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.swarm = Swarm()
        self.hub_ports = free_port(), free_port()
        self.data_port = free_port()
        self.workers = {}
        self.server = None
        self.server_down = False
        self.server_generation = 0
        self.faults = {}  # kind → the longest pause that each made, None for those that end the text
        self.n_in_flight = 0
        self.unexpected = []
        self.expected_ends = set()

    # ---- what runs

    def start(self):
        self.start_hub()
        self.control = Wire(self.hub_ports[0])
        self.data = Wire(self.data_port)
        for name in WORKERS:
            self.start_worker(name)
        self.wait_whole()
        self.start_server()

    def start_hub(self):
        port, https = self.hub_ports
        self.swarm.serve(models.path_of(KIND), "--port", port, "--https-port", https, "--replicas", 2)

    def start_worker(self, name):
        fingerprint, token = re.search("linkcpp://[^/]+/([^/]+)/([^/?]+)", self.swarm.line).groups()
        line = f"linkcpp://127.0.0.1:{self.control.port}/{fingerprint}/{token}?https={self.hub_ports[1]}"
        self.workers[name] = self.swarm.join(name, "--store", self.swarm.home / f"store-{name}", line=line)

    def start_server(self):
        port = free_port()
        process = self.swarm.start_exec(
            "llama-server", "-m", models.path_of(KIND), "--port", port, *SERVER_ARGUMENTS, LINKCPP_UNIX="off",
            LINKCPP_LISTEN=f"127.0.0.1:{self.data_port}", LINKCPP_ADVERTISE=f"127.0.0.1:{self.data.port}")
        server = Server(port, process).wait_healthy()
        self.server = server
        self.server_down = False

    def wait_whole(self):
        """Until every slice has its two holders, all of them ready and linked."""
        self.swarm.wait_covered(RECOVER_S)
        if self.server is None or self.server_down:
            return
        wait_for(lambda: len(self.data.alive()) >= len(WORKERS), RECOVER_S, "the data links")

    # ---- what can happen

    def any_worker(self):
        return self.random.choice(WORKERS)

    def any_link(self, wire):
        """One that stands: a fault that hits nothing is none."""
        return self.random.choice(wait_for(wire.alive, RECOVER_S, "a link"))

    def kill_worker(self):
        name = self.any_worker()
        self.workers[name].kill()
        time.sleep(self.random.uniform(0, 0.5))
        self.start_worker(name)

    def restart_worker(self):
        name = self.any_worker()
        self.workers[name].stop()
        self.start_worker(name)

    def hang_worker(self):
        worker = self.workers[self.any_worker()]
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(0.2, 2.5))
        os.kill(worker.pid, signal.SIGCONT)

    def slow_worker(self):
        worker = self.workers[self.any_worker()]
        end = time.monotonic() + self.random.uniform(0.3, 1.5)
        while time.monotonic() < end:
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(self.random.uniform(0.01, 0.08))
            os.kill(worker.pid, signal.SIGCONT)
            time.sleep(0.01)

    def delay_data(self):
        link = self.any_link(self.data)
        link.delay = self.random.uniform(0.005, 0.3)
        time.sleep(self.random.uniform(0.3, 1.0))
        link.delay = 0.0

    def corrupt_data(self):
        self.any_link(self.data).corrupt()

    def cut_data(self):
        self.any_link(self.data).cut()

    def dead_data(self):
        link = self.any_link(self.data)
        link.dead = True
        time.sleep(self.random.uniform(0.2, 2.0))
        link.reset()

    def corrupt_control(self):
        self.any_link(self.control).corrupt()

    def cut_control(self):
        self.any_link(self.control).cut()

    def drain_worker(self):
        name = self.any_worker()
        self.operate("drain", name, "--no-wait")
        time.sleep(self.random.uniform(0.5, 2))
        self.operate("drain", name, "--back")

    def operate(self, *arguments):
        process = self.swarm.linkcpp(*arguments, timeout=60)
        if process.poll() != 0:
            self.unexpected.append(f"linkcpp {' '.join(arguments)}: {process.err()[-500:]}")

    def kill_hub(self):
        self.swarm.hub.kill()
        time.sleep(self.random.uniform(0, 1))
        self.start_hub()

    def kill_server(self):
        self.server_generation += 1
        self.server_down = True
        for pid, line in self.swarm.running().items():
            if "llama-server" in line and " exec " not in line:
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: self.server.process.poll() is not None, 20, "the end of llama-server")
        self.start_server()

    # Quick ones are more frequent: two minutes are short.
    KINDS = {"kill_worker": 3, "restart_worker": 1, "hang_worker": 3, "slow_worker": 4, "delay_data": 4, "corrupt_data": 6,
             "cut_data": 6, "dead_data": 4, "corrupt_control": 1, "cut_control": 1, "drain_worker": 1, "kill_hub": 1,
             "kill_server": 1}

    def one_fault(self, client, kind):
        begin_count = len(client.arrivals)
        wait_for(lambda: len(client.arrivals) > begin_count + 2 or client.failures, RECOVER_S, "tokens")
        begin = time.monotonic()
        getattr(self, kind)()
        self.wait_whole()
        count = len(client.arrivals)
        wait_for(lambda: len(client.arrivals) > count + 2 or client.failures, RECOVER_S, "tokens after the fault")
        self.n_in_flight += 1
        # With its server a request is lost, and the time until the next says how long llama.cpp takes to load.
        pauses = self.faults.setdefault(kind, [])
        pauses.append(None if kind == "kill_server" else client.largest_gap_since(begin))

    def check_alive(self):
        for name, worker in self.workers.items():
            if worker.poll() is not None:
                self.unexpected.append(f"worker {name} ended with status {worker.poll()}")
        for what, process in (("hub", self.swarm.hub), ("llama-server", self.server.process)):
            if process.poll() is not None:
                self.unexpected.append(f"{what} ended with status {process.poll()}")


def order_of(chaos, only):
    """Every kind once, then by weight."""
    kinds = {kind: weight for kind, weight in Chaos.KINDS.items() if not only or kind in only}
    first = list(kinds)
    chaos.random.shuffle(first)
    yield from first
    while True:
        yield chaos.random.choices(list(kinds), list(kinds.values()))[0]


def run(minutes, seed, only):
    chaos = Chaos(seed)
    client = Client(chaos)
    report = {}
    try:
        chaos.start()
        client.undisturbed()
        client.start()
        end = time.monotonic() + 60 * minutes
        memory = {}
        for n, kind in enumerate(order_of(chaos, only)):
            chaos.one_fault(client, kind)
            chaos.check_alive()
            print(f"{n + 1:4}  {kind:15}  a pause of {1000 * (chaos.faults[kind][-1] or 0):6.0f} ms   "
                  f"{client.n_completed} requests completed", file=sys.stderr)
            if chaos.unexpected or client.failures:
                break
            # What lives as long as the run does: whoever was started anew is small again.
            for what, process in {"hub": chaos.swarm.hub, **chaos.workers}.items():
                memory.setdefault((what, process.pid), []).append(resident(process.pid))
            if time.monotonic() > end:
                break
        client.stop = True
        client.join(60)
        # Of each third the most: what a worker holds, and has held, differs with every drain.
        thirds = {key: [max(series[i * len(series) // 3:(i + 1) * len(series) // 3]) for i in range(3)]
                  for key, series in memory.items() if len(series) > 15}
        grown = [f"{what}: {middle >> 20} to {last >> 20} MiB" for (what, _), (_, middle, last) in thirds.items()
                 if last > FLAT[0] * middle + FLAT[1]]
        status = chaos.swarm.status()
        usual_gap = client.usual_gap()
        added = {kind: [1000 * max(0.0, pause - usual_gap) for pause in pauses if pause is not None]
                 for kind, pauses in sorted(chaos.faults.items())}
        report = {
            "seed": seed,
            "minutes": minutes,
            "faults": {kind: len(pauses) for kind, pauses in sorted(chaos.faults.items())},
            "faults_in_flight": chaos.n_in_flight,
            "requests_completed": client.n_completed,
            "requests_lost_with_their_server": client.n_failed_with_server,
            "requests_failed": client.failures,
            "added_delay_ms": {kind: {"median": round(statistics.median(delays)), "max": round(max(delays))}
                               for kind, delays in added.items() if delays},
            "usual_gap_ms": round(1000 * usual_gap, 2),
            "unexpected": chaos.unexpected,
            "memory_mib": {f"{what}[{pid}]": [most >> 20 for most in three] for (what, pid), three in thirds.items()},
            "memory_grown": grown,
            "given_to_two": [c["twice"] for c in status["coordinators"]] if status else None,
            "slices_sent": status["hub"]["slices_sent"] if status else None,
        }
    finally:
        client.stop = True
        logs = chaos.swarm.close()
        if report and chaos.swarm.reports:
            report["unexpected"].append(chaos.swarm.reports)
        failed = not report or report["requests_failed"] or report["unexpected"] or report["memory_grown"]
        if failed:
            print(f"=== what the processes said\n{logs}\n===", file=sys.stderr)
    return report


def check_environment():
    wanted = ("LINKCPP_BIN", "LINKCPP_LLAMA_BIN", "LINKCPP_TEST_MODELS")
    missing = [name for name in wanted if name not in os.environ]
    if missing:
        sys.exit(f"chaos.py: set {', '.join(missing)}; `ctest --preset release -R integration.chaos -N -V` shows them")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"of {', '.join(Chaos.KINDS)}")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--least", type=int, default=0, help="fail with fewer faults in flight than this")
    options = parser.parse_args()
    check_environment()
    print(f"seed {options.seed}", file=sys.stderr)
    report = run(options.minutes, options.seed, options.only)
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    bad = report["requests_failed"] or report["unexpected"] or report["memory_grown"]
    if report["faults_in_flight"] < options.least:
        print(f"{report['faults_in_flight']} faults in flight, expected {options.least}", file=sys.stderr)
        bad = True
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

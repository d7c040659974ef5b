"""Hosts with addresses of their own, for what loopback cannot show: partitions, half-open links, long ways.

A host is a network namespace, joined to this machine by a virtual cable, or by tests/tools/link_emulator, which gives the
way a length; or one of several on a Lan, each with a line of its own. Needs root; what is made is removed by close(), and by
the kernel with the namespace.
"""

import itertools
import os
import subprocess

from swarm import bin_dir, wait_for

_numbers = itertools.count()


def can_make_hosts():
    """Whether this process may make network namespaces here."""
    name = f"lk{os.getpid()}probe"
    made = os.geteuid() == 0 and subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


def _run(*command):
    subprocess.run([str(c) for c in command], check=True, capture_output=True)


class Host:
    """A host beside this machine, which it reaches at `here`."""

    def __init__(self, length=None):
        """`length`: options of link_emulator, such as delay=10; without it a cable as fast as the kernel."""
        number = next(_numbers)
        self.namespace = f"lk{os.getpid()}n{number}"
        subnet = f"10.{77 + os.getpid() % 100}.{number}"
        self.here, self.address = f"{subnet}.1", f"{subnet}.2"
        self._link = None
        _run("ip", "netns", "add", self.namespace)
        self._in("ip", "link", "set", "lo", "up")
        if length is None:
            near, far = f"lk{os.getpid() % 100000}a{number}", f"lk{os.getpid() % 100000}b{number}"
            _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", self.namespace)
            _run("ip", "address", "add", f"{self.here}/24", "dev", near)
            _run("ip", "link", "set", near, "up")
            self._in("ip", "address", "add", f"{self.address}/24", "dev", far)
            self._in("ip", "link", "set", far, "up")
        else:
            options = [text for name, value in length.items() for text in (f"--{name}", str(value))]
            self._link = subprocess.Popen(
                [bin_dir() / "link_emulator", "--from", f"-,{self.here}/24", "--to", f"{self.namespace},{self.address}/24",
                 *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if self._link.stdout.readline() != "ready\n":
                raise RuntimeError("link_emulator did not start")
        self._in("ip", "route", "add", "default", "via", self.here)
        self._in("nft", "add", "table", "inet", "cut")
        for chain, hook in (("arriving", "input"), ("leaving", "output")):
            self._in("nft", "add", "chain", "inet", "cut", chain, f"{{ type filter hook {hook} priority 0; }}")

    @property
    def prefix(self):
        """What starts a program there."""
        return ["ip", "netns", "exec", self.namespace]

    def _in(self, *command):
        _run("ip", "netns", "exec", self.namespace, *command)

    def cut(self, *directions):
        """Packets are dropped without a word: "arriving", "leaving", or both."""
        for direction in directions or ("arriving", "leaving"):
            self._in("nft", "add", "rule", "inet", "cut", direction, "drop")

    def join(self):
        """All packets pass again."""
        for chain in ("arriving", "leaving"):
            self._in("nft", "flush", "chain", "inet", "cut", chain)

    def change(self, what, value):
        """A setting of the emulated link: delay, jitter, loss, rate."""
        self._link.stdin.write(f"{what} {value}\n")
        self._link.stdin.flush()
        if self._link.stdout.readline() != "ok\n":
            raise RuntimeError(f"link_emulator did not understand {what} {value}")

    def close(self):
        if self._link:
            self._link.kill()
            self._link.communicate()
        # Processes in it hold the namespace, not its name.
        wait_for(lambda: not subprocess.run(["ip", "netns", "delete", self.namespace], capture_output=True).returncode,
                 10, f"the end of {self.namespace}")


class Lan:
    """Hosts on one switch, which is this machine: it has the address `here` there."""

    def __init__(self):
        self._number = next(_numbers)
        self._bridge = f"lk{os.getpid() % 100000}s{self._number}"
        self._subnet = f"10.{77 + os.getpid() % 100}.{self._number}"
        self.here = f"{self._subnet}.254"
        self._namespaces = []
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self.here}/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")

    def host(self, rate=None):
        """(what starts a program there, its address). `rate`: Mbit/s of what it sends."""
        n = len(self._namespaces) + 1
        namespace, near, far = f"{self._bridge}n{n}", f"{self._bridge}a{n}", f"{self._bridge}b{n}"
        self._namespaces.append(namespace)
        inside = ["ip", "netns", "exec", namespace]
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", namespace)
        _run("ip", "link", "set", near, "master", self._bridge, "up")
        _run(*inside, "ip", "link", "set", "lo", "up")
        _run(*inside, "ip", "address", "add", f"{self._subnet}.{n}/24", "dev", far)
        _run(*inside, "ip", "link", "set", far, "up")
        if rate is not None:
            _run(*inside, "tc", "qdisc", "add", "dev", far, "root", "tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "50ms")
        return inside, f"{self._subnet}.{n}"

    def close(self):
        for namespace in self._namespaces:
            wait_for(lambda: not subprocess.run(["ip", "netns", "delete", namespace], capture_output=True).returncode, 10,
                     f"the end of {namespace}")
        subprocess.run(["ip", "link", "delete", self._bridge], capture_output=True)

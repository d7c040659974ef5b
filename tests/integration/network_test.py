"""Workers on hosts of their own: what a network does to a swarm."""

import re
import time
import unittest

import models
from case import N_LONG, PROMPT, SwarmTest
from network import Host, can_make_hosts
from server import free_port
from swarm import SLOWNESS, bin_dir, wait_for

HANG_S = 1.0  # the default


@unittest.skipUnless(can_make_hosts(), "needs root and network namespaces")
class Network(SwarmTest):
    def setUp(self):
        super().setUp()
        self.hosts = []

    def host(self, length=None):
        host = Host(length)
        self.addCleanup(host.close)
        # Before the hosts go, and after the test has seen the logs: see SwarmTest.run().
        self.hosts.append(host)
        return host

    def start_hub(self, *arguments):
        self.port, https = free_port(), free_port()
        self.swarm.serve(models.path_of("Q8_0"), "--port", self.port, "--listen", "0.0.0.0", "--https-port", https, *arguments)

    def join_from(self, host, name):
        line = re.sub("//[^/]*/", f"//{host.here}:{self.port}/", self.swarm.line)
        return self.swarm.start(name, [*host.prefix, bin_dir() / "linkcpp", "join", "--name", name, "--threads", 1],
                                LINKCPP_HUB=line)

    def start_server(self):
        """A llama-server that workers reach at any of this machine's addresses."""
        data = free_port()
        return self.server_on_swarm("Q8_0", options=("--no-local-experts", "--listen", f"0.0.0.0:{data}"), LINKCPP_UNIX="off")

    def two_hosts(self):
        one, two = self.host(), self.host()
        self.start_hub("--replicas", 2)
        for host, name in ((one, "one"), (two, "two")):
            self.join_from(host, name)
        self.swarm.wait_covered()
        server = self.start_server()
        return one, server, server.complete(PROMPT, N_LONG)

    def check_cut(self, *directions):
        """Nothing passes, and nobody says so: no reset, no end of file."""
        one, server, text = self.two_hosts()
        request = server.start_completion(PROMPT, N_LONG)
        request.wait_arrived(20)
        one.cut(*directions)
        began = time.monotonic()
        self.assertLess(request.n_arrived, N_LONG / 2, "too late for this test")
        self.assertEqual(request.finish(), text)
        after = [t for t in request.arrivals if t > began]
        gaps = [b - a for a, b in zip(after, after[1:])]
        self.assertLess(max(gaps), HANG_S + 0.5 * SLOWNESS)
        # The next request goes on without it; the hub gives it up, too, and when it is back it is the same worker.
        self.assertEqual(server.complete(PROMPT, N_LONG), text)
        self.swarm.wait_status(lambda s: len(s["workers"]) < 2 or any(w["state"] == "gone" for w in s["workers"]),
                               "the hub to notice", 30)
        one.join()
        status = self.swarm.wait_covered()
        self.assertEqual(sorted(w["name"] for w in status["workers"]), ["one", "two"])
        self.assertEqual(server.complete(PROMPT, N_LONG), text)
        self.assertEqual(self.swarm.status()["coordinators"][0]["failures"], 0)
        faults = [link["faults"] for link in self.swarm.status()["coordinators"][0]["links"]]
        self.assertGreaterEqual(sum(f["hung"] + f["dead"] for f in faults), 1, faults)
        # As many as there are workers: nobody is counted twice.
        self.assertEqual(len(faults), 2)

    def test_a_partition_costs_no_more_than_the_time_until_it_is_noticed(self):
        self.check_cut()

    def test_a_half_open_link_does_not_either(self):
        self.check_cut("arriving")

    def test_a_long_way_is_measured_and_no_reason_to_give_a_worker_up(self):
        host = self.host({"delay": 20, "jitter": 2, "loss": 0.002, "seed": 5})
        self.start_hub()
        self.join_from(host, "far")
        self.swarm.wait_covered()
        server = self.start_server()
        text = server.complete(PROMPT, 10)
        status = self.swarm.status()
        link = status["coordinators"][0]["links"][0]
        self.assertEqual(link["faults"], {k: 0 for k in link["faults"]})
        self.assertGreater(link["wait_us"], 40_000)  # there and back
        host.change("delay", 0)
        host.change("jitter", 0)
        host.change("loss", 0)
        self.assertEqual(server.complete(PROMPT, 10), text)

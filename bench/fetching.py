"""How quickly slices get where they belong: hashed, sent, read back, and from one newcomer to the next. Parts of run.py."""

import hashlib
import json
import os
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path

ROUNDS = 5


def seconds(command, **variables):
    start = time.monotonic()
    subprocess.run([str(c) for c in command], check=True, capture_output=True, env={**os.environ, **variables}, timeout=600)
    return time.monotonic() - start


def make_layer(bin_path, folder):
    """One layer of the real shape, 1.57 GB, made once."""
    layer = folder / "layer.gguf"
    if not layer.exists():
        seconds([bin_path / "linkcpp", "synth", layer, "--preset", "qwen3.5-122b-a10b-layer"])
    return layer


def manifest_seconds(bin_path, layer, folder):
    """Nothing is known of it before."""
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    return seconds([bin_path / "linkcpp", "manifest", layer], LINKCPP_HOME=str(home))


NGINX = """
user root; worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.err;
events {{}}
http {{
  access_log off; client_body_temp_path {folder}/t1; proxy_temp_path {folder}/t2; fastcgi_temp_path {folder}/t3;
  uwsgi_temp_path {folder}/t4; scgi_temp_path {folder}/t5; sendfile on;
  server {{
    listen 127.0.0.1:{port} ssl; ssl_protocols TLSv1.3; ssl_certificate {folder}/nginx.pem; ssl_certificate_key {folder}/nginx.pem;
    root {folder};
  }}
}}
"""


class Nginx:
    """Plain files over TLS 1.3 with a key like a hub's."""

    def __init__(self, folder, port):
        key = folder / "nginx.pem"
        subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=x",
                        "-keyout", folder / "k", "-out", folder / "c"], check=True, capture_output=True)
        key.write_bytes((folder / "k").read_bytes() + (folder / "c").read_bytes())
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port))
        self.process = subprocess.Popen(["nginx", "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)

    def close(self):
        self.process.terminate()
        self.process.wait()


def fetching(bin_path, folder, row):
    from server import free_port
    from swarm import Swarm, wait_for

    layer = make_layer(bin_path, folder)
    n_bytes = layer.stat().st_size
    results = []

    print(f"\nhashing and fetching a layer of {n_bytes / 1e9:.2f} GB")
    rounds = [(seconds(["sha256sum", layer]), manifest_seconds(bin_path, layer, folder)) for _ in range(ROUNDS)]
    results.append(row("  manifest: speed against sha256sum of the file", statistics.median(a / b for a, b in rounds), 1.0,
                       sha256sum_s=statistics.median(a for a, _ in rounds)))

    swarm = Swarm()
    nginx = None
    try:
        swarm.serve(layer)
        https = swarm.status()["https"]
        token = swarm.line.split("/")[-1].split("?")[0]
        # tmpfs, so that the disk is not what is measured
        out = Path(f"/dev/shm/linkcpp-bench-{os.getpid()}")
        shard = folder / "shard.gguf"
        seconds([bin_path / "linkcpp", "slice", layer, "--layer", 0, "--experts", "0-255", "-o", shard])
        port = free_port()
        nginx = Nginx(folder, port)
        curl = ["curl", "-sk", "--fail", "-o", out]
        from_hub = [*curl, "--pinnedpubkey", https["pinned_public_key"], "-H", f"Authorization: Bearer {token}",
                    f"{https['url']}/expert-shard?layer=0&experts=0-255"]
        from_nginx = [*curl, f"https://127.0.0.1:{port}/shard.gguf"]
        wait_for(lambda: not subprocess.run([*from_nginx[:-1], from_nginx[-1].replace("shard.gguf", "nginx.conf")]).returncode, 10, "nginx")
        rounds = []
        for _ in range(ROUNDS):
            rounds.append((seconds(from_nginx), seconds(from_hub)))
            if hashlib.sha256(out.read_bytes()).digest() != hashlib.sha256(shard.read_bytes()).digest():
                raise RuntimeError("what came is not what was cut")
        out.unlink()
        results.append(row("  /expert-shard: speed against curl of the file from nginx", statistics.median(a / b for a, b in rounds), 0.8,
                           nginx_s=statistics.median(a for a, _ in rounds)))

        # A worker: to its store and into its memory, hashed twice. Then again, from the store.
        store = folder / "store"
        colds, warms, cats = [], [], []
        for _ in range(3):
            shutil.rmtree(store, ignore_errors=True)
            for times in (colds, warms):
                start = time.monotonic()
                worker = swarm.join("worker", "--store", store)
                wait_for(lambda: re.search("holding 256 slices", worker.err()), 120, "the worker", 0.01)
                times.append(time.monotonic() - start)
                worker.stop()
                swarm.wait_status(lambda s: not any(w["state"] == "ready" for w in s["workers"]), "its end")
            start = time.monotonic()
            subprocess.run("cat " + str(store / "??" / "*") + " > /dev/null", shell=True, check=True)
            cats.append(time.monotonic() - start)
        nginx_s = statistics.median(a for a, _ in rounds)
        results.append(row(f"  worker, nothing stored: {statistics.median(colds):.2f} s, against curl from nginx", nginx_s / statistics.median(colds), 0.5,
                           cold_s=colds))
        results.append(row(f"  worker, all stored: {statistics.median(warms):.2f} s, against cat of its slices",
                           statistics.median(cats) / statistics.median(warms), 0.2, warm_s=warms, cat_s=cats))
    finally:
        if nginx:
            nginx.close()
        swarm.close()
    return results


RATE = 100  # Mbit/s of each host's line


def sharing_round(bin_path, model, n_newcomers):
    """Seconds until so many newcomers, each on a host of its own, hold the whole model; bytes that the hub has sent."""
    from network import Lan
    from server import free_port
    from swarm import Swarm

    lan, swarm = Lan(), Swarm()
    try:
        hub_host, address = lan.host(RATE)
        swarm.hub = swarm.start("hub", [*hub_host, bin_path / "linkcpp", "serve", "-m", model, "--hub-only", "--listen", f"{address}:{free_port()}",
                                        "--replicas", n_newcomers, "--expect-workers", n_newcomers])
        from swarm import wait_for
        swarm.line = wait_for(swarm._find_line, 60, "the hub's join line")
        start = time.monotonic()
        for i in range(n_newcomers):
            host, own = lan.host(RATE)
            swarm.start(f"worker-{i}", [*host, bin_path / "linkcpp", "join", "--name", f"worker-{i}", "--threads", 1, "--memory", "1G", "--listen", own,
                                        "--store", swarm.home / f"store-{i}"], LINKCPP_HUB=swarm.line)
        status = swarm.wait_covered(300)
        return time.monotonic() - start, status["hub"]["bytes_sent"], status["model"]["expert_bytes"]
    finally:
        swarm.close()
        lan.close()


def sharing(bin_path, folder, row):
    model = folder / "shared.gguf"
    seconds([bin_path / "linkcpp", "synth", model, "--layers", 8, "--experts", 64, "--used", 4, "--embd", 512, "--ff", 256, "--types", "q8_0"])
    seconds([bin_path / "linkcpp", "manifest", model])
    one = [sharing_round(bin_path, model, 1) for _ in range(3)]
    eight = [sharing_round(bin_path, model, 8) for _ in range(3)]
    n_bytes = one[0][2]
    alone, together = statistics.median(r[0] for r in one), statistics.median(r[0] for r in eight)
    line = n_bytes * 8 / (RATE * 1e6)
    sent = statistics.median(r[1] for r in eight) / n_bytes
    print(f"\neight newcomers that each take {n_bytes / 1e6:.0f} MB, every host with a line of {RATE} Mbit/s (the line alone: {line:.1f} s)")
    return [row(f"  {together:.1f} s, against one newcomer's {alone:.1f} s", together / alone, 2.0, at_most=True, one=one, eight=eight),
            row(f"  the hub has sent {sent:.2f} copies", sent, 2.0, at_most=True)]

"""llama-server as a client sees it."""

import http.client
import json
import socket
import threading
import time

from swarm import SLOWNESS, START_S, wait_for

REQUEST_S = 60


def free_port():
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RequestFailed(Exception):
    """The server answered with an error: status and what it says."""

    def __init__(self, status, body):
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


class Server:
    """A llama-server on a port of this machine."""

    def __init__(self, port, process):
        self.port = port
        self.process = process

    def healthy(self):
        try:
            return self._get("/health") == 200
        except OSError:
            return False

    def wait_healthy(self):
        def check():
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.process.name} ended with status {self.process.poll()}:\n"
                                   f"{self.process.err()}")
            return self.healthy()
        wait_for(check, START_S, "llama-server's health")
        return self

    def _get(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5 * SLOWNESS)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        finally:
            connection.close()

    def _events(self, path, body):
        """The JSON of each server-sent event until [DONE] or the end."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_S * SLOWNESS)
        try:
            connection.request("POST", path, json.dumps({**body, "stream": True}),
                               {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(response.status, response.read().decode())
            for line in response:
                line = line.decode().strip()
                if line.startswith("error:"):
                    raise RequestFailed(response.status, line)
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise RequestFailed(event["error"].get("code"), event["error"].get("message"))
                yield event
        finally:
            connection.close()

    def start_completion(self, prompt, n_tokens):
        """A Completion under way."""
        completion = Completion(self, prompt, n_tokens)
        completion.start()
        return completion

    def complete(self, prompt, n_tokens, on_token=None):
        """The text that follows a prompt; on_token() is called as each token arrives."""
        text = ""
        for event in self._events("/completion", {"prompt": prompt, "n_predict": n_tokens, "temperature": 0, "seed": 1,
                                                  "cache_prompt": False}):
            text += event["content"]
            if on_token:
                on_token()
        return text

    def chat(self, question, n_tokens):
        """(text, number of events) of an OpenAI-style chat request, streamed."""
        text, n_events = "", 0
        body = {"model": "any", "messages": [{"role": "user", "content": question}], "max_tokens": n_tokens,
                "temperature": 0, "seed": 1, "cache_prompt": False}
        for event in self._events("/v1/chat/completions", body):
            n_events += 1
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
        return text, n_events


class Completion(threading.Thread):
    """A streamed request in a thread of its own, so that something can be done in its midst."""

    def __init__(self, server, prompt, n_tokens):
        super().__init__(daemon=True)
        self.server, self.prompt, self.n_tokens = server, prompt, n_tokens
        self.arrivals = []  # when each token came
        self.text = self.error = self.ended = None

    def run(self):
        try:
            self.text = self.server.complete(self.prompt, self.n_tokens, on_token=self._count)
        except (RequestFailed, OSError) as error:
            self.error = error
        self.ended = time.monotonic()

    def _count(self):
        self.arrivals.append(time.monotonic())

    @property
    def n_arrived(self):
        return len(self.arrivals)

    def wait_arrived(self, n_tokens):
        """Until so many tokens are there, and more to come."""
        wait_for(lambda: self.n_arrived >= n_tokens or self.ended, REQUEST_S, f"{n_tokens} tokens")

    def finish(self):
        """Waits for the end; the text, or raises what failed."""
        self.join(REQUEST_S * SLOWNESS)
        if self.ended is None:
            raise TimeoutError(f"a request neither failed nor ended within {REQUEST_S} s")
        if self.error:
            raise self.error
        return self.text

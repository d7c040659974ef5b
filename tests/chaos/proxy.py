"""A wire that can be disturbed: a TCP proxy on loopback whose connections can be cut, held up, corrupted or left dead.

What passes is TLS and means nothing to it, as to whoever sits between two machines.
"""

import random
import socket
import struct
import threading
import time

CHUNK = 64 << 10


class Connection:
    """One connection through the wire, in both directions."""

    def __init__(self, near, far):
        self.near, self.far = near, far
        self.closed = False
        self.dead = False  # it stands, and nothing passes any more
        self.delay = 0.0  # seconds that each piece is held up
        self._flip = self._cut = False
        self.n_bytes = 0
        self._lock = threading.Lock()
        for end in (near, far):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for source, sink in ((near, far), (far, near)):  # from here on either may close both
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def corrupt(self):
        """One bit of the next piece is flipped."""
        self._flip = True

    def cut(self):
        """The next piece passes by half, then the connection is reset."""
        self._cut = True

    def reset(self):
        with self._lock:
            if self.closed:
                return
            self.closed = True
        for end in (self.near, self.far):
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()

    def _pump(self, source, sink):
        try:
            while True:
                piece = source.recv(CHUNK)
                if not piece:
                    break
                while self.dead and not self.closed:
                    time.sleep(0.01)
                if self.delay:
                    time.sleep(self.delay)
                if self._cut:
                    sink.sendall(piece[:len(piece) // 2])
                    break
                if self._flip:
                    self._flip = False
                    place = random.randrange(len(piece))
                    piece = piece[:place] + bytes([piece[place] ^ 1 << random.randrange(8)]) + piece[place + 1:]
                sink.sendall(piece)
                self.n_bytes += len(piece)
        except OSError:
            pass
        self.reset()


class Wire:
    """Listens on a port of its own and connects whoever calls with `target`, a port of this machine."""

    def __init__(self, target):
        self.target = target
        self._connections = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def alive(self):
        """The connections that stand."""
        with self._lock:
            self._connections = [c for c in self._connections if not c.closed]
            return list(self._connections)

    def close(self):
        self._listener.close()
        for connection in self.alive():
            connection.reset()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._connections.append(Connection(near, far))

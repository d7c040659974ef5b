"""GGUF files, read and written: enough to change a model's metadata and tensors."""

import struct

ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
F32 = 0


class Gguf:
    """keys: {name: (type, value)}, values of arrays as (type, list); tensors: {name: (ne, ggml type, bytes)}."""

    def __init__(self, path):
        self.data = path.read_bytes()
        self.at = 8
        n_tensors, n_keys = self._take("Q"), self._take("Q")
        self.keys = {}
        for _ in range(n_keys):
            name = self._text()
            kind = self._take("I")
            self.keys[name] = (kind, self._value(kind))
        table = []
        for _ in range(n_tensors):
            name = self._text()
            ne = [self._take("Q") for _ in range(self._take("I"))]
            table.append((name, ne, self._take("I"), self._take("Q")))
        start = -(-self.at // ALIGNMENT) * ALIGNMENT
        ends = [offset for *_, offset in table[1:]] + [len(self.data) - start]
        self.tensors = {name: (ne, kind, self.data[start + offset:start + end])
                        for (name, ne, kind, offset), end in zip(table, ends)}
        del self.data

    def _take(self, form):
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values[0]

    def _text(self):
        n = self._take("Q")
        self.at += n
        return self.data[self.at - n:self.at].decode()

    def _value(self, kind):
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            inner, n = self._take("I"), self._take("Q")
            return inner, [self._value(inner) for _ in range(n)]
        return self._take(SCALARS[kind])

    def write(self, path):
        out = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.keys)))

        def text(value):
            return struct.pack("<Q", len(value.encode())) + value.encode()

        def value_bytes(kind, value):
            if kind == STRING:
                return text(value)
            if kind == ARRAY:
                inner, values = value
                return struct.pack("<IQ", inner, len(values)) + b"".join(value_bytes(inner, v) for v in values)
            return struct.pack("<" + SCALARS[kind], value)

        for name, (kind, value) in self.keys.items():
            out += text(name) + struct.pack("<I", kind) + value_bytes(kind, value)
        offset = 0
        for name, (ne, kind, data) in self.tensors.items():
            out += text(name) + struct.pack(f"<I{len(ne)}QIQ", len(ne), *ne, kind, offset)
            offset += -(-len(data) // ALIGNMENT) * ALIGNMENT
        out += bytes(-len(out) % ALIGNMENT)
        for _, _, data in self.tensors.values():
            out += data + bytes(-len(data) % ALIGNMENT)
        path.write_bytes(out)

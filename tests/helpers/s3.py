"""A stand-in for an S3 server: one bucket in memory, with conditional create and lists."""

import contextlib
import http.server
import re
import threading
import urllib.parse
from collections.abc import Iterator
from typing import ClassVar
from xml.sax import saxutils

KEY = "key"
"""The access key that it knows; it checks no signature."""


class _Handler(http.server.BaseHTTPRequestHandler):
    objects: ClassVar[dict[str, bytes]]
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def handle_one(self, act):
        url = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(url.path).strip("/").partition("/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self.answer(403, b"<Error><Code>InvalidAccessKeyId</Code></Error>")
        elif bucket != "runs":
            self.answer(404, b"<Error><Code>NoSuchBucket</Code></Error>")
        else:
            act(key, body, dict(urllib.parse.parse_qsl(url.query)))

    def do_PUT(self):  # noqa: N802
        def put(key, body, query):
            if self.headers.get("If-None-Match") == "*" and key in self.objects:
                return self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            self.objects[key] = body
            return self.answer(200, ETag='"0"')

        self.handle_one(put)

    def do_GET(self):  # noqa: N802
        def get(key, body, query):
            if not key:
                return self.answer(200, self.listed(query.get("prefix", "")))
            if key not in self.objects:
                return self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            when = "Fri, 27 Nov 2026 00:00:00 GMT"
            return self.answer(200, self.objects[key], ETag='"0"', Last_Modified=when)

        self.handle_one(get)

    def do_POST(self):  # noqa: N802
        def delete(key, body, query):
            found = re.findall(r"<Key>.*?</Key>", body.decode())
            for each in found:
                self.objects.pop(saxutils.unescape(each[5:-6]), None)
            told = "".join(f"<Deleted>{each}</Deleted>" for each in found)
            self.answer(200, f"<DeleteResult>{told}</DeleteResult>".encode())

        self.handle_one(delete)

    def listed(self, prefix):
        found = "".join(
            f"<Contents><Key>{saxutils.escape(key)}</Key><Size>{len(self.objects[key])}</Size>"
            '<LastModified>2026-11-27T00:00:00.000Z</LastModified><ETag>"0"</ETag></Contents>'
            for key in sorted(self.objects)
            if key.startswith(prefix)
        )
        head = "<IsTruncated>false</IsTruncated>"
        return f"<ListBucketResult>{head}{found}</ListBucketResult>".encode()


@contextlib.contextmanager
def served(host: str = "127.0.0.1", port: int = 0) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Serves the bucket `runs`; the endpoint, and the objects by key."""
    objects: dict[str, bytes] = {}
    handler = type("Handler", (_Handler,), {"objects": objects})
    with http.server.ThreadingHTTPServer((host, port), handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://{host}:{server.server_port}", objects
        finally:
            server.shutdown()

"""An object store of this process that speaks S3, for the real client: no file system, and no network but loopback.

It has what s3fs asks for: objects as a whole, listings in pages, removal of many at once, uploads in parts. Signatures
are not checked.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape


_PAGE = 7  # of a listing: few, so that there are pages


class S3Server(ThreadingHTTPServer):
    """Serves until it is closed.

    Attributes:
        objects: content of each, by "bucket/key".
        refused: methods that are answered with 403.
        num_refused: so many calls of any method, too, from now on.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket = f"bucket-{self.server_address[1]}"  # clients that are kept for another one do not come here
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        self.refused: frozenset[str] = frozenset()
        self.num_refused = 0

    @property
    def environment(self) -> dict[str, str]:
        """What makes clients come here."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server_address[1]}",
            "AWS_ACCESS_KEY_ID": "anybody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def served() -> Iterator[S3Server]:
    with S3Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10.0)


class _Handler(BaseHTTPRequestHandler):
    server: S3Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._is_refused():
            return None
        if not self._key:
            return self._list()
        if self._name not in self.server.objects:
            return self._fail(404, "NoSuchKey")
        content, status = self.server.objects[self._name], 200
        if ranged := self.headers.get("Range"):
            start, _, end = ranged.removeprefix("bytes=").partition("-")
            content, status = content[int(start) : int(end) + 1 if end else None], 206
        return self._answer(status, content, etag=content)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        content = self._body()
        if self._is_refused():
            return
        if upload := self._query.get("uploadId"):
            self.server.uploads[upload][int(self._query["partNumber"])] = content
        else:
            self.server.objects[self._name] = content
        self._answer(200, etag=content)

    def do_POST(self) -> None:
        body = self._body()
        if self._is_refused():
            return
        if "delete" in self._query:
            for element in ElementTree.fromstring(body).iter():
                if element.tag.rpartition("}")[2] == "Key":
                    self.server.objects.pop(f"{self.server.bucket}/{element.text}", None)
            self._answer(200, b"<DeleteResult/>")
        elif "uploads" in self._query:
            upload = f"upload-{len(self.server.uploads)}"
            self.server.uploads[upload] = {}
            self._answer(200, f"<R><UploadId>{upload}</UploadId></R>".encode())
        else:
            parts = self.server.uploads.pop(self._query["uploadId"])
            self.server.objects[self._name] = b"".join(parts[number] for number in sorted(parts))
            self._answer(200, b"<R><ETag>x</ETag></R>")

    def do_DELETE(self) -> None:
        if not self._is_refused():
            self.server.objects.pop(self._name, None)
            self._answer(204)

    def _list(self) -> None:
        prefix, delimiter = self._query.get("prefix", ""), self._query.get("delimiter", "")
        after = self._query.get("continuation-token", "")
        entries: dict[str, str] = {}
        for name, content in sorted(self.server.objects.items()):
            key = name.removeprefix(f"{self.server.bucket}/")
            if not key.startswith(prefix):
                continue
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            if found:
                inner = f"{prefix}{folder}{delimiter}"
                entries[inner] = f"<CommonPrefixes><Prefix>{escape(inner)}</Prefix></CommonPrefixes>"
            else:
                entries[key] = (
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size>"
                    "<LastModified>2025-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        names = [name for name in entries if name > after]
        page, rest = names[:_PAGE], names[_PAGE:]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        text = (
            f"<ListBucketResult><KeyCount>{len(page)}</KeyCount><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>"
            f"{more}{''.join(entries[name] for name in page)}</ListBucketResult>"
        )
        self._answer(200, text.encode())

    @property
    def _name(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    @property
    def _key(self) -> str:
        return self._name.partition("/")[2]

    @property
    def _query(self) -> dict[str, str]:
        query = urlsplit(self.path).query
        return {name: values[0] for name, values in parse_qs(query, keep_blank_values=True).items()}

    def _is_refused(self) -> bool:
        if self.server.num_refused:
            self.server.num_refused -= 1
            self._fail(403, "AccessDenied")
        elif self.command in self.server.refused:
            self._fail(403, "AccessDenied")
        elif self._name.partition("/")[0] != self.server.bucket:
            self._fail(404, "NoSuchBucket")
        else:
            return False
        return True

    def _body(self) -> bytes:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return body
        content = b""
        while True:
            size, _, body = body.partition(b"\r\n")
            num_bytes = int(size.partition(b";")[0], 16)
            if not num_bytes:
                return content
            content, body = content + body[:num_bytes], body[num_bytes + 2 :]

    def _fail(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _answer(self, status: int, content: bytes = b"", *, etag: bytes | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        if etag is not None:
            self.send_header("ETag", f'"{hashlib.md5(etag).hexdigest()}"')
            self.send_header("Last-Modified", "Wed, 01 Jan 2025 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

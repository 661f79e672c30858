"""A server for the client's tests that answers as it is told; `served` has a real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from confpred.predict.choice import answers_json
from confpred.predict.predictor import Predictor
from confpred.problem.conv2d import Problem


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64


@dataclass
class Answer:
    """The answer of a scripted server: status, headers and body, or nothing at all."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None  # None: what the predictor says
    before_s: float = 0.0  # how long it lets the client wait first
    drip_s: float = 0.0  # how long it waits after each byte of the body
    drop: bool = False  # it closes the connection instead


class ToldServer:
    """A real HTTP server that gives `answers` in turn, the last one again and again.

    Attributes:
        seen: the headers of the requests so far, names in lower case, and ``body``.
    """

    def __init__(self, predictor: Predictor | None = None, *answers: Answer, port: int = 0) -> None:
        self.predictor, self.answers = predictor, list(answers) or [Answer()]
        self.seen: list[dict[str, str]] = []
        self.connections: set[object] = set()
        self._http = _Http(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self.port = self._http.server_port

    def __enter__(self) -> ToldServer:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def next_answer(self) -> Answer:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def body(self, request: bytes) -> bytes:
        assert self.predictor is not None
        asked = json.loads(request)
        problems = [Problem.from_json(fields) for fields in asked["problems"]]
        ranked = [self.predictor.rank(p, asked["device"], asked["top"]) for p in problems]
        return answers_json(ranked).encode()


def _handler(server: ToldServer) -> Callable[..., BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.connections.add(self.client_address)
            server.seen.append(headers | {"body": request.decode()})
            answer = server.next_answer()
            time.sleep(answer.before_s)
            if answer.drop:
                self.close_connection = True
                return
            body = server.body(request) if answer.body is None else answer.body
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            try:
                if not answer.drip_s:
                    self.wfile.write(body)
                    return
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                    time.sleep(answer.drip_s)
            except OSError:  # the client has gone
                self.close_connection = True

        do_GET = do_POST  # noqa: N815 -- the name is http.server's

        def log_message(self, *_: object) -> None: ...

    return Handler

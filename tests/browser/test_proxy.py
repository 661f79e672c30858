"""Two hosts of the service behind nginx, by the file that is shipped."""

from __future__ import annotations

import contextlib
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from served import ONE, Server, eventually, running

DEPLOY = Path(__file__).parents[2] / "docs" / "deploy"


@contextmanager
def proxied(nginx: str, folder: Path, *servers: Server) -> Iterator[str]:
    """Run nginx by its file as shipped, but for addresses, the port and the certificate, before
    these servers; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    made += ["-keyout", f"{folder}/confpred.example.com.key"]
    made += ["-out", f"{folder}/confpred.example.com.crt", "-days", "2"]
    subprocess.run(made, check=True, capture_output=True)
    text = (DEPLOY / "nginx.conf").read_text().replace("listen 443", f"listen 127.0.0.1:{port}")
    text = text.replace("/etc/ssl/private", str(folder)).replace("/etc/ssl", str(folder))
    for number, server in enumerate(servers, 11):
        text = text.replace(f"10.0.0.{number}:8000", f"127.0.0.1:{server.port}")
    places = "".join(
        f"{name}_temp_path {folder}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    http = f"access_log {folder}/access.log; {places} {text}"
    own = f"daemon off; pid {folder}/pid; error_log {folder}/nginx.log; events {{}}"
    (folder / "nginx.conf").write_text(f"{own} http {{ {http} }}")
    command = [nginx, "-p", str(folder), "-c", str(folder / "nginx.conf")]
    with subprocess.Popen(command) as process:
        try:
            url = f"https://127.0.0.1:{port}"
            eventually(lambda: can_connect(port), command)
            yield url
        finally:
            process.terminate()


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_one_client_s_refusals_are_nobody_else_s_behind_the_proxy(
    nginx: str, openssl: str, tmp_path: Path
) -> None:
    """A client that asks for new layers in no time is refused, and no host counts as failed."""
    trusts = ("--trusted-proxies", "127.0.0.1")
    folders = [tmp_path / name for name in ("a", "b", "nginx")]
    for folder in folders:
        folder.mkdir()
    with (
        running(folders[0], *trusts, "--exchange", str(folders[0] / "exchange")) as first,
        running(folders[1], *trusts) as second,
        proxied(nginx, folders[2], first, second) as url,
        httpx.Client(base_url=url, verify=False, timeout=60) as client,
    ):
        for server in (first, second):
            assert server.predict().status_code == 200
        statuses: dict[str, list[int]] = {"greedy": [], "other": []}
        for number in range(60):
            new = {**ONE, "problem": {**ONE["problem"], "n": 100 + number}}
            reply = client.post("/v1/predict", json=new, headers={"prefer": "wait=0"})
            statuses["greedy"].append(reply.status_code)
            statuses["other"].append(client.post("/v1/predict", json=ONE).status_code)
        assert {*statuses["greedy"]} == {429}
        assert "retry-after" in reply.headers
        assert {*statuses["other"]} == {200}
        # One host alone has the exchange.
        assert {client.get("/v1/measurements").status_code for _ in range(6)} == {200}
        assert {client.get("/v1/jobs").status_code for _ in range(6)} == {200}
        assert {client.get(f"/v1/measurements/{'0' * 64}").status_code for _ in range(6)} == {404}
        assert client.get("/metrics").status_code == 403
        second.process.terminate()
        second.process.wait(60)
        replies = {client.post("/v1/predict", json=ONE).status_code for _ in range(20)}
        assert replies == {200}

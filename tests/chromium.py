"""A headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
)  # fmt: skip
#: Virtual key codes of Windows, which the protocol wants.
_KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}
_LONGEST_S = 60


class Tab:
    """One page, and what was asked of the network and said in the console since it was opened."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection, self._count, self._session = connection, 0, ""
        self.requests: list[str] = []
        self.said: list[str] = []
        self._loaded = False
        (target,) = self.call("Target.getTargets", filter=[{"type": "page"}])["targetInfos"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            reply = self._receive()
            if reply.get("id") == self._count:
                assert "error" not in reply, reply["error"]
                found: dict[str, Any] = reply["result"]
                return found

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._connection.recv(timeout=_LONGEST_S))
        event, told = message.get("method"), message.get("params", {})
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.said.append(json.dumps(told))
        elif event == "Page.loadEventFired":
            self._loaded = True
        return message

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._loaded = False
        found = self.call("Page.navigate", url=url)
        assert "errorText" not in found, found
        if "loaderId" not in found:  # it is there already
            self.call("Page.reload")
        self.wait()

    def wait(self) -> None:
        """Wait until the page that is coming is loaded."""
        while not self._loaded:
            self._receive()
        self._loaded = False

    def run(self, script: str) -> Any:
        """Return the value of an expression, as the developer's console has it: pages that run no
        scripts have it too."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key, and release it."""
        about: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        if key in ("Enter", " "):
            about["text"] = "\r" if key == "Enter" else " "
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Put `text` where the focus is, in the place of what is there."""
        self.run("document.activeElement.select()")
        self.call("Input.insertText", text=text)


@contextmanager
def tab(chromium: str, folder: Path) -> Iterator[Tab]:
    """Run a browser whose profile is in `folder`."""
    port = folder / "DevToolsActivePort"
    command = [chromium, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={folder}"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen([*command, "about:blank"], stdout=quiet, stderr=quiet) as process:
        try:
            deadline = time.monotonic() + _LONGEST_S
            while not port.exists() or len(port.read_text().split()) < 2:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.02)
            number, path = port.read_text().split()
            with connect(f"ws://127.0.0.1:{number}{path}", max_size=None) as connection:
                yield Tab(connection)
        finally:
            process.terminate()

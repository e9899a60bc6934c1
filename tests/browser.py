"""A headless Chromium, driven through the DevTools protocol over a pipe: no package and no port is needed.

with Browser() as browser:
    page = browser.open(path, width=1280)
    page.click(*page.middle("#tree"))
    assert page.evaluate("document.title") == "..."
"""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 60  # to wait for an answer
KEYS = {"Enter": 13, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


def find():
    """The path of a Chromium, or None. FASTFF_BROWSER names another one."""
    named = os.environ.get("FASTFF_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


def _pipe():
    """A pipe whose ends are not among the descriptors that the browser takes over."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high


class Browser:
    def __enter__(self):
        self.profile = tempfile.mkdtemp(prefix="fastff-browser-")
        command_read, self.commands = _pipe()
        self.answers, answer_write = _pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        flags += [
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--disable-background-networking",
            "--disable-extensions",
        ]
        # Chromium reads commands from descriptor 3 and writes to 4.
        script = f'exec "$0" "$@" 3<&{command_read} 4>&{answer_write}'
        arguments = ["/bin/bash", "-c", script, find(), *flags, f"--user-data-dir={self.profile}", "about:blank"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(arguments, pass_fds=(command_read, answer_write), **quiet)
        os.close(command_read)
        os.close(answer_write)
        self.number, self.buffer, self.events = 0, b"", []
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError, RuntimeError):
            self.send("Browser.close")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.commands)
        os.close(self.answers)
        shutil.rmtree(self.profile, ignore_errors=True)

    def send(self, method, session=None, **parameters):
        """Send a command and return its result; events that arrive meanwhile are kept."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": session} if session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _receive(self):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], SECONDS)
            part = os.read(self.answers, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser has ended." if ready else f"the browser is silent for {SECONDS} s.")
            self.buffer += part
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def open(self, path, *, width=1280, height=900, dark=False):
        """A page of a local file in a new tab, when its scripts have run."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        page.send("Runtime.enable")
        page.send("Network.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=Path(path).absolute().as_uri())
        page.wait("location.protocol === 'file:' && document.readyState === 'complete'")
        return page


class Page:
    def __init__(self, browser, session):
        self.browser, self.session = browser, session

    def send(self, method, **parameters):
        return self.browser.send(method, self.session, **parameters)

    def evaluate(self, expression):
        """The value of a JavaScript expression; promises are awaited."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"].get("exception", {}).get("description", expression))
        return found["result"].get("value")

    def wait(self, expression, seconds=20):
        end = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"waited {seconds} s for {expression}")
            time.sleep(0.02)

    def middle(self, selector):
        """The middle of an element, in the window, after scrolling to it."""
        left, top, width, height = self.box(selector)
        return left + width / 2, top + height / 2

    def box(self, selector):
        """Left, top, width and height of an element, in the window, after scrolling to it."""
        code = "(e => { e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
        code += "return [b.left, b.top, b.width, b.height]; })"
        return self.evaluate(f"{code}(document.querySelector({json.dumps(selector)}))")

    def click(self, x, y):
        """A real click of the mouse at a point of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key):
        """A real key, to whatever has the focus."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        self.send("Input.dispatchKeyEvent", type="keyDown", **names, **({"text": "\r"} if key == "Enter" else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **names)

    def type(self, text):
        self.send("Input.insertText", text=text)

    def text(self, selector):
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def errors(self):
        """Uncaught exceptions, and requests for anything but the page itself."""
        events = [event for event in self.browser.events if event.get("sessionId") == self.session]
        found = [
            event["params"]["exceptionDetails"] for event in events if event["method"] == "Runtime.exceptionThrown"
        ]
        asked = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        return found + [url for url in asked if not url.startswith(("file:", "data:"))]

    def screenshot(self, path, *, whole=False):
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

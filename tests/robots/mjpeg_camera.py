"""A network camera in a separate process: ``python mjpeg_camera.py A.jpg B.jpg``.

It sends the images in turn, at 20 Hz, as motion JPEG over HTTP on a port that it prints. A line on stdin ends the
stream.
"""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path

ended = threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        for path in cycle(sys.argv[1:]):
            picture = Path(path).read_bytes()
            self.wfile.write(b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n" % len(picture))
            self.wfile.write(picture + b"\r\n")
            if ended.wait(0.05):
                return

    def log_message(self, format: str, *args: object) -> None:
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print("ready", server.server_address[1], flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.readline()
ended.set()
sys.stdin.readline()

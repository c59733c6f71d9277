"""A fork server that loads nothing: ``python -m testing.forking.small_server FD``. Its task says how it
behaves: it gets a second thread, or ends."""

from __future__ import annotations

import os
import socket
import sys
import threading

from twinfang.forking.loop import serve_forks


def behave(task: str) -> None:
    if task == "thread":
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    elif task == "end":
        os._exit(3)
    elif task == "wait":
        threading.Event().wait()


if __name__ == "__main__":
    serve_forks(socket.socket(fileno=int(sys.argv[1])), behave)

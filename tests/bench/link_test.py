from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from unittest import mock

from absl.testing import absltest

from tfcdo.bench import link

# Sends 2 MB through the loopback interface of the process and prints how many arrived.
_SENDER = """
import socket, threading
server = socket.create_server(("127.0.0.1", 0))
def send():
    with socket.create_connection(server.getsockname()) as client:
        client.sendall(bytes(2_000_000))
threading.Thread(target=send).start()
connection, _ = server.accept()
received = 0
while chunk := connection.recv(1 << 20):
    received += len(chunk)
print(received)
"""


class LinkTest(absltest.TestCase):
    def test_counts_what_its_own_programs_send_and_nothing_else(self):
        with self._open(None) as opened:
            if opened is None:
                return
            self.assertTrue(opened.is_own)
            before = opened.count_bytes()
            subprocess.run([sys.executable, "-c", _SENDER], check=True, stdout=subprocess.DEVNULL)
            self.assertEqual(opened.count_bytes(), before)
            self._send(opened)
            sent = opened.count_bytes() - before
        self.assertBetween(sent, 2_000_000, 2_100_000)

    def test_the_rate_is_that_of_the_interface(self):
        with self._open(12.5e6) as opened:
            if opened is None:
                return
            shown = subprocess.run(
                [*opened.command, "tc", "qdisc", "show", "dev", "lo"],
                check=True,
                capture_output=True,
                text=True,
            )
            self.assertIn("tbf", shown.stdout)
            self.assertIn("rate 100Mbit", shown.stdout)
            self._send(opened)
        # The machine's own interface is as it was.
        own = subprocess.run(
            ["tc", "qdisc", "show", "dev", "lo"], check=True, capture_output=True, text=True
        )
        self.assertNotIn("tbf", own.stdout)

    def test_a_refusal_names_the_reason_and_a_remedy(self):
        with tempfile.TemporaryDirectory() as folder:
            for program in ("ip", "tc", "nsenter"):
                pathlib.Path(folder, program).symlink_to(shutil.which(program) or "/bin/false")
            pathlib.Path(folder, "unshare").write_text("#!/bin/sh\necho Denied >&2; exit 1\n")
            pathlib.Path(folder, "unshare").chmod(0o755)
            with (
                mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}"),
                self.assertRaisesRegex(link.LinkError, r"refused \(Denied\): run it as root"),
                link.open_link(None),
            ):
                pass

    def test_a_missing_program_is_named(self):
        with (
            mock.patch.dict(os.environ, PATH=""),
            self.assertRaisesRegex(link.LinkError, "unshare is not installed"),
            link.open_link(None),
        ):
            pass

    def test_the_shared_link_is_the_machines(self):
        shared = link.shared_link()
        self.assertEqual((shared.command, shared.is_own), ((), False))
        self.assertGreaterEqual(shared.count_bytes(), 0)

    @contextlib.contextmanager
    def _open(self, rate: float | None) -> Iterator[link.Loopback | None]:
        """Opens a link; None where this user may not, and the refusal says what would help."""
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(link.open_link(rate))
            except link.LinkError as error:
                self.assertRegex(str(error), "run it as root|is not installed: it comes with")
                opened = None
            yield opened

    def _send(self, opened: link.Loopback) -> None:
        sent = subprocess.run(
            [*opened.command, sys.executable, "-c", _SENDER],
            check=True,
            capture_output=True,
            text=True,
        )
        self.assertEqual(sent.stdout, "2000000\n")


if __name__ == "__main__":
    absltest.main()

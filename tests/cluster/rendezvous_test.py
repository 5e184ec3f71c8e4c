"""The hosts' meeting before TensorFlow starts, with hosts that are threads."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from absl.testing import absltest

from tfcdo.cluster import config
from tfcdo.cluster import rendezvous
from tfcdo.launch import cluster as launch_cluster


def meet_all(
    addresses: Sequence[str],
    settings: Mapping[int, Mapping[str, Any]],
    timeout: float = 10.0,
    delays: Mapping[int, float] | None = None,
) -> list[str]:
    """Has the hosts that have settings meet; returns how each ended."""
    ends = ["still waiting"] * len(addresses)

    def attend(host: int) -> None:
        time.sleep((delays or {}).get(host, 0.0))
        cluster = config.from_spec({"worker": list(addresses)}, "worker", host)
        assert cluster is not None
        try:
            rendezvous.meet(cluster, settings[host], timeout)
            ends[host] = "all are here"
        except rendezvous.RendezvousError as error:
            ends[host] = str(error)

    threads = [threading.Thread(target=attend, args=[host], daemon=True) for host in settings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout + 10.0)
    return ends


class RendezvousTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        self.addresses = self.enter_context(launch_cluster.reserved_ports(3))
        self.ports = [int(address.rpartition(":")[2]) for address in self.addresses]

    def test_all_come_though_one_is_late(self):
        settings = {host: {"version": "1"} for host in range(3)}
        for late in (0, 2):
            self.assertEqual(
                ["all are here"] * 3, meet_all(self.addresses, settings, delays={late: 1.5})
            )

    def test_one_is_set_up_differently(self):
        settings = {0: {"version": "1"}, 1: {"version": "1"}, 2: {"version": "2"}}
        for end in meet_all(self.addresses, settings):
            self.assertRegex(end, r"not set up alike: version: 1 on host 0 .*, 2 on host 2")

    def test_one_does_not_come(self):
        ends = meet_all(self.addresses, {0: {}, 2: {}}, timeout=2.0)
        for end in (ends[0], ends[2]):
            self.assertRegex(end, r"timed out waiting for host 1 \(.* at " + self.addresses[1])

    def test_the_chief_does_not_come(self):
        ends = meet_all(self.addresses, {1: {}, 2: {}}, timeout=2.0)
        for end in ends[1:]:
            self.assertRegex(end, r"timed out waiting for host 0 .* to start: .*refused")

    def test_a_name_that_nobody_knows(self):
        ends = meet_all(["nobody.invalid:1", self.addresses[1]], {1: {}}, timeout=2.0)
        self.assertRegex(ends[1], r"host 0 .*nobody.invalid:1.* to start: .*(Name|name)")

    def test_an_address_that_does_not_answer(self):
        # Host 1 listens on its port, but the cluster says that it is elsewhere.
        addresses = [self.addresses[0], f"127.0.0.1:{self.ports[1]}"]
        with unreachable(self.ports[1]):
            ends = meet_all(addresses, {0: {}, 1: {}}, timeout=5.0)
        for end in ends:
            self.assertRegex(end, r"host 1 .* has started, but does not answer at that address")

    def test_a_port_in_use(self):
        with socket.create_server(("", self.ports[0])):
            ends = meet_all(self.addresses[:2], {0: {}}, timeout=2.0)
        self.assertRegex(
            ends[0], f"port {self.ports[0]} of host 0 .* cannot be used on this machine: .*in use"
        )

    def test_strangers_are_ignored(self):
        def disturb() -> None:
            for message in (b"GET / HTTP/1.1\r\n\r\n", b'{"host": 7, "settings": {}}\n', b"[]\n"):
                for _ in range(50):
                    with contextlib.suppress(OSError):
                        with socket.create_connection(("127.0.0.1", self.ports[0])) as stranger:
                            stranger.sendall(message)
                        break
                    time.sleep(0.05)

        threading.Thread(target=disturb, daemon=True).start()
        ends = meet_all(self.addresses[:2], {0: {}, 1: {}}, delays={1: 1.0})
        self.assertEqual(["all are here"] * 2, ends)


@contextlib.contextmanager
def unreachable(port: int) -> Any:
    """Refuses connections to a port of this machine."""
    connect = socket.create_connection

    def refuse(address: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
        if address[1] == port:
            raise ConnectionRefusedError(111, "Connection refused")
        return connect(address, *arguments, **options)

    with absltest.mock.patch.object(socket, "create_connection", refuse):
        yield


if __name__ == "__main__":
    absltest.main()

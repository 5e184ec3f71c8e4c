"""The hosts' meeting before TensorFlow starts, with hosts that are threads."""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from multiprocessing import connection
from typing import Any
from unittest import mock

from absl.testing import absltest, parameterized

from tfcdo.cluster import config, protocol, rendezvous
from tfcdo.cluster.config import reserved_ports

SUCCESS = "all are here"
LATE = "timed out waiting for host "


def cluster_of(addresses: Sequence[str], host: int) -> config.Cluster:
    tasks = [config.ClusterTask("worker", *numbered) for numbered in enumerate(addresses)]
    return config.Cluster(tuple(tasks), host)


def meet_all(
    addresses: Sequence[str],
    settings: Mapping[int, Mapping[str, Any]],
    timeout: float = 60.0,
    delays: Mapping[int, float] | None = None,
    tokens: Mapping[int, str] | None = None,
) -> dict[int, str]:
    """Has the hosts that have settings meet; returns how each ended."""

    def attend(host: int) -> str:
        time.sleep((delays or {}).get(host, 0.0))
        try:
            token = (tokens or {}).get(host, "")
            rendezvous.meet(cluster_of(addresses, host), settings[host], timeout, token)
        except protocol.RendezvousError as error:
            return str(error)
        return SUCCESS

    ends = futures.ThreadPoolExecutor().map(attend, settings, timeout=timeout + 10.0)
    return dict(zip(settings, ends, strict=True))


class RendezvousTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        self.addresses = self.enter_context(reserved_ports(3))
        self.ports = [int(address.rpartition(":")[2]) for address in self.addresses]

    def meet_beside(self, others: Callable[[], Any], hosts: int = 2, **options: Any) -> Any:
        """Returns how the chief ends while others do something, and what they return."""
        with futures.ThreadPoolExecutor() as pool:
            result = pool.submit(others)
            chief = meet_all(self.addresses[:hosts], {0: {}}, **options)[0]
            return chief, result.result()

    @parameterized.parameters((10.0, {0: "1", 1: "1", 2: "2"}), (1.5, {0: "1", 2: "2"}))
    def test_one_is_set_up_differently_and_another_may_not_come(self, timeout, versions):
        settings = {host: {"version": version} for host, version in versions.items()}
        ends = meet_all(self.addresses, settings, timeout)
        late = "" if 1 in versions else rf"; {LATE}1 \(.* at {self.addresses[1]}\) to start"
        for host in versions:
            expected = rf"not set up alike: version: 1 on host 0 .*, 2 on host 2 [^;]*{late}$"
            self.assertRegex(ends[host], expected)

    def test_an_address_that_does_not_answer(self):
        # Host 1 listens on its port, but no connection can be made to its address.
        addresses = [self.addresses[0], f"255.255.255.255:{self.ports[1]}"]
        for end in meet_all(addresses, {0: {}, 1: {}}, timeout=5.0).values():
            self.assertRegex(end, r"host 1 .* has started, but does not answer at that address")

    def test_a_port_in_use(self):
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        with socket.create_server(("", self.ports[0]), family=family):  # Not for IPv4.
            ends = meet_all(self.addresses[:2], {0: {}}, timeout=2.0)
        told = f"port {self.ports[0]} of host 0 .* cannot be used on this machine: .*in use"
        self.assertRegex(ends[0], told)

    def test_something_else_at_the_chiefs_address(self):
        def talk() -> None:
            with contextlib.suppress(OSError):  # It is closed.
                while True:
                    with listener.accept()[0] as peer:
                        peer.sendall(b"\0\0\x12\4" + bytes(60))  # As TensorFlow's server begins.

        with socket.create_server(("", self.ports[0])) as listener:
            threading.Thread(target=talk, daemon=True).start()
            ends = meet_all(self.addresses[:2], {1: {}}, timeout=1.0)
        self.assertRegex(ends[1], f"{LATE}0 .*: something other .* is listening there.* end it")

    @parameterized.parameters(
        b"\xff\xfe\n",
        b'[1, {"version": "of a stranger"}]\n',
        b"[1, " + b"[" * 100_000 + b"\n",
        b"x" * 3_000_000,
    )
    def test_a_stranger_is_ignored(self, message):
        def disturb() -> str:
            for _ in range(3):
                with connected(self.ports[0]) as stranger, contextlib.suppress(OSError):
                    stranger.sendall(message)
            return meet_all(self.addresses[:2], {1: {}})[1]

        self.assertEqual((SUCCESS, SUCCESS), self.meet_beside(disturb))

    @parameterized.parameters(
        (b"[1, 5]", ""),
        (b'[1, {"a": ' + b"[" * 100_000, ""),
        (b"[7, {}]", "the cluster has no other host 7"),
    )
    def test_a_host_of_the_job_that_talks_nonsense(self, content, answer):
        def talk() -> str:
            heard = ""
            with greeted(self.ports[0], b"token", content) as chief:
                with contextlib.suppress(EOFError):
                    heard = chief.recv_bytes().decode()
                # Only now: once all hosts have come, the chief may not hear this one any longer.
                meet_all(self.addresses[:2], {1: {}}, tokens={1: "token"})
            return heard

        end, heard = self.meet_beside(talk, tokens={0: "token"})
        self.assertEqual(SUCCESS, end)
        self.assertIn(answer, heard)
        self.assertEqual(bool(answer), bool(heard))

    @parameterized.parameters((False, 1.5), (True, 5.0))
    def test_a_host_that_ends_or_is_started_again(self, again, timeout):
        def come() -> str:
            with greeted(self.ports[0], b"", b"[1, {}]") as first:
                if not again:
                    first.close()
                settings: dict[int, Any] = {host: {} for host in ((1, 2) if again else (2,))}
                return meet_all(self.addresses, settings, timeout, delays={2: 0.5})[2]

        for end in self.meet_beside(come, hosts=3, timeout=timeout):
            self.assertRegex(end, SUCCESS if again else rf"{LATE}1 \(.*\) to start")

    def test_some_are_late_and_slow_strangers_hold_nobody_up(self):
        def drip() -> None:
            with connected(self.ports[0]) as stranger, contextlib.suppress(OSError):
                for _ in range(40):
                    stranger.sendall(b"x")
                    time.sleep(0.5)

        for _ in range(5):
            threading.Thread(target=drip, daemon=True).start()
        settings = {host: {"version": "1"} for host in range(3)}
        ends = meet_all(self.addresses, settings, timeout=8.0, delays={0: 0.3, 2: 1.0})
        self.assertEqual(dict.fromkeys(range(3), SUCCESS), ends)

    def test_nobody_goes_on_when_the_chief_is_interrupted(self):
        with (
            mock.patch.object(rendezvous, "_unreachable", side_effect=KeyboardInterrupt),
            futures.ThreadPoolExecutor() as pool,
        ):
            ends = pool.submit(meet_all, self.addresses[:2], {1: {}}, timeout=1.0)
            with self.assertRaises(KeyboardInterrupt):
                rendezvous.meet(cluster_of(self.addresses[:2], 0), {}, 10.0, "")
        self.assertRegex(ends.result()[1], rf"^{LATE}0 .* to start: .*refused")

    @mock.patch.object(protocol, "PATIENCE", 0.0)
    @mock.patch.object(rendezvous, "_unreachable", lambda *_: threading.Event().wait(3.0))
    def test_a_chief_that_is_stopped(self):
        end = meet_all(self.addresses[:2], {0: {}, 1: {}}, timeout=1.0)[1]
        self.assertRegex(end, r"^timed out: host 0 .* waits for another host, or is stopped$")

    def test_a_machine_that_is_gone_ends_a_connection(self):
        with socket.create_server(("", self.ports[0])), connected(self.ports[0]) as peer:
            own = peer.dup()
            rendezvous._channel(peer)
        self.assertTrue(own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE))
        options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
        idle, interval, count = (own.getsockopt(socket.IPPROTO_TCP, each) for each in options)
        self.assertLessEqual(idle + interval * count, 30)  # As the simulator has it.

    def test_jobs_with_other_tokens_keep_apart(self):
        ends = meet_all(self.addresses[:2], {0: {}, 1: {}}, timeout=1.0, tokens={0: "a"})
        for host, end in ends.items():
            pattern = f"for host {1 - host} .* does not know this job's TFCDO_CLUSTER_TOKEN"
            self.assertRegex(end, pattern)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    """Connects to a port of this machine as soon as somebody listens there."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection(("127.0.0.1", port)) as peer:
                yield peer
            return
        time.sleep(0.05)
    raise TimeoutError(port)


@contextlib.contextmanager
def greeted(port: int, token: bytes, content: bytes) -> Iterator[connection.Connection]:
    """Comes to the chief as a host that knows the token, and says something."""
    with connected(port) as peer, connection.Connection(peer.detach()) as chief:
        chief.send_bytes(bytes(32))
        chief.send_bytes(hmac.digest(token, b"tfcdo host " + chief.recv_bytes(), "sha256"))
        chief.recv_bytes()
        chief.send_bytes(content)
        yield chief


if __name__ == "__main__":
    absltest.main()

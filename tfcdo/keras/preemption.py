"""Notices that a machine will be taken away: all hosts leave after the same step.

Once there is a notice, each host publishes the step that it has begun, and waits for all steps.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from typing import Any

import tensorflow as tf
from absl import logging

from tfcdo import environment, keras_internals, log, tf_internals, wakeup
from tfcdo.cluster import session

_POLL = 1.0
# All hosts answer from a thread of their own, in which no step can hold them up.
_ANSWER_SECONDS = 20.0

_fits = itertools.count()  # Hosts count the same trainings.
_signalled = threading.Event()  # This machine will be taken away, in the next training too.


class Preemption:
    """Hears notices while a `fit` runs, and says after which of its calls to leave."""

    def __init__(self) -> None:
        self._session = session.current()
        self._prefix = f"preemption/{next(_fits)}"
        self._lock = threading.Lock()
        self._begun = 0
        self._published = False
        self._last: int | None = None  # None: a host did not answer.
        self._agreed = threading.Event()
        self._ended = threading.Event()
        self._previous_handler: Any = None

    def start(self) -> None:
        """Begins to listen; SIGTERM is heard unless the program handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            log.info_once(
                "SIGTERM makes no backup, because fit was not called by the main thread, the only "
                "one that handles signals; call fit there"
            )
        # The last is there if an earlier `fit` has ended with an error.
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None, _handle):
            signal.signal(signal.SIGTERM, _handle)
            self._previous_handler = signal.SIG_DFL
            if os.environ.get(environment.FAILURE_FILE):
                wakeup.listen()
                threading.Thread(
                    target=self._end_with_the_run, name="tfcdo signals", daemon=True
                ).start()
        if self._session is not None:
            threading.Thread(target=self._listen, name="tfcdo preemption", daemon=True).start()

    def stop(self) -> None:
        """Ends listening."""
        self._ended.set()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def may_begin(self, call: int) -> bool:
        """Returns whether to begin a call of the train function, the first being 1, or to leave."""
        with self._lock:
            if not self._published and not self._must_leave_alone():
                self._begun = call
                return True
        return not self.must_leave(call - 1)

    def must_leave(self, calls: int) -> bool:
        """Returns whether to leave now that this many calls are done, and one has not begun."""
        if self._session is None:
            return self._must_leave_alone()
        if _signalled.is_set():
            self._announce("a host got SIGTERM")
        if not (_signalled.is_set() or self._published):
            return False
        if not self._agreed.wait(_ANSWER_SECONDS) or self._last is None:
            logging.warning("tfcdo: leaving without a new backup, because a host does not answer")
            raise SystemExit(environment.RESTART_STATUS)
        return calls >= self._last

    def wait_for_all(self) -> None:
        """Waits until all hosts have come here: the chief, when its backup is written."""
        if self._session is not None:
            cluster, store = self._session.cluster, self._session.store
            store.set(f"{self._prefix}/left/{cluster.index}", "")
            for host in cluster.others:
                store.get(f"{self._prefix}/left/{host}", _ANSWER_SECONDS)

    def _must_leave_alone(self) -> bool:
        """Returns whether this host was told to leave; others learn it from `_listen`."""
        return _signalled.is_set()

    def _end_with_the_run(self) -> None:
        """Ends this process when `tfcdo launch` ends a run that has failed."""
        # The main thread may wait in a collective for a host that is gone, and so run no handler.
        while not self._ended.wait(_POLL):
            if wakeup.take(signal.SIGTERM) and environment.another_has_failed():
                os._exit(128 + signal.SIGTERM)

    def _announce(self, notice: str) -> None:
        assert self._session is not None
        key = f"{self._prefix}/notice"
        if self._session.store.get(key, 0.01) is None:
            with contextlib.suppress(tf.errors.OpError):  # Another host was first.
                self._session.store.set(key, notice)

    def _listen(self) -> None:
        assert self._session is not None
        store = self._session.store
        try:
            while not self._ended.is_set():
                if store.get(f"{self._prefix}/notice", _POLL) is not None:
                    self._agree()
                    return
                if tf_internals.preemption_notice(0.01) is not None:
                    self._announce("TensorFlow's notice")
        except tf.errors.OpError as error:  # The chief is gone, and the training fails by itself.
            logging.info("tfcdo: notices of preemption are no longer heard: %s", error)
        finally:
            self._agreed.set()

    def _agree(self) -> None:
        """Publishes this host's step, and takes the greatest of all."""
        assert self._session is not None
        cluster, store = self._session.cluster, self._session.store
        with self._lock:
            self._published = True
            begun = self._begun
        store.set(f"{self._prefix}/begun/{cluster.index}", str(begun))
        steps = [begun]
        for host in cluster.others:
            text = store.get(f"{self._prefix}/begun/{host}", _ANSWER_SECONDS)
            if text is None:
                logging.warning("tfcdo: %s does not say in which step it is", cluster.name(host))
                return
            steps.append(int(text))
        self._last = max(steps)


def _handle(number: int, frame: Any) -> None:
    """Handles SIGTERM: between steps it is remembered, and elsewhere it ends the process."""
    if environment.another_has_failed():
        os._exit(128 + number)
    if keras_internals.is_fitting():
        _signalled.set()
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(number)

"""Notices of preemption: all hosts leave after the same step.

`cluster.protocol.Leaving` has the rules; here are the threads, the signals and the store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from typing import Any

import tensorflow as tf
from absl import logging

from tfcdo import keras_internals, log, tf_internals
from tfcdo.cluster import protocol, session, worker

_POLL = 1.0

_fits = itertools.count()  # Hosts count the same trainings.
_signalled = threading.Event()  # This machine is being preempted; for later trainings too.


class Preemption:
    """Hears notices while a `fit` runs, and says after which of its calls to leave."""

    def __init__(self, joined: session.Session | None = None) -> None:
        self._session = joined  # None for a model that this host trains alone.
        if joined is not None:
            self._prefix = f"preemption/{next(_fits)}"
            self._leaving = protocol.Leaving(joined.cluster.index, len(joined.cluster.tasks))
        self._lock = threading.Lock()  # Guards what this host has begun.
        self._decided = threading.Event()
        self._ended = threading.Event()
        self._previous_handler: Any = None

    def start(self) -> None:
        """Begins to listen; SIGTERM is heard unless the program handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            log.info_once(
                "SIGTERM makes no backup, because fit was not called by the main thread, the only "
                "one that handles signals; call fit there"
            )
        elif signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            signal.signal(signal.SIGTERM, _handle)
            self._previous_handler = signal.SIG_DFL
            if os.environ.get(worker.FAILURE_FILE):
                threading.Thread(
                    target=self._end_with_the_run, name="tfcdo signals", daemon=True
                ).start()
        if self._session is not None:
            threading.Thread(
                target=self._listen, args=[self._session], name="tfcdo preemption", daemon=True
            ).start()

    def complete(self) -> None:
        """Tells hosts that leave which call was the last one here: the training is complete."""
        if self._session is not None and not self._decided.is_set():
            with contextlib.suppress(tf.errors.OpError):  # The chief is gone.
                self._tell_begun(self._session)

    def stop(self) -> None:
        """Ends listening."""
        self._ended.set()
        if self._previous_handler is not None:
            signal.signal(signal.SIGTERM, self._previous_handler)
            self._previous_handler = None

    def may_begin(self, call: int) -> bool:
        """Returns whether to begin a call of the train function, the first being 1, or to leave."""
        if self._session is None:
            return not _signalled.is_set()
        with self._lock:
            if _signalled.is_set():
                self._leaving.hold()
            answer = self._leaving.may_begin(call)
        if answer is None:
            if _signalled.is_set():
                self._tell(self._session, "notice")
            # The listening thread ends in bounded time.
            self._decided.wait()
            answer = self._leaving.may_begin(call)
        if answer is None:
            logging.warning("tfcdo: leaving without a new backup, because a host does not answer")
            raise SystemExit(128 + signal.SIGTERM)
        return answer

    def _end_with_the_run(self) -> None:
        """Ends this process when `tfcdo launch` ends a run that has failed."""
        # The main thread may wait in a collective for a host that is gone, and run no handler of
        # the SIGTERM, which follows at once.
        while not self._ended.wait(_POLL):
            if worker.another_has_failed():
                os._exit(128 + signal.SIGTERM)

    def _tell(self, joined: session.Session, key: str, value: str = "") -> None:
        with contextlib.suppress(tf.errors.AlreadyExistsError):  # Another host was first.
            joined.store.set(f"{self._prefix}/{key}", value)

    def _listen(self, joined: session.Session) -> None:
        store = joined.store
        try:
            while not self._ended.is_set():
                if store.get(f"{self._prefix}/notice", _POLL) is not None:
                    self._agree(joined)
                    return
                if tf_internals.has_preemption_notice(protocol.LOOK_SECONDS):
                    self._tell(joined, "notice")
        except tf.errors.OpError as error:  # The chief is gone, and the training fails by itself.
            logging.info("tfcdo: notices of preemption are no longer heard: %s", error)
        finally:
            self._decided.set()

    def _tell_begun(self, joined: session.Session) -> None:
        """Tells the other hosts which call this one has begun; it then begins no other."""
        with self._lock:
            begun = self._leaving.hold()
        self._tell(joined, f"begun/{joined.cluster.index}", str(begun))

    def _agree(self, joined: session.Session) -> None:
        """Takes the hosts' decision, which the first of them makes that has heard all."""
        cluster, store = joined.cluster, joined.store
        self._tell_begun(joined)
        start = time.monotonic()
        while (proposal := self._leaving.proposal(time.monotonic() - start)) is None:
            host = self._leaving.unheard[0]
            text = store.get(f"{self._prefix}/begun/{host}", _POLL)
            if text is not None:
                self._leaving.hear(host, int(text))
        if proposal == protocol.NO_STEP:
            late = ", ".join(cluster.name(host) for host in self._leaving.unheard)
            logging.warning("tfcdo: a host does not say in which step it is: %s", late)
        self._tell(joined, "decision", proposal)
        self._leaving.decide(store.get(f"{self._prefix}/decision", protocol.ANSWER_SECONDS))


def _handle(number: int, frame: Any) -> None:
    """Handles SIGTERM: between steps it is remembered, and elsewhere it ends the process."""
    if keras_internals.is_fitting() and not worker.another_has_failed():
        _signalled.set()
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(number)


def _forget() -> None:  # Else a process that is forked to read data does not end at SIGTERM.
    if signal.getsignal(signal.SIGTERM) is _handle:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)

"""What `tfcdo launch` tells a worker, by variables and a file, and a worker it."""

from __future__ import annotations

import contextlib
import os
import pathlib

# How many devices this worker trains on: the default of MultiWorkerMirroredStrategy's argument
# `devices_per_worker`.
DEVICES_PER_WORKER = "TFCDO_DEVICES_PER_WORKER"
# How often `tfcdo launch --max-restarts` has started the workers again: 0 in the first run.
RESTART_COUNT = "TFCDO_RESTART_COUNT"
# A file that exists once another worker of this run has failed: a SIGTERM then comes from
# `tfcdo launch`, which ends the run, and a backup is not possible. A worker that ends because of
# another one makes it too, so that `tfcdo launch` does not blame it.
FAILURE_FILE = "TFCDO_FAILURE_FILE"
# The secret of hosts that meet at the start; `tfcdo launch` makes one for the workers of a host.
CLUSTER_TOKEN = "TFCDO_CLUSTER_TOKEN"


def devices_per_worker() -> int | None:
    """Returns the number of devices that the launcher gave this worker; None if it gave none."""
    text = os.environ.get(DEVICES_PER_WORKER, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ValueError(
            f"the environment variable {DEVICES_PER_WORKER} must be a positive number of devices; "
            f"got {text!r}"
        )
    return int(text)


def cluster_token() -> str:
    """Returns the token that this job's hosts must know; empty without one."""
    return os.environ.get(CLUSTER_TOKEN, "").strip()


def another_has_failed() -> bool:
    """Returns whether `tfcdo launch` ends this run because a worker has failed."""
    path = os.environ.get(FAILURE_FILE, "")
    return bool(path) and os.path.exists(path)  # noqa: PTH110 - called by a signal's handler


def tell_that_another_has_failed() -> None:
    """Tells `tfcdo launch` that this worker ends because of another one."""
    path = os.environ.get(FAILURE_FILE, "")
    if path:
        with contextlib.suppress(OSError):  # The launcher is gone.
            pathlib.Path(path).touch()

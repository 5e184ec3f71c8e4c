"""The environment variables by which `tfcdo launch` tells a worker about its run."""

from __future__ import annotations

import os

# How many devices this worker trains on: the default of MultiWorkerMirroredStrategy's argument
# `devices_per_worker`.
DEVICES_PER_WORKER = "TFCDO_DEVICES_PER_WORKER"
# How often `tfcdo launch --max-restarts` has started the workers again: 0 in the first run.
RESTART_COUNT = "TFCDO_RESTART_COUNT"
# A file that is there once another worker of this run has failed: a SIGTERM then comes from
# `tfcdo launch`, which ends the run, and there is nobody to back up with.
FAILURE_FILE = "TFCDO_FAILURE_FILE"
# The exit status of a worker that has made a backup and asks to be started again (EX_TEMPFAIL).
RESTART_STATUS = 75
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
    """Returns the token that this job's hosts must know; empty if there is none."""
    return os.environ.get(CLUSTER_TOKEN, "").strip()


def another_has_failed() -> bool:
    """Returns whether `tfcdo launch` ends this run because a worker has failed."""
    path = os.environ.get(FAILURE_FILE, "")
    return bool(path) and os.path.exists(path)  # noqa: PTH110 - called by a signal's handler

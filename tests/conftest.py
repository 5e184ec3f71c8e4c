"""Which tests pytest runs, and in which processes."""

import gc
import os
import sys
from typing import Any

import pytest
import warm_python

# Each is NAME_test.py.
_LONG = {"diloco", "programs", "multi_worker", "faulty_hosts", "simulator"}
_LONG |= {"hosts", "exchanges", "backup_hosts", "examples"}


def pytest_configure(config: Any) -> None:
    """Has pytest's workers, and what they start, forked from a warm process."""
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["executable"]  # For tests of how Python starts.
    elif config.getoption("numprocesses", None):
        os.environ[warm_python.VARIABLE] = warm_python.executable()
        if "COVERAGE_RUN" in os.environ:
            return  # What the warm process has imported would not count.
        config.option.tx = [f"popen//python={warm_python.executable()}" for _ in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a worker which Python the tests were started with."""
    node.workerinput["executable"] = sys.executable


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Leaves out `test_session`, which always skips, and puts the longest tests first."""
    left_out = [item for item in items if item.name == "test_session"]
    config.hook.pytest_deselected(items=left_out)
    kept = [item for item in items if item.name != "test_session"]
    items[:] = sorted(kept, key=lambda item: item.path.stem.removesuffix("_test") not in _LONG)


def pytest_runtest_setup(item: Any) -> None:
    """Lets no test meet the collectives of another one."""
    import tensorflow_quirks  # Here, as the workers' parent needs no TensorFlow.

    tensorflow_quirks.keep_collectives_apart()


def pytest_collection_finish(session: Any) -> None:
    """Spares the garbage collector what has been imported: 5 % of the time that tests take."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)

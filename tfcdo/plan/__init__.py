"""Plans an all-reduce on any machine: algorithms, their schedules, times and a lower bound.

Nothing here needs TensorFlow, nor the machine.
"""

from tfcdo.plan.algorithms import ALGORITHMS, make_schedule
from tfcdo.plan.copy_tree import CopyTree, path
from tfcdo.plan.lower_bound import lower_bound_seconds
from tfcdo.plan.schedule import Pack, Schedule
from tfcdo.plan.simulator import robust_seconds, simulate

__all__ = [
    "ALGORITHMS",
    "CopyTree",
    "Pack",
    "Schedule",
    "lower_bound_seconds",
    "make_schedule",
    "path",
    "robust_seconds",
    "simulate",
]

"""Plans an all-reduce on any machine: algorithms, their schedules, times and a lower bound.

Nothing here needs TensorFlow, nor the machine.
"""

from tfcdo.plan.algorithms import ALGORITHMS, make_schedule
from tfcdo.plan.lower_bound import lower_bound_seconds
from tfcdo.plan.schedule import Pack, Schedule
from tfcdo.plan.simulator import robust_seconds

__all__ = [
    "ALGORITHMS",
    "Pack",
    "Schedule",
    "lower_bound_seconds",
    "make_schedule",
    "robust_seconds",
]

"""Plans an all-reduce on any machine: algorithms, their plans, times and a lower bound.

Nothing here needs TensorFlow, nor the machine.
"""

from tfcdo.plan.algorithms import ALGORITHMS, make_plan
from tfcdo.plan.copy_tree import CopyTree, path
from tfcdo.plan.plan import Pack, Plan
from tfcdo.plan.simulator import robust_seconds, simulate
from tfcdo.plan.tree_program import lower_bound_seconds

__all__ = [
    "ALGORITHMS",
    "CopyTree",
    "Pack",
    "Plan",
    "lower_bound_seconds",
    "make_plan",
    "path",
    "robust_seconds",
    "simulate",
]

"""RL algorithms. Each is a row of `presets.ALGORITHMS` with the names of its parts (advantage, loss, aggregation ...).

A part is a pure function. To add an algorithm: write its new part in the module of such parts, register it in the table
of that module, and add a row to `presets.ALGORITHMS`. `python -m mindspeed_rl_plugin algorithms` prints all algorithms.
"""

from mindspeed_rl_plugin.algorithms.aggregate import AGGREGATIONS, Totals
from mindspeed_rl_plugin.algorithms.algorithm import Algorithm
from mindspeed_rl_plugin.algorithms.estimators import ADVANTAGES, RewardBatch
from mindspeed_rl_plugin.algorithms.kl import KL_ESTIMATORS
from mindspeed_rl_plugin.algorithms.losses import LOSSES, PolicyTerms, TrainedTokens
from mindspeed_rl_plugin.algorithms.presets import ALGORITHMS, resolve
from mindspeed_rl_plugin.algorithms.whiten import Moments, whiten

__all__ = [
    "ADVANTAGES",
    "AGGREGATIONS",
    "ALGORITHMS",
    "KL_ESTIMATORS",
    "LOSSES",
    "Algorithm",
    "Moments",
    "PolicyTerms",
    "RewardBatch",
    "Totals",
    "TrainedTokens",
    "resolve",
    "whiten",
]

"""RL algorithms as rows over pure parts: advantages, policy losses, KL, aggregation, corrections, selection.

To add an algorithm: write its new part as one function in the module of that part, register it in that
module's table, and add one row to `presets.ALGORITHMS`. `python -m mindspeed_rl_plugin algorithms` prints them.
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

"""The compiled train step, and the evaluation step.

One step, read from the outside in:

    jit, state donated
      shard_map over every mesh axis: the collectives are written, not guessed
        for each microbatch (a scan or a pipeline): model -> summed loss -> local gradients
        one reduction of the gradients over the data axes; sums over every replica
      divide once by the global weight -> clip by global norm -> optimizer -> keep or skip
    -> new state with the same shardings, metrics still on the devices
"""

from jaxdist.core.step.config import REMAT_NAMES, EvalConfig, TrainConfig
from jaxdist.core.step.gradients import (
    make_evaluate,
    make_value_and_grad,
)
from jaxdist.core.step.layer_scan import remat_policy
from jaxdist.core.step.model_context import describe_exchange, make_context
from jaxdist.core.step.train_step import Metrics, Optimizer, Step, make_step, make_update

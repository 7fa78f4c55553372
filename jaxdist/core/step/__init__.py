"""The compiled train step, and the evaluation step.

Structure of a step, from the outside in:

    jit, state donated
      shard_map over the mesh axes, without `tensor` for a model without hooks
        for each microbatch (a scan or a pipeline): model -> summed loss -> local gradients
        reduction of the gradients that are still local; sums over all replicas
        division by the global weight
      clip by global norm -> optimizer -> apply or skip the update
    -> new state with the same shardings; metrics stay on the devices
"""

from jaxdist.core.step.config import REMAT_NAMES, EvalConfig, TrainConfig
from jaxdist.core.step.gradients import (
    make_evaluate,
    make_value_and_grad,
    needs_step_sums,
)
from jaxdist.core.step.layer_scan import remat_policy
from jaxdist.core.step.model_context import describe_exchange, make_context
from jaxdist.core.step.row_logps import make_prepare
from jaxdist.core.step.train_step import Metrics, Optimizer, Reports, Step, make_step, make_update

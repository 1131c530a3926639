"""Replays the halves of a capture through CUDA graphs."""

import dataclasses

from perfuse.context import Context
from perfuse.deferred import deferred
from perfuse.graph_cache import Executable
from perfuse.torch_compat.graphs import GraphKind

Replayed = deferred("perfuse.runtime.cuda_graph:Replayed")
GpuRecorder = deferred("perfuse.runtime.cuda_graph:GpuRecorder")

# A backward reads what its forward saved: that stays in place once the forward is recorded.
WARM_UP_CALLS = {GraphKind.FORWARD: 1, GraphKind.INFERENCE: 1, GraphKind.BACKWARD: 2}


def replayed(made: Executable, kind: GraphKind, num_results: int, context: Context) -> Executable:
    """The executable as it is; under the setting `cudagraphs`, one that records and replays.

    The first `num_results` results are the user's.
    """
    if not context.settings.cudagraphs:
        return made
    if made.gpu is None or context.device.type != "cuda":
        context.counters.inc("cudagraph.refused.not_on_a_gpu")
        return made
    call = Replayed(
        made.call,
        made.gpu,
        GpuRecorder(context.device),
        context.counters,
        num_cloned=num_results,
        num_warm_up=WARM_UP_CALLS[kind],
        limit=context.settings.gpu.max_cuda_graphs,
    )
    return dataclasses.replace(made, call=call)

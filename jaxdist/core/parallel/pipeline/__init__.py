"""Pipeline parallelism, read from the schedule down to the arithmetic.

schedule, schedules     what a schedule is; which there are
simulation              what one costs, and its drawing
buffers, loop_plan      which slot holds which value; which loops run the ticks
executor                runs a schedule on the devices, one program for all stages
stage                   a stage's layers and microbatches, and the model applied to them
value_and_grad          training: what forwards, backwards and weight actions do
evaluate                forwards alone
layerwise_backward      a stack of layers, backward one by one
split_backward          one layer's backward, cut into input and weight gradient
virtual_stages          parameters moved to where interleaving runs them
axis, config            the mesh axis; the settings
"""

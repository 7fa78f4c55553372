"""Pipeline parallelism, from the schedule down to the arithmetic.

schedule, schedules  the schedule's type and rules; the available schedules
simulation           the cost of a schedule, and its drawing
buffers, loop_plan   slots of values; loops that run the ticks
executor             runs a schedule on the devices, one program for all stages
stage                a stage's layers and microbatches
value_and_grad       training: forward, backward and weight actions
evaluate             forwards only
layerwise_backward   a stack of layers, backward one by one
split_backward       one layer's backward, cut into input and weight gradients
virtual_stages       parameters moved to the stage that runs them
"""

"""Pipeline parallelism, from the schedule to the gradients of a layer.

schedule, schedules  data type and rules of a schedule; the available schedules
simulation           cost of a schedule, and its drawing
buffers, loop_plan   buffer slots; the loops that run the ticks
executor             runs a schedule on the devices, one program for all stages
stage                layers and microbatches of a stage
value_and_grad       training: forward and backward actions
evaluate             evaluation: forward actions only
layerwise_backward   forward and backward of a stack of layers, layer by layer
layer_vjp            forward and backward of one layer, with the smallest set of saved values
virtual_stages       order of the layers in checkpoints and in a run's state
"""

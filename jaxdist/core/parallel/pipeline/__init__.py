"""Pipeline parallelism, from the schedule to the gradients of a layer.

schedule, schedules  data type and rules of a schedule; the available schedules
simulation           cost of a schedule, and its drawing
buffers, loop_plan   buffer slots; the loops that run the ticks
executor             runs a schedule on the devices, one program for all stages
stage                layers and microbatches of a stage
value_and_grad       training: forward, backward and weight actions
evaluate             evaluation: forward actions only
layerwise_backward   forward and backward of a stack of layers, layer by layer
split_backward       splits the backward of one layer into input and weight gradients
virtual_stages       moves parameters to the stage that runs them
"""

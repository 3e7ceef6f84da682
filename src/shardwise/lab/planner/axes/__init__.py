"""The axes of the ranks that hold a model together: a file has what the planner knows of one."""

from shardwise.lab.planner.axes.cp import ContextMessages
from shardwise.lab.planner.axes.ep import ExpertMessages
from shardwise.lab.planner.axes.pp import PipelineMessages
from shardwise.lab.planner.axes.tp import TensorMessages

AXES = (PipelineMessages(), TensorMessages(), ContextMessages(), ExpertMessages())
"""All but those of data."""

"""The planner, which says beforehand what a run needs and takes."""

HERE = "here"
"""The name of this machine as devices, as `shardwise calibrate` has measured it."""

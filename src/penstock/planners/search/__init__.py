"""The default planner: improves on the plans of all others, as the simulator judges."""

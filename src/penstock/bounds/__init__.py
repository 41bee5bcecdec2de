"""Lower bounds of iteration time, apart from all planners."""

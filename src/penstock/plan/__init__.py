"""Plans, the problems they answer, and the planners."""

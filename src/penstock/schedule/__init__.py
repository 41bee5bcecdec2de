"""The order of work: actions, schedules, their proof."""
